"""What this machine's command line and learners may ask, over the local endpoint."""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from meshtraind.dashboard.dashboard import Dashboard
from meshtraind.jobs.queries import JobQueries
from meshtraind.jobs.routing import JobRouter
from meshtraind.measuring.measuring import Measuring
from meshtraind.owner.live_settings import LiveSettings
from meshtraind.owner.notifier import keep_command
from meshtraind.owner.settings import SettingsError
from meshtraind.peers.links import Link
from meshtraind.peers.mesh import Mesh
from meshtraind.peers.selection import devices_together
from meshtraind.transport.connection import Connection, Emit, RequestFailed
from meshwire import limits
from meshwire.frames.header import Header
from meshwire.message_base import Wire
from meshwire.messages.config import GetConfig, NotifyOfJob, SetConfig
from meshwire.messages.course import GetCourse
from meshwire.messages.envelope import Done
from meshwire.messages.group import GroupBegin, GroupEnd, SignOfLife, StoreAsk
from meshwire.messages.job import Fetch, Found, ListCheckpoints, ListOutputs
from meshwire.messages.link import LinkedDevices
from meshwire.messages.local import (
    AskTogether,
    Attach,
    Cancel,
    ChangeSettings,
    EnvironmentMade,
    GetJobs,
    GetMachines,
    GetPeers,
    GetStatus,
    Leave,
    LinkTraffic,
    MakeEnvironment,
    MeasureLinks,
    OpenDashboard,
    PairAccept,
    PairHost,
    PairJoin,
    Peers,
    RemoveResults,
    Resubmit,
    ResultsRemoved,
    SetIntroductions,
    Shutdown,
    Status,
    Submit,
    SubmitProgress,
    Unpair,
    Watch,
    Watched,
)
from meshwire.messages.network import GetNetwork
from meshwire.timeouts import Timeouts

if TYPE_CHECKING:
    from meshtraind.session.session import JobSession

log = logging.getLogger(__name__)


