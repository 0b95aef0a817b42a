"""Every timeout of membership, from one setting and the measured round trip: formulas here, timers elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwire import limits

ASK_S_MAX = 60.0
BASE_S = 86_400.0  # for a laptop that may have the model, where no other has: its lid may be closed overnight
STEADY_S = 60.0  # in one generation: then the next time of being left out counts as the first


@dataclass(frozen=True, slots=True)
class Timeouts:
    """`patience_s` is the person's setting; `rtt_s` the longest round trip among the job's links.

    Smaller patience finds a lost member sooner and takes more hiccups for losses; whoever was taken for lost loads the
    model again. `partition_wait_s` is the job's: None is 6 patience, infinity for ever. Raises ValueError if one of
    them is no positive number, or the wait is negative.
    """

    patience_s: float = limits.PATIENCE_S
    rtt_s: float = 0.01
    partition_wait_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("patience_s", "rtt_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}: expected a positive number of seconds")
        if self.partition_wait_s is not None and not self.partition_wait_s >= 0:
            raise ValueError(f"partition_wait_s is {self.partition_wait_s}: expected seconds from 0 on, or infinity")

    @property
    def silence_s(self) -> float:
        """= patience: a link on which nothing was heard for so long is closed by whoever waits."""
        return self.patience_s

    @property
    def relink_grace_s(self) -> float:
        """max(6 % of patience, 4 RTT): a closed socket may be opened again (TCP and TLS: 3 RTT) before suspicion."""
        return max(0.06 * self.patience_s, 4 * self.rtt_s)

    @property
    def turn_s(self) -> float:
        """max(4 % of patience, 4 RTT): a proposal and its promises take 2 RTT; then the next rank proposes (G7)."""
        return max(0.04 * self.patience_s, 4 * self.rtt_s)

    @property
    def answer_s(self) -> float:
        """patience + 4 RTT: a proposer's wait for promises. A silent member's link is closed before."""
        return self.patience_s + 4 * self.rtt_s

    @property
    def enter_s(self) -> float:
        """answer + grace + 2 turns: a member's wait after its promise, so that the proposer tries again before it."""
        return self.answer_s + self.relink_grace_s + 2 * self.turn_s

    @property
    def catch_up_s(self) -> float:
        """24 patience: a member's time to fetch the rounds it lacks. Left out, it would fetch the whole model."""
        return 24 * self.patience_s

    @property
    def provisional_s(self) -> float:
        """`partition_wait_s`, or 6 patience: a part that is not entitled waits so long, and goes on all the same."""
        return 6 * self.patience_s if self.partition_wait_s is None else self.partition_wait_s

    @property
    def back_s(self) -> float:
        """6 patience: who was away itself looks so long for the others before it goes on without them."""
        return 6 * self.patience_s

    @property
    def missed_s(self) -> float:
        """6 patience: who alone has the base and falls silent has so long to come back, before all others go back to a
        checkpoint."""
        return 6 * self.patience_s

    @property
    def doubt_s(self) -> float:
        """2 patience: who was away itself leaves its history for no other before. What it hears may have lain in its
        socket, and of a sender that was lost since; until then a link that stays silent is closed."""
        return 2 * self.patience_s

    @property
    def yield_s(self) -> float:
        """= patience: such a part waits so long for the rest of an entitled one before it joins a provisional one, and
        one without a base for who has it before it joins others that have another."""
        return self.patience_s

    @property
    def stall_s(self) -> float:
        """6 patience: a member that has what it needs sends nothing of a round for so long, and is left out."""
        return 6 * self.patience_s

    def pardon_s(self, violations: int) -> float:
        """2, 4 patience: a member that broke the protocol is taken in again after that (G10)."""
        return self.patience_s * 2.0 ** min(violations, limits.VIOLATIONS_MAX)

    def ask_s(self, tries: int, failures: int = 0) -> float:
        """0, 1, 2, 4 .. 60 s: the wait before a device asks in for the (tries+1)-th time (G7).

        The limit doubles, up to about an hour, with each of the `failures` to begin after it was taken in.
        """
        longest_s = ASK_S_MAX * 2.0 ** min(failures, 6)
        return 0.0 if tries == 0 else min(longest_s, 2.0 ** min(tries - 1, 12))

    def describe(self) -> Mapping[str, float]:
        """For `meshtrain status -v`: seconds by what is waited for."""
        return {
            "a silent link is closed": self.silence_s,
            "a closed link may come back": self.relink_grace_s,
            "the next rank proposes": self.turn_s,
            "members promise": self.answer_s,
            "the proposer commits": self.enter_s,
            "a member catches up": self.catch_up_s,
            "a part that is not entitled goes on": self.provisional_s,
            "a laptop that was away goes on": self.back_s,
            "who may have the model is waited for": BASE_S,
            "the same, where there is a checkpoint": self.missed_s,
            "who sends nothing is left out": self.stall_s,
            "a device asks in again, at most": ASK_S_MAX,
        }
