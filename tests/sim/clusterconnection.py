"""One side of a link between two daemons of the cluster, as the shells that ship know it: a link, and its connection.

Messages travel as they are, by the cluster's network: late, lost with their link, never twice. Requests are numbered,
answered, lost and given up as those of `meshtraind.transport.connection`.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshtraind.transport.requests import ConnectionEnded, RequestFailed, Requests
from meshwire.frames.header import Header
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope, Failure, Role
from meshwire.messages.job import Member
from meshwire.rounds.effects import Message
from tests.sim.clusterexchange import Chunk, News
from tests.sim.clusternetwork import Link, Network
from tests.unpacedlink import UnpacedLink

if TYPE_CHECKING:
    from tests.sim.clusterdaemon import Daemon


class LinkEnd(UnpacedLink):
    """A `Messenger` and `RoundLink` of `meshtraind.transport`, and a `MemberLink` of `meshtraind.session`.

    Nothing of rounds is sent in a generation before all of its members have entered it.

    Args:
        here: whose side it is; it is asked for the answers to requests.
        hello: who is at the other end.
        rtt_s: what is measured, if anything is.
    """

    def __init__(self, network: Network, link: Link, here: "Daemon", hello: Member, rtt_s: float | None) -> None:
        self._network = network
        self._here = here
        self._requests = Requests()
        self._answering: set[asyncio.Task[None]] = set()
        self.link = link
        self.hello = hello
        self.rtt_s = rtt_s

    @property
    def connection(self) -> "LinkEnd":
        return self

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def closing(self) -> bool:
        return self._here in self.link.closed

    def send(self, body: object) -> None:
        """Whatever it is; dropped when the link has ended."""
        self._network.send(self.link, self._here, body)

    def notify(self, body: Wire, *, job: int = 0, generation: int = 0, complete: int = 0) -> None:
        if isinstance(body, Message):
            self._here.world.check_sends(self._here, generation)
            self.send(News(generation, complete, body))
        else:
            self.send(body)

    async def request(self, body: Any, *, timeout_s: float, name: str) -> Any:
        """Any body may travel here. Raises RequestFailed, ConnectionEnded, TimeoutError."""
        if self.closing:
            raise ConnectionEnded(f"{name}: the connection to {self.name} has ended")
        number, answer = self._requests.begin(None)
        try:
            self.send(Envelope(Role.REQUEST, number, body))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise TimeoutError(f"{name}: no answer from {self.name} within {timeout_s:g} s") from None
        finally:
            self._requests.end(number)

    # Chunks

    @property
    def writable(self) -> bool:
        return True

    @property
    def chunk_bytes_received(self) -> int:
        return 0  # no daemon of the cluster asks: here a link that stands still is a silent one

    @property
    def chunk_payload_bytes_sent(self) -> int:
        return 0  # states travel by a time of their own

    def on_writable(self, callback: Callable[[], None]) -> Callable[[], None]:
        return callback  # it always is, so whoever subscribes is never called

    def send_chunk(self, header: Header, payload: memoryview | bytes | None) -> None:
        self._here.world.check_sends(self._here, header.generation)
        self.send(Chunk(header, bytes(payload or b"")))

    # What comes

    def refuse(self, reason: str) -> None:
        self._network.refuse(self.link, self._here, reason)

    def received(self, envelope: Envelope) -> None:
        """A request, or an answer to one."""
        if envelope.role is Role.REQUEST:
            task = self._here.tasks.spawn(self._answer(envelope), f"answer {type(envelope.body).__name__}")
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        else:
            wrong = self._requests.answered(envelope)
            assert wrong is None, wrong

    async def _answer(self, envelope: Envelope) -> None:
        try:
            body: Any = await self._here.asked(self.hello.device, envelope.body)
            self.send(Envelope(Role.REPLY, envelope.id, body))
        except RequestFailed as error:
            self.send(Envelope(Role.FAILURE, envelope.id, Failure(error=str(error))))

    def lost(self, reason: str) -> None:
        """The link has ended: no answers come, and none are wanted."""
        self._requests.lost(f"the connection to {self.name} has ended: {reason}")
        for task in self._answering:
            task.cancel()
