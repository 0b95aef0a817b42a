"""`python -m tests.bench.large_batches > tests/bench/results/large_batches.md`: what `--scale-lr` is worth.

Four laptops with the script's batch take a quarter of one laptop's steps for the same samples. How much of its loss do
they reach, with the script's rate, with a scaled one, and with a scaled one that warms up? All in one process, which
steps on joint batches at the rates that the job's own rule gives: that a job of four learners does the same to 1e-6 is
what `tests/train/optim/test_scaled_rates.py` proves. All ways see the same samples in the same order. Losses are of
samples held out, and do not depend on what else the machine does.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from meshwire.sync_modes.rate_rule import RateRule, parse_rate_rule
from tests.bench.codec_tasks import TASKS

LAPTOPS = 4
NOISE_FACTOR = 2.0  # standard errors of the difference of two means


@dataclass(frozen=True)
class Study:
    """What is trained.

    Attributes:
        task: a name of `codec_tasks.TASKS`.
        batch: of one laptop.
        steps: that one laptop takes.
        rules: as typed after --scale-lr.
        rate: the learning rate; None: the task's own.
    """

    title: str
    task: str
    batch: int
    steps: int
    rules: tuple[str, ...]
    rate: float | None = None


STUDIES = (
    Study(
        "The example CNN on digits, SGD at 0.02 with momentum 0.9, five epochs in batches of 32",
        *("cnn", 32, 240, ("linear", "linear,warmup=15", "linear,warmup=0", "sqrt,warmup=0")),
    ),
    Study(
        "The same at a rate of 0.004",
        *("cnn", 32, 240, ("linear", "linear,warmup=15", "linear,warmup=0", "sqrt,warmup=0"), 0.004),
    ),
    Study(
        "The demo's GPT, smaller, AdamW at 2e-3, in batches of 8",
        *("gpt", 8, 240, ("sqrt", "sqrt,warmup=15", "sqrt,warmup=0")),
    ),
)


def pieces(study: Study, count: int, seed: int) -> Iterator[torch.Tensor]:
    """The batches that one laptop draws, as places in the data: the same ones for all ways that are compared."""
    generator = torch.Generator().manual_seed(1000 * seed)
    for _ in range(study.steps):
        yield torch.randint(0, count, (study.batch,), generator=generator)


def train(study: Study, laptops: int, rule: RateRule | None, seed: int) -> float:
    """Trains a model anew, on joint batches of so many laptops. Returns the held-out loss."""
    torch.manual_seed(seed)
    task = TASKS[study.task]()
    optimizer = task.optimizer(study.rate)
    own = optimizer.param_groups[0]["lr"]
    each = pieces(study, task.count, seed)
    for round_ in range(1, study.steps // laptops + 1):
        joint = torch.cat([next(each) for _ in range(laptops)])
        if rule is not None:
            optimizer.param_groups[0]["lr"] = own * rule.factor(round_, len(joint), study.batch, task.count)
        optimizer.zero_grad()
        task.loss(joint).backward()
        optimizer.step()
    task.model.eval()
    with torch.no_grad():
        return task.loss(task.held_out).item()


def rows(study: Study, seeds: int) -> Iterator[str]:
    """The lines of the study's table, under its head."""
    ways: list[tuple[str, int, RateRule | None]] = [
        ("one laptop", 1, None),
        (f"{LAPTOPS} laptops, the script's rate", LAPTOPS, None),
        *((f"{LAPTOPS} laptops, `--scale-lr {typed}`", LAPTOPS, parse_rate_rule(typed)) for typed in study.rules),
    ]
    first: list[float] = []
    for name, laptops, rule in ways:
        losses = [train(study, laptops, rule, seed) for seed in range(seeds)]
        first = first or losses
        difference = statistics.mean(losses) - statistics.mean(first)
        noise = NOISE_FACTOR * ((statistics.variance(losses) + statistics.variance(first)) / seeds) ** 0.5
        told = " ".join(f"{loss:.3f}" for loss in losses)
        behind = "" if losses is first else f"{difference:+.3f}"
        yield f"| {name} | {study.steps // laptops} | {statistics.mean(losses):.3f} ({told}) | {behind} | {noise:.3f} |"


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.large_batches", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--studies", nargs="+", choices=[each.task for each in STUDIES], metavar="TASK")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("# What `--scale-lr` is worth\n")
    print("```\npython -m tests.bench.large_batches > tests/bench/results/large_batches.md\n```\n")
    print(
        f"Loss on samples held out after equally many samples, mean and seeds; torch {torch.__version__}. *behind*: of "
        "one laptop, which\ntakes four times as many steps. *noise*: two standard errors of that difference."
    )
    for study in STUDIES:
        if options.studies and study.task not in options.studies:
            continue
        print(f"\n## {study.title}\n\n| way | rounds | loss | behind | noise |\n|---|---|---|---|---|")
        for row in rows(study, options.seeds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
