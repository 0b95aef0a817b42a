"""What learners show their neighbours within a period, so that they mix weights (R9, `--sync local:H,gossip=G`).

All of it is best effort: a round is exact whatever of it arrives, so nothing is agreed on, repeated or kept, and nobody
waits here. A turn's vector goes to each neighbour in pieces, while its link has room, until the learner begins the next
turn or ends its period. What comes is taken for the turn that the learner here is in, or the next one.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from meshtraind.rounds.data_plane import RawSlots
from meshtraind.transport.round_link import RoundLink
from meshwire import limits
from meshwire.frames.header import Header, Kind
from meshwire.jobs.lifecycle import job_number
from meshwire.message_base import Wire
from meshwire.messages.job import JobSpec
from meshwire.messages.learner import LearnerTurn, Shown, TurnNews
from meshwire.sync_modes.neighbours import NEIGHBOURS_MAX, Partner, Turn, neighbours

log = logging.getLogger(__name__)

NO_TURN = Turn(0, 0)


class DecidedRounds(Protocol):
    """Knows which round the learner computes for: the one behind those that are decided."""

    @property
    def decided(self) -> int:
        """The newest round that this member is in, or was passed over in."""


@dataclass(slots=True)
class _Arriving:
    """What a neighbour shows in a turn, as far as it is here."""

    slot: int
    pieces: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Going:
    """What is sent to a neighbour. `next`: the piece whose turn it is."""

    link: RoundLink
    next: int = 0
    stop: Callable[[], None] | None = None  # being told that the link has room


class Gossip:
    """The neighbours of one learner, in every generation of its job.

    Args:
        rank: of this device.
        links: the way to each other member, by rank; live.
        notify: tells the learner.
    """

    def __init__(
        self,
        spec: JobSpec,
        rank: int,
        rounds: DecidedRounds,
        links: Mapping[int, RoundLink],
        slots: RawSlots,
        notify: Callable[[Wire], None],
    ) -> None:
        self._job = job_number(spec.job)
        self._name = spec.job
        self._over = spec.sync.over
        self._rank = rank
        self._rounds = rounds
        self._links = links
        self._slots = slots
        self._notify = notify
        self._generation: int | None = None  # None: fenced
        self._learning: tuple[int, ...] = ()
        self._turn = NO_TURN  # that the learner is in, or was in last
        self._left = NO_TURN  # what comes of this one is not taken any more
        self._asked: tuple[Partner, ...] = ()  # in it
        self._going: list[_Going] = []
        self._coming: dict[tuple[Turn, int], _Arriving] = {}  # by turn and rank
        self._landing: dict[int, tuple[Turn, bytearray]] = {}  # the piece that is being received, by rank
        self._turns = self._hoped = self._had = 0

    # From one generation to the next

    def fence(self) -> None:
        """G2: nothing is sent, and nothing taken, before the next generation goes on."""
        self._generation = None
        self._forget()

    def resume(self, generation: int, learning: tuple[int, ...]) -> None:
        """All have entered it: those whose learners compute in it are each other's neighbours."""
        self._generation, self._learning = generation, learning

    # The learner

    def begin(self, message: LearnerTurn) -> None:
        """The learner is in this turn now; what is left of the one before is dropped."""
        self._stop_sending()
        self._turn = turn = Turn(message.round, message.turn)
        self._drop_what_is_over()
        around = self._neighbours(turn) if self._is_due(turn) else ()
        self._asked = tuple(one for one in around if one.rank in self._links)
        self._turns += 1
        self._hoped += len(self._asked)
        self._had += sum(self._has_come(one) for one in self._asked)
        for one in self._asked if message.shown else ():
            going = _Going(self._links[one.rank])
            if not self._send(going):
                self._going.append(going)
                going.stop = going.link.on_writable(partial(self._send_more, going))
        self._tell()

    def learner_lost(self) -> None:
        """Its process has ended; the next one begins with no turn."""
        self._forget()
        self._turn = self._left = NO_TURN

    def close(self) -> None:
        """The job ends here."""
        self.fence()
        if self._turns:
            log.info("job %s: %d of %d neighbours' weights came in time", self._name, self._had, self._hoped)

    # What leaves

    def _send(self, going: _Going) -> bool:
        """Sends what the link has room for. Returns whether that was the last of it: a period that has ended, too, is
        the last, for its round is to leave."""
        vector = self._slots.mixed(0)
        pieces = _pieces(len(vector))
        while going.next < pieces and self._rounds.decided < self._turn.round:
            if not going.link.writable:
                return False
            assert self._generation is not None
            payload = bytes(_piece(vector, going.next))  # the slot may be written again before it has left
            header = Header(
                Kind.GOSSIP,
                len(payload),
                job=self._job,
                generation=self._generation,
                round=self._turn.round,
                step=self._turn.number,
                first_segment=going.next,
                segment_count=pieces,
            )
            going.link.send_chunk(header, payload)
            going.next += 1
        return True

    def _send_more(self, going: _Going) -> None:
        if self._send(going):
            assert going.stop is not None
            going.stop()
            self._going.remove(going)
            if not self._going:
                self._tell()

    def _stop_sending(self) -> None:
        for going in self._going:
            assert going.stop is not None
            going.stop()
        self._going = []

    # What comes

    def announced(self, sender: int, header: Header) -> memoryview | str | None:
        """Where a piece is to be written; None where it comes too late or too early; a text where it breaks the
        rules."""
        turn = Turn(header.round, header.step)
        if header.generation != self._generation or not self._is_due(turn):
            return None
        if sender not in (one.rank for one in self._neighbours(turn)):
            return f"it shows its weights in turn {turn.number} of round {turn.round}, and is no neighbour there"
        vector, index = self._slots.mixed(0), header.first_segment
        pieces = _pieces(len(vector))
        if header.segment_count != pieces or index >= pieces or header.payload_bytes != len(_piece(vector, index)):
            return (
                f"it shows piece {index + 1} of {header.segment_count} of its weights, of {header.payload_bytes} "
                f"bytes, and all of them have {len(vector)}"
            )
        # Not straight into the slot: when it ends, another turn may be there.
        self._landing[sender] = turn, bytearray(header.payload_bytes)
        return memoryview(self._landing[sender][1])

    def received(self, sender: int, header: Header) -> None:
        """An announced piece is there."""
        turn, piece = self._landing.pop(sender, (NO_TURN, bytearray()))
        if turn != (header.round, header.step) or not self._is_due(turn):
            return
        if (turn, sender) not in self._coming:
            self._drop_what_is_over()
            self._coming[turn, sender] = _Arriving(self._slot(turn, sender))
        coming = self._coming[turn, sender]
        if header.first_segment in coming.pieces:
            return
        vector = self._slots.mixed(coming.slot)
        _piece(vector, header.first_segment)[:] = piece
        coming.pieces.add(header.first_segment)
        awaited = turn == self._turn and sender in (one.rank for one in self._asked)
        if awaited and len(coming.pieces) == _pieces(len(vector)):
            self._had += 1
            self._tell()

    def _is_due(self, turn: Turn) -> bool:
        """Whether it is the learner's turn, or its next one, in the period that it computes."""
        now = self._turn.number if self._turn.round == turn.round else 0
        computes_for = self._rounds.decided + 1
        comes = self._generation is not None and turn != self._left
        return comes and turn.round == computes_for and max(1, now) <= turn.number <= now + 1

    def _drop_what_is_over(self) -> None:
        """Rounds may end without this learner, which then begins no turn in them."""
        self._coming = {key: each for key, each in self._coming.items() if self._is_due(key[0])}

    def _has_come(self, one: Partner) -> bool:
        coming = self._coming.get((self._turn, one.rank))
        return coming is not None and len(coming.pieces) == _pieces(len(self._slots.mixed(0)))

    def _slot(self, turn: Turn, sender: int) -> int:
        """Turns that follow each other have slots apart: one is read while the next one's fill."""
        place = [one.rank for one in self._neighbours(turn)].index(sender)
        return 1 + place + turn.number % 2 * NEIGHBOURS_MAX[self._over]

    def _neighbours(self, turn: Turn) -> tuple[Partner, ...]:
        return neighbours(self._over, turn, self._rank, self._learning)

    # Both

    def _tell(self) -> None:
        come = [one for one in self._asked if self._has_come(one)]
        self._notify(
            TurnNews(
                round=self._turn.round,
                turn=self._turn.number,
                shown=tuple(Shown(slot=self._coming[self._turn, one.rank].slot, weight=one.weight) for one in come),
                awaited=len(self._asked) - len(come),
                sent=not self._going,
            )
        )

    def _forget(self) -> None:
        """Nothing more is sent or comes in the learner's turn; it is told so, if it could wait for that."""
        waits = bool(self._going) or not all(self._has_come(one) for one in self._asked)
        self._stop_sending()
        self._asked = tuple(one for one in self._asked if self._has_come(one))
        self._left = self._turn  # the learner may be reading what it was told of: nobody else's comes into its place
        if waits:
            self._tell()
        self._landing.clear()
        self._coming.clear()
        self._asked = ()


def _pieces(size_bytes: int) -> int:
    return -(-size_bytes // limits.GOSSIP_PIECE_BYTES)


def _piece(vector: memoryview, index: int) -> memoryview:
    return vector[index * limits.GOSSIP_PIECE_BYTES : (index + 1) * limits.GOSSIP_PIECE_BYTES]
