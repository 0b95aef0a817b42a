"""hivemind's workload of stragglers, its benchmark of the optimizer: eight peers whose batches have 2 to 16 samples and
take 1 to 4.5 s each, handwritten digits, on processors; time to an accuracy. In a tenth of its time.

A peer's batch there is as large as it likes. Here a script says one size for all, so what is drawn is how long a sample
takes: its batch's time by its size. Learners sleep for it. Its three clients own no part of what is averaged; here they
are peers like the others, for a laptop that cannot be called takes part as any other.
"""

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from meshtrain.demo.localmesh import LocalMesh
from meshtrain.examples.digits import FILE_NAME, fetch_digits
from tests.bench.goals.sides import NAMES
from tests.bench.journal import Case, Figures, Section
from tests.bench.proof.places import NOTHING_CHOSEN, ProofError, chosen_in, printed
from tests.bench.stragglers import Run, ended, run
from tests.daemon import realjobs as jobs

PEERS = len(NAMES)
SCALE = 0.1  # of their time
SIZES, TIMES_S, TIME_SPREAD_S = (2, 16), (1.0, 4.5), 0.5  # theirs: of a batch; of one after another
DRAWN_BY = 0  # the seed of who is how fast
BATCH = 8  # of each peer
SAMPLES = 6000  # of a job: one and a half times those that there are
TARGET = 0.8  # of what is held out is read right
KEPT_EVERY_S = 0.2
POINTS = 40  # of a curve that is kept
TIMEOUT_S = 420.0

SCRIPT = """
import copy, json, random, sys, time
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
import meshtrain as mt
from meshtrain.examples.train_cnn import evaluate, load_digits

options = json.loads(sys.argv[1])
torch.manual_seed(options["seed"])
sample_s, spread = options["sample_s"][mt.rank()], options["spread"][mt.rank()]
luck = random.Random(f"{options['seed']} {mt.rank()}")
model = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
training, held_out = load_digits()
drawn = Subset(training, [at % len(training) for at in range(options["samples"])])
loader = DataLoader(drawn, batch_size=options["batch"], shuffle=True)
shown, seen = copy.deepcopy(model), []
model, optimizer, loader = mt.prepare(model, optimizer, loader)
torch.set_num_threads(1)


def keep():
    with mt.base():
        seen.append((time.monotonic(), {name: value.clone() for name, value in model.state_dict().items()}))


steps = []
for x, y in loader:
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    if mt.is_main() and (not seen or began_s - seen[-1][0] >= options["kept_every_s"]):
        keep()
    step_s = len(x) * sample_s * max(0.1, luck.gauss(1.0, spread))
    time.sleep(step_s)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    steps.append([began_s, time.monotonic(), len(x), step_s, time.process_time() - began_cpu_s])
mt.finish()
(mt.output_dir() / "steps.json").write_text(json.dumps(steps))
if mt.is_main():
    keep()
    curve = []
    for at_s, state in seen:
        shown.load_state_dict(state)
        curve.append((at_s, evaluate(shown, held_out)[1]))
    (mt.output_dir() / "curve.json").write_text(json.dumps(curve))
"""


@dataclass(frozen=True)
class Peer:
    """What was drawn for one: a batch of theirs, and how long it takes."""

    size: int
    batch_s: float

    @property
    def samples_s(self) -> float:
        """In this measurement's time."""
        return self.size / (SCALE * self.batch_s)


def peers() -> list[Peer]:
    """The fastest first."""
    drawing = random.Random(DRAWN_BY)
    drawn = [Peer(drawing.randint(*SIZES), drawing.uniform(*TIMES_S)) for _ in range(PEERS)]
    return sorted(drawn, key=lambda peer: -peer.samples_s)


@dataclass(frozen=True)
class Way:
    """How a job trains.

    Attributes:
        options: fields of `Submit`; None: `submit` is typed, and chooses.
        seconds: that it takes, about.
        batch: of each that trains.
    """

    name: str
    options: dict[str, Any] | None
    seconds: int
    batch: int = BATCH


# With the batch of all together, as theirs would: a step is one of so many samples, whoever computes them.
ALONE = Way("the fastest alone", {"sync": "bsp", "on": NAMES[:1]}, 110, PEERS * BATCH)
IN_STEP = Way("bsp", {"sync": "bsp", "shares": "equal"}, 80)
WAYS = (
    ALONE,
    IN_STEP,
    Way("bsp, shares by speed", {"sync": "bsp", "shares": "speed"}, 55),
    Way("ssp:3", {"sync": "ssp:3", "straggler": "carry"}, 45),
    Way("local:8,ssp:1, periods by speed", {"sync": "local:8,ssp:1"}, 40),
    Way("auto", None, 60),
)
EXPECTED = (
    "The fastest is five times the slowest, at whose pace bsp goes: 0.3 of the sum of speeds, less for what varies "
    "from batch to batch. Shares by speed come near the sum once batches have their sizes, and the 32 equal ones "
    "before are a third of the job. ssp:3 lets the fast be four times as fast as the slow: 0.9. Periods by speed "
    "reach 0.9 of the sum, too, and the accuracy a little later than that. auto measures how fast processors are, "
    "which these sleeping learners hide from it: it takes all eight for equal, and is as good as what it chooses "
    "adapts by itself."
)


