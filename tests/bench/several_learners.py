"""`python -m tests.bench.several_learners`: what a second learner on a device brings, in samples a second.

One daemon, which leaves all cores to its learners: one with a batch B, one with 2B, and two with B each, which is the
same joint batch. The link to others is not looked at: what travels is as large with any number of learners.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMesh, LocalMeshError
from tests.daemon import realjobs as jobs

STEPS = 300
RUNS = 3
SCRIPT = """
import sys, time
import torch
import meshtrain as mt
from torch import nn

kind, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
SHAPES = {"mlp": (64,), "augmented": (64,), "cnn": (1, 28, 28), "wide": (512,)}
MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 11 * 11, 10),
    ),
    "wide": lambda: nn.Sequential(
        nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10)
    ),
}

class Samples(torch.utils.data.Dataset):
    x = torch.randn(4096, *SHAPES[kind])
    def __len__(self):
        return batch * steps * mt.world_size()
    def __getitem__(self, index):
        x = self.x[index % 4096]
        if kind == "augmented":  # some Python for each sample, as scripts have it
            for shift in range(8):
                x = torch.roll(x, shift) * 0.9 + 0.1
        return x, index % 10

model = MODELS["mlp" if kind == "augmented" else kind]()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Samples(), batch_size=batch, shuffle=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)
count, began_s = 0, 0.0
for step, (x, y) in enumerate(loader):
    if step == steps // 5:
        began_s = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if began_s:
        count += len(x)
(mt.output_dir() / "rate.txt").write_text(str(count / (time.perf_counter() - began_s)))
"""
CASES = (("mlp", 32), ("cnn", 32), ("wide", 32), ("augmented", 32))


def rate(mesh: LocalMesh, kind: str, batch: int, learners: int) -> float:
    """Samples a second of all learners together."""
    daemon = mesh.daemons[0]
    with tempfile.TemporaryDirectory(prefix="meshtrain-") as folder:
        args = (kind, str(batch), str(STEPS))
        summary = jobs.run(
            daemon, Path(folder), SCRIPT, args=args, env=(), learners=learners, hash_every=0, checkpoint_every="off"
        )
        if summary.state != "succeeded":
            raise LocalMeshError(f"the job {summary.state}: {summary.error}")
        files = ["rate.txt", *(f"learner{number}/rate.txt" for number in range(2, learners + 1))]
        return sum(float(jobs.read(daemon, summary.job, "output", 0, file)) for file in files)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.several_learners", description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help="of each, of which the median counts")
    parser.add_argument("--only", metavar="TEXT", default="", help="only the models whose name holds this")
    options = parser.parse_args()
    print("# A second learner on one device\n")
    print(f"```\npython -m tests.bench.several_learners\n```\n\n{os.cpu_count()} cores; samples a second.\n")
    print("| model | batch B | one learner, B | one, 2B | two, B each | two against one with 2B |")
    print(f"|{'---|' * 6}", flush=True)
    try:
        with LocalMesh(("anna",), lambda _: None) as mesh:
            for kind, batch in CASES:
                if options.only not in kind:
                    continue
                ways = ((batch, 1), (2 * batch, 1), (batch, 2))
                runs = [[rate(mesh, kind, *way) for way in ways] for _ in range(options.runs)]
                one, double, two = (median(each) for each in zip(*runs, strict=True))
                print(
                    f"| {kind} | {batch} | {one:.0f}/s | {double:.0f}/s | {two:.0f}/s | {two / double:.2f} |",
                    flush=True,
                )
    except (LocalMeshError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
