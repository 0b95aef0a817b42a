"""What befalls a cluster: a schedule of faults drawn from a seed, its run, and the shortest part of it that fails."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from meshwire.sync_modes.mode import SyncSettings, sync_settings
from meshwire.sync_modes.settings_changes import SettingsWish
from tests.sim.cluster import Cluster, Setting
from tests.sim.clustermoments import Moment
from tests.sim.clusternetwork import Wake

KINDS = (
    *("kill", "kill", "power cut", "restart", "restart", "quick restart", "leave"),
    *("reset", "reset", "half open", "stall", "deaf", "offline", "partition", "partition", "sleep"),
    *("kill learner", "kill learner", "kill all learners", "pause", "hang", "poison"),
)
WAKES = {"sleep": Wake.IN_ORDER, "sleep, timers first": Wake.TIMERS_FIRST, "sleep, messages first": Wake.MESSAGES_FIRST}
WISHES = (
    *(SettingsWish(codec=codec) for codec in ("fp32", "int8", "topk:0.01", "fp16")),
    *(SettingsWish(period=period) for period in (4, 16, 2, 8)),
)  # that people ask for: where there are periods, either
ASKED = 0.4  # of the clusters are asked for other settings
FIXED = 0.3  # of the clusters in which every learner is waited for
FOR_S = (0.1, 0.5, 1.0, 3.0, 8.0, 20.0)
TIMED = 0.4  # of the faults wait for a moment of the protocol
AFTER_S = (0.0, 0.0, 0.0005, 0.003, 0.05)  # such a moment
BROKEN = (AssertionError, KeyError, ValueError)  # what a broken rule raises


@dataclass(frozen=True)
class Fault:
    """What befalls devices.

    Attributes:
        side: devices on one side of a partition.
        wave: what it is a part of, if it does not come alone.
        moment: it waits from `at_s` on until this happens on some device, which then takes the place of `one`.
        after_s: the moment.
    """

    at_s: float
    kind: str
    one: int
    other: int
    side: tuple[int, ...] = ()
    for_s: float = 0.0
    moment: Moment | None = None
    after_s: float = 0.0
    wave: str = ""

    def __str__(self) -> str:
        between = {"reset", "half open", "stall", "deaf"}
        whom = f"{self.side}" if self.kind == "partition" else f"{self.one}"
        whom += f" and {self.other}" if self.kind in between else ""
        when = f", {self.after_s:g} s after it {self.moment.value}" if self.moment else ""
        return f"{self.at_s:.3f} s: {self.kind} {whom} for {self.for_s:g} s{when}{self.wave and f' ({self.wave})'}"

    def on(self, device: int) -> "Fault":
        """The same with this device in the place of `one`, and the other way round."""
        swapped = {self.one: device, device: self.one}
        other, *side = (swapped.get(number, number) for number in (self.other, *self.side))
        return replace(self, one=device, other=other, side=tuple(sorted(side)), moment=None)


@dataclass(frozen=True)
class Schedule:
    """A cluster and what befalls it; equal for equal seeds."""

    seed: int
    setting: Setting
    faults: tuple[Fault, ...]
    calm_at_s: float

    def __str__(self) -> str:
        setting = self.setting
        devices = f"{setting.founders} founders and {setting.newcomers} newcomers"
        head = f"seed {self.seed}: {devices}, {setting.sync.text()} {setting.sync.straggler} {setting.sync.visibility}"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


def random_setting(random: Random, founders_choice: Sequence[int] = (1, 2, 2, 3, 3, 4, 4, 5)) -> Setting:
    """A cluster of any kind."""
    founders = random.choice(founders_choice)
    newcomers = random.choice([0, 0, 0, 1])
    devices = founders + newcomers
    s = random.choice([0, 0, 1, 2, 3, 8])
    straggler = "wait" if s == 0 else random.choice(["carry", "carry", "wait"])
    shares = random.choice(["equal", "equal", "speed"])
    sync: SyncSettings = sync_settings(f"ssp:{s}" if s else "bsp", straggler, shares=shares)
    if straggler == "wait" and s and random.random() < FIXED:
        sync = sync_settings(f"ssp:{s}", "wait", "fixed")
    total, batch = random.choice([max(7, devices), 23, 60]), random.choice([1, 2, 3])
    if straggler == "carry" and shares == "equal" and batch > 1:
        sync = sync_settings(f"local:4,ssp:{s}")  # a step of the simulated learners is a period, and can end early
    patience_s = random.choice([1.0, 2.0])
    step_s = tuple(random.choice([0.6, 0.6, 0.8, 2.0]) for _ in range(devices))
    return Setting(
        founders=founders,
        newcomers=newcomers,
        sync=sync,
        total=total,
        batch=batch,
        patience_s=patience_s,
        step_s=step_s,
        delays_s=random.choice([(0.001, 0.005), (0.001, 0.005, 0.02, 0.1), (0.02, 0.3)]),
        start_s=random.choice([(0.3,), (0.3, 3.0)]),
        load_s=random.choice([(0.1,), (0.1, 1.0, 6.0)]),
        unapplied_max=2 * (s + 1) + random.choice([0, 6]),
        speeds=tuple(batch / each for each in step_s) if shares == "speed" else (),
    )


def random_schedule(seed: int, kinds: Sequence[str] = (), count: int = 0) -> Schedule:
    """Everything at random; or only such faults, and so many."""
    random = Random(seed)
    setting = random_setting(random)
    devices = setting.founders + setting.newcomers
    within_s = random.choice([3.0, 8.0, 20.0])
    count = count or random.choice([1, 2, 3, 5, 8])
    kinds = kinds or (KINDS if random.random() < 0.6 else random.sample(KINDS, 3))
    times_s = sorted(random.uniform(0.2, within_s) for _ in range(count))
    if random.random() < 0.3:  # all at about the same time
        times_s = [times_s[0] + random.uniform(0.0, 0.5) for _ in times_s]
    faults = tuple(random_fault(random, at_s, random.choice(kinds), devices) for at_s in sorted(times_s))
    return Schedule(seed, setting, tuple(sorted((*faults, *_asks(seed, devices, within_s)), key=_at_s)), within_s)


def _asks(seed: int, devices: int, within_s: float) -> list[Fault]:
    """People who ask for other settings; drawn apart, so that what else befalls a cluster stays what it was."""
    random = Random(f"codecs {seed}")
    count = random.choice([1, 1, 2, 4]) if random.random() < ASKED else 0
    return [random_fault(random, random.uniform(0.2, within_s), "ask", devices) for _ in range(count)]


def _at_s(fault: Fault) -> float:
    return fault.at_s


def random_fault(random: Random, at_s: float, kind: str, devices: int) -> Fault:
    """Of this kind, to whomever."""
    one = random.randrange(devices)
    other = random.choice([device for device in range(devices) if device != one] or [one])
    side = tuple(sorted(random.sample(range(devices), random.randint(1, max(1, devices - 1)))))
    for_s = random.choice(FOR_S)
    moment = random.choice([*Moment]) if random.random() < TIMED else None
    after_s = random.choice(AFTER_S) if moment else 0.0
    return Fault(round(at_s, 3), kind, one, other, side, for_s, moment, after_s)


def befall(cluster: Cluster, fault: Fault) -> None:
    """It happens now, or at its moment."""
    if fault.moment is not None:
        after_s = fault.after_s

        def strike(device: int) -> None:
            cluster.clock.at(after_s, partial(_befall_unless_calm, cluster, fault.on(device)))

        cluster.moments.wait(fault.moment, strike)
        return
    cluster.befallen[f"{fault.kind} ({fault.wave})" if fault.wave else fault.kind] += 1
    one, network, clock = cluster.daemons[fault.one], cluster.network, cluster.clock
    other = cluster.daemons[fault.other]
    learner = one.learner
    if fault.kind in ("kill", "power cut", "quick restart"):
        cut = fault.kind == "power cut"
        cluster.kill(one, "loses its power" if cut else "is killed", silent=cut)
        if fault.kind == "quick restart":
            clock.at(cluster.timeouts.relink_grace_s * 0.5, partial(cluster.restart, fault.one))
    elif fault.kind == "restart":
        cluster.restart(fault.one)
    elif fault.kind == "leave":
        one.do(one.wish_leave)
    elif fault.kind == "ask":
        wish = WISHES[fault.other % 4 + 4 * (cluster.sync.period > 0 and fault.one % 2)]
        one.do(partial(one.ask_settings, wish))
    elif fault.kind in WAKES:
        cluster.sleep(fault.one, fault.for_s, WAKES[fault.kind])
    elif fault.kind == "kill learner":
        one.do(one.processes.kill)
    elif fault.kind == "learner gone":
        one.do(one.processes.give_up)
    elif fault.kind == "kill all learners":
        for daemon in cluster.daemons:
            daemon.do(daemon.processes.kill)
    elif fault.kind in ("pause", "hang", "poison"):
        if learner is not None:
            cluster.tell(one.name, f"'s learner: {fault.kind} for {fault.for_s:g} s")
            if fault.kind == "pause" and cluster.sync.visibility == "eager":  # a pause is a barrier, which flushes
                learner.pause_s = fault.for_s
            elif fault.kind == "hang":
                learner.hang_s = fault.for_s
            elif fault.kind == "poison":
                learner.poison = True
    elif fault.one != fault.other:
        _befall_link(cluster, fault, other.name, network.darken, network.lighten)


def _befall_link(
    cluster: Cluster,
    fault: Fault,
    other: str,
    darken: Callable[[int, int], None],
    lighten: Callable[[int, int], None],
) -> None:
    one, name = fault.one, cluster.daemons[fault.one].name
    if fault.kind == "reset":
        cluster.tell(name, f"and {other}: their link is reset")
        cluster.network.reset(one, fault.other)
        return
    if fault.kind == "half open":
        cluster.tell(name, f"and {other}: their link is half open")
        cluster.network.half_open(one, fault.other)
        return
    ways = [(one, fault.other), (fault.other, one)]
    if fault.kind == "deaf":
        cluster.tell(other, f"hears nothing of {name} for {fault.for_s:g} s")
        ways = ways[:1]
    elif fault.kind == "stall":
        cluster.tell(name, f"and {other}: nothing passes for {fault.for_s:g} s")
    else:
        side = fault.side if fault.kind == "partition" else (one,)
        others = [number for number in range(cluster.devices) if number not in side]
        cluster.tell("the network", f"is parted into {list(side)} and {others} for {fault.for_s:g} s")
        ways = [way for pair in itertools.product(side, others) for way in (pair, pair[::-1])]
    for way in ways:
        darken(*way)
        cluster.clock.at(fault.for_s, partial(lighten, *way))


def run(schedule: Schedule, *, recording: bool = False) -> Cluster:
    """The whole of it: faults, calm, and all well again. Raises AssertionError, with the cluster as `cluster`."""
    cluster = Cluster(schedule.seed, schedule.setting, recording=recording)
    try:
        for fault in schedule.faults:
            cluster.clock.at(fault.at_s, partial(befall, cluster, fault))
        cluster.run_until(schedule.calm_at_s)
        calm(cluster)
        cluster.recover()
        cluster.check_end()
    except BROKEN as error:
        error.cluster = cluster  # type: ignore[union-attr]
        error.add_note(str(schedule))
        raise
    finally:
        cluster.end()
    return cluster


def _befall_unless_calm(cluster: Cluster, fault: Fault) -> None:
    """Whom it ended then nobody would start again."""
    if not cluster.calm:
        befall(cluster, fault)


def calm(cluster: Cluster) -> None:
    """Failures stop: the network heals, sleepers wake, whoever is down is started again."""
    cluster.calm = True
    cluster.moments.clear()
    cluster.tell("the network", "heals; whoever is down is started again")
    cluster.network.lighten_all()
    for number, daemon in enumerate(cluster.daemons):
        if daemon.asleep:
            cluster.network.wake(daemon)
        cluster.restart(number)
    for daemon in cluster.daemons:
        if daemon.leaving and daemon.alive:
            cluster.clock.at(4.0, partial(cluster.restart, daemon.number))


def failure(schedule: Schedule) -> str | None:
    """Which rule it breaks, without the names and numbers of this run; None if none."""
    try:
        run(schedule)
    except BROKEN as error:
        return re.sub(r"[0-9]+", "", str(error).split("\n", 1)[0])
    return None


def shrunk(schedule: Schedule) -> Schedule:
    """Faults are dropped while the same rule is broken: half of them at a time, a quarter, at last one by one."""
    broken = failure(schedule)
    size = max(1, len(schedule.faults) // 2)
    position = 0
    while broken is not None and size:
        faults = schedule.faults[:position] + schedule.faults[position + size :]
        shorter = replace(schedule, faults=faults)
        if failure(shorter) == broken:
            schedule = shorter
            position = 0 if size == 1 else position  # what was needed beside it may be needed no more
        else:
            position += size
        if position >= len(schedule.faults):
            position, size = 0, size // 2
    return schedule
