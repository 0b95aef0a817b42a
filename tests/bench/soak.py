"""`python -m tests.bench.soak`: real daemons and a real job, and every 0.5 to 2 s something of them breaks.

Storms of 75 s and calms of 45 s take turns; after each calm the job ends, and another with another codec begins. Nobody
is spared. In the first half no daemon ends, so that what one keeps can be seen to grow. `--power` is another run: all
processes are killed at once, and daemons come up one after the other, which begin the job again. Ends with exit code 1
when an invariant breaks: 30 s without a round while two peers could commit one, a job that ended, replicas that differ,
samples that count twice, or growth without bound of memory, disk, descriptors or log. What is done, and when, follows
from `--seed`.
"""

import argparse
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import psutil

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMeshError
from meshwire.messages.local import Cancel
from tests.bench.chaosjob import ChaosJob
from tests.bench.soakhost import DISK_BYTES, Host, HostError, can_mount, clock_library
from tests.bench.soakschedule import CALM_S, POWER, STORM_S, VERBS, Action, Schedule, power_cuts
from tests.bench.soakwatch import Watch
from tests.lab.chaosmesh import NAMES, ChaosMesh
from tests.lab.chaosproxy import ChaosProxy, Cut

LOOK_S = 0.5
STATUS_S = 10.0
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0
BETWEEN_S = 12.0  # from one job to the next, about
PEER_BYTES = 700 * 2**20  # of a daemon and its learner
CHECKPOINT_EVERY = "50r"  # every daemon, or every learner, may be killed in a job's first minute
HARMLESS = ("storm", "calm", "spawn", "thaw", "heal", "empty", "delay", "throttle", "step")  # these end no round
WAYS = (
    "fp32@bsp",
    "int8@bsp",
    "topk:0.05@ssp:2",
    "powersgd:2@bsp",
    "onebit@ssp:1",
    "nf4@local:2",
)  # CODEC@SYNC of one job after the other
WIDTH = 512  # of the model's hidden layers: 1 MiB, of which as much remains of each job that is not let go of


def say(text: str) -> None:
    """To people; stdout is for figures."""
    print(text, file=sys.stderr, flush=True)


class Jobs:
    """One after the other on a mesh: each way of exchanging in its turn."""

    def __init__(
        self, mesh: ChaosMesh, folder: Path, ways: Sequence[str], *, trace: bool, checkpoint_every: str
    ) -> None:
        self._mesh = mesh
        self._folder = folder
        self._ways = itertools.cycle(ways)
        self._numbers = itertools.count(1)
        self._trace = trace
        self._checkpoint_every = checkpoint_every

    def begin(self) -> ChaosJob:
        """The next one; when all its learners have been in a round it returns. Raises LocalMeshError."""
        codec, _, sync = next(self._ways).partition("@")
        folder = self._folder / f"{next(self._numbers)}"
        folder.mkdir()
        for daemon in self._mesh.daemons.values():
            daemon.wait()
        job = ChaosJob(
            self._mesh,
            folder,
            width=WIDTH,
            deep=True,
            counts=codec == "fp32" and sync in ("", "bsp"),
            kernel_time=True,
            codec=codec,
            sync=sync or "bsp",
            hash_every=1,
            trace=self._trace,
            checkpoint_every=self._checkpoint_every,
        )
        wait_running(self._mesh, job)
        return job


