"""What must hold while a soak breaks things: rounds go on, replicas are equal, samples count once, nothing grows."""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import psutil

from meshwire.messages.job import JobSummary
from tests.bench.chaosjob import ChaosJob, missing, repeated
from tests.bench.soakgrowth import Growth
from tests.bench.soakhost import FILLER
from tests.lab.chaosmesh import ChaosDaemon, ChaosMesh

STALL_S = 30.0  # without a round, while two peers could have committed one for as long
DESCRIPTORS_SLACK = 6  # a dial under way, a client
THREADS_SLACK = 6  # of pools that fill when they are first used
MEMORY_SLACK_BYTES = 64 * 1024 * 1024
MEMORY_GROWTH = 1.25
SHARED_MEMORY = Path("/dev/shm")
GROWTH_EVERY_S = 15.0
OVER = ("failed", "failing", "succeeded", "cancelled", "cancelling")


@dataclass(frozen=True)
class Use:
    """What one daemon holds in a calm."""

    descriptors: int
    memory_files: int  # memfd
    threads: int
    children: int
    resident_bytes: int


@dataclass
class Findings:
    """All that was seen.

    Attributes:
        violations: none is wanted.
        notes: what a person should know of a soak without violations.
        interruptions: kills, freezes and faults of links, each of which may have voided a round (V2).
        longest_gap_s: between rounds, while two peers could commit them.
        rounds: of all jobs.
        jobs: that have ended in order.
        growth: of each kind the series nearest to its bound.
        job_over: the job has ended and was not to.
    """

    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rounds: int = 0
    interruptions: int = 0
    longest_gap_s: float = 0.0
    samples_missing: int = 0
    epochs: int = 0
    jobs: int = 0
    growth: dict[str, str] = field(default_factory=dict)
    job_over: bool = False


