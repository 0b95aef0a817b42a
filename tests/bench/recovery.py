"""`python -m tests.bench.recovery`: how many seconds a job needs when something is lost, and when it comes back.

Real daemons whose links pass the chaos proxy. Times are from the daemons' own logs and traces, and of the slowest of
those that go on. Ends with exit code 1 when a goal is missed, or a job ends.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMeshError
from meshwire import limits
from meshwire.messages.local import Cancel
from tests.bench.chaosjob import ChaosJob, missing, repeated
from tests.bench.recoverylog import Story, rate_ratio, read_story, times, whole_again_s
from tests.bench.soak import interruptible, say, wait_running
from tests.lab.chaosmesh import NAMES, ChaosDaemon, ChaosMesh
from tests.lab.chaosproxy import ChaosProxy

PEERS = (2, 3, 4, 8)
MBIT = 50.0
BALLAST_VALUES = 11_500_000  # 46 MB of optimizer state
BEFORE_S = 5.0  # steady rounds before anything breaks
AFTER_ROUNDS = 10  # rounds that show that it goes on
RECOVERY_TIMEOUT_S = 240.0  # the least share of 50 Mbit/s carries 46 MB in 90 s; imports on shared cores
PARTITION_PATIENCES = 3.0  # how long a partition lasts
POLL_S = 0.1
SOCKET_GOAL_S = 1.0
SILENCE_GOAL_S = 1.0  # beyond the patience
LEARNER_GOAL_S = 3.0  # beyond the imports
RATE_GOAL = 0.9


@dataclass(frozen=True)
class Row:
    """One scenario, measured.

    Attributes:
        mbit: what each peer can send, and receive; None: loopback without a limit.
        detected_s, agreed_s, round_s, fenced_s: see `recoverylog.Times`.
        whole_s: until all peers compute again, from when the lost one could come back.
        imports_s: of it: Python and torch of the script that starts again.
        rate: the others' rounds a second while the lost one came back, over those of before.
        missing: samples in no round that counts (X5: those of void rounds).
        repeated: samples that count twice (X6).
        outcome: "recovered", or why not.
    """

    scenario: str
    peers: int
    mbit: float | None
    outcome: str
    detected_s: float | None = None
    agreed_s: float | None = None
    round_s: float | None = None
    fenced_s: float | None = None
    whole_s: float | None = None
    imports_s: float | None = None
    rate: float | None = None
    missing: int = 0
    repeated: int = 0
    goal: str = ""
    met: bool = False


class Case:
    """One mesh with one job, something that breaks, and what became of it.

    Attributes:
        broke_s, back_s: monotonic times: when it broke, and when the lost one could come back.
        lost: names to which links break.
    """

    def __init__(self, mesh: ChaosMesh, job: ChaosJob, patience_s: float) -> None:
        self.mesh = mesh
        self.job = job
        self.patience_s = patience_s
        self.broke_s = 0.0
        self.back_s: float | None = None
        self.lost: frozenset[str] = frozenset()

    @property
    def victim(self) -> ChaosDaemon:
        """The one that is lost where it is not said otherwise: the last rank."""
        return self.mesh.daemons[self.job.names[-1]]

    def breaks(self, *lost: str) -> None:
        """From now on."""
        self.lost = frozenset(lost)
        self.broke_s = time.monotonic()

    def others(self) -> list[str]:
        """Those that are expected to go on."""
        return [name for name in self.job.names if name not in self.lost]

    def stories(self, names: Sequence[str]) -> list[Story]:
        """What these have written so far."""
        return [
            read_story(name, self.mesh.daemons[name].log_path, self.job.folder(name), self.job.id) for name in names
        ]

    def go_on(self) -> str | None:
        """Waits until those that are left have entered a generation and had rounds. Returns why not."""
        return self._until(
            lambda: all(
                any(one.at_s >= self.broke_s for one in story.entered) for story in self.stories(self.others())
            ),
            "those that are left to enter a generation",
        ) or self._have_rounds(self.others())

    def is_whole(self) -> str | None:
        """Waits until all compute again, and have had rounds. Returns why not."""
        assert self.back_s is not None
        since_s, names = self.back_s, frozenset(self.job.names)
        return self._until(
            lambda: whole_again_s(self.stories(self.job.names), since_s, names) is not None, "all to compute again"
        ) or self._have_rounds(self.job.names)

    def _have_rounds(self, names: Sequence[str]) -> str | None:
        before = self._rounds(names)
        return self._until(lambda: self._rounds(names) >= before + AFTER_ROUNDS, f"{AFTER_ROUNDS} rounds")

    def _rounds(self, names: Sequence[str]) -> int:
        summaries = [self.job.summary(self.mesh.daemons[name]) for name in names]
        return min((summary.rounds for summary in summaries if summary is not None), default=0)

    def _until(self, condition: Callable[[], bool], what: str) -> str | None:
        deadline_s = time.monotonic() + RECOVERY_TIMEOUT_S
        while not condition():
            for name in self.others():
                summary = self.job.summary(self.mesh.daemons[name])
                if summary is not None and summary.state not in ("running", "finishing"):
                    return f"the job is {summary.state} on {name}: {summary.error}"
            if time.monotonic() > deadline_s:
                return f"waited {RECOVERY_TIMEOUT_S:.0f} s for {what}"
            time.sleep(POLL_S)
        return None


# What breaks, and what is waited for


def peer_killed(case: Case) -> str | None:
    """SIGKILL of a daemon: its sockets close."""
    case.breaks(case.victim.name)
    case.victim.kill()
    return case.go_on()


def peer_silent(case: Case) -> str | None:
    """Nothing of a peer arrives any more, nor does what is sent to it."""
    case.breaks(case.victim.name)
    case.mesh.proxy(lambda proxy: partition(proxy, case.others(), [case.victim.name]))
    return case.go_on()


def learner_killed(case: Case) -> str | None:
    """SIGKILL of a learner; its daemon starts another."""
    case.breaks()
    case.back_s = case.broke_s
    case.victim.kill_learner()
    return case.is_whole()


def submitter_killed(case: Case) -> str | None:
    """SIGKILL of the daemon that has submitted the job: nothing special."""
    submitter = case.mesh.daemons[case.job.names[0]]
    case.breaks(submitter.name)
    submitter.kill()
    return case.go_on()


def peer_rejoins(case: Case) -> str | None:
    """A killed daemon is started again when the others go on: it loads 46 MB of state."""
    if failed := peer_killed(case):
        return failed
    case.back_s = time.monotonic()
    case.victim.start()
    return case.is_whole()


def partition_heals(case: Case) -> str | None:
    """Two halves that do not hear each other, for some time; both go on, one gives way."""
    half = len(case.job.names) // 2
    here, there = case.job.names[: len(case.job.names) - half], case.job.names[-half:]
    case.breaks(*there)
    case.mesh.proxy(lambda proxy: partition(proxy, here, there))
    if failed := case.go_on():
        return failed
    time.sleep(max(0.0, case.broke_s + PARTITION_PATIENCES * case.patience_s - time.monotonic()))
    case.back_s = time.monotonic()
    case.mesh.proxy(lambda proxy: heal(proxy, here, there))
    return case.is_whole()


def partition(proxy: ChaosProxy, here: Sequence[str], there: Sequence[str]) -> None:
    """Nothing passes between the two sides."""
    for one, other in product(here, there):
        proxy.stall(one, other)
        proxy.stall(other, one)


def heal(proxy: ChaosProxy, here: Sequence[str], there: Sequence[str]) -> None:
    """All passes again."""
    for one, other in product(here, there):
        proxy.heal(one, other)


SCENARIOS: dict[str, Callable[[Case], str | None]] = {
    "peer killed": peer_killed,
    "peer silent": peer_silent,
    "learner killed": learner_killed,
    "submitter killed": submitter_killed,
    "peer rejoins": peer_rejoins,
    "partition healed": partition_heals,
}


def measure(scenario: str, peers: int, mbit: float | None, patience_s: float, keep: bool) -> Row:
    """One row, on a mesh of its own. Raises what starting a mesh or a job raises."""
    ballast = BALLAST_VALUES if scenario == "peer rejoins" else 0
    bytes_per_s = mbit * 1e6 / 8 if mbit is not None else None
    with ChaosMesh(peers, patience_s=patience_s, station_bytes_per_s=bytes_per_s, keep=keep) as mesh:
        with tempfile.TemporaryDirectory(prefix="meshtrain-recovery-") as folder:
            job = ChaosJob(mesh, Path(folder), trace=True, hash_every=50, ballast_values=ballast)
        wait_running(mesh, job)
        time.sleep(BEFORE_S)
        case = Case(mesh, job, patience_s)
        failed = SCENARIOS[scenario](case)
        ended_s = time.monotonic()
        for daemon in mesh.daemons.values():
            if daemon.up and daemon.ask(Cancel(job=job.id, now=True), "cancel") is not None:
                break
        _wait_ended(mesh, job)
        others = case.stories(case.others())
        whole_s = None
        if case.back_s is not None:
            whole_s = whole_again_s(case.stories(job.names), case.back_s, frozenset(job.names))
        records = job.records()
        return judged(
            Row(
                scenario=scenario,
                peers=peers,
                mbit=mbit,
                outcome=failed or "recovered",
                **asdict(times(others, case.broke_s, case.lost)),
                whole_s=whole_s,
                imports_s=imports_s(job, case.victim.name) if case.back_s is not None else None,
                rate=rate_of(case, others, ended_s, whole_s),
                missing=missing(records),
                repeated=len(repeated(records)),
            ),
            patience_s,
        )


def rate_of(case: Case, others: Sequence[Story], ended_s: float, whole_s: float | None) -> float | None:
    """The others' rounds while the lost one came back over those of before it was lost."""
    if case.back_s is None:
        return None
    until_s = ended_s if whole_s is None else case.back_s + whole_s
    return rate_ratio(others, (case.broke_s - BEFORE_S, case.broke_s), (case.back_s, until_s))


