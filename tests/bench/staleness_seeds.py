"""`python -m tests.bench.staleness_seeds`: does a stale bound cost anything per sample? The demo's GPT, several seeds.

Every way to train runs under bsp and under `--sync` on three local daemons, with the same seeds. What counts is the
loss of the final base on text that nobody trained on, after one epoch of the same samples: a round of a stale job may
have fewer contributions, and the job makes more rounds then. Ends with exit code 1 when the means differ by more than
the seeds' noise.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMesh, LocalMeshError
from meshtrain.examples.text import stdlib_text
from meshwire.messages.job import JobSummary
from tests.daemon import realjobs as jobs

NAMES = ("anna", "bert", "cleo")
TEXT_BYTES = 1_000_000
NOISE_FACTOR = 2.0  # standard errors of the difference of two means

SCRIPT = """
import json, sys
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
import meshtrain as mt
from meshtrain.examples.dataset import CharDataset
from meshtrain.examples.gpt import GPT, GPTConfig

way, samples, batch_size, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(seed)
text = (mt.data_dir() / "input.txt").read_text(encoding="utf-8")
cut = len(text) * 9 // 10
context = 64
model = GPT(GPTConfig(context=context))
if way.startswith("adamw"):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3 if way == "sgd" else 0.05,
                                momentum=0.0 if way == "sgd" else 0.9)
windows = CharDataset(text[:cut], context)
loader = DataLoader(Subset(windows, torch.randperm(len(windows))[:samples].tolist()), batch_size, shuffle=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)
scheduler = None
if "cosine" in way:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader))
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    if "clip" in way:
        mt.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    mt.log(loss=loss)
mt.finish()
if mt.is_main():
    held_out = CharDataset(text[cut:], context)
    x, y = (torch.stack(column) for column in zip(*(held_out[index] for index in range(0, len(held_out), 3))))
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    (mt.output_dir() / "loss.json").write_text(json.dumps(loss))
"""

WAYS = ("adamw", "sgd", "momentum", "adamw-cosine", "momentum-clip")


@dataclass(frozen=True)
class Trained:
    """One job. Loss in nats per character."""

    loss: float
    summary: JobSummary


def train(mesh: LocalMesh, folder: Path, way: str, seed: int, samples: int, batch: int, sync: str) -> Trained:
    """Runs one job. Raises RuntimeError when it fails."""
    arguments = (way, str(samples), str(batch), str(seed))
    summary = jobs.run(
        mesh.daemons[0],
        folder,
        SCRIPT,
        args=arguments,
        data=folder / "data",
        seed=seed,
        sync=sync,
        shares="equal",
        hash_every=25,
    )
    if summary.state != "succeeded" or summary.replicas_equal is not True:
        raise RuntimeError(f"{way}, {sync}, seed {seed}: {summary.state}, {summary.error or 'replicas differ'}")
    loss = json.loads(jobs.read(mesh.daemons[0], summary.job, "output", 0, "loss.json"))
    return Trained(loss, summary)


def compare(mesh: LocalMesh, folder: Path, way: str, options: argparse.Namespace) -> bool:
    """All seeds of one way under both bounds; prints a line of a Markdown table."""
    seeds = range(options.seeds)
    samples = options.steps * options.batch * len(NAMES)
    losses: dict[str, list[Trained]] = {}
    for sync in ("bsp", options.sync):
        losses[sync] = [train(mesh, folder, way, seed, samples, options.batch, sync) for seed in seeds]
    bsp, stale = ([one.loss for one in losses[sync]] for sync in ("bsp", options.sync))
    difference = statistics.mean(stale) - statistics.mean(bsp)
    noise = NOISE_FACTOR * ((statistics.variance(bsp) + statistics.variance(stale)) / len(seeds)) ** 0.5
    within = difference <= noise
    stale_jobs = [one.summary for one in losses[options.sync]]
    print(
        f"| {way} | {_losses(bsp)} | {_losses(stale)} | {difference:+.4f} | {noise:.4f} "
        f"| {' '.join(str(job.rounds) for job in stale_jobs)} "
        f"| {statistics.mean(sum(jobs.ages(job)) / job.rounds for job in stale_jobs):.2f} "
        f"| {' '.join(map(str, jobs.ages(*stale_jobs)))} | {'PASS' if within else 'FAIL'} |",
        flush=True,
    )
    return bool(within)


def _losses(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ({' '.join(f'{value:.4f}' for value in values)})"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.staleness_seeds", description=__doc__)
    parser.add_argument("--sync", default="ssp:2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="of each peer on average; with bsp, rounds")
    parser.add_argument("--batch", type=int, default=16, help="windows per step and peer")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    columns = ("way", "bsp", options.sync, "difference", "noise", "rounds", "contributors", "ages", "within noise")
    try:
        with tempfile.TemporaryDirectory(prefix="meshtrain-") as name, LocalMesh(NAMES, lambda _line: None) as mesh:
            folder = Path(name)
            (folder / "data").mkdir()
            (folder / "data" / "input.txt").write_text(stdlib_text(TEXT_BYTES), encoding="utf-8")
            print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
            met = [compare(mesh, folder, way, options) for way in options.ways]
    except (LocalMeshError, RequestError, ConnectionLost, TimeoutError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
