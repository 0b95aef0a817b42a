"""Harsh schedules: what befalls a cluster comes in waves, which overlap. Times in a wave are in patiences.

Networks are parted again and again, along any line; messages pass one way and not the other; most daemons are killed at
about the same time, and come back one by one; laptops sleep for up to ten patiences and wake with old timers and full
sockets; links come and go; few of all pairs are linked.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from tests.sim.clusterfaults import AFTER_S, KINDS, WAKES, Fault, Schedule, random_fault, random_setting
from tests.sim.clustermoments import Moment

FOUNDERS = (2, 2, 3, 3, 4, 4, 5, 5)
TIMED = 0.4  # of the faults that come first in a wave wait for a moment of the protocol
SPARING = 0.8  # of the storms leave somebody alive who was there before
KILLS = ("kill", "kill", "power cut", "quick restart")

Wave = Callable[[Random, int], list[Fault]]


def _pick(random: Random, devices: int, least: int = 1, most: int | None = None) -> list[int]:
    most = devices if most is None else most
    return random.sample(range(devices), random.randint(min(least, most), most))


def _other(random: Random, devices: int, one: int) -> int:
    return random.choice([number for number in range(devices) if number != one] or [one])


def parted(random: Random, devices: int) -> list[Fault]:
    """Up to four partitions, the next one perhaps before the last has healed."""
    faults, at = [], 0.0
    for _ in range(random.choice([1, 1, 2, 3, 4])):
        side = tuple(sorted(_pick(random, devices, 1, max(1, devices - 1))))
        for_ = random.choice([0.3, 1.2, 3.0, 8.0, 16.0])
        faults.append(Fault(at, "partition", side[0], _other(random, devices, side[0]), side, for_))
        at += for_ * random.uniform(0.2, 1.5)
    return faults


def one_way(random: Random, devices: int) -> list[Fault]:
    """A device hears nobody, or nobody hears it, or any of the ways between any two is dark."""
    one, how, for_ = random.randrange(devices), random.choice(["hears", "heard", "any"]), random.uniform(0.5, 8.0)
    ways = list(itertools.permutations(range(devices), 2))
    if how == "hears":
        ways = [(sender, receiver) for sender, receiver in ways if receiver == one]
    elif how == "heard":
        ways = [(sender, receiver) for sender, receiver in ways if sender == one]
    else:
        ways = [way for way in ways if random.random() < 0.3]
    return [Fault(random.uniform(0.0, 0.3), "deaf", *way, for_s=for_) for way in ways]


def storm(random: Random, devices: int) -> list[Fault]:
    """Most are killed within two patiences; they come back, or are killed again as soon as they do."""
    spared = set(_pick(random, devices, 1, 1)) if random.random() < SPARING else set()
    faults = []
    for one in (number for number in _pick(random, devices, min(2, devices)) if number not in spared):
        at = random.uniform(0.0, 2.0)
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            faults.append(Fault(at, random.choice(KILLS), one, one))
            at += random.choice([0.1, 0.5, 2.0, 6.0])
            faults.append(Fault(at, "restart", one, one))
            at += random.choice([0.2, 1.0, 4.0])
    faults += [Fault(random.uniform(0.0, 2.0), "kill learner", one, one) for one in _pick(random, devices, 0)]
    return faults


def asleep(random: Random, devices: int) -> list[Fault]:
    """Some sleep for 1 to 10 patiences, perhaps all at once, perhaps again when they have just woken."""
    faults = []
    for one in _pick(random, devices):
        at = random.uniform(0.0, random.choice([0.1, 3.0]))
        for _ in range(random.choice([1, 1, 2])):
            for_ = random.uniform(1.0, 10.0)
            faults.append(Fault(at, random.choice(list(WAKES)), one, one, for_s=for_))
            at += for_ + random.choice([0.01, 0.1, 0.5])
    return faults


def flapping(random: Random, devices: int) -> list[Fault]:
    """A link, or all links of a device, are dark or reset again and again."""
    one = random.randrange(devices)
    kind, at = random.choice(["stall", "reset", "half open", "offline"]), 0.0
    other = _other(random, devices, one)
    faults = []
    for _ in range(random.randint(3, 10)):
        faults.append(Fault(at, kind, one, other, for_s=random.choice([0.05, 0.3, 0.9, 1.1, 1.6])))
        at += random.uniform(0.2, 2.0)
    return faults


def torn(random: Random, devices: int) -> list[Fault]:
    """Who reaches whom is no equivalence any more."""
    for_ = random.uniform(1.0, 10.0)
    pairs = [pair for pair in itertools.combinations(range(devices), 2) if random.random() < 0.5]
    return [Fault(random.uniform(0.0, 0.5), "stall", *pair, for_s=for_) for pair in pairs]


WAVES: dict[str, Wave] = {
    "parted": parted,
    "one way": one_way,
    "storm": storm,
    "asleep": asleep,
    "flapping": flapping,
    "torn": torn,
}


def harsh_schedule(seed: int, waves: Sequence[str] = tuple(WAVES)) -> Schedule:
    """Two to five such waves, and a few faults beside them."""
    random = Random(f"harsh {seed}")
    setting = random_setting(random, FOUNDERS)
    devices, patience_s = setting.founders + setting.newcomers, setting.patience_s
    within_s = patience_s * random.choice([4.0, 12.0, 30.0])
    faults: list[Fault] = []
    for _ in range(random.choice([2, 3, 4, 5])):
        name, at_s = random.choice(waves), random.uniform(0.2, within_s)
        for number, fault in enumerate(WAVES[name](random, devices)):
            moment = random.choice([*Moment]) if number == 0 and random.random() < TIMED else None
            after_s = random.choice(AFTER_S) if moment else 0.0
            at = round(at_s + fault.at_s * patience_s, 3)
            for_s = round(fault.for_s * patience_s, 3)
            faults.append(replace(fault, at_s=at, for_s=for_s, moment=moment, after_s=after_s, wave=name))
    faults += [
        random_fault(random, random.uniform(0.2, within_s), random.choice(KINDS), devices)
        for _ in range(random.choice([0, 1, 3]))
    ]
    faults.sort(key=lambda fault: fault.at_s)
    end_s = max((fault.at_s for fault in faults), default=within_s)
    return Schedule(seed, setting, tuple(faults), round(end_s + patience_s * random.uniform(0.0, 6.0), 3))
