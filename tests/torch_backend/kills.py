"""Ranks and daemons that are killed, or stand still, in the middle of an all-reduce, over the daemons of three laptops.

    python -m tests.torch_backend.kills [--count 100] [--log FILE] [--write]

Each time one job of three ranks does nothing but sum two million values; then, in turn, a rank or a daemon gets SIGKILL
or SIGSTOP, of each laptop in turn. Measured is when each of the two scripts that are left has its error, on one clock.
The error has to name the culprit and come in time, the job has to end, and nothing may be left of it: processes,
descriptors of the daemons, shared memory, files. A kill takes 3 to 6 seconds on two idle cores. With `--log` each is
written down as it has happened, and those that stand there are not done again.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGSTOP

import psutil
import torch

from meshtraind.storage.cleanup import DATA, SOURCE, STATE
from meshtraind.storage.fetch import log_path
from meshwire.jobs.lifecycle import TERMINAL_STATES
from meshwire.messages.job import JobSummary
from tests.bench.soak import interruptible
from tests.daemon import realjobs as jobs
from tests.lab.chaosmesh import ChaosDaemon, ChaosMesh

PATIENCE_S = 1.0
LIMITS_S = {
    "rank killed": 1.0,
    "daemon killed": 1.0,
    "rank frozen": PATIENCE_S + 1.0,
    "daemon frozen": PATIENCE_S + 1.0,
}
KINDS = tuple(LIMITS_S)
SETTLE_S = 15.0  # until nothing is left of a job that has ended
POLL_S = 0.05
RESULTS = Path(__file__).parents[1] / "bench" / "results" / "group_kills.md"

SUMMING = """
import json, os, time
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group()
ones = torch.ones(2_000_000)
dist.all_reduce(ones)
print("begun", os.getpid(), flush=True)
try:
    while True:
        dist.all_reduce(ones.fill_(1))
except dist.DistBackendError as error:
    print("told", json.dumps({"at_s": time.monotonic(), "error": str(error)}), flush=True)
    raise
