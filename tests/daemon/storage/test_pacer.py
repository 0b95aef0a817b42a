"""What a state on its way costs the rounds that go on, and how long it takes: on a link in virtual time."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.background_pacing import PRICE_MAX, DutyCycle, Pacer
from meshtraind.storage.fetch import PIECES_IN_FLIGHT
from meshwire import limits

LINK_BYTES_PER_S = 50e6 / 8
LATENCY_S = 0.001


class Net:
    """One link, first come, first served, that carries a job's chunks and the pieces of a state.

    Args:
        compute_s: of a round, during which nothing is sent.
        turns: messages of a round, one after the other: each waits for that of before.
        turn_bytes: of each.
        jitter: computing takes up to so much longer, in a fixed order.
    """

    def __init__(self, compute_s: float, turns: int, turn_bytes: int, jitter: float = 0.2) -> None:
        self.compute_s, self.turns, self.turn_bytes = compute_s, turns, turn_bytes
        self.now_s = self._free_s = self.longest_wait_s = 0.0
        self.rounds = self.state_bytes = self.carried = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._jitter = itertools.cycle([1 + jitter * (step * 7 % 11) / 11 for step in range(11)])
        self.share: DutyCycle | None = None
        self._compute()

    def after(self, wait_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + wait_s, next(self._number), what))

    def send(self, size_bytes: int, arrived: Callable[[], None]) -> None:
        self._free_s = max(self._free_s, self.now_s) + size_bytes / LINK_BYTES_PER_S
        self.after(self._free_s + LATENCY_S - self.now_s, arrived)

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._queue)
            what()
        self.now_s = until_s

    def _compute(self) -> None:
        self.after(self.compute_s * next(self._jitter), lambda: self._turn(self.turns))

    def _turn(self, left: int) -> None:
        if not left:
            self.rounds += 1
            if self.share is not None:
                self.share.round_complete(self.now_s)
            self._compute()
            return
        wait_s = max(0.0, self._free_s - self.now_s)
        self.longest_wait_s = max(self.longest_wait_s, wait_s)
        self.send(self.turn_bytes, lambda: self._arrived(left))

    def _arrived(self, left: int) -> None:
        self.carried += self.turn_bytes
        self._turn(left - 1)

    def fetch(self, share: DutyCycle) -> None:
        """Pieces, one after the other, from now on."""
        self.share = share
        self._ask()

    def _ask(self) -> None:
        share = self.share
        assert share is not None
        if not share.may_begin(self.now_s, self.carried):
            self.after(0.01, self._ask)
            return
        size_bytes = share.piece_bytes
        share.begins(self.now_s, self.carried)
        self.after(LATENCY_S, lambda: self.send(size_bytes, lambda: self._came(size_bytes)))

    def _came(self, size_bytes: int) -> None:
        assert self.share is not None
        self.state_bytes += size_bytes
        self.share.ended(size_bytes, self.now_s, self.carried)
        self._ask()


@pytest.mark.parametrize(
    ("compute_s", "turns", "turn_bytes", "least"),
    [
        (0.005, 6, 2_000, 0.05),  # a small model: whatever is under way delays every round
        (0.1, 4, 30_000, 0.2),
        (0.5, 4, 100_000, 0.3),  # the link is free most of the time
        (2.0, 4, 1_000_000, 0.4),
        (0.1, 40, 1_000_000, 0.05),  # a large model: the link is never free
        (0.0, 1, 100, 0.05),
    ],
)
def test_rounds_keep_nine_tenths_of_their_speed_and_the_state_comes_all_the_same(
    compute_s: float, turns: int, turn_bytes: int, least: float
) -> None:
    """J1: whatever the rounds are like, and without being told; `least` of what the link carries is the state's."""
    net = Net(compute_s, turns, turn_bytes)
    seconds = 40 * (net.compute_s + turns * turn_bytes / LINK_BYTES_PER_S) + 60
    net.run(seconds)
    alone, net.longest_wait_s = net.rounds, 0.0
    net.fetch(DutyCycle())
    net.run(seconds)
    assert (net.rounds - alone) / alone >= 0.9
    assert net.state_bytes / seconds / LINK_BYTES_PER_S >= least
    assert net.longest_wait_s <= 0.05, "a chunk waits for one piece"


def test_a_state_gets_its_share_of_the_time_even_if_rounds_stand_still_because_of_it() -> None:
    """Nothing starves: rounds that take as much longer as pieces are under way leave it PRICE_MAX of the time."""
    share, now_s, busy_s = DutyCycle(), 0.0, 0.0
    while now_s < 100.0:
        for _ in range(5):
            now_s += 0.01
            share.round_complete(now_s)
        if share.may_begin(now_s, 0):
            share.begins(now_s, 0)
            now_s, busy_s = now_s + 0.02, busy_s + 0.02
            share.ended(share.piece_bytes, now_s, 0)
    assert 0.6 * PRICE_MAX <= busy_s / now_s <= PRICE_MAX


def test_where_no_round_is_ever_complete_the_state_comes() -> None:
    """A job whose rounds take minutes, or that waits for others."""
    share, now_s, pieces = DutyCycle(), 0.0, 0
    while now_s < 100.0:
        if share.may_begin(now_s, 0):
            share.begins(now_s, 0)
            now_s += 0.02
            share.ended(share.piece_bytes, now_s, 0)
            pieces += 1
        now_s += 0.01
    assert pieces * 0.02 / 100.0 >= 0.5 * PRICE_MAX


def test_a_piece_that_took_long_is_not_paid_for_in_minutes() -> None:
    """The network was gone for a while, and the link came through it: no fault of the piece."""
    share = DutyCycle()
    share.begins(0.0, 0)
    share.ended(share.piece_bytes, 30.0, 0)
    assert not share.may_begin(34.9, 0)
    assert share.may_begin(35.1, 0)


@pytest.mark.asyncio
async def test_nothing_is_held_back_while_the_others_wait_for_this_device() -> None:
    """R5, M1: as many rounds are kept for its learner as can be; all stand still until it has the state."""
    beside = SimpleNamespace(carried_bytes=0, hold_others_up=False)
    pace = Pacer(beside)
    assert (pace.pieces, pace.piece_bytes) == (1, 32 * limits.KIB)
    async with pace.piece(pace.piece_bytes):
        await asyncio.sleep(0.05)
    tasks = TaskSet("test")
    resting = tasks.spawn(_piece(pace), "a piece")
    await asyncio.sleep(0.05)
    assert not resting.done(), "a piece of 50 ms is paid for"
    beside.hold_others_up = True
    assert (pace.pieces, pace.piece_bytes) == (PIECES_IN_FLIGHT, limits.FETCH_BYTES_MAX)
    await asyncio.wait_for(asyncio.gather(resting, *(_piece(pace) for _ in range(4))), 10)
    await tasks.close()


async def _piece(pace: Pacer) -> None:
    async with pace.piece(1):
        pass
