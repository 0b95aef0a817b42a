"""Fetches a state beside rounds that go on, at the price of a twelfth of their time.

Nothing here knows how fast the network is. One small piece at a time is under way, so that what a round sends never
queues behind more than that, and each piece is paid for by a pause. How long it must be is measured: rounds during
which pieces came are compared with rounds of which none did.
"""

import asyncio
import statistics
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from meshtraind.storage.fetch import PIECES_IN_FLIGHT
from meshwire import limits

PRICE_MAX = 0.08  # of the rounds' time: they keep 0.9 of their speed, with some room for what is not measured
PIECE_S = 0.02  # how long a chunk may find the link taken
PIECE_BYTES_MIN = 32 * limits.KIB  # below it the answer's way takes longer than its bytes
CLEAN_ROUNDS = 15  # whose median is a round's time without pieces
CLEAN_EVERY = 10  # rounds: as often one is left without pieces
CLEAN_TIMEOUT_S = 10.0  # where a round takes longer, none is left without
MEMORY_ROUNDS = 30  # behind what pieces cost: seconds, for what else the network carries changes
REST_S_MAX = 5.0  # after one piece: one that took long waited for something else than its bytes
POLL_S = 0.01


class DutyCycle:
    """How much of the time pieces may be under way. Pure: every input has its time, of one clock.

    Pieces take at least PRICE_MAX of the time, for then they cost no more even if rounds stand still meanwhile; or
    PRICE_MAX of the bytes, where chunks keep the link full and a piece spends its time in their queue.
    """

    def __init__(self) -> None:
        self._clean: deque[float] = deque(maxlen=CLEAN_ROUNDS)
        self._since_clean = 0
        self._round_s: float | None = None  # when the newest round was complete
        self._begun_s: float | None = None  # the piece that is under way: from here on not counted yet
        self._piece_began_s = self._piece_carried = 0.0
        self._busy_s = 0.0  # in the round that goes on
        # In rounds of before, the older the less; at first the worst.
        self._all_busy_s = self._all_cost_s = 10 * PIECE_S
        self._rest_s = 0.0  # the next piece may begin then
        self._rest_carried = float("inf")  # or when so many bytes of chunks have passed
        self._clean_until_s: float | None = None  # a round is being left without pieces
        self.piece_bytes = PIECE_BYTES_MIN

    @property
    def share(self) -> float:
        """The part of the time that pieces may take now."""
        return min(1.0, PRICE_MAX / max(PRICE_MAX, self._all_cost_s / self._all_busy_s))

    def round_complete(self, now_s: float) -> None:
        """Measures what pieces have cost the round that is complete now."""
        if self._begun_s is not None:
            self._busy_s += now_s - self._begun_s
            self._begun_s = now_s
        busy_s, self._busy_s = self._busy_s, 0.0
        before_s, self._round_s = self._round_s, now_s
        if before_s is None:
            return
        if not busy_s:
            self._clean.append(now_s - before_s)
            self._since_clean, self._clean_until_s = 0, None
            return
        self._since_clean += 1
        if self._clean:
            # No piece delays a round for longer than it is under way. What else does is as often with as without one.
            delay_s = now_s - before_s - statistics.median(self._clean)
            fade = 1 - 1 / MEMORY_ROUNDS
            self._all_busy_s = fade * self._all_busy_s + busy_s
            self._all_cost_s = max(0.0, fade * self._all_cost_s + max(-busy_s, min(busy_s, delay_s)))

    def may_begin(self, now_s: float, carried_bytes: int) -> bool:
        """Whether the next piece may be asked for. `carried_bytes`: all chunks that this device has passed on."""
        if self._since_clean >= CLEAN_EVERY and self._clean_until_s is None:
            self._clean_until_s = now_s + CLEAN_TIMEOUT_S
        if self._clean_until_s is not None:
            if now_s < self._clean_until_s:
                return False
            self._since_clean, self._clean_until_s = 0, None
        return now_s >= self._rest_s or carried_bytes >= self._rest_carried

    def begins(self, now_s: float, carried_bytes: int) -> None:
        """Notes that a piece is asked for."""
        self._begun_s = self._piece_began_s = now_s
        self._piece_carried = carried_bytes

    def ended(self, size_bytes: int, now_s: float, carried_bytes: int) -> None:
        """Notes that the piece has come, or will not: how long to rest, and how large the next one may be, follows from
        it."""
        assert self._begun_s is not None, "no piece is under way"
        self._busy_s += now_s - self._begun_s
        self._begun_s = None
        took_s = max(now_s - self._piece_began_s, 1e-6)
        self._rest_s = min(self._piece_began_s + took_s / self.share, now_s + REST_S_MAX)
        self._rest_carried = self._piece_carried + size_bytes / PRICE_MAX
        in_time = size_bytes * PIECE_S / took_s
        beside_chunks = PRICE_MAX * (carried_bytes - self._piece_carried)
        wanted = min(max(in_time, beside_chunks), 2 * self.piece_bytes)
        self.piece_bytes = int(max(PIECE_BYTES_MIN, min(wanted, limits.FETCH_BYTES_MAX)))


class RoundsBeside(Protocol):
    """The rounds that go on while something is fetched."""

    @property
    def carried_bytes(self) -> int:
        """The chunks that this device has passed on so far."""

    @property
    def hold_others_up(self) -> bool:
        """Whether the others stand still until it is here (R5): then nothing is held back."""


class Pacer:
    """Paces (`fetch.Pace`) the fetching of one state, or of a job's files for a device that takes part in no round yet.

    Args:
        beside: None: this device takes part in none.
    """

    def __init__(self, beside: RoundsBeside | None = None) -> None:
        self._beside = beside
        self._share = DutyCycle()
        self._one = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    def round_complete(self) -> None:
        """Tells of another round that is complete here."""
        self._share.round_complete(self._loop.time())

    @property
    def _waited_for(self) -> bool:
        return self._beside is not None and self._beside.hold_others_up

    @property
    def _carried_bytes(self) -> int:
        return 0 if self._beside is None else self._beside.carried_bytes

    @property
    def pieces(self) -> int:
        """How many pieces may be asked for at once."""
        return PIECES_IN_FLIGHT if self._waited_for else 1

    @property
    def piece_bytes(self) -> int:
        """How large the next piece may be."""
        return limits.FETCH_BYTES_MAX if self._waited_for else self._share.piece_bytes

    @asynccontextmanager
    async def piece(self, size_bytes: int) -> AsyncIterator[None]:
        """Waits until a piece may be asked for; ends when it is here."""
        async with self._one:
            while not self._waited_for:
                if self._share.may_begin(self._loop.time(), self._carried_bytes):
                    self._share.begins(self._loop.time(), self._carried_bytes)
                    try:
                        yield
                    finally:
                        self._share.ended(size_bytes, self._loop.time(), self._carried_bytes)
                    return
                await asyncio.sleep(POLL_S)
        yield
