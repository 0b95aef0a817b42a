"""`python -m tests.bench.soak`: real daemons and a real job, and every 0.5 to 2 s something of them breaks.

Storms of 75 s and calms of 45 s take turns. Ends with exit code 1 when an invariant breaks: 30 s without a round while
two peers could commit one, a job that ended, replicas that differ, samples that count twice, or a leak. What is done,
and when, follows from `--seed`.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import psutil

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.localmesh import LocalMeshError
from meshwire.messages.local import Cancel
from tests.bench.chaosjob import ChaosJob
from tests.bench.soakschedule import CALM_S, VERBS, Action, Schedule
from tests.bench.soakwatch import Watch
from tests.lab.chaosmesh import NAMES, ChaosMesh
from tests.lab.chaosproxy import ChaosProxy, Cut

LOOK_S = 0.5
STATUS_S = 10.0
START_TIMEOUT_S = 120.0
HARMLESS = ("storm", "calm", "spawn", "thaw", "heal", "delay", "throttle")  # these end no round


def say(text: str) -> None:
    """To people; stdout is for figures."""
    print(text, file=sys.stderr, flush=True)


class Soak:
    """One run.

    Attributes:
        done: the actions so far.
    """

    def __init__(self, mesh: ChaosMesh, job: ChaosJob, schedule: Schedule) -> None:
        self.done: list[Action] = []
        self._mesh = mesh
        self._schedule = schedule
        self._began_s = time.monotonic()
        self._told_s = self._began_s
        self.watch = Watch(mesh, job, self._began_s)

    @property
    def lasted_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began_s

    def run(self) -> None:
        """Returns at the end of the schedule, or when the job is over."""
        for action in self._schedule:
            self._look_until(self._began_s + action.at_s)
            if self.watch.findings.job_over:
                return
            self._do(action)
            if action.verb == "calm":
                self._look_until(self._began_s + action.at_s + CALM_S)
                if not self.watch.findings.job_over:
                    self.watch.check_calm()

    def _look_until(self, at_s: float) -> None:
        while not self.watch.findings.job_over:
            known = len(self.watch.findings.violations)
            self.watch.look()
            for text in self.watch.findings.violations[known:]:
                say(f"VIOLATION at {text}")
            now_s = time.monotonic()
            if now_s - self._told_s >= STATUS_S:
                self._told_s = now_s
                say(self._status())
            if now_s >= at_s:
                return
            time.sleep(min(LOOK_S, at_s - now_s))

    def _status(self) -> str:
        findings = self.watch.findings
        peers = " ".join(f"{name}{'' if daemon.up else '-'}" for name, daemon in self._mesh.daemons.items())
        return (
            f"{self.lasted_s:8.1f} s  round {findings.rounds}, {len(self.done)} actions, "
            f"{len(findings.violations)} violations, longest gap {findings.longest_gap_s:.1f} s, {peers}"
        )

    def _do(self, action: Action) -> None:
        say(str(action))
        self.done.append(action)
        self.watch.findings.interruptions += action.verb not in HARMLESS
        if len(action.who) == 1:
            self._do_to_peer(action)
        elif action.verb not in ("storm", "calm"):
            self._do_to_link(action)

    def _do_to_peer(self, action: Action) -> None:
        daemon = self._mesh.daemons[action.who[0]]
        match action.verb:
            case "kill":
                daemon.kill()
            case "spawn":
                daemon.start()
            case "freeze":
                daemon.freeze()
            case "thaw":
                daemon.thaw()
                self.watch.thawed(daemon.name)
            case "learner":
                if not daemon.kill_learner():
                    say(f"            {daemon.name} had no learner")

    def _do_to_link(self, action: Action) -> None:
        one, other = action.who
        self._mesh.proxy(lambda proxy: shape_link(proxy, action))
        if action.verb == "heal":
            self.watch.link_healed(one, other)
        else:
            self.watch.link_broken(one, other)


def shape_link(proxy: ChaosProxy, action: Action) -> None:
    """Does to a link what the action says."""
    one, other = action.who
    match action.verb:
        case "cut":
            proxy.cut(one, other, Cut(action.how))
        case "stall":
            proxy.stall(one, other)
            if action.how == "both":
                proxy.stall(other, one)
        case "throttle" | "delay":
            for src, dst in ((one, other), (other, one)):
                if action.verb == "throttle":
                    proxy.shape(src, dst, bytes_per_s=action.amount)
                else:
                    proxy.shape(src, dst, delay_s=action.amount, jitter_s=action.amount / 2)
        case "heal":
            proxy.heal(one, other)


def wait_running(mesh: ChaosMesh, job: ChaosJob) -> None:
    """Until every peer's learner has been in a round. Raises LocalMeshError."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        summary = job.summary(mesh.daemons[mesh.names[0]])
        if summary is not None and summary.error is not None:
            raise LocalMeshError(f"the job has not begun: {summary.error}")
        if summary is not None and sum(rank.metrics.step > 1 for rank in summary.ranks) == len(mesh.names):
            return
        if time.monotonic() > deadline_s:
            raise LocalMeshError(f"the job has not begun within {START_TIMEOUT_S:.0f} s: {summary}")
        time.sleep(0.1)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM, too, ends in order; a second ctrl-C does not break the order."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def soak(options: argparse.Namespace) -> dict[str, object]:
    """Returns the result. Raises LocalMeshError and what a daemon answers when it cannot begin."""
    duration_s = (options.hours * 60 + options.minutes if options.hours else options.minutes) * 60.0
    schedule = Schedule(
        NAMES[: options.peers], seed=options.seed, duration_s=duration_s, verbs=options.verbs.split(",")
    )
    interrupted = False
    with ChaosMesh(options.peers, seed=options.seed, patience_s=options.patience, keep=options.keep) as mesh:
        say(f"{options.peers} daemons in {mesh.folder}, seed {options.seed}, for {duration_s / 60:g} minutes")
        with tempfile.TemporaryDirectory(prefix="meshtrain-soak-") as folder:
            job = ChaosJob(mesh, Path(folder), sync=options.sync, hash_every=10, trace=options.trace)
        wait_running(mesh, job)
        run = Soak(mesh, job, schedule)
        try:
            run.run()
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted: ending in order")
        findings = run.watch.findings
        if not findings.job_over:
            _end(mesh, job, findings.violations)
    left = [child.pid for child in psutil.Process().children(recursive=True)]
    if left:
        findings.violations.append(f"processes are left: {left}")
    return {
        "seed": options.seed,
        "peers": options.peers,
        "patience_s": options.patience,
        "sync": options.sync,
        "duration_s": run.lasted_s,
        "interrupted": interrupted,
        **asdict(findings),
        "actions": [asdict(action) for action in run.done],
    }