def case_name(way: Way) -> str:
    """The name under which the file keeps it."""
    return f"{PEERS} stragglers, {way.name}"


def sections() -> tuple[Section]:
    """Time to accuracy of each way."""
    cases = tuple(Case(case_name(way), way.seconds, _measured(way)) for way in WAYS)
    return (Section("stragglers", "time to accuracy of eight unequal peers, as in hivemind", cases, expected=EXPECTED),)


def script_options(seed: int, samples: int, batch: int) -> str:
    """The script's argument."""
    each = peers()
    return json.dumps(
        {
            "seed": seed,
            "samples": samples,
            "batch": batch,
            "sample_s": [1 / peer.samples_s for peer in each],
            "spread": [TIME_SPREAD_S / peer.batch_s for peer in each],
            "kept_every_s": KEPT_EVERY_S,
        }
    )


def _measured(way: Way) -> Callable[[int, bool], Figures]:
    def measured(seed: int, short: bool) -> Figures:
        options = script_options(seed, SAMPLES // 6 if short else SAMPLES, way.batch)
        with tempfile.TemporaryDirectory(prefix="meshtrain-") as name, LocalMesh(NAMES, lambda _line: None) as mesh:
            folder = Path(name)
            data = _data(folder)
            if way.options is not None:
                done = run(mesh.daemons, folder, options, SCRIPT, data=data, seed=seed, **way.options)
                return _found(done, json.loads(jobs.read(mesh.daemons[0], done.summary.job, "output", 0, "curve.json")))
            return _chosen(mesh, folder, data, seed, options)

    return measured


def _data(folder: Path) -> Path:
    cache, data = user_cache_path("meshtrain") / "digits", folder / "digits"
    if not (cache / FILE_NAME).exists():
        fetch_digits(cache)
    data.mkdir()
    shutil.copy(cache / FILE_NAME, data / FILE_NAME)
    return data


def _chosen(mesh: LocalMesh, folder: Path, data: Path, seed: int, options: str) -> Figures:
    """As a person would type it on the first laptop, with the usual quality: over loopback `submit` chooses nothing
    where none is typed. Raises ProofError."""
    work, daemon = folder / "typed", mesh.daemons[0]
    work.mkdir()
    (work / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "meshtrain.cli", "submit", "--json", "--data-dir", str(daemon.data_dir)]
    command += [
        "--quality",
        "safe",
        "--data",
        str(data),
        "--seed",
        str(seed),
        "--env",
        "OMP_NUM_THREADS=1",
        "train.py",
        options,
    ]
    out, said = printed(command, work, TIMEOUT_S)
    told = json.loads(out)
    if chosen_in(said) == NOTHING_CHOSEN:
        raise ProofError(f"submit has chosen nothing: {said[:1500]}")
    summary = jobs.summary(daemon, told["job"])
    if summary.state != "succeeded":
        raise ProofError(f"the job {summary.state}: {summary.error}")
    done = ended(daemon, summary, len(told["members"]))
    found = _found(done, json.loads(jobs.read(daemon, told["job"], "output", 0, "curve.json")))
    return {**found, f"on {len(told['members'])}, {chosen_in(said)}": found["lasted_s"]}


def _found(done: Run, curve: list[tuple[float, float]]) -> Figures:
    return figures([(step.began_s, step.ended_s, step.samples) for steps in done.steps for step in steps], curve)


def figures(steps: list[tuple[float, float, int]], curve: list[tuple[float, float]]) -> Figures:
    """What is kept of a job.

    Args:
        steps: (begun, ended, samples) of all ranks.
        curve: (when, accuracy of the base then) on the same clock.
    """
    first_s, last_s = min(began for began, _, _ in steps), max(end for _, end, _ in steps)
    reached_s = next((at_s - first_s for at_s, accuracy in curve if accuracy >= TARGET), None)
    thin = curve[:: -(-len(curve) // POINTS)]
    samples = sum(count for _, _, count in steps)
    found = {
        "lasted_s": [last_s - first_s],
        "of the sum": [samples / (last_s - first_s) / sum(peer.samples_s for peer in peers())],
        "accuracy": [curve[-1][1]],
        "at_s": [at_s - first_s for at_s, _ in thin],
        "accuracies": [accuracy for _, accuracy in thin],
    }
    if reached_s is not None:
        until = sum(count for _, end, count in steps if end - first_s <= reached_s)
        found |= {"reached_s": [reached_s], "reached_samples": [float(until)]}
    return found
