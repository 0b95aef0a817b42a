"""Who may measure a link when, and what was found (W7)."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Collection, Iterator
from typing import Protocol

from meshtraind.measuring.link_measurement import Leg, LegFigures, Legs
from meshtraind.measuring.machines import MachineLook
from meshtraind.measuring.speed import ComputeKernel, OwnSpeed
from meshtraind.peers.interfaces import is_wired
from meshtraind.peers.links import Link
from meshtraind.peers.node import Node
from meshtraind.runtime.tasks import TaskSet, told_elsewhere
from meshtraind.transport.connection import Connection, ConnectionEnded, Emit, RequestFailed
from meshwire import limits
from meshwire.frames.header import Header
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.local import LinksMeasured, MeasureProgress, PeerSummary
from meshwire.messages.measuring import AskSpeed, ComputeSpeed, MeasureLink, MeasureReady, ProbeEnd, ProbeTaken
from meshwire.planning.measured_link import SPEED_RATIO_MAX, MeasuredLink
from meshwire.text import printable

log = logging.getLogger(__name__)

SPEED_ANSWER_S = limits.SPEED_S_MAX + 1.0
ANSWER_S_MAX = limits.MEASURE_S_MAX + 0.5  # of who was asked: who asks ends sooner


class JobsHere(Protocol):
    """Whoever knows the jobs of this device."""

    @property
    def running(self) -> int:
        """How many have not ended."""


class Measuring:
    """Measures this device's links, one at a time and never beside a job, and keeps what was found.

    Attributes:
        machines: how this machine is, and those at the other ends: asked beside jobs, too.
    """

    def __init__(self, node: Node, jobs: JobsHere, speed: ComputeKernel | None = None) -> None:
        self.machines = MachineLook(node)
        self._node = node
        self._speed = speed or OwnSpeed()
        self._jobs = jobs
        self._tasks = TaskSet("measuring", told_elsewhere)
        self._found: dict[str, MeasuredLink] = {}
        self._legs: Legs | None = None
        self._other: tuple[str, int] | None = None  # device and number of the measurement under way
        self._rests_until_s = float("-inf")  # from what others ask

    async def close(self) -> None:
        """Ends what is under way."""
        await self._tasks.close()

    def check(self) -> None:
        """Raises RequestFailed while a job runs here: a measurement takes its link and its processor."""
        if self._jobs.running:
            raise RequestFailed(f"a job runs on {self._node.name}: links are measured when it has ended")

    def with_figures(self, peers: Collection[PeerSummary]) -> tuple[PeerSummary, ...]:
        """The same with what is known of their links. What is known of others is forgotten."""
        here = {peer.device for peer in peers if peer.state in ("linked", "paired")}
        self._found = {device: found for device, found in self._found.items() if device in here}
        return tuple(peer.model_copy(update={"measured": self._found.get(peer.device)}) for peer in peers)

    # Asked by this device's person

    async def measure(self, devices: Collection[str], emit: Emit) -> LinksMeasured:
        """Measures the links to these devices, or to all that are linked, one after the other.

        Raises RequestFailed where none can be; one that fails does not keep the others from it.
        """
        chosen = tuple(devices) or tuple(self._node.links)
        failed = []
        for at, device in enumerate(chosen):
            self.check()
            link = self._node.links.get(device)
            name = device[:8] if link is None else printable(link.hello.name)
            emit(MeasureProgress(name=name, done=at, total=len(chosen)))
            try:
                if link is None:
                    raise RequestFailed("it is not linked any more")
                found = await self._measure(link, name)
                self._found[device] = found.model_copy(update={"peer_speed": await self._speed_of(link, name)})
            except RequestFailed as error:
                log.info("the link to %s was not measured: %s", name, error)
                failed.append((name[: limits.NAME_CHARS_MAX], str(error)[: limits.REASON_CHARS_MAX]))
        return LinksMeasured(failed=tuple(failed))

    async def _speed_of(self, link: Link, name: str) -> float | None:
        """How fast it computes, in this device's speed; None: that is not known."""
        try:
            own_s = await self._speed.kernel_s()
            there = await link.connection.request(AskSpeed(), timeout_s=SPEED_ANSWER_S, name=f"speed of {name}")
        except (RequestFailed, ConnectionEnded, TimeoutError) as error:
            log.info("how fast %s computes is not known: %s", name, error)
            return None
        if not isinstance(there, ComputeSpeed):
            return None
        return min(max(own_s / there.kernel_s, 1 / SPEED_RATIO_MAX), SPEED_RATIO_MAX)

    async def _measure(self, link: Link, name: str) -> MeasuredLink:
        number = secrets.randbelow(2**62 - 1) + 1
        ready: asyncio.Future[MeasureReady] = asyncio.get_running_loop().create_future()

        def told(event: Wire) -> None:
            if isinstance(event, MeasureReady) and not ready.done():
                ready.set_result(event)

        comes = (Leg.ASKED, Leg.BOTH)
        with self._under_way(link, number, comes) as legs:
            asked = link.connection.request(
                MeasureLink(number=number), timeout_s=ANSWER_S_MAX, name="measuring the link", on_event=told
            )
            answer = self._tasks.spawn(asked, f"ask {name}")
            script = self._tasks.spawn(self._ask(ready, legs), f"measure {name}")
            try:
                async with asyncio.timeout(limits.MEASURE_S_MAX):
                    await asyncio.wait((answer, script), return_when=asyncio.FIRST_COMPLETED)
                    if not script.done():
                        await answer  # raises why there is none
                    figures, there = await script
                    await answer
            except TimeoutError:
                raise RequestFailed(
                    f"{limits.MEASURE_S_MAX:g} s have passed, and {legs.doing} is still awaited: the link is slower "
                    "than 0.1 Mbit/s, or one of both is too busy"
                ) from None
            except ConnectionEnded as error:
                raise RequestFailed(f"the link has ended: {error}") from None
            finally:
                answer.cancel()
                script.cancel()
        return self._kept(link, figures, there)

    async def _ask(self, ready: "asyncio.Future[MeasureReady]", legs: Legs) -> tuple[LegFigures, MeasureReady]:
        there = await ready
        return await legs.ask(), there

    def _kept(self, link: Link, figures: LegFigures, there: MeasureReady) -> MeasuredLink:
        rates = (
            figures.send_bytes_s,
            figures.receive_bytes_s,
            figures.both_send_bytes_s,
            figures.both_receive_bytes_s,
        )
        send, receive, both_send, both_receive = (min(rate or 0.0, limits.GOODPUT_BYTES_S_MAX) for rate in rates)
        if not (send and receive and both_send and both_receive):
            raise RequestFailed("too little came to tell how fast it is")
        return MeasuredLink(
            send_bytes_s=send,
            receive_bytes_s=receive,
            both_send_bytes_s=both_send,
            both_receive_bytes_s=both_receive,
            rtt_s=figures.rtt_s,
            loaded_rtt_s=figures.loaded_rtt_s,
            wired=is_wired(link.connection.local_host),
            peer_wired=there.wired,
            at_s=time.time(),
        )

    # Asked by another device

    async def answer(self, connection: Connection, body: MeasureLink, emit: Emit) -> Wire:
        """Takes part in what another device measures. Raises RequestFailed, with the reason."""
        link = self._node.links.get(connection.device or "")
        if link is None or link.connection is not connection:
            raise RequestFailed("there is a newer link")
        rests_s = self._rests_until_s - time.monotonic()
        if rests_s > 0:
            raise RequestFailed(f"{self._node.name} was measured a moment ago: again in {rests_s:.1f} s")
        with self._under_way(link, body.number, (Leg.ASKER, Leg.BOTH)) as legs:
            emit(MeasureReady(wired=is_wired(connection.local_host)))
            try:
                async with asyncio.timeout(ANSWER_S_MAX):
                    await legs.answer(link.rtt_s or 0.0)
            except TimeoutError:
                raise RequestFailed(f"{ANSWER_S_MAX:g} s have passed, and {legs.doing} is still awaited") from None
            finally:
                self._rests_until_s = time.monotonic() + limits.MEASURE_PAUSE_S
        return Done()

    async def answer_speed(self) -> Wire:
        """Tells another device how fast this one computes. Raises RequestFailed."""
        self.check()
        if self._legs is not None:
            raise RequestFailed(f"a link of {self._node.name} is being measured: try again in a few seconds")
        return ComputeSpeed(kernel_s=min(await self._speed.kernel_s(), limits.SPEED_S_MAX))

    # Both

    @contextlib.contextmanager
    def _under_way(self, link: Link, number: int, comes: Collection[Leg]) -> Iterator[Legs]:
        self.check()
        if self._legs is not None:
            raise RequestFailed(f"another link of {self._node.name} is being measured: try again in a few seconds")
        name = printable(link.hello.name)
        self._legs = Legs(link.connection, number, comes, self, name, self._tasks)
        self._other = link.device, number
        try:
            yield self._legs
        finally:
            self._legs = self._other = None

    def chunk_announced(self, device: str, header: Header) -> memoryview | None:
        """Where a chunk of no job goes; None: to nobody, for its measurement is over, or there was none."""
        legs = self._legs_of(device, header.generation)
        return None if legs is None else legs.chunk_announced(header)

    def chunk_received(self, device: str, header: Header) -> None:
        """Hears that it lies there."""
        if (legs := self._legs_of(device, header.generation)) is not None:
            legs.chunk_received(header)

    def heard(self, device: str, body: ProbeTaken | ProbeEnd) -> None:
        """Takes a word on a leg; one that comes late is dropped."""
        if (legs := self._legs_of(device, body.number)) is not None:
            legs.heard(body)

    def _legs_of(self, device: str, number: int) -> Legs | None:
        return self._legs if self._other == (device, number) else None
