"""What learners show their neighbours within a period (R9, `,gossip=G`): sent while there is room, taken while due."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from meshtraind.rounds.gossip import Gossip
from meshwire import limits
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import job_number
from meshwire.message_base import Wire
from meshwire.messages.learner import LearnerTurn, TurnNews
from meshwire.sync_modes.mode import sync_settings
from tests.sim.clusterrounds import job_spec
from tests.unpacedlink import UnpacedLink

PIECE, VECTOR = 10, 25  # so it takes three pieces
GENERATION, OTHER = 7, 8
JOB = "1kx3m9q2v7bd"
ROUND = 4  # in it, of four, rank 0 is paired with 2 in turn 1, and with 1 in turn 2


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GOSSIP_PIECE_BYTES", PIECE)


@dataclass
class Link(UnpacedLink):
    """A link that has room for so many frames."""

    room: int = 100
    sent: list[tuple[Header, bytes]] = field(default_factory=list)
    waiting: list[Callable[[], None]] = field(default_factory=list)
    chunk_bytes_received: int = 0

    def notify(self, body: Wire, *, job: int, generation: int, complete: int) -> None:
        raise AssertionError("gossip is no message")

    @property
    def writable(self) -> bool:
        return self.room > 0

    def on_writable(self, callback: Callable[[], None]) -> Callable[[], None]:
        self.waiting.append(callback)
        return lambda: self.waiting.remove(callback)

    def send_chunk(self, header: Header, payload: memoryview | bytes | None) -> None:
        assert isinstance(payload, bytes), "the slot may be written again before it has left"
        self.room -= 1
        self.sent.append((header, payload))

    def make_room(self, frames: int) -> None:
        self.room += frames
        for callback in tuple(self.waiting):
            callback()


class Daemon:
    """Of rank 0, with three others that all compute, in generation 7; its learner computes for round 4."""

    def __init__(self, sync: str = "local:8,gossip=2", learning: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        self.decided = ROUND - 1
        self.slots = [bytearray(VECTOR) for _ in range(5)]
        self.links = {rank: Link() for rank in range(1, 4)}
        self.news: list[TurnNews] = []
        spec = job_spec(JOB, "0" * 64, sync_settings(sync))
        self.gossip = Gossip(spec, 0, self, self.links, self, self._notify)
        self.gossip.resume(GENERATION, learning)

    def raw(self, step: int) -> memoryview:
        raise AssertionError("nothing of a round is mixed")

    def mixed(self, slot: int) -> memoryview:
        return memoryview(self.slots[slot])

    def _notify(self, body: Wire) -> None:
        assert isinstance(body, TurnNews)
        self.news.append(body)

    def begin(self, turn: int, *, round_: int = ROUND, fill: int = 1, shown: bool = True) -> None:
        if shown:
            self.slots[0][:] = bytes([fill] * VECTOR)
        self.gossip.begin(LearnerTurn(round=round_, turn=turn, shown=shown))

    def hear(self, sender: int, header: Header, fill: int) -> str | None:
        """Whether, or why not, a piece of this fill was taken."""
        place = self.gossip.announced(sender, header)
        if place is None:
            return "dropped"
        if isinstance(place, str):
            return place
        place[:] = bytes([fill] * len(place))
        self.gossip.received(sender, header)
        return None

    def hear_all(self, sender: int, turn: int, fill: int, round_: int = ROUND) -> list[str | None]:
        return [self.hear(sender, piece(index, turn, round_), fill) for index in range(3)]


def piece(index: int, turn: int, round_: int = ROUND) -> Header:
    return Header(
        Kind.GOSSIP,
        min(PIECE, VECTOR - PIECE * index),
        job=job_number(JOB),
        generation=GENERATION,
        round=round_,
        step=turn,
        first_segment=index,
        segment_count=3,
    )


def test_weights_go_to_the_partner_of_the_turn_alone() -> None:
    """W8: in pieces, each of which says which it is."""
    daemon = Daemon()
    daemon.begin(1, fill=9)
    assert [header for header, _ in daemon.links[2].sent] == [piece(index, 1) for index in range(3)]
    assert b"".join(payload for _, payload in daemon.links[2].sent) == bytes([9] * VECTOR)
    assert not daemon.links[1].sent
    assert not daemon.links[3].sent
    assert [(one.awaited, one.sent) for one in daemon.news] == [(1, True)]


def test_what_a_link_has_no_room_for_goes_later() -> None:
    """The slot is the daemon's until all of it has left; it is copied, for the learner writes the next turn into it."""
    daemon = Daemon()
    daemon.links[2].room = 1
    daemon.begin(1)
    assert (len(daemon.links[2].sent), daemon.news[-1].sent) == (1, False)
    daemon.links[2].make_room(1)
    assert (len(daemon.links[2].sent), len(daemon.news)) == (2, 1)
    daemon.links[2].make_room(5)
    assert (len(daemon.links[2].sent), daemon.news[-1].sent) == (3, True)
    assert not daemon.links[2].waiting


