"""What the learners of a job send each other through their daemons: frames in order, over the links that are there.

A daemon knows of them whom they are for. How much may be under way is the learners' own agreement (P1): a daemon holds
what a link or a learner does not take yet, and ends the part of whoever sends more than that.
"""

from collections import deque
from collections.abc import Mapping

from meshtraind.process_group.store import KeyValueStore
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import Connection
from meshtraind.transport.requests import ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.frames.header import GROUP_BREAKS, GROUP_ENDS, Header, Kind
from meshwire.jobs.lifecycle import job_number
from meshwire.messages.group import GroupBegin, GroupWelcome, GroupWorld, MemberLost, StoreAnswer, StoreAsk
from meshwire.messages.job import Member
from meshwire.messages.learner import Stop

STORE_GRACE_S = 10.0  # for the way to the store's daemon and back, beyond what the answer itself may take


class Outlet:
    """Frames on their way to one end, which takes them when it can.

    Args:
        end: a link to a member, or the connection of the learner here.
    """

    def __init__(self, end: Connection) -> None:
        self.end = end
        self._queued: deque[tuple[Header, memoryview | None]] = deque()
        self._stop = end.on_writable(self._send)
        self.queued_bytes = 0

    def put(self, header: Header, payload: memoryview | None) -> None:
        """Sends it, behind all that was put before."""
        self._queued.append((header, payload))
        self.queued_bytes += header.payload_bytes
        self._send()

    def _send(self) -> None:
        while self._queued and self.end.writable:
            header, payload = self._queued.popleft()
            self.queued_bytes -= header.payload_bytes
            self.end.send_chunk(header, payload)

    def close(self) -> None:
        """Drops what has not left."""
        self._stop()
        self._queued.clear()