"""


@dataclass(frozen=True)
class Kill:
    """One, and what came of it.

    Attributes:
        errors_s: from the signal to the error of each script that was left.
        wrong: what should not have happened; empty if nothing.
        load: of the machine, by the minute, when it was sent.
    """

    number: int
    kind: str
    errors_s: tuple[float, ...]
    wrong: tuple[str, ...]
    load: float


class Descriptors:
    """How many each daemon has open where no job runs; its first job opens some for good."""

    def __init__(self) -> None:
        self._idle: dict[int, int] = {}

    def more(self, daemon: ChaosDaemon) -> str | None:
        """What is open beside those, if anything is."""
        pid = daemon.process.pid
        names = sorted(_descriptors(pid))
        known = self._idle.setdefault(pid, len(names))
        return f"{daemon.name}: {len(names)} descriptors, before {known}: {names}" if len(names) > known else None


def _descriptors(pid: int) -> Iterable[str]:
    folder = Path("/proc") / str(pid) / "fd"
    for entry in folder.iterdir():
        try:
            yield str(entry.readlink())
        except OSError:
            continue  # closed meanwhile


def one_kill(mesh: ChaosMesh, folder: Path, number: int, open_: Descriptors) -> Kill:
    """Does one, and looks at all that is left."""
    kind = KINDS[number % len(KINDS)]
    names = list(mesh.names)
    victim = mesh.daemons[names[number // len(KINDS) % len(names)]]
    left = [daemon for name, daemon in mesh.daemons.items() if name != victim.name]
    job = jobs.submit(left[number % len(left)], folder, SUMMING, name=kind.replace(" ", "-")).job
    members = [member.name for member in jobs.summary(left[0], job).members]

    def text(daemon: ChaosDaemon) -> str:
        path = log_path(daemon.data_dir / "jobs" / job, members.index(daemon.name))
        return path.read_text() if path.exists() else ""

    def begun(_seen: JobSummary) -> bool:
        return all("begun" in text(daemon) for daemon in mesh.daemons.values())

    jobs.wait_for(left[0], job, begun, "a process group")
    learners = [int(text(daemon).split("begun ")[1].split()[0]) for daemon in mesh.daemons.values()]
    learner = int(text(victim).split("begun ")[1].split()[0])
    time.sleep(0.05 + 0.01 * (number % 7))  # somewhere in an all-reduce, each time elsewhere
    load, sent_s = os.getloadavg()[0], time.monotonic()
    match kind:
        case "rank killed":
            psutil.Process(learner).kill()
        case "daemon killed":
            victim.kill()
            sent_s = min(sent_s, time.monotonic())
        case "rank frozen":
            psutil.Process(learner).send_signal(SIGSTOP)
        case "daemon frozen":
            victim.process.send_signal(SIGSTOP)
    wrong: list[str] = []
    ended = [jobs.ended(daemon, job) for daemon in left]
    if kind == "daemon frozen":
        victim.thaw()
    elif kind == "daemon killed":
        victim.start()
        victim.wait()
    rank = members.index(victim.name)
    wrong += [f"it ended as {one.state}: {one.error}" for one in ended if one.state != "failed"]
    wrong += [
        f"its end does not name the culprit: {one.error}" for one in ended if victim.name not in (one.error or "")
    ]
    errors_s = []
    for daemon in left:
        told = [line.removeprefix("told ") for line in text(daemon).splitlines() if line.startswith("told ")]
        if not told:
            wrong.append(f"no error on {daemon.name}")
            continue
        error = json.loads(told[0])
        errors_s.append(error["at_s"] - sent_s)
        if f"rank {rank} ({victim.name})" not in error["error"]:
            wrong.append(f"the error on {daemon.name} does not name the culprit: {error['error']}")
    wrong += [f"an error after {each:.3f} s" for each in errors_s if each > LIMITS_S[kind]]
    mesh.wait_linked()
    wrong += settled(lambda: left_behind(mesh, job, learners, open_))
    return Kill(number, kind, tuple(round(each, 4) for each in errors_s), tuple(wrong), round(load, 1))


def settled(look: Callable[[], Sequence[str]]) -> Sequence[str]:
    """What is still there when there was time for it to go."""
    deadline_s = time.monotonic() + SETTLE_S
    while (seen := look()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return seen


def left_behind(mesh: ChaosMesh, job: str, learners: Sequence[int], open_: Descriptors) -> list[str]:
    """What there is of a job that has ended."""
    found = [f"process {pid} is there" for pid in learners if psutil.pid_exists(pid)]
    found += [f"{name} in /dev/shm" for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in learners)]
    temporary = set(os.listdir(os.environ["TMPDIR"])) - {f"meshtrain-{os.getuid()}"}  # where their sockets are
    found += [f"{name} in the folder for temporary files" for name in sorted(temporary)]
    for daemon in mesh.daemons.values():
        own = daemon.data_dir / "jobs" / job
        found += [f"{daemon.name} has {name}" for name in (SOURCE, DATA, STATE) if (own / name).exists()]
        found += [f"{daemon.name} has {path.name}" for path in own.glob("logs/*.error")]
        found += [f"{daemon.name} has started {len(daemon.learners())}"] if daemon.learners() else []
        summary = jobs.summary(daemon, job)
        if summary.state not in TERMINAL_STATES:
            found.append(f"on {daemon.name} it is {summary.state}")
    return found or [more for daemon in mesh.daemons.values() if (more := open_.more(daemon)) is not None]


def page(kills: Sequence[Kill]) -> str:
    """What is published."""
    loads = [each.load for each in kills]
    lines = [
        "# Ranks and daemons killed in the middle of an all-reduce",
        "",
        "```",
        f"python -m tests.torch_backend.kills --count {len(kills)} --write",
        "```",
        "",
        f"{len(kills)} jobs, one after the other, on three real daemons (`--patience {PATIENCE_S:g}`), each summing",
        "two million values over and over; a rank's process or a daemon gets SIGKILL or SIGSTOP, on each laptop in",
        "turn. Seconds from the signal to the error of each of the two scripts that are left. Two cores, load",
        f"{min(loads)} to {max(loads)}; torch {torch.__version__}.",
        "",
        "| what | times | median s | longest s | has to be within s | errors that name the culprit |",
        "|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [each for each in kills if each.kind == kind]
        times_s = [each for kill in of_kind for each in kill.errors_s]
        if times_s:
            named = len(times_s) - sum("does not name" in text for kill in of_kind for text in kill.wrong)
            lines.append(
                f"| {kind} | {len(of_kind)} | {statistics.median(times_s):.3f} | {max(times_s):.3f} | "
                f"{LIMITS_S[kind]:g} | {named} of {2 * len(of_kind)} |"
            )
    wrong = [f"- {kill.number} ({kill.kind}, load {kill.load}): {text}" for kill in kills for text in kill.wrong]
    if wrong:
        lines += ["", "What was wrong:", "", *wrong]
    else:
        lines += [
            "",
            "All jobs ended on all laptops. Of none was anything left: no process, no descriptor of a daemon, no",
            "shared memory, no temporary file.",
        ]
    return "\n".join(lines) + "\n"


def done_before(log: Path | None) -> list[Kill]:
    """Those that were written down."""
    if log is None or not log.exists():
        return []
    made = [json.loads(line) for line in log.read_text().splitlines()]
    return [Kill(**{**one, "errors_s": tuple(one["errors_s"]), "wrong": tuple(one["wrong"])}) for one in made]


def main() -> int:
    """The exit code: 1 where anything was wrong."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--count", type=int, default=100, help="how many kills")
    arguments.add_argument("--log", type=Path, help="where each is written down, and read from")
    arguments.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    asked = arguments.parse_args()
    kills = done_before(asked.log)[: asked.count]
    with interruptible(), tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as temporary:
        os.environ["TMPDIR"] = temporary  # of the daemons, and their learners
        with ChaosMesh(3, patience_s=PATIENCE_S) as mesh:
            open_ = Descriptors()
            for number in range(len(kills), asked.count):
                kill = one_kill(mesh, Path(folder), number, open_)
                kills.append(kill)
                said = ", ".join(f"{each:.3f} s" for each in kill.errors_s)
                sys.stdout.write(f"{number + 1:4} {kill.kind:13} {said}  load {kill.load}\n")
                sys.stdout.writelines(f"     WRONG: {text}\n" for text in kill.wrong)
                sys.stdout.flush()
                if asked.log is not None:
                    with asked.log.open("a") as file:
                        file.write(json.dumps(asdict(kill)) + "\n")
    text = page(kills)
    sys.stdout.write(text)
    if asked.write:
        RESULTS.write_text(text)
    return int(any(kill.wrong for kill in kills))


if __name__ == "__main__":
    sys.exit(main())