def test_the_next_turn_drops_what_is_left_of_the_one_before() -> None:
    daemon = Daemon()
    daemon.links[2].room = 1
    daemon.begin(1)
    daemon.begin(2, shown=False)
    assert daemon.news[-1] == TurnNews(round=ROUND, turn=2, shown=(), awaited=1, sent=True)
    daemon.links[2].make_room(5)
    assert len(daemon.links[2].sent) == 1
    assert not daemon.links[1].sent, "there was nothing to show"


def test_a_period_that_has_ended_sends_no_more() -> None:
    """Its round is to leave, and nobody mixes what comes now."""
    daemon = Daemon()
    daemon.links[2].room = 1
    daemon.begin(1)
    daemon.decided = ROUND
    daemon.links[2].make_room(5)
    assert (len(daemon.links[2].sent), daemon.news[-1].sent) == (1, True)


@pytest.mark.parametrize("turn", [1, 2])
def test_what_comes_is_told_when_all_of_it_is_there(turn: int) -> None:
    daemon, partner = Daemon(), {1: 2, 2: 1}[turn]
    daemon.begin(turn)
    assert daemon.hear_all(partner, turn, 5) == [None] * 3
    assert [one.awaited for one in daemon.news] == [1, 0]
    [shown] = daemon.news[-1].shown
    assert shown.weight == 0.5
    assert daemon.slots[shown.slot] == bytes([5] * VECTOR)


def test_a_ring_has_two_neighbours_each_with_a_slot_of_its_own() -> None:
    daemon = Daemon("local:8,gossip=2,over=ring")
    daemon.begin(1)
    assert [len(link.sent) for link in daemon.links.values()] == [3, 0, 3]
    daemon.hear_all(1, 1, 5)
    daemon.hear_all(3, 1, 6)
    shown = daemon.news[-1].shown
    assert [daemon.slots[one.slot][0] for one in shown] == [6, 5]
    assert [one.weight for one in shown] == [1 / 3, 1 / 3]


def test_who_is_a_turn_ahead_is_heard_and_who_is_further_or_behind_is_not() -> None:
    """The next turn's weights wait in another slot: those of this turn are being mixed."""
    daemon = Daemon()
    daemon.begin(1)
    daemon.hear_all(2, 1, 5)
    first = daemon.news[-1].shown[0].slot
    assert daemon.hear_all(1, 2, 6) == [None] * 3
    assert daemon.hear_all(2, 3, 7) == ["dropped"] * 3
    assert daemon.slots[first] == bytes([5] * VECTOR)
    daemon.begin(2)
    assert daemon.news[-1].awaited == 0, "it was there before"
    assert daemon.slots[daemon.news[-1].shown[0].slot] == bytes([6] * VECTOR)
    assert daemon.hear_all(2, 1, 8) == ["dropped"] * 3


def test_the_first_turn_of_a_period_is_heard_before_it_begins_here() -> None:
    daemon = Daemon()
    daemon.begin(3, round_=ROUND)
    assert daemon.hear_all(1, 1, 5, ROUND + 1) == ["dropped"] * 3, "this learner has not ended its period"
    daemon.decided = ROUND
    assert daemon.hear_all(1, 1, 5, ROUND + 1) == [None] * 3
    assert len(daemon.news) == 1
    daemon.begin(1, round_=ROUND + 1)
    assert daemon.slots[daemon.news[-1].shown[0].slot] == bytes([5] * VECTOR)


def test_what_came_in_rounds_that_ended_without_this_learner_is_forgotten() -> None:
    """One that waits for its data is shown the first turn of each round, and begins none: nothing of that adds up."""
    daemon, taken = Daemon(), 0
    for daemon.decided in range(ROUND, ROUND + 50):
        round_ = daemon.decided + 1
        partner = {0: 1, 1: 2}[(round_ + 1) % 2]
        taken += daemon.hear_all(partner, 1, 5, round_) == [None] * 3
        assert len(daemon.gossip._coming) == 1
    assert taken == 50
    daemon.begin(1, round_=round_)
    assert len(daemon.news[-1].shown) == 1


def test_a_piece_that_lands_when_its_turn_is_over_touches_no_slot() -> None:
    """G8: the link was slow, and two turns later another partner's lies in the same slot."""
    daemon = Daemon(learning=tuple(range(8)))
    daemon.begin(1)
    late = piece(0, 1)
    place = daemon.gossip.announced(4, late)
    assert isinstance(place, memoryview)
    daemon.begin(2)
    daemon.begin(3)
    daemon.hear_all(2, 3, 5)
    place[:] = bytes([6] * PIECE)
    daemon.gossip.received(4, late)
    assert daemon.slots[daemon.news[-1].shown[0].slot] == bytes([5] * VECTOR)


