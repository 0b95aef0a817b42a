"""What the other members of a running job say, and where their chunks belong."""

from typing import TYPE_CHECKING, Protocol

from meshtraind.session.barriers import Barriers
from meshtraind.storage.job_record import Job
from meshwire.frames.header import Header
from meshwire.message_base import Wire
from meshwire.messages.job import BarrierReached, BaseHash, End, RankReport
from meshwire.rounds.effects import Message

if TYPE_CHECKING:
    from meshtraind.rounds.driver import Rounds


class MemberJudge(Protocol):
    """Who is a member that counts."""

    def hears(self, rank: int) -> bool:
        """Whether what this member says belongs anywhere."""

    def refuse(self, rank: int, reason: str) -> None:
        """It broke the protocol."""


class JobOwner(Protocol):
    """Whoever runs the job that the members speak of."""

    @property
    def rounds(self) -> "Rounds | None":
        """None before the learner is ready, and while this member has no history."""

    def member_reported(self) -> None:
        """A member has told how it stands."""

    def member_ended(self, rank: int, end: End) -> None:
        """A member says that the job has ended."""


class MemberHandler:
    """What the other members of one job say, checked and handed to the job's parts."""

    def __init__(self, job: Job, barriers: Barriers, membership: MemberJudge, owner: JobOwner) -> None:
        self._job = job
        self._barriers = barriers
        self._membership = membership
        self._owner = owner

    def notice(self, rank: int, header: Header, body: Wire) -> str | None:
        """A message of another member. Returns what is wrong with it, if anything."""
        rounds = self._owner.rounds if not self._job.ended else None
        if not isinstance(body, End) and not self._membership.hears(rank):
            return None
        if isinstance(body, RankReport):
            self._job.report(body)
            if rounds is not None:
                if rounds.takes(header.generation):
                    rounds.peer_complete(rank, header.complete)
                rounds.peer_measured(body)
            self._barriers.wake()
            self._owner.member_reported()
        elif isinstance(body, End):
            self._owner.member_ended(rank, body)
        elif isinstance(body, BaseHash):
            self._job.take_hash(body, header.generation)
        elif isinstance(body, BarrierReached):
            if wrong := self._barriers.reached(body):
                return wrong
            if rounds is not None:
                rounds.peer_in_barrier(rank, inside=self._barriers.in_barrier(rank))
        elif not isinstance(body, Message):
            return f"a member does not send {type(body).__name__}"
        elif rounds is not None and rounds.takes(header.generation):
            rounds.message(rank, body, behind=not self._barriers.in_barrier(rank))
            rounds.peer_complete(rank, header.complete)
        return None

    def chunk_announced(self, rank: int, header: Header) -> memoryview | str | None:
        """Where a chunk belongs; None when its round is no longer of interest."""
        rounds = self._owner.rounds
        if rounds is None or self._job.ending or not self._membership.hears(rank):
            return None
        if not rounds.takes(header.generation):
            return None  # G2: work of another generation is dropped
        place = rounds.chunk_announced(rank, header)
        if isinstance(place, str):
            self._membership.refuse(rank, place)
            return None  # the link can go on: where the chunk ends is known
        return place

    def chunk_received(self, rank: int, header: Header) -> None:
        """A chunk is in its place."""
        rounds = self._owner.rounds
        taken = rounds is not None and not self._job.ended and rounds.takes(header.generation)
        if rounds is not None and taken and self._membership.hears(rank):
            rounds.chunk_received(rank, header)