class Soak:
    """One run.

    Args:
        hosts: the machines of the daemons, by name; without them no disk is filled and no clock stepped.

    Attributes:
        done: the actions so far.
        job: that runs.
    """

    def __init__(self, mesh: ChaosMesh, jobs: Jobs, schedule: Iterable[Action], hosts: Mapping[str, Host]) -> None:
        self.done: list[Action] = []
        self.job = jobs.begin()
        self._mesh = mesh
        self._jobs = jobs
        self._schedule = schedule
        self._hosts = hosts
        self._began_s = time.monotonic()
        self._between_s = 0.0  # from one job to the next: the schedule stands still
        self._told_s = self._began_s
        self.watch = Watch(mesh, self.job, self._began_s)

    @property
    def lasted_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began_s

    def run(self) -> None:
        """Returns at the end of the schedule, or when the job is over and was not to."""
        calm = False
        for action in self._schedule:
            if calm and not self._next_job():
                return
            at_s = self._began_s + self._between_s + action.at_s
            self._look_until(at_s)
            if self.watch.findings.job_over:
                return
            self._do(action)
            calm = action.verb == "calm"
            if calm:
                self._look_until(at_s + CALM_S)
                if self.watch.findings.job_over:
                    return
                self.watch.check_calm()

    def _next_job(self) -> bool:
        """The job ends in order, and another begins. False, with a violation, if the first does not end."""
        since_s = time.monotonic()
        self.watch.job_ends()
        self.job.finish()
        while not self._all_succeeded() and not self.watch.findings.job_over:
            if time.monotonic() > since_s + END_TIMEOUT_S:
                self.watch.violated(f"the job has not ended {END_TIMEOUT_S:.0f} s after its script was told to")
                return False
            self._look_until(time.monotonic() + LOOK_S)
        if self.watch.findings.job_over:
            return False
        self.job = self._jobs.begin()
        self.watch.job_begins(self.job)
        self._between_s += time.monotonic() - since_s
        say(f"{self.lasted_s:8.1f} s  another job runs, with {self.job.way}")
        return True

    def _all_succeeded(self) -> bool:
        summaries = [self.job.summary(daemon) for daemon in self._mesh.daemons.values()]
        return all(summary is not None and summary.state == "succeeded" for summary in summaries)

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
        if len(action.who) == 1 and action.verb != "storm":
            self._do_to_peer(action)
        elif action.verb == "learners":
            for daemon in self._mesh.daemons.values():
                daemon.kill_learner()
        elif action.verb == POWER:
            for daemon in self._mesh.daemons.values():
                daemon.kill()
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
            case "fill":
                self._hosts[daemon.name].fill()
            case "empty":
                self._hosts[daemon.name].empty()
            case "step":
                self._hosts[daemon.name].step(action.amount)
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


class Hosts:
    """The machines of all daemons, made as the mesh asks for them; what this one cannot play is left out, and said."""

    def __init__(self, seed: int, stack: ExitStack) -> None:
        self.by_name: dict[str, Host] = {}
        self._clock: Path | None = None
        self.left_out: list[str] = []
        self._boots = random.Random(f"{seed} boots") if can_mount() else None
        if not can_mount():
            self.left_out.append("fill")
            say("left out: full disks and times since boot of their own, which need root")
        try:
            self._clock = stack.enter_context(clock_library())
        except HostError as error:
            self.left_out.append("step")
            say(f"left out: steps of the wall clock: {error}")

    def make(self, folder: Path) -> Host:
        """One daemon's."""
        disk_bytes = DISK_BYTES if can_mount() else 0
        host = Host(folder, clock=self._clock, boots=self._boots, disk_bytes=disk_bytes)
        self.by_name[folder.name] = host
        return host


def duration_of(options: argparse.Namespace) -> float:
    """Seconds of storms and calms."""
    return float(options.hours * 60 + options.minutes if options.hours else options.minutes) * 60.0


def cost(options: argparse.Namespace) -> str:
    """What a run takes, for people."""
    jobs = max(1, round(duration_of(options) / (STORM_S + CALM_S)))
    minutes = (duration_of(options) + CALM_S + jobs * BETWEEN_S) / 60
    disk_mib = options.peers * DISK_BYTES // 2**20
    memory_gib = options.peers * PEER_BYTES / 2**30
    return (
        f"about {minutes:.0f} minutes: {jobs} jobs, {options.peers} daemons and as many learners on all cores of this "
        f"machine, {memory_gib:.1f} GiB of memory, beside {disk_mib} MiB while disks are full"
    )


