"""What other daemons may ask of this one, over their pinned links."""

import logging

from meshtraind.environments.packages import lacking_modules
from meshtraind.jobs.queries import JobQueries
from meshtraind.jobs.routing import JobRouter
from meshtraind.measuring.measuring import Measuring
from meshtraind.peers.introducer import Introducer
from meshtraind.peers.links import Link
from meshtraind.peers.node import Node
from meshtraind.transport.connection import Connection, Emit, RequestFailed
from meshwire.frames.header import Header
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.generation import AskModel, AskState, CatchUp, FetchRound, Invite, KeepState
from meshwire.messages.group import StoreAsk
from meshwire.messages.job import (
    AskCheckpoint,
    AskPackages,
    Fetch,
    Find,
    Found,
    LackingPackages,
    ListCheckpoints,
    ListOutputs,
    Offer,
    Prepare,
)
from meshwire.messages.link import AskLinked, AskMachine, Introductions, LinkedDevices
from meshwire.messages.local import Cancel
from meshwire.messages.measuring import AskSpeed, MeasureLink, ProbeEnd, ProbeTaken

log = logging.getLogger(__name__)


class PeerHandler:
    """What other daemons say, ask and do: everything that their links bring goes through here to the jobs."""

    def __init__(
        self, node: Node, jobs: JobRouter, questions: JobQueries, introducer: Introducer, measuring: Measuring
    ) -> None:
        self._node = node
        self._jobs = jobs
        self._questions = questions
        self._introducer = introducer
        self._measuring = measuring

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        if not header.job:
            return self._measuring.chunk_announced(_device(conn), header)
        return self._jobs.chunk_announced(_device(conn), header)

    def chunk_received(self, conn: Connection, header: Header) -> None:
        if not header.job:
            self._measuring.chunk_received(_device(conn), header)
            return
        self._jobs.chunk_received(_device(conn), header)

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        if isinstance(body, Introductions):
            self._introducer.heard(_device(conn), body)
            return
        if isinstance(body, ProbeTaken | ProbeEnd):
            self._measuring.heard(_device(conn), body)
            return
        wrong = self._jobs.notice(_device(conn), header, body)
        if wrong is not None:
            conn.refuse(wrong)

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Emit) -> Wire:
        match body:
            case Offer():
                return self._jobs.admission.offered(body, _device(conn))
            case Invite():
                return await self._jobs.admission.invited(body, _device(conn))
            case Prepare():
                return self._jobs.admission.prepared(body.generation, body.port)
            case Fetch():
                return await self._questions.fetch(body, forward=False)
            case ListOutputs():
                return await self._questions.outputs(body, forward=False)
            case ListCheckpoints():
                return await self._questions.checkpoints(body, forward=False)
            case AskCheckpoint():
                return await self._questions.checkpoint(body)
            case Find():
                return Found(jobs=await self._questions.known_here(body.prefix))
            case Cancel():
                await self._questions.cancel(body, conn.name, forward=False)
                return Done()
            case AskPackages():
                return LackingPackages(modules=await lacking_modules(body.modules))
            case AskLinked():
                return LinkedDevices(devices=tuple(self._node.links))
            case AskMachine():
                return await self._measuring.machines.own()
            case MeasureLink():
                return await self._measuring.answer(conn, body, emit)
            case AskSpeed():
                return await self._measuring.answer_speed()
            case StoreAsk():
                return await self._jobs.ask_store(_device(conn), body)
            case CatchUp() | FetchRound() | AskModel() | AskState() | KeepState():
                return await self._jobs.answer_member(_device(conn), body)
        raise RequestFailed(f"a peer may not ask for {type(body).__name__}")

    def link_made(self, link: Link) -> None:
        self._introducer.link_made(link)
        self._jobs.link_made(link)

    def was_away(self) -> None:
        self._jobs.was_away()

    def peer_gone(self, device: str, incarnation: int) -> None:
        self._jobs.peer_gone(device, incarnation)

    def violated(self, device: str, reason: str) -> None:
        self._jobs.violated(device, reason)

    def lost(self, conn: Connection, reason: str) -> None:
        self._jobs.peer_lost(_device(conn), reason)


def _device(conn: Connection) -> str:
    assert conn.device is not None, "only verified links get this handler"
    return conn.device
