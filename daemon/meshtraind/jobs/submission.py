"""The submitter's part of a job's start: from what a person typed to a running job, in two phases (G2, entering)."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

from meshtraind.environments.packages import lacking_modules
from meshtraind.jobs.admission import PROGRESS_INTERVAL_S, Admission
from meshtraind.jobs.checkpoint_search import CheckpointSearch, NoCheckpointError, Resumed
from meshtraind.jobs.registry import Dialler
from meshtraind.jobs.revival import RefusedError
from meshtraind.jobs.spec import check_engine, check_settings, describe_size, ingest_all, make_spec, spec_again
from meshtraind.learner.environment import calls_prepare
from meshtraind.peers.node import Node
from meshtraind.peers.selection import absences, ask_who_is_linked, choose_members, hubs_for
from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.blob_writer import BlobError
from meshtraind.transport.connection import Connection, ConnectionEnded, Emit, RequestFailed
from meshwire import limits
from meshwire.collectives.cost import cost_note
from meshwire.collectives.strategy import Topology, collective_for, topology_by_way_of, topology_of
from meshwire.jobs.lifecycle import job_number
from meshwire.message_base import Wire
from meshwire.messages.group import NOT_PREPARED, UNENCRYPTED
from meshwire.messages.job import (
    AskPackages,
    Commit,
    End,
    FilesProgress,
    Generation,
    JobSpec,
    LackingPackages,
    Member,
    Offer,
    OfferReply,
    Prepare,
    Promise,
)
from meshwire.messages.local import Resubmit, ResumeFrom, Submit, SubmitProgress, Submitted
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import SyncSettings

log = logging.getLogger(__name__)

OFFER_TIMEOUT_S = 20.0
PREPARE_TIMEOUT_S = 20.0
PACKAGES_TIMEOUT_S = 20.0
FILES_SILENCE_TIMEOUT_S = 120.0  # a member that receives files says so more often
OFFER_REPEAT_S = 60.0  # while others still receive the files; who hears nothing for OFFER_SILENCE_S_MAX forgets it
DRY_RUN_JOB = "0" * 12


class Submission:
    """One job on its way to its members.

    Args:
        admission: takes part for this device, as the others do for theirs.

    Attributes:
        progress: how far each member's files are, by device; fed by the admission.
    """

    def __init__(self, node: Node, admission: Admission, body: Submit | Resubmit, emit: Emit) -> None:
        self.progress: dict[str, FilesProgress] = {}
        self._node = node
        self._admission = admission
        self._body = body
        self._emit = emit
        self._changed = asyncio.Event()
        self._told: list[str] = []  # members that may have accepted, whether or not their answer has come

    async def run(self, owner: str) -> Submitted:
        """Returns when all members were told to start. Raises RequestFailed with a text for the person.

        Args:
            owner: in its name the blobs are held that the members fetch from here.
        """
        body = self._body
        linked = await ask_who_is_linked(self._node)
        members, notes = choose_members(self._node, body.on, body.peers, body.peers_max, linked)
        if isinstance(body, Submit):
            members = members + await self._hubs(body, members, linked, notes)
        else:
            members = members + hubs_for(self._node, members, linked)  # for a job that goes by them
        if body.peers_max is not None and body.peers_max > len(members):
            notes.append(f"devices that are paired or wake up while it runs join it, up to {body.peers_max} in all")
        if isinstance(body, Submit) and body.engine == "torchrun":
            check_engine(body)
            notes.append(UNENCRYPTED)
        if isinstance(body, Submit) and body.restarts_max is not None:
            if body.independent:
                raise RequestFailed("--restart is for scripts that train together, --independent for others: take one")
            if await asyncio.to_thread(calls_prepare, Path(body.root) / body.script):
                raise RequestFailed(f"{body.script} uses {NOT_PREPARED}")
        if isinstance(body, Submit) and body.modules and not body.requirements:
            await self._check_packages(body, members, notes)
        if isinstance(body, Submit) and body.dry_run:
            self._settings(body, members, notes)
            files = await asyncio.to_thread(describe_size, body)
            return Submitted(job=DRY_RUN_JOB, members=members, notes=(*notes, *files))
        if self._admission.jobs_running >= limits.JOBS_RUNNING_MAX:
            raise RequestFailed(f"{limits.JOBS_RUNNING_MAX} jobs run here already; see `meshtrain jobs`")
        if isinstance(body, Submit):
            spec = await self._new(body, owner, members, notes)
        else:
            spec = await self._again(body, owner, notes, members)
            if not (spec.by_hubs or body.on):
                members = tuple(member for member in members if not member.hub)
        await self._start(spec, Generation.first(spec.job, self._node.device, members))
        return Submitted(job=spec.job, members=members, notes=tuple(notes))

    async def revive(self, owner: str, generation: Generation) -> None:
        """Begins a job again under its own id, in this generation, from its newest checkpoint (J5), or from its start
        where nothing of it was saved.

        Raises:
            RefusedError, RequestFailed: it could not begin, and is called off.
        """
        notes: list[str] = []
        assert isinstance(self._body, Resubmit)
        try:
            spec = await self._again(self._body, owner, notes)
        except NoCheckpointError:
            spec = await self._from_start(owner, generation)
        for note in notes:
            log.info("job %s: %s", generation.job, note)
        await self._start(spec.model_copy(update={"job": generation.job}), generation)

    async def _hubs(
        self, body: Submit, members: tuple[Member, ...], linked: Mapping[str, Collection[str]], notes: list[str]
    ) -> tuple[Member, ...]:
        """The hubs that are taken in beside these members, where nobody has named any. Raises RequestFailed where one
        was named, and the job cannot use it."""
        named = [member.name for member in members if member.hub]
        hubs = hubs_for(self._node, members, linked) if body.hubs and not named else ()
        if not named and not hubs:
            return ()
        why_not = await self._no_use_of_hubs(body, len(members))
        if named and why_not:
            raise RequestFailed(f"--on names the hub {', '.join(named)}, and {why_not}")
        if why_not and len(members) > 1:
            names = ", ".join(member.name for member in hubs)
            notes.append(f"the hub {names} is left out: {why_not}")
        return () if why_not else hubs

    async def _no_use_of_hubs(self, body: Submit, trainers: int) -> str | None:
        """Why a hub cannot be in the job, or is not taken by itself (H1); None: it can."""
        if body.engine != "mesh" or body.restarts_max is not None or body.independent:
            return "nothing passes the daemons' rounds: without --engine torchrun, --restart and --independent it does"
        if not await asyncio.to_thread(calls_prepare, Path(body.root) / body.script):
            return f"{body.script} does not call mt.prepare: what it exchanges is between learners"
        if trainers < 2 and not body.on:
            return "one laptop trains alone: --on with both names takes the hub in, which keeps the state then"
        if body.topology is not None and not body.on:
            return f"--topology {body.topology} was typed: --on with all names takes it in"
        try:
            collective_for(codec_of(check_settings(body), body.codec), "star")
        except ValueError:
            return "the codec goes over no star" if body.topology is None else None
        return None

    async def _start(self, spec: JobSpec, generation: Generation) -> None:
        try:
            with self._admission.submitting(spec.job, self):
                await self._offer_all(spec, generation)
                await self._await_files(spec, generation)
                self._emit(SubmitProgress(text="starting"))
                await self._agree(spec, generation)
        except RefusedError as error:
            self._call_off(spec, str(error))
            raise
        except (RequestFailed, ConnectionEnded, TimeoutError) as error:
            self._call_off(spec, str(error))
            raise RequestFailed(str(error)) from error
        except BaseException:
            self._call_off(spec, "its submission was given up")
            raise

    async def _new(self, body: Submit, owner: str, members: tuple[Member, ...], notes: list[str]) -> JobSpec:
        """Makes the job's specification of what was typed, and adds to the notes what the person should know."""
        node, emit = self._node, self._emit
        sync = self._settings(body, members, notes)  # before anything is copied
        resumed = await self._bring(body.resume, owner, notes) if body.resume is not None else None
        emit(SubmitProgress(text="reading the files"))
        try:
            files_ref, data_ref = await ingest_all(body, node, owner, emit)
        except BlobError as error:
            raise RequestFailed(f"{node.name}: {error}") from error
        topology = hub_topology(body, members)
        spec = make_spec(body, sync, node.device, files_ref, data_ref, resumed)
        if topology is None:
            return spec
        hubs = len([member for member in members if member.hub])
        peers_max = None if body.peers_max is None else min(body.peers_max + hubs, limits.MEMBERS_MAX)
        return spec.model_copy(update={"topology": topology, "by_hubs": True, "peers_max": peers_max})

    async def _check_packages(self, body: Submit, members: tuple[Member, ...], notes: list[str]) -> None:
        """Sees to it, before anything is shipped, that no script ends at its imports.

        Raises RequestFailed, which names for each member what its script would not find.
        """
        self._emit(SubmitProgress(text="looking for the script's packages"))
        members = tuple(member for member in members if not member.hub)
        found = await asyncio.gather(*(self._lacking(body, member) for member in members))
        known = await asyncio.to_thread(packages_distributions)
        wanted: dict[str, None] = {}
        lacks = []
        for member, lacking in zip(members, found, strict=True):
            if isinstance(lacking, str):
                notes.append(f"which packages {member.name} has is not known: {lacking}")
            elif lacking:
                packages = [known.get(module, [module])[0] for module in lacking]
                wanted.update(dict.fromkeys(packages))
                lacks.append(f"{member.name} has no {', '.join(packages)}")
        if lacks:
            raise RequestFailed(
                f"{'; '.join(lacks)}, which {body.script} imports. Next: pip install {' '.join(wanted)} there; or "
                "write them into requirements.txt, and meshtrain submit -r requirements.txt installs them everywhere "
                "for this job"
            )

    async def _lacking(self, body: Submit, member: Member) -> tuple[str, ...] | str:
        """The modules that a member does not have, or why that is not known."""
        try:
            if member.device == self._node.device:
                return await lacking_modules(body.modules)
            answer = await self._link(member).request(
                AskPackages(modules=body.modules), timeout_s=PACKAGES_TIMEOUT_S, name=f"packages of {member.name}"
            )
        except (RequestFailed, ConnectionEnded, TimeoutError) as error:
            return str(error)
        return answer.modules if isinstance(answer, LackingPackages) else f"it answered {type(answer).__name__}"

    def _settings(self, body: Submit, members: tuple[Member, ...], notes: list[str]) -> SyncSettings:
        """Reads what was typed, and adds to the notes what the person should know. Raises RequestFailed."""
        sync = check_settings(body)
        if body.engine == "torchrun":
            return sync
        topology = hub_topology(body, members)
        collective = collective_for(codec_of(sync, body.codec), topology or body.topology)
        if topology is not None:
            names = " and ".join(member.name for member in members if member.hub)
            notes.append(
                f"the laptops send to the hub {names}, and it sends the mean back (--topology {topology}), which takes "
                "least air where it is on a cable. Between laptops that are on a switch, too, --topology ring is faster"
            )
        check_ranks(collective.topology, members, body.peers_max)
        if (note := cost_note(collective, len(members))) is not None:
            notes.append(note)
        return sync

    async def _again(
        self, body: Resubmit, owner: str, notes: list[str], members: tuple[Member, ...] | None = None
    ) -> JobSpec:
        """The specification of the job as it was. `members`: of now, whom its topology may name by other ranks; None
        where they have those of before."""
        resumed = await self._bring(body.resume, owner, notes)
        if members is not None and resumed.spec.topology is not None and not resumed.spec.by_hubs:
            topology = topology_of(resumed.spec.topology)
            ranks = check_ranks(topology, members, body.peers_max)
            if topology.named:
                notes.append(f"--topology {topology}, as before: now {ranks} (others: --on, in the order of ranks)")
        await CheckpointSearch(self._node, owner, self._emit).bring_files(resumed.spec, resumed.source)
        spec = spec_again(resumed.spec, resumed.point, self._node.device)
        if members is not None and spec.by_hubs:
            spec = spec.model_copy(update={"topology": topology_at(members), "by_hubs": any(m.hub for m in members)})
        return spec if body.peers is None else spec.model_copy(update={"peers_max": body.peers_max})

    async def _from_start(self, owner: str, generation: Generation) -> JobSpec:
        """The specification of a job of which no checkpoint lies on any device that is here. All that were in it have
        to be, for one of them may have a checkpoint. Raises RequestFailed."""
        node, links = self._node, self._node.links
        away = [one.name for one in generation.members if one.device != node.device and one.device not in links]
        if away:
            raise RequestFailed(
                f"no checkpoint of it lies on the devices that are here, but {', '.join(away)} may have one"
            )
        spec = self._admission.left_spec(generation.job)
        search = CheckpointSearch(node, owner, self._emit)
        begins = spec.resume
        if begins is not None:  # the checkpoint of another job, or of this one
            begins = (await search.bring(ResumeFrom(job=begins.job, round=begins.round))).point
        why_not = ""
        for source in (None, *(link.connection for link in links.values())):
            try:
                await search.bring_files(spec, source)
                break
            except RequestFailed as error:
                why_not = why_not or str(error)
        else:
            raise RequestFailed(why_not)
        log.warning("job %s: nothing of it was saved: it begins from its start", generation.job)
        return spec_again(spec, begins, node.device)

    async def _bring(self, resume: ResumeFrom, owner: str, notes: list[str]) -> Resumed:
        resumed = await CheckpointSearch(self._node, owner, self._emit).bring(resume)
        notes += [*resumed.notes, f"goes on from the checkpoint of job {resume.job} after round {resumed.point.round}"]
        return resumed

    def files_progress(self, device: str, report: FilesProgress) -> None:
        """A member says how far its files are."""
        self.progress[device] = report
        self._changed.set()

    async def _offer_all(self, spec: JobSpec, generation: Generation) -> None:
        offer = Offer(spec=spec, members=generation.members)
        for member in generation.live.values():
            if member.device not in self._told:
                self._told.append(member.device)
            if member.device == self._node.device:
                reply = self._admission.offered(offer, self._node.device)
            else:
                reply = await self._offer(offer, member)
            if reply.refusal is not None:
                raise RefusedError(f"{member.name} refused the job: {reply.refusal}", member.device)

    async def _offer(self, offer: Offer, member: Member) -> OfferReply:
        name = f"offer to {member.name}"
        link = self._link(member)
        try:
            answer = await link.request(offer, timeout_s=OFFER_TIMEOUT_S, name=name)
        except ConnectionEnded:
            again = self._link(member)  # W4: when both sides had dialled, the second link replaces the first
            if again is link:
                raise
            answer = await again.request(offer, timeout_s=OFFER_TIMEOUT_S, name=name)
        if not isinstance(answer, OfferReply):
            raise RequestFailed(f"{member.name} answered an offer with {type(answer).__name__}")
        return answer

    async def _await_files(self, spec: JobSpec, generation: Generation) -> None:
        """Waits until every member has the files; shows the slowest."""
        names = {member.device: member.name for member in generation.live.values()}
        loop = asyncio.get_running_loop()
        heard_s = offered_s = loop.time()
        while waiting := [device for device in names if not self._ready(device)]:
            for device, name in names.items():
                report = self.progress.get(device)
                if report is not None and report.error is not None:
                    raise RefusedError(f"{name} could not receive the job: {report.error}", device)
            for device in waiting:
                if device != self._node.device and device not in self._node.links:
                    raise RequestFailed(f"lost {names[device]} while it received the files")
            if loop.time() - offered_s > OFFER_REPEAT_S:
                await self._offer_all(spec, generation)
                offered_s = loop.time()
            shown = ", ".join(names[device] for device in waiting)
            if loop.time() - heard_s > FILES_SILENCE_TIMEOUT_S:
                raise RequestFailed(f"no progress in {FILES_SILENCE_TIMEOUT_S:.0f} s from {shown}")
            reports = [self.progress[device] for device in waiting if device in self.progress]
            if reports:
                slowest = max(reports, key=lambda report: report.total_bytes - report.done_bytes)
                travels = slowest.done_bytes < slowest.total_bytes
                text = f"sending files to {shown}" if travels else f"putting files in place: {shown}"
                doing = {names[device]: told for device in waiting if (told := self._doing(device))}
                if doing and not travels:
                    text = f"{next(iter(doing.values()))}: {', '.join(doing)}"
                self._emit(SubmitProgress(text=text, done_bytes=slowest.done_bytes, total_bytes=slowest.total_bytes))
            self._changed.clear()
            try:
                async with asyncio.timeout(PROGRESS_INTERVAL_S):
                    await self._changed.wait()
                heard_s = loop.time()
            except TimeoutError:
                continue

    def _doing(self, device: str) -> str | None:
        return self.progress[device].doing if device in self.progress else None

    def _ready(self, device: str) -> bool:
        return device in self.progress and self.progress[device].ready

    async def _agree(self, spec: JobSpec, generation: Generation) -> None:
        """Enters the first generation: a promise from all, then commit (G2, entering)."""
        members = generation.live.values()
        port = None
        for rank, member in generation.live.items():
            if member.device == self._node.device:
                promise = self._admission.prepared(generation, port)
            else:
                answer = await self._link(member).request(
                    Prepare(generation=generation, port=port),
                    timeout_s=PREPARE_TIMEOUT_S,
                    name=f"promise of {member.name}",
                )
                if not isinstance(answer, Promise):
                    raise RequestFailed(f"{member.name} answered a proposal with {type(answer).__name__}")
                promise = answer
            if promise.refusal is not None:
                raise RefusedError(f"{member.name} cannot take part: {promise.refusal}", member.device)
            port = promise.port if rank == 0 else port
        commit = Commit(job=spec.job, generation=generation.hash64())
        for member in members:
            if member.device == self._node.device:
                self._admission.committed(commit)
            elif member.device in self._node.links:  # else the others begin without it (G9)
                self._node.links[member.device].connection.notify(commit, job=job_number(spec.job))

    def _call_off(self, spec: JobSpec, reason: str) -> None:
        end = End(job=spec.job, outcome="failed", reason=reason[: limits.ERROR_CHARS_MAX], now=True)
        for device in self._told:
            if device == self._node.device:
                self._admission.end_job(end)
            elif device in self._node.links:
                self._node.links[device].connection.notify(end, job=job_number(spec.job))

    def _link(self, member: Member) -> Connection:
        link = self._node.links.get(member.device)
        if link is None:
            raise RequestFailed(f"lost {member.name} before the job began")
        return link.connection


