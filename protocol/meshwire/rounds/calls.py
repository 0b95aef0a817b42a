"""R3: which rounds have been called, and when this daemon calls the next one itself.

One call covers all older rounds and reaches everybody, so a round is called by whoever is first.
"""


class Calls:
    """What one daemon knows of called rounds, and which of its own contributions may still need a call.

    Attributes:
        newest: the newest round that anybody called; the older ones are called with it.
        at_s: own contributions that may still need a call, oldest first: when `due` will name the round.
    """

    def __init__(self) -> None:
        self.newest = 0
        self.at_s: dict[int, float] = {}

    def heard(self, round_: int) -> None:
        """Somebody called `round_`, or does as much by binding it (lockstep)."""
        self.newest = max(self.newest, round_)

    def contributed(self, round_: int, call_at_s: float) -> None:
        """This daemon has bound `round_`, and calls it at `call_at_s` unless that has become needless."""
        self.at_s[round_] = call_at_s

    def due(self, now_s: float, decided_by_all: int, blocked_on: int | None) -> int | None:
        """The round to call now, which counts as called from here on; None if there is none.

        A learner that is blocked on a round calls the oldest of its contributions that somebody has not decided: that
        very round, or a newer one if this daemon nulled it (it is called then, and moot). To call the newer ones as
        well would cost them contributors.
        """
        moot = max(self.newest, decided_by_all)
        self.at_s = {round_: at_s for round_, at_s in self.at_s.items() if round_ > moot}
        due = [round_ for round_, at_s in self.at_s.items() if now_s >= at_s]
        if not due and blocked_on is not None and blocked_on > moot:
            due = list(self.at_s)[:1]
        if not due:
            return None
        self.newest = due[-1]
        self.at_s = {round_: at_s for round_, at_s in self.at_s.items() if round_ > self.newest}
        return self.newest
