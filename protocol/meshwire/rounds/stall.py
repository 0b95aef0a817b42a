"""A member that has all that it needs and sends nothing of a round: who it is, and when that has lasted too long (G10).

All members have decided the round, so nobody waits for a learner. Each says with its reports how many steps of the
round's program are over with it: so whoever lacks something knows whether its sender could send it. A slow link is no
stall: while bytes of chunks come, time begins anew.
"""

from collections.abc import Iterable, Mapping


class StallWatch:
    """Since when others could have sent this member what it lacks, and did not. `look` about once a second.

    Args:
        stall_s: after which a member is named.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._since: dict[int, tuple[int, int, float]] = {}  # by rank: round, bytes that had come, and when that began
        self._looked_s: float | None = None

    def look(
        self,
        now_s: float,
        round_: int | None,
        lacks: Iterable[tuple[int, int]],
        receipts: Mapping[int, tuple[int, int]],
        chunk_bytes: Mapping[int, int],
    ) -> tuple[int, str] | None:
        """Whom to leave out and why, if anybody.

        Args:
            round_: the oldest one that is not complete here; None while not all members have decided it.
            lacks: of which rank something is lacking, and how many steps must be over with it before it can send that.
            receipts: by rank, as it said last: the oldest round that is not complete there, and its steps that are
                over.
            chunk_bytes: by rank, what has come of its chunks on its link.
        """
        asleep = self._looked_s is not None and now_s - self._looked_s > self._stall_s / 2
        self._looked_s = now_s
        if round_ is None or asleep:
            self._since.clear()
            return None
        able = {rank for rank, after in lacks if not after or receipts.get(rank, (0, 0)) >= (round_, after)}
        for rank in [rank for rank in self._since if rank not in able]:
            del self._since[rank]
        for rank in sorted(able):
            come = chunk_bytes.get(rank, 0)
            known = self._since.get(rank)
            if known is None or known[:2] != (round_, come):
                self._since[rank] = round_, come, now_s
            elif now_s - known[2] >= self._stall_s:
                return rank, f"round {round_}: it has all that it needs, and has sent nothing for {self._stall_s:.0f} s"
        return None