def topology_at(members: Sequence[Member]) -> str | None:
    """At the hubs among these members; None: there is none."""
    return topology_by_way_of([rank for rank, member in enumerate(members) if member.hub])


def hub_topology(body: Submit, members: Sequence[Member]) -> str | None:
    """By which a job goes that has hubs, where nobody has typed another one; None: it has none, or somebody has."""
    return topology_at(members) if body.topology is None else None


def check_ranks(topology: Topology, members: tuple[Member, ...], peers_max: int | None) -> str:
    """Refuses ranks that the job will never have. Returns who has which now.

    Args:
        peers_max: how many devices it may come to have; None: no others.
    """
    ranks = ", ".join(f"rank {rank} is {member.name}" for rank, member in enumerate(members))
    if any(rank >= max(len(members), peers_max or 0) for rank in topology.named):
        later = f", and others join up to {peers_max} in all" if peers_max is not None else ""
        raise RequestFailed(f"--topology {topology}: the job has no such rank; {ranks}{later}")
    return ranks


class Submissions:
    """Jobs that are submitted on this device, by a person or because all of their daemons have ended."""

    def __init__(self, node: Node, dialler: Dialler, admission: Admission, tasks: TaskSet) -> None:
        self._node = node
        self._dialler = dialler
        self._admission = admission
        self._tasks = tasks

    async def submit(self, body: Submit | Resubmit, emit: Emit) -> Submitted:
        """Takes a person's command as far as a running job. Raises RequestFailed with a text for the person."""
        blobs = self._node.blobs
        with blobs.holding() as owner:
            submitted = await Submission(self._node, self._admission, body, emit).run(owner)
        self._tasks.spawn(asyncio.to_thread(blobs.trim), "trim the blobs")  # a submitter need not be a member
        if body.on:
            return submitted
        away = absences(self._dialler.away, self._dialler.unlinkable)
        return submitted.model_copy(update={"notes": (*submitted.notes, *away)})

    def is_under_way(self, job: str) -> bool:
        """Whether the job is about to begin here; see `Admission.is_under_way`."""
        return self._admission.is_under_way(job)

    async def begin_again(self, generation: Generation) -> None:
        """Begins a lost job again; see `Submission.revive`."""
        body = Resubmit(resume=ResumeFrom(job=generation.job))
        with self._node.blobs.holding() as owner:
            await Submission(self._node, self._admission, body, _tell_nobody).revive(owner, generation)


def _tell_nobody(_progress: Wire) -> None:
    """No person waits for a job that begins again."""
