"""What the soak does to its peers and links, and when: a function of the seed alone.

Storms and calms take turns. In a storm one thing happens every 0.5 to 2 s, and nobody is spared: any daemon, any
learner, all learners at once. One daemon is up at any time, for all of them at once is the power cut, which is a
schedule of its own. A calm begins with everything repaired.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

INTERVAL_S = (0.5, 2.0)
STORM_S = 75.0
CALM_S = 45.0
HARM = 0.55  # of the actions in a storm, where there is something to repair
DELAY_S = (0.02, 0.3)
BYTES_PER_S = (50_000.0, 1_000_000.0)
CLOCK_S = (30.0, 3600.0, 86_400.0)  # forth or back
POWER_AT_S = (15.0, 60.0)  # of a storm
POWER_UP_S = (0.5, 15.0)  # from one machine that comes up to the next

# SIGKILL and SIGSTOP of a daemon, SIGKILL of its learner; its disk is full; its wall clock is stepped.
PEER_VERBS = ("kill", "freeze", "learner", "fill", "step")
LINK_VERBS = ("cut", "stall", "throttle", "delay")
ALL_VERBS = ("learners",)  # SIGKILL of every learner
VERBS = (*PEER_VERBS, *LINK_VERBS, *ALL_VERBS)
REPAIRS = {"kill": "spawn", "freeze": "thaw", "fill": "empty", **dict.fromkeys(LINK_VERBS, "heal")}
DAEMON_VERBS = ("kill",)  # which end a daemon
POWER = "power"  # SIGKILL of all daemons and learners


@dataclass(frozen=True)
class Action:
    """One thing that is done.

    Attributes:
        at_s: since the start.
        verb: of VERBS or of REPAIRS, or "calm", or "storm", or "power".
        who: a peer, or the two ends of a link, or nobody in particular; in front of a storm those that are left alone.
        how: of a cut "rst" or "fin"; of a stall which way: "both", or only from the first to the second: "forth".
        amount: of a throttle bytes/s, of a delay or a step of a clock seconds.
    """

    at_s: float
    verb: str
    who: tuple[str, ...] = ()
    how: str = ""
    amount: float = 0.0

    def __str__(self) -> str:
        amount = f" {self.amount:.3g}" if self.amount else ""
        return f"{self.at_s:8.1f} s  {self.verb} {' '.join(self.who)} {self.how}{amount}".rstrip()


class Schedule:
    """The actions of a soak, in order.

    Args:
        names: of the peers.
        verbs: which of VERBS may happen.
        spare: so many peers, others in each storm, and the links between them are left alone.
        living_s: so long no daemon is ended: what one holds can be seen to grow only while it lives.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        seed: int,
        duration_s: float,
        verbs: Collection[str] = VERBS,
        spare: int = 0,
        living_s: float = 0.0,
    ) -> None:
        self._names = tuple(names)
        self._verbs = verbs
        self._spare = spare
        self._living_s = living_s
        self._duration_s = duration_s
        self._random = random.Random(seed)
        self._broken: dict[tuple[str, ...], str] = {}  # by verb

    def __iter__(self) -> Iterator[Action]:
        now_s = 0.0
        storm = 0
        while now_s < self._duration_s:
            spared = self._spared(storm)
            yield Action(now_s, "storm", spared)
            end_s = min(now_s + STORM_S, self._duration_s)
            while (now_s := now_s + self._random.uniform(*INTERVAL_S)) < end_s:
                action = self._next(now_s, spared)
                if action is not None:
                    yield action
            for who in list(self._broken):
                yield self._repair(now_s, who)
            yield Action(now_s, "calm")
            now_s += CALM_S
            storm += 1

    def _spared(self, storm: int) -> tuple[str, ...]:
        count = len(self._names)
        return tuple(self._names[(storm + index) % count] for index in range(min(self._spare, count - 1)))

    def _next(self, now_s: float, spared: tuple[str, ...]) -> Action | None:
        harms: list[tuple[str, tuple[str, ...]]] = [
            (verb, (name,))
            for name in self._names
            for verb in PEER_VERBS
            if name not in spared and (name,) not in self._broken
        ]
        harms += [
            (verb, link)
            for link in combinations(self._names, 2)
            for verb in LINK_VERBS
            if link not in self._broken and not set(link) <= set(spared)
        ]
        harms += [(verb, ()) for verb in ALL_VERBS if not spared]
        harms = [(verb, who) for verb, who in harms if verb in self._verbs]
        down = sum(verb in DAEMON_VERBS for verb in self._broken.values())
        if now_s < self._living_s or down >= len(self._names) - 1:
            harms = [(verb, who) for verb, who in harms if verb not in DAEMON_VERBS]
        if self._broken and (not harms or self._random.random() > HARM):
            return self._repair(now_s, self._random.choice(list(self._broken)))
        if not harms:
            return None
        verb = self._random.choice(sorted({verb for verb, _ in harms}))
        who = self._random.choice([who for one, who in harms if one == verb])
        if verb in REPAIRS:
            self._broken[who] = verb
        return self._harm(now_s, verb, who)

    def _harm(self, now_s: float, verb: str, who: tuple[str, ...]) -> Action:
        match verb:
            case "cut":
                return Action(now_s, verb, who, self._random.choice(("rst", "fin")))
            case "stall":
                ends = tuple(self._random.sample(who, 2))
                return Action(now_s, verb, ends, self._random.choice(("both", "forth")))
            case "throttle":
                return Action(now_s, verb, who, amount=self._random.uniform(*BYTES_PER_S))
            case "delay":
                return Action(now_s, verb, who, amount=self._random.uniform(*DELAY_S))
            case "step":
                return Action(now_s, verb, who, amount=self._random.choice(CLOCK_S) * self._random.choice((1, -1)))
        return Action(now_s, verb, who)

    def _repair(self, now_s: float, who: tuple[str, ...]) -> Action:
        return Action(now_s, REPAIRS[self._broken.pop(who)], who)


def power_cuts(names: Sequence[str], *, seed: int, duration_s: float) -> Iterator[Action]:
    """In each storm the power is cut for all at once; the machines come up one after the other, in any order."""
    draw = random.Random(seed)
    now_s = 0.0
    while now_s < duration_s:
        yield Action(now_s, "storm")
        now_s += draw.uniform(*POWER_AT_S)
        yield Action(now_s, POWER)
        for name in draw.sample(names, len(names)):
            now_s += draw.uniform(*POWER_UP_S)
            yield Action(now_s, "spawn", (name,))
        yield Action(now_s, "calm")
        now_s += CALM_S
