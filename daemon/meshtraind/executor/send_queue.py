"""What this member sends in one generation: work of rounds that waits for a link, made into frames only when the link
can take them, a slice at a time."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshtraind.contributions.results import RoundResults
from meshtraind.contributions.segments import RoundForm
from meshtraind.executor.compute import Calculation
from meshtraind.executor.host import ChunkTrace, ExchangeMembers, RoundHost
from meshtraind.executor.round_buffers import RoundMemory
from meshtraind.runtime.timeslice import Slices
from meshtraind.transport.uplink_share import UplinkShare
from meshwire.collectives.exchange import Strategy, Work
from meshwire.frames.header import Flags, Header, Kind


@dataclass(frozen=True, slots=True)
class _Item:
    """A run of segments to be computed, if it still is to be, and sent at a step, if it is."""

    round: RoundResults
    bucket: int
    work: Work
    computed: bool
    step: int | None


class Sending:
    """One queue to each member that is sent to, and one for work that is nobody else's. Nothing leaves before `start`.
    With the generation ends what still waits.

    Args:
        members: of the generation.
        job: number for the frame headers.
        strategies: of the generation.
        host: says which round is complete.
        trace: None: nobody notes chunks.
        all_to_all: whether everybody sends to all others at once.
    """

    def __init__(
        self,
        members: ExchangeMembers,
        job: int,
        strategies: Mapping[RoundForm, Strategy],
        memory: RoundMemory,
        calculation: Calculation,
        host: RoundHost,
        trace: ChunkTrace | None,
        *,
        all_to_all: bool,
    ) -> None:
        self._links = members.links
        self._job = job
        self._generation = members.generation
        self._strategies = strategies
        self._memory = memory
        self._calculation = calculation
        self._host = host
        self._trace = trace
        self._all_to_all = all_to_all
        self._share: UplinkShare | None = None
        self._queues: dict[int, deque[_Item]] = {}
        self._local: deque[_Item] = deque()  # a world of one has nobody to send to
        self._slices = Slices(self._next)
        self._started = False
        self._unsubscribe: list[Callable[[], None]] = []

    def start(self) -> None:
        """All members take what is sent. It leaves on the links that there are now: one that is lost later takes
        nothing more."""
        self._started = True
        self._links = dict(self._links)
        if self._all_to_all:
            self._share = UplinkShare([*self._links.values()])
        self._unsubscribe = [link.on_writable(self._slices.run) for link in self._links.values()]
        self._slices.run()

    def put(self, round_: RoundResults, bucket: int, work: Work, *, computed: bool) -> None:
        """Queues work for those that it is sent to, or for this member alone. `pump` gets it going.

        Args:
            computed: the bytes to be sent lie in the round's area.
        """
        if not work.send_steps:
            self._local.append(_Item(round_, bucket, work, computed, None))
        steps = self._strategies[round_.form].program.steps
        for step in work.send_steps:
            to = steps[step].send_to
            assert to is not None
            self._queues.setdefault(to, deque()).append(_Item(round_, bucket, work, computed, step))

    def pump(self) -> None:
        """Computes and sends while links can take it."""
        if self._started:
            self._slices.run()

    def close(self) -> None:
        """Drops what waits, and lets go of the links."""
        self._started = False
        self._slices.stop()
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        if self._share is not None:
            self._share.close()
        self._queues.clear()
        self._local.clear()

    def _next(self) -> bool:
        """Does a little. Returns False if there was nothing to do."""
        if self._local:
            self._prepare(self._local.popleft())
            return True
        for peer, queue in self._queues.items():
            link = self._links.get(peer)  # none: it was lost, and another generation will go on without it
            if queue and link is not None and link.writable:
                frame = self._prepare(queue.popleft())
                assert frame is not None
                link.send_chunk(*frame)
                if self._share is not None:
                    self._share.sends()
                return True
        return False

    def _prepare(self, item: _Item) -> tuple[Header, memoryview | None] | None:
        """The frame of an item whose turn has come; None if nobody but this member is concerned."""
        work, payload = item.work, None
        if not item.computed:
            if work.add_own and not work.finish and not work.poison:
                own = self._memory.own[item.round.number]
                payload = own.encoded(item.bucket, work.first_segment, work.segment_count)
            if payload is None:
                work = self._calculation.compute(item.round, item.bucket, work)
                self._calculation.report(item.round, item.bucket, work)
        if item.step is None:
            return None
        if work.poison or not work.contributors:
            payload = None
        elif payload is None:
            offset, _ = item.round.form.layout.span(item.bucket, work.first_segment, work.segment_count)
            payload = item.round.area[offset : offset + work.length_bytes]
        header = Header(
            kind=Kind.CHUNK,
            payload_bytes=len(payload) if payload is not None else 0,
            flags=Flags.POISON if work.poison else Flags.NONE,
            job=self._job,
            generation=self._generation,
            round=item.round.number,
            step=item.step,
            bucket=item.bucket,
            first_segment=work.first_segment,
            segment_count=work.segment_count,
            contributors=work.contributors,
            weight=work.weight,
            complete=self._host.complete,
            squared_norm=work.squared_norm,
        )
        if self._trace is not None:
            self._trace.chunk(header)
        return header, payload