class LocalHandler:
    """Answers the command line and learners, once they have attached.

    Args:
        shutdown: begins the daemon's end.
        warnings: from its start, which a person should know.
    """

    def __init__(
        self,
        mesh: Mesh,
        jobs: JobRouter,
        questions: JobQueries,
        measuring: Measuring,
        dashboard: Dashboard,
        shutdown: Callable[[], None],
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._mesh = mesh
        self._jobs = jobs
        self._questions = questions
        self._measuring = measuring
        self._dashboard = dashboard
        self._shutdown = shutdown
        self._warnings = warnings

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        session = self._group_of(conn)
        return "no frame of data is taken here" if session is None else session.group.announced_by_learner(header)

    def chunk_received(self, conn: Connection, header: Header) -> None:
        session = self._group_of(conn)
        if session is not None:
            session.group.received_from_learner(header)

    def _group_of(self, conn: Connection) -> "JobSession | None":
        """The session whose process group's connection this is."""
        attached = _attached(conn)
        session = self._jobs.registry.session(attached.job) if attached.job is not None else None
        return session if session is not None and session.group.is_over(conn) else None

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        attached = _attached(conn)
        if isinstance(body, GroupBegin):
            if (of_group := self._group_of(conn)) is not None:
                of_group.group.begin(body)
            return
        if isinstance(body, GroupEnd):
            if (of_group := self._group_of(conn)) is not None:
                of_group.group.leaves()
            return
        if isinstance(body, SignOfLife):
            return  # that it has come says it all
        session = self._jobs.registry.session(attached.job) if attached.job is not None else None
        if attached.role != "learner" or session is None or not session.learner.is_over(conn):
            conn.refuse(f"{type(body).__name__} is not for the local endpoint")
            return
        session.learner.notice(body)

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Emit) -> Wire:
        attached = _attached(conn)
        if attached.role == "learner":
            return await self._learner(conn, attached, body, emit)
        if attached.role == "group":
            return await self._group(conn, attached, body)
        return await self.answer(body, emit)

    def lost(self, conn: Connection, reason: str) -> None:
        attached = conn.attached
        if attached is not None and attached.role == "learner" and attached.job is not None:
            session = self._jobs.registry.session(attached.job)
            if session is not None:
                session.learner_lost(conn)
        elif attached is not None and (of_group := self._group_of(conn)) is not None:
            of_group.group.learner_lost(conn)

    async def _learner(self, conn: Connection, attached: Attach, body: Wire, emit: Emit) -> Wire:
        session = self._jobs.registry.session(attached.job or "")
        if session is None:
            raise RequestFailed(f"no job {attached.job} runs here")
        if isinstance(body, Attach):
            return session.attach(conn)
        if not session.learner.is_over(conn):
            raise RequestFailed(f"another process is the learner of job {attached.job}")
        return await session.learner.request(body, emit)

    async def _group(self, conn: Connection, attached: Attach, body: Wire) -> Wire:
        session = self._jobs.registry.session(attached.job or "")
        if session is None:
            raise RequestFailed(f"no job {attached.job} runs here")
        if isinstance(body, Attach):
            return session.attach_group(conn)
        if not session.group.is_over(conn) or not isinstance(body, StoreAsk):
            raise RequestFailed(f"another process makes the process group of job {attached.job}")
        return await session.group.ask_store(body)

    async def answer(self, body: Wire, emit: Emit) -> Wire:
        """What a person at this device has asked, by a command or on the dashboard. Raises RequestFailed."""
        mesh, questions = self._mesh, self._questions
        match body:
            case Attach():
                return Done()
            case GetStatus():
                return self._status()
            case OpenDashboard():
                return await self._dashboard.open(self)
            case GetPeers():
                return Peers(peers=self._measuring.with_figures(mesh.peers()))
            case GetMachines():
                return await self._measuring.machines.all()
            case GetNetwork():
                return mesh.network()
            case AskTogether():
                return LinkedDevices(devices=await devices_together(mesh.node))
            case MeasureLinks():
                return await self._measuring.measure(body.devices, emit)
            case GetJobs():
                return Found(jobs=await questions.find(body.prefix))
            case Submit() | Resubmit():
                return await self._jobs.submissions.submit(body, emit)
            case MakeEnvironment():
                return await self._environment(body, emit)
            case Watch():
                return await questions.watch(body, self._with_joined(emit))
            case Cancel():
                await questions.cancel(body, mesh.node.name, forward=True)
                return Done()
            case Leave():
                await questions.leave(body.job)
                return Done()
            case RemoveResults():
                return ResultsRemoved(size_bytes=await self._jobs.housekeeper.remove(body.job))
            case ChangeSettings():
                return await questions.change_settings(body)
            case Fetch():
                return await questions.fetch(body, forward=True)
            case GetCourse():
                return await questions.course(body.job)
            case ListOutputs():
                return await questions.outputs(body, forward=True)
            case ListCheckpoints():
                return await questions.checkpoints(body, forward=True)
            case PairHost():
                return await mesh.host_pairing(emit)
            case PairJoin():
                return await mesh.join_pairing(body, emit)
            case PairAccept():
                return mesh.accept(body)
            case SetIntroductions():
                mesh.set_introductions(body)
                return Done()
            case GetConfig():
                return mesh.node.settings.shown()
            case SetConfig():
                return self._set(body)
            case NotifyOfJob():
                return self._notify_of(body)
            case Unpair():
                return mesh.unpair(body)
            case Shutdown():
                self._shutdown()
                return Done()
        raise RequestFailed(f"a client may not ask for {type(body).__name__}")

    async def _environment(self, body: MakeEnvironment, emit: Emit) -> EnvironmentMade:
        environments = self._jobs.admission.environments
        python = await environments.make(body.requirements, lambda doing: emit(SubmitProgress(text=doing)))
        return EnvironmentMade(python=str(python))

    def _set(self, body: SetConfig) -> Wire:
        settings = self._mesh.node.settings
        try:
            settings.change(body.key, body.value)
        except SettingsError as error:
            raise RequestFailed(str(error)) from error
        return settings.shown()

    def _notify_of(self, body: NotifyOfJob) -> Done:
        if body.job not in self._jobs.registry.jobs:
            raise RequestFailed(f"this device is not in job {body.job}, and hears nothing of its end")
        try:
            keep_command(self._mesh.node.job_folder(body.job), body.command)
        except OSError as error:
            raise RequestFailed(f"the command cannot be kept: {error.strerror or error}") from error
        return Done()

    def _status(self) -> Status:
        mesh = self._mesh
        node = mesh.node
        rtt_s = max((link.rtt_s for link in node.links.values() if link.rtt_s is not None), default=None)
        timeouts = Timeouts(node.patience_s, rtt_s) if rtt_s else Timeouts(node.patience_s)
        return Status(
            device=mesh.node.device,
            name=mesh.node.name,
            software=mesh.node.software,
            pid=os.getpid(),
            listen=mesh.listen,
            data_dir=str(mesh.node.data_dir),
            up_s=mesh.up_s,
            peers_linked=len(mesh.node.links),
            peers_paired=mesh.paired,
            jobs_running=self._jobs.registry.running,
            warnings=(*self._warnings, *mesh.warnings, *_of_settings(node.settings)),
            patience_s=node.patience_s,
            rtt_s=rtt_s,
            timeouts=tuple(timeouts.describe().items()),
            links=tuple(map(_traffic, node.links.values())),
            introductions=mesh.introductions,
            joined=mesh.joined,
            waiting=mesh.waiting,
            hub=mesh.node.hub,
        )

    def _with_joined(self, emit: Emit) -> Emit:
        """Whoever follows a job is told once of each device that joins this one's meanwhile."""
        introducer = self._mesh.introducer
        told = introducer.joined_count

        def emit_with_joined(event: Wire) -> None:
            nonlocal told
            if isinstance(event, Watched):
                event = event.model_copy(update={"joined": introducer.joined_since(told)})
                told = introducer.joined_count
            emit(event)

        return emit_with_joined


def _of_settings(settings: LiveSettings) -> tuple[str, ...]:
    if settings.problem is None:
        return ()
    return (f"the settings are as they were before the file was changed: {settings.problem}"[: limits.ERROR_CHARS_MAX],)


def _traffic(link: Link) -> LinkTraffic:
    lossless = link.connection.lossless
    return LinkTraffic(
        name=link.hello.name,
        bytes_per_s=lossless.rate.bytes_per_s,
        sent_bytes=link.connection.chunk_payload_bytes_sent,
        spared_bytes=lossless.spared_bytes,
    )


def _attached(conn: Connection) -> Attach:
    assert conn.attached is not None, "the endpoint lets nobody in without a token"
    return conn.attached