def test_a_piece_counts_once() -> None:
    """Nor does it change what the learner was told of."""
    daemon = Daemon()
    daemon.begin(1)
    for index in (0, 0, 1):
        daemon.hear(2, piece(index, 1), 5)
    assert daemon.news[-1].awaited == 1
    daemon.hear(2, piece(2, 1), 5)
    daemon.hear_all(2, 1, 6)
    assert daemon.slots[daemon.news[-1].shown[0].slot] == bytes([5] * VECTOR)
    assert [one.awaited for one in daemon.news] == [1, 0]


@pytest.mark.parametrize(
    ("sender", "header", "wrong"),
    [
        (1, piece(0, 1), "is no neighbour there"),
        (2, replace(piece(0, 1), segment_count=4), "piece 1 of 4 of its weights"),
        (2, replace(piece(0, 1), first_segment=3), "piece 4 of 3 of its weights"),
        (2, replace(piece(0, 1), payload_bytes=9), "of 9 bytes"),
        (2, replace(piece(2, 1), payload_bytes=PIECE), "of 10 bytes, and all of them have 25"),
    ],
)
def test_who_shows_what_nobody_shows_breaks_the_rules(sender: int, header: Header, wrong: str) -> None:
    """G10: by its length and its place alone; nothing of it lands."""
    daemon = Daemon()
    daemon.begin(1)
    assert wrong in str(daemon.hear(sender, header, 5))


def test_between_generations_nothing_is_sent_or_heard() -> None:
    """G2: the learner is told that nothing more of its turn comes, and mixes again in the next generation."""
    daemon = Daemon()
    daemon.links[2].room = 1
    daemon.begin(1)
    daemon.gossip.fence()
    assert daemon.news[-1] == TurnNews(round=ROUND, turn=1, shown=(), awaited=0, sent=True)
    daemon.links[2].make_room(5)
    assert len(daemon.links[2].sent) == 1
    assert daemon.hear_all(2, 1, 5) == ["dropped"] * 3
    daemon.begin(2)
    assert daemon.news[-1] == TurnNews(round=ROUND, turn=2, shown=(), awaited=0, sent=True)
    daemon.gossip.resume(OTHER, (0, 3))
    assert daemon.hear_all(3, 3, 5) == ["dropped"] * 3, "of the generation before"
    daemon.begin(3)
    assert [header.generation for header, _ in daemon.links[3].sent] == [OTHER] * 3
    assert daemon.hear(3, replace(piece(0, 3), generation=OTHER), 5) is None


def test_a_fence_takes_nothing_back_that_the_learner_was_told_of() -> None:
    """Nor does anybody else's of that turn come into its place: the learner may be reading it."""
    daemon = Daemon()
    daemon.begin(1)
    daemon.hear_all(2, 1, 5)
    daemon.gossip.fence()
    assert [one.awaited for one in daemon.news] == [1, 0]
    slot = daemon.news[-1].shown[0].slot
    daemon.gossip.resume(GENERATION, (0, 2))
    assert daemon.hear_all(2, 1, 6) == ["dropped"] * 3
    assert daemon.slots[slot] == bytes([5] * VECTOR)
    assert daemon.hear_all(2, 2, 6) == [None] * 3


def test_who_has_no_link_is_not_awaited() -> None:
    daemon = Daemon()
    del daemon.links[2]
    daemon.begin(1)
    assert [(one.awaited, one.sent) for one in daemon.news] == [(0, True)]


@pytest.mark.parametrize("why", ["no link", "a turn that was not due yet"])
def test_who_was_not_awaited_when_the_turn_began_is_not_counted(why: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is not mixed in either: what was hoped for is what the learner could be told of."""
    daemon = Daemon()
    link = daemon.links.pop(2)
    if why != "no link":
        daemon.links[2], daemon.decided = link, ROUND - 2
    daemon.begin(1)
    told = len(daemon.news)
    daemon.links[2], daemon.decided = link, ROUND - 1
    assert daemon.hear_all(2, 1, 5) == [None] * 3
    assert len(daemon.news) == told
    with caplog.at_level("INFO"):
        daemon.gossip.close()
    assert "0 of 0 neighbours' weights came in time" in caplog.text


def test_alone_nothing_is_mixed() -> None:
    daemon = Daemon(learning=(0,))
    daemon.begin(1)
    assert [(one.awaited, one.sent) for one in daemon.news] == [(0, True)]


def test_a_turn_of_another_round_than_the_next_one_is_over() -> None:
    """A learner that is told late that its period was lost."""
    daemon = Daemon()
    daemon.begin(1, round_=ROUND - 1)
    assert not daemon.links[2].sent
    assert [(one.awaited, one.sent) for one in daemon.news] == [(0, True)]


def test_the_next_process_begins_without_a_turn() -> None:
    daemon = Daemon()
    daemon.links[2].room = 1
    daemon.begin(2)
    daemon.begin(3)
    daemon.gossip.learner_lost()
    daemon.links[2].make_room(5)
    assert len(daemon.links[2].sent) == 1
    assert daemon.hear_all(2, 1, 5) == [None] * 3
    daemon.begin(1)
    assert len(daemon.news[-1].shown) == 1
