"""What the table of codecs trains: the demo's GPT on text, and the example CNN on handwritten digits.

Learners have one thread, for they share the cores. The batch is that of all members together, so that jobs of two and
of four train on as many samples.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from meshtrain.examples.digits import FILE_NAME, fetch_digits
from meshtrain.examples.text import stdlib_text

TEXT_BYTES = 1_000_000
WARM_STEPS = 5  # which are not timed
PACED_S = 0.25  # between two steps of a job whose member is killed, so that it is back long before the end

RATE = """
def rate(step):
    if step < warm:
        return (step + 1) / warm
    return (1 + math.cos(math.pi * min(1.0, (step - warm) / (steps - warm)))) / 2
"""

SCRIPT = (
    """
import copy, itertools, json, math, sys, time
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import meshtrain as mt

name, sync, steps, batch_size, seed = *sys.argv[1:3], *map(int, sys.argv[3:6])
torch.manual_seed(seed)
if name == "cnn":
    from meshtrain.examples.cnn import CNN
    from meshtrain.examples.train_cnn import load_digits
    model, (training, held_out) = CNN(), load_digits()
    x, y = held_out.tensors
else:
    from meshtrain.examples.dataset import CharDataset
    from meshtrain.examples.gpt import GPT, GPTConfig
    text = (mt.data_dir() / "input.txt").read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    model, context = GPT(GPTConfig()), GPTConfig().context
    training, held_out = CharDataset(text[:cut], context), CharDataset(text[cut:], context)
    x, y = (torch.stack(column) for column in zip(*(held_out[index] for index in range(0, len(held_out), 3))))
if sync == "demo":  # which takes its own steps, and this optimizer's rate
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
elif name == "gpt" or sync.startswith("muloco"):  # which goes together with AdamW alone
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 if name == "cnn" else 0.05, momentum=0.9)
loader = DataLoader(training, batch_size=batch_size, shuffle=True)
shown, seen = copy.deepcopy(model), []
model, optimizer, loader = mt.prepare(model, optimizer, loader)
torch.set_num_threads(1)

began_s = []
# By mt.steps where who comes back, or is late, is to end with the others: its last period is whole.
counted, paced_s = (int(sys.argv[6]), float(sys.argv[7])) if len(sys.argv) > 6 else (0, 0.0)
every = int(sys.argv[8]) if len(sys.argv) > 8 else 0  # steps between two points of the curve, which is drawn at the end
cosine, warm = sys.argv[9:] == ["cosine"], steps // 20
"""
    + RATE
    + """

schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate) if cosine else None


def keep():
    with mt.base():
        seen.append((len(began_s), {name: value.clone() for name, value in model.state_dict().items()}))


def judged():
    shown.eval()
    with torch.no_grad():
        logits = torch.cat([shown(part) for part in x.split(256)]).flatten(0, -2)
    return F.cross_entropy(logits, y.flatten()).item(), (logits.argmax(1) == y.flatten()).float().mean().item()


for _ in mt.steps(counted) if counted else range(steps):
    time.sleep(paced_s)
    if every and mt.is_main() and len(began_s) % every == 0:
        keep()
    began_s.append(time.monotonic())
    if len(began_s) == 1:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
    inputs, labels = next(batches)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
    loss.backward()
    optimizer.step()
    if schedule is not None:
        schedule.step()
    mt.log(loss=loss)
ended_s = time.monotonic()
mt.finish()
if mt.is_main():
    keep()
    curve = []
    for step, state in seen:
        shown.load_state_dict(state)
        loss, accuracy = judged()
        curve.append((step, loss))
    result = {
        "loss": loss,
        "accuracy": accuracy,
        "curve": curve,
        "steps_s": [later - earlier for earlier, later in zip(began_s, [*began_s[1:], ended_s])],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    (mt.output_dir() / "result.json").write_text(json.dumps(result))
"""
)


@dataclass(frozen=True)
class Model:
    """Something to train.

    Attributes:
        about: for people.
        batch: samples a step, all members together.
        steps: of a job, unless others are asked for.
        data: name of the file that its data folder holds.
    """

    about: str
    batch: int
    steps: int
    data: str


MODELS = {
    "gpt": Model("the demo's GPT, AdamW at 2e-3", 24, 120, "input.txt"),
    "gpt-momentum": Model("the demo's GPT, SGD at 0.05 with momentum 0.9", 24, 120, "input.txt"),
    "cnn": Model("a CNN with BatchNorm on MNIST, SGD at 0.02 with momentum 0.9", 64, 300, FILE_NAME),
}


def write_data(folder: Path, cache: Path) -> None:
    """Makes the data folder of every model, named as its file.

    Args:
        cache: where the digits lie, or are written to. They are fetched once.

    Raises:
        DigitsError: they cannot be had.
    """
    for file in {model.data for model in MODELS.values()}:
        (folder / file).mkdir(parents=True)
    (folder / "input.txt" / "input.txt").write_text(stdlib_text(TEXT_BYTES), encoding="utf-8")
    if not (cache / FILE_NAME).exists():
        fetch_digits(cache)
    shutil.copy(cache / FILE_NAME, folder / FILE_NAME / FILE_NAME)