def imports_s(job: ChaosJob, name: str) -> float | None:
    """What the script that a peer started last has said of its imports."""
    said = [
        float(line.split()[1])
        for path in (job.folder(name) / "logs").glob("*.log")
        for line in path.read_text(errors="replace").splitlines()
        if line.startswith("imports: ")
    ]
    return said[-1] if said else None


def _wait_ended(mesh: ChaosMesh, job: ChaosJob) -> None:
    """Until the job has ended wherever a daemon runs: traces are whole then."""
    deadline_s = time.monotonic() + 30.0
    for daemon in mesh.daemons.values():
        while daemon.up and time.monotonic() < deadline_s:
            summary = job.summary(daemon)
            if summary is None or summary.ended_at_s is not None:
                break
            time.sleep(POLL_S)


def judged(row: Row, patience_s: float) -> Row:
    """With its goal, and whether it was met."""
    goal, met = _goal(row, patience_s)
    exact = row.repeated == 0 and row.outcome == "recovered"
    return Row(**{**asdict(row), "goal": goal, "met": met and exact})


def _goal(row: Row, patience_s: float) -> tuple[str, bool]:
    match row.scenario:
        case "peer killed" | "submitter killed":
            return f"round < {SOCKET_GOAL_S:g} s", row.round_s is not None and row.round_s < SOCKET_GOAL_S
        case "peer silent":
            most_s = patience_s + SILENCE_GOAL_S
            return f"round < {most_s:g} s", row.round_s is not None and row.round_s < most_s
        case "learner killed":
            goal = f"whole < {LEARNER_GOAL_S:g} s + imports"
            if row.whole_s is None or row.imports_s is None:
                return goal, False
            return goal, row.whole_s - row.imports_s < LEARNER_GOAL_S
        case "peer rejoins":
            return f"rate >= {RATE_GOAL:g}", row.rate is not None and row.rate >= RATE_GOAL
    return "whole again", row.whole_s is not None