class Watch:
    """Looks at a mesh and its job whenever it is told to.

    Attributes:
        findings: so far.
    """

    def __init__(self, mesh: ChaosMesh, job: ChaosJob, began_s: float) -> None:
        self.findings = Findings()
        self.growth = Growth()
        self._mesh = mesh
        self._job = job
        self._began_s = began_s
        self._grew_s = began_s
        self._rounds_before = 0  # of the jobs before this one
        self._interruptions_before = 0
        self._ending = False
        self._touched_s = dict.fromkeys(map(frozenset, combinations(mesh.names, 2)), began_s)  # links
        self._broken: set[frozenset[str]] = set()
        self._thawed_s: dict[str, float] = {}
        self._rounds: dict[str, int] = {}  # that each daemon has told last
        self._progress_s = dict.fromkeys(mesh.names, began_s)  # when it told more than before
        self._answered_s = dict.fromkeys(mesh.names, began_s)
        self._uses: dict[int, Use] = {}  # by process id: in the first calm that it saw
        self._memory: dict[int, int] = {}  # by process id, resident: in the first calm with its learner
        self._shared_memory = _shared_memory()
        self._said: set[str] = set()

    def link_broken(self, one: str, other: str) -> None:
        """Nothing is expected of this link until it is healed."""
        self._broken.add(frozenset((one, other)))

    def link_healed(self, one: str, other: str) -> None:
        """From now on it is expected to work."""
        link = frozenset((one, other))
        self._broken.discard(link)
        self._touched_s[link] = time.monotonic()

    def thawed(self, name: str) -> None:
        """From now on this peer is expected to work."""
        self._thawed_s[name] = time.monotonic()

    def job_ends(self) -> None:
        """The script was told to end: from now on the job may succeed."""
        self._ending = True

    def job_begins(self, job: ChaosJob) -> None:
        """Another one runs, on all peers."""
        now_s = time.monotonic()
        self.findings.jobs += 1
        self._job, self._ending = job, False
        self._rounds_before = self.findings.rounds
        self._interruptions_before = self.findings.interruptions
        self._rounds.clear()
        self._progress_s = dict.fromkeys(self._mesh.names, now_s)

    def look(self) -> Mapping[str, JobSummary | None]:
        """Notes progress and what is wrong. Returns what each daemon says of the job."""
        summaries = {name: self._job.summary(daemon) for name, daemon in self._mesh.daemons.items()}
        now_s = time.monotonic()
        for name, summary in summaries.items():
            daemon = self._mesh.daemons[name]
            if not daemon.killed and (code := daemon.process.poll()) is not None:
                self.violated(f"the daemon {name} has ended by itself, exit code {code}", once=f"end of {name}")
            if summary is None:
                self._check_answers(name, daemon, now_s)
                continue
            self._answered_s[name] = now_s
            if summary.rounds > self._rounds.get(name, 0):
                self._progress_s[name] = now_s
            self._rounds[name] = summary.rounds  # fewer than before, when its side of a partition gave way
            self.findings.rounds = max(self.findings.rounds, self._rounds_before + summary.rounds)
            if summary.replicas_equal is False:
                self.violated(f"{name} says that the replicas differ")
            if summary.state in OVER and not (self._ending and summary.state == "succeeded"):
                self.violated(f"the job is {summary.state} on {name}: {summary.error}", once=f"over on {name}")
                self.findings.job_over = True
        if not self._ending:
            self._check_progress(now_s)
        if now_s - self._grew_s >= GROWTH_EVERY_S:
            self._grew_s = now_s
            self.note_growth()
        return summaries

    def note_growth(self) -> None:
        """What each daemon holds now; and what has grown too much so far."""
        at_s = time.monotonic() - self._began_s
        for name, daemon in self._mesh.daemons.items():
            self.growth.note(name, "disk", at_s, disk_bytes(daemon.data_dir))
            self.growth.note(name, "log", at_s, daemon.log_path.stat().st_size)
            use = use_of(daemon.process.pid) if daemon.up else None
            if use is not None:
                pid = daemon.process.pid
                self.growth.note(name, "memory", at_s, use.resident_bytes, pid)
                self.growth.note(name, "descriptors", at_s, use.descriptors, pid)
                self.growth.note(name, "threads", at_s, use.threads, pid)
        for line in self.growth.lines():
            if line.too_steep:
                self.violated(f"growth: {line}", once=f"growth of {line.what} of {line.name}")
        self.findings.growth = {what: str(line) for what, line in self.growth.steepest().items()}

    def _check_answers(self, name: str, daemon: ChaosDaemon, now_s: float) -> None:
        if not daemon.up:
            self._answered_s[name] = now_s
        silent_s = now_s - max(self._answered_s[name], daemon.started_s)
        if silent_s >= STALL_S:
            self.violated(f"{name} has not answered for {silent_s:.0f} s", once=f"silence of {name}")

    def _check_progress(self, now_s: float) -> None:
        for link, able_s in self._able_since_s().items():
            progress_s = max(self._progress_s[name] for name in link)
            gap_s = now_s - max(progress_s, able_s)
            self.findings.longest_gap_s = max(self.findings.longest_gap_s, gap_s)
            if now_s - able_s >= STALL_S and now_s - progress_s >= STALL_S:
                names = " and ".join(sorted(link))
                self.violated(
                    f"no round for {now_s - progress_s:.0f} s at {names}, though both learners have been up and "
                    f"linked for {now_s - able_s:.0f} s",
                    once=f"no round at {names} since {progress_s}",
                )

    def _able_since_s(self) -> dict[frozenset[str], float]:
        """Since when there have been two daemons with learners, and a link between them that nobody touched."""
        since_s: dict[str, float] = {}
        for name, daemon in self._mesh.daemons.items():
            learners = daemon.learners() if daemon.up else []
            if learners:
                with contextlib.suppress(psutil.NoSuchProcess):
                    learner_s = time.monotonic() - (time.time() - learners[0].create_time())
                    since_s[name] = max(learner_s, self._thawed_s.get(name, 0.0))
        return {
            link: max(self._touched_s[link], *(since_s[name] for name in link))
            for link in map(frozenset, combinations(since_s, 2))
            if link not in self._broken
        }

    def check_calm(self) -> None:
        """At the end of a calm: everybody is back, samples count once, and nothing has leaked."""
        for name in self._mesh.names:
            absent = set(self._mesh.names) - {name} - self._mesh.linked(name)
            if absent:
                self.violated(f"{name} has no link to {', '.join(sorted(absent))} at the end of a calm")
        self._check_job_is_whole()
        if self._job.counts:
            self._check_samples()
        for name, daemon in self._mesh.daemons.items():
            use = use_of(daemon.process.pid)
            if use is not None:
                self._check_use(name, daemon.process.pid, use)
                if self._computes(name, daemon):
                    self._check_memory(name, daemon.process.pid, use)
        left = _shared_memory() - self._shared_memory
        if left:
            self.violated(f"shared memory is left in {SHARED_MEMORY}: {', '.join(sorted(left))}")

    def _check_job_is_whole(self) -> None:
        for name, daemon in self._mesh.daemons.items():
            summary = self._job.summary(daemon)
            if summary is None or summary.state not in ("running", "finishing"):
                state = "unknown" if summary is None else summary.state
                self.violated(f"the job is {state} on {name} at the end of a calm", once=f"state of {name}: {state}")
            if len(daemon.learners()) != 1:
                self._noted(f"{name} has {len(daemon.learners())} learners at the end of a calm")

    def _check_samples(self) -> None:
        records = self._job.records()
        for text in repeated(records):
            self.violated(f"X6: {text}")
        self.findings.epochs = max((record.epoch for record in records), default=0)
        self.findings.samples_missing = missing(records)
        interruptions = self.findings.interruptions - self._interruptions_before
        allowed = interruptions * len(self._mesh.names) * self._job.batch
        if self.findings.samples_missing > allowed:
            self.violated(
                f"X5: {self.findings.samples_missing} samples are in no round that counts, more than the {allowed} of "
                f"{interruptions} rounds that interruptions may have voided",
                once="too many samples missing",
            )

    def _computes(self, name: str, daemon: ChaosDaemon) -> bool:
        """Whether its learner does. For one that loads, or waits to be started again, the daemon keeps all rounds that
        follow what it has (J1, J3), and its memory says nothing."""
        summary = self._job.summary(daemon)
        return summary is not None and any(summary.members[rank].name == name for rank in summary.learning)

    def _check_use(self, name: str, pid: int, use: Use) -> None:
        first = self._uses.setdefault(pid, use)
        self._check_most(name, "file descriptors", use.descriptors, first.descriptors + DESCRIPTORS_SLACK)
        self._check_most(name, "memory files", use.memory_files, max(first.memory_files, 1))
        self._check_most(name, "threads", use.threads, first.threads + THREADS_SLACK)
        self._check_most(name, "child processes", use.children, 1)

    def _check_memory(self, name: str, pid: int, use: Use) -> None:
        first_bytes = self._memory.setdefault(pid, use.resident_bytes)
        most_bytes = first_bytes * MEMORY_GROWTH + MEMORY_SLACK_BYTES
        self._check_most(name, "resident bytes", use.resident_bytes, most_bytes)

    def _check_most(self, name: str, what: str, now: int, most: float) -> None:
        if now > most:
            self.violated(f"{name} leaks {what}: {now} now, at most {most:.0f} expected after its first calm")

    def violated(self, text: str, once: str | None = None) -> None:
        """An invariant is broken; it is said once."""
        if (once or text) not in self._said:
            self._said.add(once or text)
            self.findings.violations.append(f"{time.monotonic() - self._began_s:.1f} s: {text}")

    def _noted(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.findings.notes.append(f"{time.monotonic() - self._began_s:.1f} s: {text}")


def use_of(pid: int) -> Use | None:
    """None when the process has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return Use(
                descriptors=process.num_fds(),
                memory_files=_memory_files(pid),
                threads=process.num_threads(),
                children=len(process.children()),
                resident_bytes=process.memory_info().rss,
            )
    except (psutil.NoSuchProcess, FileNotFoundError):
        return None


def disk_bytes(folder: Path) -> int:
    """Of all files below it, but what fills a disk on purpose."""
    found = 0
    for path, _, names in os.walk(folder):
        for name in names:
            if name != FILLER:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    found += (Path(path) / name).lstat().st_blocks * 512
    return found


def _memory_files(pid: int) -> int:
    found = 0
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += os.readlink(f"/proc/{pid}/fd/{number}").startswith("/memfd:")
    return found


def _shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.exists() else set()