def schedule_of(options: argparse.Namespace, left_out: Collection[str]) -> Iterable[Action]:
    """What is done, and when."""
    names, duration_s = NAMES[: options.peers], duration_of(options)
    if options.power:
        return power_cuts(names, seed=options.seed, duration_s=duration_s)
    verbs = [verb for verb in options.verbs.split(",") if verb not in left_out]
    living_s = duration_s * options.living
    return Schedule(
        names, seed=options.seed, duration_s=duration_s, verbs=verbs, spare=options.spare, living_s=living_s
    )


def soak(options: argparse.Namespace) -> dict[str, object]:
    """Returns the result. Raises LocalMeshError and what a daemon answers when it cannot begin."""
    interrupted = False
    say(cost(options))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-soak-")))
        hosts = Hosts(options.seed, stack)
        made = ChaosMesh(
            options.peers, seed=options.seed, patience_s=options.patience, keep=options.keep, machine=hosts.make
        )
        mesh = stack.enter_context(made)
        say(f"{options.peers} daemons in {mesh.folder}, seed {options.seed}")
        jobs = Jobs(mesh, folder, options.ways.split(","), trace=options.trace, checkpoint_every=CHECKPOINT_EVERY)
        run = Soak(mesh, jobs, schedule_of(options, hosts.left_out), hosts.by_name)
        try:
            run.run()
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted: ending in order")
        except (LocalMeshError, RequestError, ConnectionLost, TimeoutError) as error:
            run.watch.violated(f"the next job has not begun: {error}")
        findings = run.watch.findings
        if findings.violations and options.logs:
            save_logs(mesh, Path(options.logs))
        if not findings.job_over:
            _end(mesh, run.job, findings.violations)
    left = [child.pid for child in psutil.Process().children(recursive=True)]
    if left:
        findings.violations.append(f"processes are left: {left}")
    return {
        "seed": options.seed,
        "peers": options.peers,
        "patience_s": options.patience,
        "ways": options.ways,
        "spare": options.spare,
        "power": options.power,
        "duration_s": run.lasted_s,
        "interrupted": interrupted,
        **asdict(findings),
        "actions": [asdict(action) for action in run.done],
    }


def save_logs(mesh: ChaosMesh, folder: Path) -> None:
    """What the daemons have said, for whoever looks for the reason."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, daemon in mesh.daemons.items():
        shutil.copy(daemon.log_path, folder / f"{name}.log")
    say(f"the daemons' logs are in {folder}")


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
    counts = Counter(action["verb"] for action in actions)
    print(
        f"{result['peers']} peers, seed {result['seed']}, {result['duration_s']:.0f} s, patience "
        f"{result['patience_s']:g} s: {result['jobs']} jobs ended in order, {result['rounds']} rounds, longest gap "
        f"{result['longest_gap_s']:.1f} s, samples of void rounds {result['samples_missing']}"
    )
    print("actions: " + ", ".join(f"{count} {verb}" for verb, count in counts.most_common()))
    growth = result["growth"]
    assert isinstance(growth, dict)
    for line in growth.values():
        print(f"nearest to its bound: {line}")
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
        "--patience", type=float, default=2.0, help="of the daemons; parts that may not go on wait 6 times it"
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="CODEC@SYNC of one job after the other (%(default)s)")
    parser.add_argument("--spare", type=int, default=0, help="so many peers are left alone in each storm")
    parser.add_argument("--living", type=float, default=0.5, help="share of the time in which no daemon is ended")
    parser.add_argument("--power", action="store_true", help="nothing but power cuts: all processes killed at once")
    parser.add_argument("--verbs", default=",".join(VERBS), help="what may happen (default %(default)s)")
    parser.add_argument("--trace", action="store_true", help="let members write traces")
    parser.add_argument("--keep", action="store_true", help="leave the daemons' folders")
    parser.add_argument("--logs", help="where the daemons' logs go if an invariant breaks")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--save", help="the same in this file, whatever happens")
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
    if options.save:
        Path(options.save).write_text(json.dumps(result, indent=1), "utf-8")
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    return int(bool(result["violations"]))


if __name__ == "__main__":
    sys.exit(main())