COLUMNS = ("scenario", "m", "Mbit/s", "detected", "agreed", "round", "whole", "imports", "rate", "missing", "twice")


def table_row(row: Row) -> str:
    """A line of the table, for people."""
    seconds = [_shown(value) for value in (row.detected_s, row.agreed_s, row.round_s, row.whole_s, row.imports_s)]
    rate = "-" if row.rate is None else f"{row.rate:.2f}"
    network = "loopback" if row.mbit is None else f"{row.mbit:g}"
    cells = (row.scenario, str(row.peers), network, *seconds, rate, str(row.missing), str(row.repeated))
    verdict = "PASS" if row.met else f"FAIL ({row.outcome})" if row.outcome != "recovered" else "FAIL"
    return f"| {' | '.join(cells)} | {row.goal}: {verdict} |"


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.recovery", description=__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS, metavar="M", help="2 to 10 (default 2 3 4 8)")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name holds this")
    parser.add_argument("--network", choices=("loopback", "limited", "both"), default="both")
    parser.add_argument("--mbit", type=float, default=MBIT, help="of a limited network (default %(default)g)")
    parser.add_argument("--patience", type=float, default=limits.PATIENCE_S, help="default %(default)g s")
    parser.add_argument("--keep", action="store_true", help="leave the daemons' folders")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    scenarios = [name for name in SCENARIOS if options.only in name]
    if not scenarios:
        parser.error(f"--only: none of {', '.join(SCENARIOS)} holds {options.only!r}")
    if bad := [count for count in options.peers if not 2 <= count <= len(NAMES)]:
        parser.error(f"--peers: {bad[0]}: from 2 to {len(NAMES)}")
    networks = {"loopback": [None], "limited": [options.mbit], "both": [None, options.mbit]}[options.network]
    rows: list[Row] = []
    if not options.json:
        print(f"| {' | '.join((*COLUMNS, 'goal'))} |\n|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    try:
        with interruptible():
            for mbit, peers, scenario in product(networks, options.peers, scenarios):
                say(f"{scenario}, {peers} peers, {'loopback' if mbit is None else f'{mbit:g} Mbit/s'}")
                rows.append(_measured(scenario, peers, mbit, options.patience, options.keep))
                if not options.json:
                    print(table_row(rows[-1]), flush=True)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    if options.json:
        print(json.dumps({"patience_s": options.patience, "rows": [asdict(row) for row in rows]}, indent=1))
    return int(not all(row.met for row in rows))


def _measured(scenario: str, peers: int, mbit: float | None, patience_s: float, keep: bool) -> Row:
    try:
        return measure(scenario, peers, mbit, patience_s, keep)
    except (LocalMeshError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
        return judged(Row(scenario, peers, mbit, outcome=str(error) or type(error).__name__), patience_s)


if __name__ == "__main__":
    sys.exit(main())