def _end(mesh: ChaosMesh, job: ChaosJob, violations: list[str]) -> None:
    """The job can be cancelled still, on whoever is up."""
    for daemon in mesh.daemons.values():
        if daemon.frozen:
            daemon.thaw()
    up = [daemon for daemon in mesh.daemons.values() if daemon.up]
    if not up or up[0].ask(Cancel(job=job.id, now=True), "cancel") is None:
        violations.append("at the end the job could not be cancelled")


def show(result: dict[str, object]) -> None:
    """The summary, for people."""
    violations, notes, actions = result["violations"], result["notes"], result["actions"]
    assert isinstance(violations, list)
    assert isinstance(notes, list)
    assert isinstance(actions, list)
    counts = {verb: sum(action["verb"] == verb for action in actions) for verb in (*VERBS, "spawn", "thaw", "heal")}
    print(
        f"{result['peers']} peers, seed {result['seed']}, {result['duration_s']:.0f} s, patience "
        f"{result['patience_s']:g} s: {result['rounds']} rounds, {result['epochs']} epochs, longest gap "
        f"{result['longest_gap_s']:.1f} s, samples of void rounds {result['samples_missing']}"
    )
    print("actions: " + ", ".join(f"{count} {verb}" for verb, count in counts.items() if count))
    for text in notes:
        print(f"note at {text}")
    for text in violations:
        print(f"VIOLATION at {text}")
    print("FAIL" if violations else "PASS: no invariant was broken")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description=__doc__)
    parser.add_argument("--peers", type=int, default=4, choices=range(2, len(NAMES) + 1), help="default %(default)s")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hours", type=float, default=0.0, help="instead of minutes")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000), help="replays a run's actions")
    parser.add_argument(
        "--patience", type=float, default=2.0, help="of the daemons; a part that is not entitled waits 6 times as long"
    )
    parser.add_argument("--sync", default="bsp", help="as of `meshtrain submit`")
    parser.add_argument("--verbs", default=",".join(VERBS), help="what may happen (default %(default)s)")
    parser.add_argument("--trace", action="store_true", help="let members write traces")
    parser.add_argument("--keep", action="store_true", help="leave the daemons' folders")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if unknown := set(options.verbs.split(",")) - set(VERBS):
        parser.error(f"--verbs: {', '.join(sorted(unknown))} is none of {', '.join(VERBS)}")
    try:
        with interruptible():
            result = soak(options)
    except KeyboardInterrupt:
        say("interrupted before the job had begun")
        return 130
    except (LocalMeshError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
        say(f"error: {error}")
        return 1
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    return int(bool(result["violations"]))


if __name__ == "__main__":
    sys.exit(main())