class GroupRelay:
    """Serves the process group of one job, or of one of its worlds: its learner here, one process after the other, and
    what others send it.

    Learners know ranks of their world, daemons those of the job; here both meet.

    Args:
        links: the connection to each other member, by rank; live.
        world: None: the only one of the job, of all its members.
        used: a script of an earlier world has made a process group.

    Attributes:
        used: whether the script has made a process group.
        exchanged: whether it has sent or received something in one.
        survives_losses: the script goes on without whoever is lost.
    """

    def __init__(
        self, job: Job, links: Mapping[int, Connection], world: GroupWorld | None = None, *, used: bool = False
    ) -> None:
        self._job = job
        self._world = world
        self._world_number = 0 if world is None else world.number
        self._number = job_number(job.spec.job)
        self._links = links
        self._store = KeyValueStore()
        self._learner: Outlet | None = None
        self._early: deque[tuple[Header, memoryview | None]] = (
            deque()
        )  # came before the learner here has begun: first it is welcomed
        self._inbound_bytes: dict[int, int] = {}  # of those, by rank
        self._outlets: dict[int, Outlet] = {}
        self._places: dict[int, memoryview] = {}  # of the frame that is being received, by rank; -1: the learner's
        self._lost: dict[int, str] = {}
        self._left: dict[int, str] = {}  # whose learners have left the instance of now, in order, and why, by rank
        self._instance = 0
        self._ending: str | None = None
        self._leaves = False  # it has said so
        self._disturbed: bool | None = None  # when the learner here has left; None: it has not
        self.used = used
        self.exchanged = used
        self.survives_losses = False
        self._made = False  # in this world

    @property
    def ranks(self) -> tuple[int, ...]:
        """Which rank of the job each rank of the world is."""
        return tuple(range(len(self._job.members))) if self._world is None else self._world.ranks

    @property
    def members(self) -> tuple[Member, ...]:
        """By rank of the world."""
        return tuple(self._job.members[rank] for rank in self.ranks)

    @property
    def place(self) -> int:
        """This device's rank of the world."""
        return self.ranks.index(self._job.rank)

    # The learner here

    def attach(self, connection: Connection) -> GroupWelcome:
        """Lets the learner's process group in. Raises RequestFailed where there can be none."""
        if self._learner is not None:
            raise RequestFailed(
                "this job's process group has a connection already: call init_process_group in one process of each "
                "device only (one rank a device)"
            )
        for rank, reason in self._lost.items():
            raise RequestFailed(f"{self.name(rank)} is gone: {reason}")
        self._learner = Outlet(connection)
        self._instance = 0
        self._ending = self._disturbed = None
        self._leaves = False
        self.used = self._made = True
        return GroupWelcome(spec=self._job.spec, rank=self.place, members=self.members)

    @property
    def learner(self) -> Connection | None:
        """The connection of the process that has the group; None: there is none."""
        return None if self._learner is None else self._learner.end

    def will_end(self, reason: str) -> None:
        """This daemon is about to end the learner here; the others will be told so."""
        self._ending = reason

    def is_over(self, connection: Connection) -> bool:
        """Whether this connection is the group's."""
        return self._learner is not None and connection is self._learner.end

    def begin(self, body: GroupBegin) -> None:
        """The ranks have agreed on the instance of their world, or will by themselves."""
        self._instance = body.instance
        self.survives_losses = body.survives_losses
        self._left.clear()
        assert self._learner is not None
        for header, payload in self._early:
            self._learner.put(header, payload)
        self._early.clear()
        self._inbound_bytes.clear()

    def leaves(self) -> None:
        """The learner's socket is about to close in order."""
        self._leaves = True

    def learner_lost(self, connection: Connection) -> None:
        """Its socket has closed: the others are told behind all that it has sent them."""
        if self._learner is None or connection is not self._learner.end:
            return
        self._learner.close()
        self._learner = None
        self._disturbed = bool(self._lost or self._left)  # whoever leaves later does so for the sake of this one
        self._places.pop(-1, None)
        if self._instance:
            why = memoryview((self._ending or self.loss or self._why_left).encode()[: limits.ERROR_CHARS_MAX])
            last = self._header(len(why), self._instance, step=GROUP_ENDS if self._leaves else GROUP_BREAKS)
            for rank in self.ranks:
                if rank != self._job.rank:
                    self._put(rank, last, why)

    def announced_by_learner(self, header: Header) -> memoryview | str:
        """Where the learner's frame is to be written; a text where it breaks the rules."""
        place = _only(header.contributors)
        if header.kind is not Kind.RELAYED or place is None or place == self.place or not header.payload_bytes:
            return "a learner's frames are relayed ones, each for one other rank"
        if place >= len(self.ranks):
            return f"there is no rank {place} in this job"
        rank = self.ranks[place]
        outlet = self._outlets.get(rank)
        if outlet is not None and outlet.queued_bytes > limits.RELAY_QUEUE_BYTES_MAX:
            return f"more than {limits.RELAY_QUEUE_BYTES_MAX} bytes under way to rank {place}"
        self._places[-1] = memoryview(bytearray(header.payload_bytes))
        return self._places[-1]

    def received_from_learner(self, header: Header) -> None:
        """The frame is there."""
        place = _only(header.contributors)
        assert place is not None
        self.exchanged = True
        self._put(self.ranks[place], self._header(header.payload_bytes, header.round), self._places.pop(-1))

    def _header(self, payload_bytes: int, instance: int, step: int = 0) -> Header:
        """What stands before a frame to another daemon: which job, world and instance it is of."""
        return Header(
            Kind.RELAYED, payload_bytes, job=self._number, generation=self._world_number, round=instance, step=step
        )

    def _put(self, rank: int, header: Header, payload: memoryview | None) -> None:
        if rank in self._lost:
            return  # the learner was told
        if rank not in self._outlets:
            if rank not in self._links:
                self.member_lost(rank, "there is no link to it")
                return
            self._outlets[rank] = Outlet(self._links[rank])
        self._outlets[rank].put(header, payload)

    # The other members

    def announced(self, rank: int, header: Header) -> memoryview | str | None:
        """Where a member's frame is to be written; None where nobody needs it; a text where it breaks the rules."""
        if self._job.ending or rank in self._lost or header.generation != self._world_number or rank not in self.ranks:
            return None
        most = limits.RELAY_QUEUE_BYTES_MAX
        unread = self._learner is not None and self._learner.queued_bytes > most * len(self._job.members)
        if unread or self._inbound_bytes.get(rank, 0) + header.payload_bytes > most:
            return f"it sends more than {limits.RELAY_QUEUE_BYTES_MAX} bytes that nobody takes"
        self._places[rank] = memoryview(bytearray(header.payload_bytes))
        return self._places[rank]

    def received(self, rank: int, header: Header) -> None:
        """A member's frame is there."""
        payload = self._places.pop(rank, None)
        if payload is None:
            return
        self.exchanged = self.exchanged or header.step != GROUP_ENDS
        incoming = Header(
            Kind.RELAYED,
            header.payload_bytes,
            job=self._number,
            round=header.round,
            step=header.step,
            contributors=1 << self.ranks.index(rank),
        )
        if header.step in (GROUP_ENDS, GROUP_BREAKS) and header.round == self._instance:
            self._left.setdefault(rank, bytes(payload[: limits.ERROR_CHARS_MAX]).decode(errors="replace"))
        if self._learner is not None and self._instance:
            self._learner.put(incoming, payload)
        elif self._learner is not None or header.step not in (GROUP_ENDS, GROUP_BREAKS):
            self._early.append((incoming, payload))
            self._inbound_bytes[rank] = self._inbound_bytes.get(rank, 0) + header.payload_bytes

    def link_lost(self, rank: int, reason: str) -> None:
        """A link to a member is gone, with what was on it."""
        outlet = self._outlets.get(rank)
        if (
            self._made
            and rank in self.ranks
            and (outlet is None or outlet.end.closing or self._links.get(rank) is not outlet.end)
        ):
            self.member_lost(rank, reason)

    def member_lost(self, rank: int, reason: str) -> None:
        """Nothing more comes from this member, nor reaches it."""
        if rank in self._lost:
            return
        self._lost[rank] = reason
        if (outlet := self._outlets.pop(rank, None)) is not None:
            outlet.close()
        if self._learner is not None:
            text = reason[: limits.ERROR_CHARS_MAX]
            self._learner.end.notify(MemberLost(rank=self.ranks.index(rank), reason=text))

    @property
    def loss(self) -> str | None:
        """Why the group is broken, where it is a member's link: the first one that was lost."""
        return next((f"{self.name(rank)} is gone: {reason}" for rank, reason in self._lost.items()), None)

    @property
    def _why_left(self) -> str:
        """Why the learner here has left, as the others are told. Who leaves behind another one does so for its sake,
        perhaps, and may be heard of first; so that one is named too."""
        left = "its script has ended, or destroyed it" if self._leaves else "its process was lost"
        before = next((f", after {self.name(rank)} had left it: {why}" for rank, why in self._left.items()), "")
        return left + before

    @property
    def is_disturbed(self) -> bool:
        """Whether the script here ends, or has ended, when another rank was gone or had left: perhaps for its sake."""
        return bool(self._lost or self._left) if self._disturbed is None else self._disturbed

    def stop(self, reason: str) -> None:
        """The job ends: whatever the learner waits for does not come."""
        if self._learner is not None:
            self._learner.end.notify(Stop(reason=reason[: limits.ERROR_CHARS_MAX]))

    def name(self, rank: int) -> str:
        """A rank as people know it. In one of several worlds it has two numbers, and is known by its device."""
        name = self._job.members[rank].name
        return f"rank {rank} ({name})" if self._world is None else name

    # The store

    async def ask_store(self, asked: StoreAsk) -> StoreAnswer:
        """Answers the learner here: the store is on the first rank's daemon. Raises RequestFailed."""
        first = self.ranks[0]
        if self._job.rank == first:
            return await self._store.answer(asked)
        link = self._links.get(first)
        if link is None:
            raise RequestFailed(f"{self.name(first)}, whose daemon keeps the job's store, is not linked")
        asked = asked.model_copy(update={"world": self._world_number})
        try:
            answer = await link.request(
                asked, timeout_s=asked.timeout_s + STORE_GRACE_S, name=f"the store of job {self._job.spec.job}"
            )
        except (ConnectionEnded, TimeoutError) as error:
            raise RequestFailed(f"{self.name(first)}, whose daemon keeps the job's store: {error}") from error
        if not isinstance(answer, StoreAnswer):
            raise RequestFailed(f"{self.name(first)} answered with {type(answer).__name__}")
        return answer

    async def asked_by_member(self, asked: StoreAsk) -> StoreAnswer:
        """Answers a member's daemon. Raises RequestFailed."""
        if asked.world != self._world_number:
            raise RequestFailed("that world of the job has ended")
        if self._job.rank != self.ranks[0]:
            raise RequestFailed("the job's store is on the daemon of rank 0")
        return await self._store.answer(asked)

    def close(self, reason: str = "the job has ended") -> None:
        """The job, or this world, has ended."""
        self._store.close()
        for outlet in self._outlets.values():
            outlet.close()
        self._outlets.clear()
        if self._learner is not None:
            self._learner.end.close(reason)


def _only(ranks: int) -> int | None:
    """The rank of a bitmap of one."""
    return ranks.bit_length() - 1 if ranks and not ranks & (ranks - 1) else None
