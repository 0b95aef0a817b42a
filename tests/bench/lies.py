"""`python -m tests.bench.lies`: four real daemons train, and from a round on one of them lies.

Each lie of `tests.daemon.lies` is told in a job of its own. The other three must name the liar in their logs, go on
without it, and end with equal weights: those of a job in which that daemon was killed before the round in which it was
refused. Ends with exit code 1 where that is not so.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMesh, LocalMeshError
from meshwire.messages.job import JobSummary
from tests.bench.soak import interruptible, say
from tests.daemon import realjobs as jobs
from tests.daemon.lies import LIAR, LIES

NAMES = ("anna", "bert", "cleo", "dora")
ROUND = 12  # from which on it lies
EPOCHS = 10  # of three rounds with four members
PATIENCE_S = 4.0  # a member that sends nothing is left out after six times that
SCRIPT = jobs.TRAIN.replace('" ".join(str(p.sum().item())', '" ".join(p.detach().numpy().tobytes().hex()')
HONEST = tuple(rank for rank in range(len(NAMES)) if rank != LIAR)


@dataclass(frozen=True)
class Ending:
    """Of one job.

    Attributes:
        without: the first round that the three exchanged alone.
        weights: by rank, of those that are honest.
        named: in whose log the liar is named, with the reason.
    """

    state: str
    rounds: int
    without: int
    weights: dict[int, str]
    named: dict[str, str]


def run(lie: str, number: int, codec: str) -> Ending:
    """Raises LocalMeshError, or what requests raise."""

    class WithALiar(LocalMesh):
        def prefix(self, data_dir: Path) -> Sequence[str]:
            lying = [sys.executable, "-m", "tests.bench.lyingdaemon", lie, str(number)]
            return lying if data_dir.name == NAMES[LIAR] else ()

    with WithALiar(NAMES, lambda _line: None, PATIENCE_S) as mesh:
        anna = mesh.daemons[0]
        with tempfile.TemporaryDirectory() as folder:
            submitted = jobs.submit(anna, Path(folder), SCRIPT, args=(str(EPOCHS),), codec=codec, on=NAMES)
        ranks = {member.name: rank for rank, member in enumerate(submitted.members)}
        assert ranks[NAMES[LIAR]] == LIAR, ranks
        summary: JobSummary = jobs.ended(anna, submitted.job)
        path = "sub/weights.txt"
        weights = {rank: jobs.read(anna, submitted.job, "output", rank, path) for rank in HONEST}
        logs = {daemon.name: daemon.log_path.read_text("utf-8") for daemon in mesh.daemons}
    cut = re.search(rf"generation \d+ entered after [^:]*: members (?!.*{NAMES[LIAR]})[^;]*; cut (\d+)", logs["anna"])
    found = {
        name: re.search(rf"\({NAMES[LIAR]}\) was refused by [^:]*: (.*?)\. The others", log)
        for name, log in logs.items()
    }
    named = {name: match[1] for name, match in found.items() if match is not None and name != NAMES[LIAR]}
    return Ending(summary.state, summary.rounds, int(cut[1]) + 1 if cut else 0, weights, named)


@cache
def killed(number: int, codec: str) -> Ending:
    """The same job, of which the liar's daemon is killed in this round."""
    return run("killed", number, codec)


def judged(lie: str) -> str:
    """What came of a lie; begins with "held" if all is as it should be."""
    codec, _, reason = LIES[lie]
    ending = run(lie, ROUND, codec)
    other = killed(ending.without, codec) if ending.without else ending
    wrong = [
        text
        for text, held in {
            f"the job has {ending.state}": ending.state == "succeeded",
            "weights differ among the honest": len(set(ending.weights.values())) == 1,
            "the liar is not named by all": len(ending.named) == len(HONEST),
            f"it was refused for another reason: {ending.named}": any(reason in why for why in ending.named.values()),
            "weights are not those of the job in which it was killed": ending.weights == other.weights,
            f"killed in round {other.without}, refused in {ending.without}": other.without == ending.without > 0,
        }.items()
        if not held
    ]
    told = next(iter(ending.named.values()), "")
    return "DID NOT HOLD: " + "; ".join(wrong) if wrong else f"held, refused in round {ending.without}: {told}"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.lies", description=__doc__)
    parser.add_argument(
        "--lie", metavar="NAME", action="append", choices=tuple(LIES), help="this one alone; repeatable"
    )
    options = parser.parse_args()
    failed = 0
    try:
        with interruptible():
            for lie in options.lie or LIES:
                found = judged(lie)
                failed += not found.startswith("held")
                print(f"{lie}: {found}", flush=True)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except (LocalMeshError, RequestError, ConnectionLost, TimeoutError, OSError, AssertionError) as error:
        say(f"error: {error}")
        return 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
