"""One job on this daemon, from its start or this daemon's return to it until the end: learner, rounds, outcome."""

import asyncio
import logging
import time
import traceback
from typing import TYPE_CHECKING

from meshtraind.learner.own_groups import NoMeetingError
from meshtraind.learner.script_error import explain_end
from meshtraind.learner.supervisor import Ending, LearnerSupervisor
from meshtraind.peers.node import Node
from meshtraind.process_group.pulse import Pulse
from meshtraind.process_group.relay import GroupRelay
from meshtraind.recovery.checkpointer import Checkpointer
from meshtraind.recovery.hub_states import HubStates
from meshtraind.recovery.state_donor import StateDonor
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session.barriers import Barriers
from meshtraind.session.course import SAVE_EVERY_S, CourseKeeper, save_course
from meshtraind.session.invitations import Inviter
from meshtraind.session.learner_handler import LearnerHandler
from meshtraind.session.member_handler import MemberHandler
from meshtraind.session.membership_host import JobPlace, MembershipHost
from meshtraind.session.membership_recorder import MembershipRecorder, membership_trace
from meshtraind.session.metrics import MetricsKeeper
from meshtraind.session.rounds_factory import RoundsFactory
from meshtraind.session.settings_choice import SettingsChoice, wish_for
from meshtraind.session.worlds import SURE_TO_FAIL, Worlds
from meshtraind.storage.checkpoint_store import CheckpointStore
from meshtraind.storage.cleanup import STATE
from meshtraind.storage.job_record import Job
from meshtraind.storage.state_transfer import StateFiles
from meshtraind.transport.connection import Connection, RequestFailed
from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.jobs.checkpoint_schedule import CheckpointSchedule
from meshwire.jobs.lifecycle import JobEvent, JobState, job_number
from meshwire.membership.proposal_checks import change_refusal
from meshwire.message_base import Wire
from meshwire.messages.generation import Model
from meshwire.messages.group import EITHER_OR, GroupWelcome, GroupWorld, WorldHere
from meshwire.messages.job import BaseHash, End, Generation, JobSummary, Outcome
from meshwire.messages.learner import LearnerHash, LearnerWelcome
from meshwire.messages.local import SettingsTaken
from meshwire.model.manifest import NOT_IN_TURNS
from meshwire.sync_modes.settings_changes import SettingsWish, options_text
from meshwire.timeouts import Timeouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshtraind.rounds.driver import Rounds
    from meshtraind.transport.messenger import Messenger

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
CHANGE_TIMEOUT_S = 60.0  # for all members to agree on another codec: a change of generation, or a few
SIDE_TASKS = ("checkpoint", "invite", "go over")  # without which a member goes on
LEARNER_LOST_GRACE_S = 5.0  # between the end of a learner's connection and that of its process
NOTHING_PREPARED = (
    "nothing was exchanged: each device has trained by itself. Call mt.prepare(model, optimizer, loader), of `import "
    "meshtrain as mt`, before the training loop, or make a process group of torch.distributed; if each is meant to "
    "train by itself, meshtrain submit --independent"
)
NOTHING_EXCHANGED = (
    "nothing was exchanged: the script has called mt.prepare, and no step of the optimizer that it gave there was "
    "completed; if each device is meant to work by itself, meshtrain submit --independent"
)
NOTHING_SENT = (
    "nothing was exchanged: the script has made a process group, and sent nothing in it, so each device has trained by "
    "itself. With Accelerate on a CPU say PartialState(cpu=True); if each is meant to, meshtrain submit --independent"
)
GROUP_LAST_WORDS_S = 5.0  # between the news that a process group is broken and the end of a script that goes on
UNDER_WAY = (JobState.RUNNING, JobState.FINISHING)


class JobSession:
    """Owns the learner, the rounds and the generations of one job here.

    Args:
        generation: that begins the job; None for a daemon that returns to it, which asks to be taken in.
        links: the connection to each other member, by rank.
        rtt_s: of the farthest member.
        learners_here: that share this machine (M3).
    """

    def __init__(
        self,
        node: Node,
        job: Job,
        generation: Generation | None,
        links: dict[int, Connection],
        *,
        rtt_s: float,
        learners_here: int,
    ) -> None:
        self._node = node
        self.job = job
        if generation is not None:
            job.take(generation, generation.trainers)
        self._number = job_number(job.spec.job)
        self._links = links
        self._dropping_out = False  # after an internal error
        self._over: set[int] = set()  # ranks that say that the job has succeeded
        self._failed_elsewhere: dict[int, str] = {}  # ranks whose daemons have given the job up, and why
        self._lying: set[int] = set()  # ranks whose daemons have laid it down, and not said since that they go on
        self._looking = False  # whether others go on
        self._cannot_rest: str | None = None  # why the learner was to rest, where nothing would be left
        self._why_ended: str | None = None  # where it was this daemon that ended the learner
        self._learners = LearnerSupervisor(node, job, learners_here)
        self._barriers = Barriers(job, self._send)
        self._metrics = MetricsKeeper(links)
        self.course = CourseKeeper(node, job)
        self._choice = SettingsChoice(job)
        self._changing = False  # other settings were asked for here, and are waited for
        self._tasks = TaskSet(f"job {job.spec.job}", self._task_failed)
        self.maker = RoundsFactory(job, links, rtt_s, Timeouts(patience_s=node.patience_s).stall_s)
        self.learner = LearnerHandler(job, self._barriers, self._metrics, self, self._tasks)
        store = CheckpointStore(job.folder, job.spec.job, CheckpointSchedule.keep)
        states = StateFiles(job.spec.job, job.folder / STATE, node.blobs)
        saving = HubStates(job.spec.job, self, states) if node.member.hub else self.learner.states
        checkpointing = Checkpointer(job, store, node.software, saving, self._tasks, self._model)
        self._donor = StateDonor(job, states, self.learner, checkpointing, self._tasks)
        recorder = MembershipRecorder(membership_trace(job.folder)) if job.spec.trace else None
        place = JobPlace(node, job, links, rtt_s, self._tasks, states, recorder)
        self.passage = MembershipHost(place, self.learner, self._barriers, self._donor, checkpointing, self.maker, self)
        peers_max = job.spec.peers_max
        self._inviting = None if peers_max is None else Inviter(node, job, peers_max, self, self._tasks)
        self.worlds = Worlds(job, links)
        self.members = MemberHandler(job, self._barriers, self.passage, self)
        job.on_odd = self._replicas_differ
        self.closed = asyncio.Event()
        if node.member.hub:
            self._learners.given_up = True
            self._metrics.part = "hub"

    # Life

    def start(self) -> None:
        """Begins the job with all others: the learner is spawned."""
        self.job.advance(JobEvent.START)
        if self.job.generation is not None:
            self.worlds.found(self.job.generation)
        self.passage.begin_with_all()
        self._invite()
        self._begin_script()
        self._tasks.spawn(self._report_regularly(), "report")
        self._tasks.spawn(self._watch_group(), "watch the process group")

    def _invite(self) -> None:
        if self._inviting is not None:
            self._tasks.spawn(self._inviting.run(), "invite")

    def _begin_script(self) -> None:
        """Starts the first process; on a hub none ever runs (H1)."""
        if self._node.member.hub:
            self.job.advance(JobEvent.LEARNER_STARTED)
        else:
            self._tasks.spawn(self._run(self._learners.run), "learner")

    @property
    def guests(self) -> tuple[str, ...]:
        """Devices that are about to join."""
        return () if self._inviting is None else self._inviting.asked

    async def come_back(self) -> None:
        """Asks to be taken into the job, with which others have gone on; the learner follows then."""
        self.job.advance(JobEvent.START)
        if self._node.member.hub:
            self.job.advance(JobEvent.LEARNER_STARTED)
        self._tasks.spawn(self._report_regularly(), "report")
        self._tasks.spawn(self._watch_group(), "watch the process group")
        self._invite()
        await self.passage.come_back()

    async def _run(self, run: int) -> None:
        """Runs the learner's processes, one after the other, once an earlier run's last one has ended."""
        job = self.job
        if self.worlds.world is not None and self.group.used:
            await self._learners.ended(GROUP_LAST_WORDS_S)  # it may save what it has
        await self._learners.kill(now=self.worlds.world is None)
        if run == self._learners.run:
            self.learner.let_go("another process takes its place")  # it may have called just before it was ended
        await self._learners.pause()
        try:
            going_on = True
            while going_on and await self._learners.start(run, self.maker.memory, self.worlds.start()):
                self._metrics.begin_anew()
                if self._by_torchrun:
                    self._metrics.stage = "process group"
                if job.state is JobState.STARTING:
                    job.advance(JobEvent.LEARNER_STARTED)
                self.tell_report()
                code = await self._learners.wait()
                going_on = run == self._learners.run and self._goes_on_after(code)
                if going_on:
                    await self._learners.pause()
        except (OSError, NoMeetingError) as error:
            self._cannot_start(self._named(f"could not start the script: {error}"))
        self.tell_report()
        self._check_all_done()

    def _cannot_start(self, why: str) -> None:
        self._metrics.failure = why
        self._learners.given_up = True
        if self._by_torchrun:
            self.fail(why)
            return
        if self.passage.founding:
            self.passage.learner_died(failed=True)
        elif not self.passage.may_leave:
            self.end("failed", why, now=True)
            return
        log.error("job %s: %s\n%s", self.job.spec.job, why, Ending.FORWARD.value)
        self._forward(why)

    def _goes_on_after(self, code: int) -> bool:
        """Decides what follows from the end of a process. Returns whether another takes its place."""
        job, rounds = self.job, self.rounds
        if job.state is not JobState.RUNNING:
            self._metrics.exit_code = code
            return False
        if code < 0 and self._learners.rests is not None and self.passage.learner_died(failed=False):
            return not job.ending  # it was ended for its owner, which costs it no restart
        if self.worlds.is_between:
            return False  # it was ended, and the script of the next world is about to be started
        if code != 0 and self.worlds.world is not None:
            self._world_broken(code)
            return False
        steps = self._metrics.step
        were_in, applied = (rounds.contributions, rounds.applied) if rounds is not None else (0, None)
        ending = self._learners.after(code, were_in, steps, applied)
        if ending is Ending.DONE:
            self._metrics.exit_code = code
            if rounds is not None:
                rounds.learner.gone("its script has ended")
            job.advance(JobEvent.LEARNER_DONE)
            return False
        explained = self._why_ended or self.group.loss or explain_end(code, self._learners.error)
        self._why_ended = None
        why = self._named(explained)
        self._metrics.failure = why
        self.tell_report()  # before the others learn that nobody computes any more
        if self.group.survives_losses and job.others_go_on:
            self._leave_to_others(why)
            return False
        requests = self.learner.requests
        broken = self.passage.founding and requests is not None and requests.broken
        if self.group.used or self._by_torchrun or broken or not self.passage.learner_died(failed=code > 0):
            self._metrics.exit_code = code
            if rounds is not None:
                rounds.learner.gone("it failed")
            self._fail_of_group(why)
            return False
        if job.ending:  # it was the last one that held the base
            return False
        log.warning("job %s: %s\n%s", job.spec.job, why, ending.value)
        if ending is Ending.FORWARD:
            self._forward(why)
        return ending is Ending.RESTART

    def _leave_to_others(self, why: str) -> None:
        """The script here is started no more, and those of the others go on without it (P4)."""
        self._learners.given_up = True
        self.passage.learner_died(failed=True)
        log.warning("job %s: %s\n%s", self.job.spec.job, why, Ending.FORWARD.value)
        self._forward(why)

    def _world_broken(self, code: int) -> None:
        """P6: decides what follows from the end of a script by a failure, in a job that restarts its scripts."""
        worlds, disturbed = self.worlds, self.group.is_disturbed
        why = self._named(self._why_ended or self.group.loss or explain_end(code, self._learners.error))
        self._why_ended = None
        self._metrics.failure = why
        self.tell_report()
        sure = not disturbed and self._learners.fails_again(code)
        if sure or worlds.used_up:
            self._metrics.exit_code = code
            self._fail_of_group(f"{why}\n{SURE_TO_FAIL}" if sure else why)
            return
        log.warning("job %s: %s", self.job.spec.job, why)
        if disturbed:  # the daemon of whoever is to blame, or all that miss it, bring the next world
            self._tasks.spawn(self._want_world_later(worlds.begun, why), "hear of the next world")
        else:
            worlds.broken = self._in_short(why)
            self.passage.want_world()

    def _fail_of_group(self, why: str) -> None:
        """Ends the job; where another rank has left before, its daemon has a while to tell the first reason."""
        error = self._learners.error
        follows = self._by_torchrun and error is not None and error.of_another_rank
        if follows or (self.group.is_disturbed and self.group.loss is None):
            self._tasks.spawn(self._fail_later(why), "hear why another rank has left")
        else:
            self.fail(why)

    async def _fail_later(self, why: str) -> None:
        await asyncio.sleep(GROUP_LAST_WORDS_S)
        self.fail(why)

    def _in_short(self, why: str) -> str:
        """A failure of the script here in a few words: the device, and the first line."""
        return f"{self._node.name}: {why.removeprefix(f'{self.who}: ').partition(chr(10))[0]}"

    async def _want_world_later(self, number: int, why: str) -> None:
        """For another rank may have left in good order, and nobody else wants the next world then."""
        await asyncio.sleep(self._node.patience_s)
        if self.worlds.begun == number and not self.job.ending:
            self.worlds.broken = self.worlds.broken or self._in_short(why)
            self.passage.want_world()

    def world(self) -> WorldHere | None:
        """Of a job that restarts its scripts: the newest world that this device was in."""
        return self.worlds.here(done=self._metrics.exit_code == 0)

    def world_entered(self, world: GroupWorld) -> None:
        """All that take part have agreed on this world, which may be the one of now. Of it nothing is sent yet."""
        said = None if self.job.ending else self.worlds.enter(world)
        if said is None:
            return
        log.warning("job %s: %s", self.job.spec.job, said)
        if self.worlds.is_over:
            self.fail(said)
        else:
            self.job.tell_restart(said)

    def world_begins(self) -> None:
        """All have entered it: its scripts are to run."""
        worlds = self.worlds
        if worlds.world is None:
            return
        if worlds.begun != worlds.world.number:
            worlds.begun = worlds.world.number
            if self.job.rank in worlds.world.ranks:
                self.begin_learner()
        elif worlds.broken is not None or self.group.loss is not None:
            self.passage.want_world()  # it broke while all entered this generation for another reason

    def _forward(self, why: str) -> None:
        """No process is started any more: this device forwards what the others send, if one of them computes."""
        self._metrics.part = "forwards"
        self._tasks.spawn(self._watch_given_up(why), "hear whether others go on")

    @property
    def learner_comes(self) -> bool:
        """Whether a process runs, or will be started."""
        return self.job.state in (JobState.STARTING, JobState.RUNNING) and not self._learners.given_up

    @property
    def learner_given_up(self) -> bool:
        """Whether none will be started, for it would fail again."""
        return self.job.state in (JobState.STARTING, JobState.RUNNING) and self._learners.given_up

    @property
    def learner_failed(self) -> bool:
        """Whether the last process ended by an error of the script's own."""
        return self._learners.failed

    def follow_settings(self) -> None:
        """Hears that the owner of this machine has changed how much of it may be taken."""
        self._learners.follow_settings()

    def look_whether_to_rest(self, why: str | None) -> None:
        """Has the learner rest while its machine's owner wants that (R5), and come back.

        Its process is ended: others go on in a generation in which its rank rests, and the next process takes over what
        it has left (J3). Not before the job has begun, for all would wait; nor where a process cannot be missed: of a
        process group, or on a device that trains by itself.
        """
        job, learners = self.job, self._learners
        may = not self._node.member.hub and job.state is JobState.RUNNING
        can = may and not self.passage.founding and not self.group.used
        begun = learners.rests is not None or (self.rounds is not None and self.rounds.complete > 0)
        if can and begun and why is not None and not job.spec.independent:
            if learners.rests is None and why != self._cannot_rest:
                learners.rest(why)
                self._metrics.part = "rests"
                self._tasks.spawn(self._end_for_rest(why), "rest")
        elif learners.rests is not None:
            log.info("job %s: the learner comes back", job.spec.job)
            self._rise()
        if why is None:
            self._cannot_rest = None

    def _rise(self) -> None:
        self._learners.rise()
        self._metrics.part = "computes"

    async def _end_for_rest(self, why: str) -> None:
        job = self.job
        if self.maker.memory.kept.round() is None:
            await self.passage.save()  # others may end theirs in the same moment, and nobody would have a base
            if not self.passage.saved and not set(job.counted) - {job.rank}:
                log.warning("job %s: it does not rest: no other device has its state, and none is saved", job.spec.job)
                self._cannot_rest = why
                self._rise()
        if self._learners.rests is not None:
            log.info("job %s: the learner rests: %s", job.spec.job, why)
            self.tell_report()
            await self._learners.kill()

    def begin_learner(self) -> None:
        """Starts a process, and ends the one that runs; on a hub there is none."""
        if self._learners.hopeless or self._node.member.hub:
            return
        if self.job.state in (JobState.STARTING, JobState.RUNNING):  # else its script has ended
            self._learners.run += 1
            self._metrics.part = "computes"
            self._tasks.spawn(self._run(self._learners.run), "learner")

    def end_learner(self) -> None:
        """Ends the process; none runs until the next `begin_learner`."""
        self._learners.run += 1
        self._tasks.spawn(self._learners.kill(), "end the learner")

    def why_none_learns(self) -> str:
        """Why learners have failed, as far as is known."""
        return self._metrics.why_none(self.job, self._failed_elsewhere.values())

    def turned_away(self, reason: str) -> None:
        """Ends the job here alone: the others have taken as many devices as they may."""
        self.end("cancelled", reason, now=True, tell=False)

    def generation_changed(self) -> None:
        """Hears that another generation was entered."""
        if self.job.generation is not None:
            self._lying.difference_update(self.job.generation.ranks)
        self.tell_report()
        self._check_all_done()

    def end(self, outcome: Outcome, reason: str, *, now: bool, tell: bool = True) -> None:
        """Ends the job here and, unless the end came from a member, everywhere. Later calls change nothing."""
        if self.job.ending:
            return
        if outcome == "succeeded":
            self._succeed()
            return
        if tell:
            message = End(job=self.job.spec.job, outcome=outcome, reason=reason[: limits.ERROR_CHARS_MAX], now=now)
            for member in self.job.members:
                if member.device in self._node.links and member.device != self._node.device:
                    self._node.links[member.device].connection.notify(message, job=self._number)
        self.job.advance(JobEvent.CANCEL if outcome == "cancelled" else JobEvent.FAIL, reason)
        self._barriers.wake()
        self.learner.stop(reason)
        self.group.stop(reason)
        self._tasks.spawn(self._stop(now), "stop")

    def lie_down(self) -> None:
        """Ends the session, and not the job: no base of it is left on any device, as after a power cut, and it begins
        again from what lies on their disks (J5)."""
        if self.job.ending:
            return
        why = "no device has its state any more: it begins again from what was saved"
        if self._node.member.hub:
            why = "no laptop is left: it goes on from what was saved here, when one comes"
        log.warning("job %s: %s", self.job.spec.job, why)
        self.job.lies_down = True
        self.job.remember()
        self._barriers.wake()
        self.learner.stop("the job begins again")
        self._tasks.spawn(self.close(), "lie down")

    def member_lies_down(self, rank: int) -> None:
        """Hears that a member has laid the job down: it brings nothing any more, and nobody takes this device in where
        no other goes on. Whoever does has a while to say so."""
        if self.job.ending:
            return
        if rank not in self._lying:
            self._lying.add(rank)
            self.passage.goes(rank)
        if not self._looking:
            self._looking = True
            self._tasks.spawn(self._look_for_others(), "hear whether others go on")

    async def _look_for_others(self) -> None:
        await asyncio.sleep(self._node.patience_s)
        self._looking = False
        self._check_abandoned()

    def member_goes_on(self, device: str) -> None:
        """Hears where a device is: it has not laid the job down, or has it again."""
        if (rank := self.job.rank_of(device)) is not None:
            self._lying.discard(rank)

    def member_reported(self) -> None:
        """Looks whether all are done, for a member has told how it stands."""
        self._check_all_done()

    def member_ended(self, rank: int, end: End) -> None:
        """Hears a member say that the job has ended. It speaks for itself alone, but where a person cancels it, and
        before round 1, which needs all."""
        if end.outcome == "cancelled" or (end.outcome == "failed" and self.passage.founding):
            self.end(end.outcome, end.reason, now=end.now, tell=False)
        elif end.outcome == "failed" and rank not in self._failed_elsewhere:
            log.warning("job %s: rank %d takes part no more: %s", self.job.spec.job, rank, end.reason)
            self._failed_elsewhere[rank] = end.reason
            self.passage.goes(rank)
            self._tasks.spawn(self._check_over_later(), "hear whether others go on")
        elif end.outcome == "succeeded" and rank not in self._over:
            self._over.add(rank)
            self._check_over()
            self._tasks.spawn(self._check_over_later(), "hear whether others go on")

    def _check_over(self, *, waited: bool = False) -> None:
        """Ends the job where it has succeeded without this device: all others that it counts on say so, each for
        itself. These are those that compute in its generation, unless it computes there with them; or, while it is in
        none, all that are linked. After a while those do who do not say that they go on."""
        job, generations = self.job, self.passage.generations
        if job.ending or not self._over or generations is None or self.passage.computes_now:
            return
        said = self._over | {rank for rank, report in job.reports.items() if report.exit_code == 0}
        if job.generation is not None and not self.passage.is_out:
            counted = set(job.counted)
        else:
            devices = generations.elsewhere if waited else self._node.links.keys()
            counted = {rank for rank, member in enumerate(job.members) if member.device in devices}
        if counted - {job.rank} <= said:
            self._succeed()

    async def _check_over_later(self) -> None:
        await asyncio.sleep(self._node.patience_s)
        self._check_over(waited=True)
        self._check_abandoned()

    async def _watch_given_up(self, why: str) -> None:
        """Where all scripts fail at the same moment before round 1, all may step out, and nobody is left to say so."""
        job, links = self.job, self._node.links
        others = [(rank, one.device) for rank, one in enumerate(job.members) if rank != job.rank and not one.hub]
        while self.learner_given_up and not job.ending:
            await asyncio.sleep(self._node.patience_s)
            parts = [job.reports[rank].part for rank, device in others if rank in job.reports and device in links]
            if self.passage.is_out and parts == ["forwards"] * len(others) and not job.ending:
                self.end("failed", why, now=True)

    def _check_abandoned(self) -> None:
        """Ends the part of a device that asks in where nobody could take it in: each of the others, which are linked,
        has given the job up or asks in itself. Where one has laid it down, this device does, too, unless somebody tells
        that it goes on: it has nothing to lose by that."""
        job, generations = self.job, self.passage.generations
        over = self._failed_elsewhere.keys() | self._lying
        if self._node.member.hub and over and not job.ending and not self._lying:
            trainers = {rank for rank, member in enumerate(job.members) if not member.hub}
            if trainers <= over:  # nobody is left for whom it could keep the state
                self.end("failed", next(iter(self._failed_elsewhere.values())), now=True, tell=False)
                return
        if job.ending or not over or generations is None or not self.passage.is_out:
            return
        ranks = {rank: member.device for rank, member in enumerate(job.members) if rank not in {job.rank, *over}}
        elsewhere = self._node.links.keys() & generations.elsewhere
        if self._lying and not elsewhere & {*ranks.values()}:
            self.lie_down()
        elif not {device for device in ranks.values() if device in elsewhere or device not in self._node.links}:
            self.end("failed", next(iter(self._failed_elsewhere.values())), now=True, tell=False)

    def _succeed(self) -> None:
        """Ends the job well: the others' learners have all ended well."""
        log.info("job %s: it ends before this peer has caught up", self.job.spec.job)
        if self.job.state is JobState.STARTING:
            self.job.advance(JobEvent.LEARNER_STARTED)
        if self.job.state is JobState.RUNNING:
            self.job.advance(JobEvent.LEARNER_DONE)
        self.job.advance(JobEvent.ALL_DONE)
        self.tell_report()
        self._tasks.spawn(self.close(), "close")

    async def _stop(self, now: bool) -> None:
        if self.group.used and not now:
            await self._learners.ended(GROUP_LAST_WORDS_S)  # it may save what it has, and tell of its own error
        await self._learners.stop(now=now)
        if not self.job.ended:
            self.job.advance(JobEvent.STOPPED)
        self.tell_report()
        await self.close()

    async def leave(self, *, to_hubs: bool = False) -> bool:
        """Lets the others go on without this device. False where there is nobody who could.

        Args:
            to_hubs: hubs that have the state are enough, which keep it until another laptop comes (H3).
        """
        if self.job.ending or self.job.spec.engine == "torchrun":
            return False
        if not self.passage.may_leave and not (to_hubs and await self.passage.hand_over()):
            return False
        self._metrics.part = "leaves"
        self.tell_report()
        await self.passage.leave()
        if self.passage.is_out:
            self.job.goodbye()
        log.info("job %s: the others go on without this device", self.job.spec.job)
        return True

    async def change_settings(self, wish: SettingsWish) -> SettingsTaken:
        """All go over to other settings (C3): returns from which round on. Raises RequestFailed where they cannot, or
        have not agreed in time; then they are not asked for any more."""
        job, spec = self.job, self.job.spec
        if job.ending or self.passage.rounds is None or not self.passage.computes_somewhere:
            raise RequestFailed(f"job {spec.job} has no rounds now: ask again when its learners compute")
        if why := change_refusal(spec, wish):
            raise RequestFailed(why)
        feeds_back = wish.codec is not None and parse_codec(wish.codec).error_feedback
        if feeds_back and self.passage.manifest.several_optimizers:
            raise RequestFailed(f"--codec {wish.codec} {NOT_IN_TURNS}")
        before = job.in_force()
        codec = None if wish.codec is None else str(parse_codec(wish.codec))
        if codec in (None, str(parse_codec(before.codec))) and wish.period in (None, before.period):
            typed = options_text(None if codec is None else before.codec, wish.period)
            raise RequestFailed(f"the rounds of job {spec.job} go by {typed} already, or are about to")
        if self._changing:
            raise RequestFailed(f"job {spec.job} is about to go over to other settings: ask again in a moment")
        self._changing = True
        asked = wish.model_copy(update={"codec": codec})
        self.passage.ask_settings(asked)
        try:
            async with asyncio.timeout(CHANGE_TIMEOUT_S):
                while self.passage.asks_settings:
                    if job.ending:
                        raise RequestFailed(f"job {spec.job} has ended before its members had agreed")
                    await job.news(REPORT_INTERVAL_S)
        except TimeoutError:
            waiting = f": it waits for {job.waiting}" if job.waiting else ""
            raise RequestFailed(f"the members have not agreed within {CHANGE_TIMEOUT_S:.0f} s{waiting}") from None
        finally:
            self._changing = False
            self.passage.ask_settings(None)
        if not asked.is_met(job.changes):
            raise RequestFailed(f"job {spec.job} has gone over to other settings meanwhile: ask again")
        return SettingsTaken(first=job.changes[-1].first, now=job.in_force(), before=before)

    async def stays(self) -> bool:
        """Saves a job that only this device could go on with, here and on its hubs. Returns whether it can be begun
        again from that (J5)."""
        generation = self.job.generation
        if self.job.ending or generation is None or self.passage.is_out or generation.trainers != (self.job.rank,):
            return False
        kept, _ = await asyncio.gather(self.passage.hand_over(), self.passage.save())
        return (kept or self.passage.saved) and not self.job.ending

    async def close(self) -> None:
        """Ends what is left of the session; the job's state stays as it is."""
        await self._learners.stop(now=True)
        self.learner.close()
        self.group.close()
        self.passage.close()
        self.job.on_odd = lambda _round, _odd: None  # jobs are remembered for long: this session is not, nor its rounds
        await self._donor.close()
        self._metrics.freeze()
        await self._keep_course(self.job.summary(), 0.0)
        self.closed.set()
        await self._tasks.close()

    def _check_all_done(self) -> None:
        """Succeeds when the script of every rank that computes has ended well."""
        job = self.job
        self._check_over()
        if job.state not in UNDER_WAY or job.generation is None or not job.others_succeeded:
            return
        running = job.state is JobState.RUNNING
        if running and (not job.counted or job.rank in job.counted):
            return
        if job.should_have_exchanged and not self.group.exchanged:
            if self.group.used:
                self.fail(NOTHING_SENT)
            else:
                self.fail(NOTHING_PREPARED if self.rounds is None else NOTHING_EXCHANGED)
            return
        if running:
            self._succeed()
            return
        job.advance(JobEvent.ALL_DONE)
        self.tell_report()
        self._tasks.spawn(self.close(), "close")

    # The learner's process and connection

    def attach(self, connection: Connection) -> LearnerWelcome:
        """Lets the learner in, which has called. Raises RequestFailed when there is one already, or none is
        expected."""
        if not self._learners.running:
            raise RequestFailed(f"job {self.job.spec.job} runs no learner here any more")
        welcome = self.learner.attach(connection)
        if self.worlds.world is None or self.worlds.is_between:
            return welcome
        return welcome.model_copy(update={"rank": self.group.place, "members": self.group.members})

    def attach_group(self, connection: Connection) -> GroupWelcome:
        """Lets the learner's process group in. Raises RequestFailed."""
        if not self._learners.running or self.worlds.is_between:
            raise RequestFailed(f"job {self.job.spec.job} runs no learner here any more")
        if self.rounds is not None:
            raise RequestFailed(EITHER_OR)
        self._metrics.stage = "process group"
        return self.group.attach(connection)

    @property
    def group(self) -> GroupRelay:
        """Serves the process group of now."""
        return self.worlds.group

    def group_link_lost(self, device: str, reason: str) -> None:
        """A link to a member is gone; there may be a newer one, which does not bring what was on it."""
        if (rank := self.job.rank_of(device)) is not None and rank != self.job.rank:
            self.group.link_lost(rank, reason)
            if self._by_torchrun and rank not in self.job.gone and not self._linked_with(rank):
                self.fail(f"rank {rank} ({self.job.members[rank].name}) was lost: {reason}")

    @property
    def _by_torchrun(self) -> bool:
        """Whether what scripts exchange goes past the daemons, so that the first loss ends the job (P9)."""
        return self.job.spec.engine == "torchrun"

    def _linked_with(self, rank: int) -> bool:
        member = self.job.members[rank]
        link = self._node.links.get(member.device)
        return link is not None and link.hello.incarnation == member.incarnation

    def learner_lost(self, connection: Connection) -> None:
        """Hears that the learner's socket has closed; the process tells how it ended."""
        if self.learner.lost(connection) and not self.job.ended:
            self._tasks.spawn(self._kill_unless_finished(self._learners.starts), "learner lost")

    async def _kill_unless_finished(self, start: int) -> None:
        """Ends a script that has lost its daemon and goes on: all others would wait for its next step."""
        await asyncio.sleep(LEARNER_LOST_GRACE_S)
        finished = self.rounds is not None and self.rounds.finished
        same = start == self._learners.starts and self._learners.running
        if same and not finished and self.job.state is JobState.RUNNING:
            log.warning("job %s: the script has closed its connection; it is ended", self.job.spec.job)
            await self._learners.kill()

    def tell_hash(self, body: LearnerHash) -> None:
        """Compares the base's hash after this round with the others' (O9, drift guard)."""
        message = BaseHash(job=self.job.spec.job, rank=self.job.rank, round=body.round, sha256=body.sha256)
        self.job.take_hash(message)
        self._tell_all(message)

    def _model(self) -> Model:
        """What is trained, once there are rounds."""
        return self.passage.model()

    @property
    def donors(self) -> "Sequence[Messenger]":
        """The way to the members whose learners compute."""
        return self.passage.computing

    @property
    def rounds(self) -> "Rounds | None":
        """The rounds; None before the learner is ready, and while this member has no history."""
        return self.learner.rounds

    # Other members

    def _replicas_differ(self, round_: int, odd: set[int]) -> None:
        job = self.job
        log.error("job %s: after round %d the bases of the ranks %s differ", job.spec.job, round_, sorted(odd))
        if job.rank in odd and job.state is JobState.RUNNING:
            self._why_ended = f"its base after round {round_} was not that of the others"
            self.passage.distrust_memory()
            self._tasks.spawn(self._learners.kill(), "repair the replica")

    # Helpers

    def _send(self, rank: int, message: Wire) -> None:
        if rank in self._links:
            generation = self.job.generation.hash64() if self.job.generation is not None else 0
            self._links[rank].notify(message, job=self._number, generation=generation)

    def _tell_all(self, message: Wire, complete: int = 0) -> None:
        generation = self.job.generation.hash64() if self.job.generation is not None else 0
        for link in self._links.values():
            link.notify(message, job=self._number, generation=generation, complete=complete)

    @property
    def who(self) -> str:
        """This rank and device, for texts."""
        return f"rank {self.job.rank} ({self._node.name})"

    def _named(self, text: str) -> str:
        return f"{self.who}: {text}"

    async def _report_regularly(self) -> None:
        if self.job.was_here:
            await asyncio.to_thread(self.course.go_on)
        while True:
            self.tell_report()
            summary = self.job.summary()
            self._choose_settings(summary)
            await self._keep_course(summary, SAVE_EVERY_S)
            self.learner.sign_of_life()
            await self._end_if_it_hangs()
            if self.passage.generations is not None:
                self.passage.generations.progress()
            self.passage.look_for_stalls()
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _choose_settings(self, summary: JobSummary) -> None:
        """Has all go over to another codec or period, where the links are not what the job was planned for."""
        if self._changing:
            return
        found = self._choice.look(summary, self._metrics.step, time.monotonic())
        if found is None:
            return
        wish = wish_for(found.settings, self.job.in_force(summary.changes))
        log.warning(
            "job %s: %s: a step takes %.3g s; with %s it is expected to take %.3g s, which is asked for",
            *(self.job.spec.job, found.why.value, found.step_s, wish.text(), found.expected_s),
        )
        self._tasks.spawn(self._take_chosen(wish), "go over to other settings")

    async def _take_chosen(self, wish: SettingsWish) -> None:
        try:
            await self.change_settings(wish)
        except RequestFailed as error:
            log.warning("job %s stays as it is: %s", self.job.spec.job, error)

    async def _keep_course(self, summary: JobSummary, every_s: float) -> None:
        self.course.look(summary, time.time())
        if (packed := self.course.to_save(time.monotonic(), every_s)) is not None:
            await asyncio.to_thread(save_course, self.job.folder, packed)

    async def _watch_group(self) -> None:
        """Ends a script with a process group that stands still, for all others would wait for it (P7)."""
        pulse = Pulse(self._node.patience_s)
        while True:
            await asyncio.sleep(pulse.beat_s)
            if pulse.beat(self.group.learner) and self.job.state is JobState.RUNNING:
                stands = f"its process stands still: no answer and no computing for {self._node.patience_s:g} s"
                log.error("job %s: %s", self.job.spec.job, self._named(stands))
                self._why_ended = stands
                self.group.will_end(stands)
                await self._learners.kill()

    async def _end_if_it_hangs(self) -> None:
        """Ends a learner that hangs, for all others would wait for it: it is lost like one that has failed, and may be
        started again (J3)."""
        hangs = self.rounds.learner.hangs() if self.rounds is not None and self._learners.running else None
        if hangs is not None and self.job.state is JobState.RUNNING:
            log.error("job %s: %s", self.job.spec.job, self._named(hangs))
            self._why_ended = hangs
            await self._learners.kill()

    def tell_report(self) -> None:
        """Tells the other members where this rank stands now."""
        report = self._metrics.report(self.job, self.rounds, self._learners.starts)
        self.job.report(report)
        if self.rounds is not None and not self.job.ended:
            self.rounds.peer_measured(report)
        self._tell_all(report, self.rounds.complete if self.rounds is not None else 0)

    def fail(self, reason: str) -> None:
        """Ends the job everywhere, for a reason that a person is to read."""
        self.end("failed", reason, now=False)

    def _task_failed(self, name: str, error: BaseException) -> None:
        """Leaves the job after an error of a task: a bug here, or what this machine lacks. It concerns nobody else."""
        log.error("%s failed", name, exc_info=error)
        if not name.rpartition("/")[2].startswith(SIDE_TASKS) and not self.job.ending and not self._dropping_out:
            self._dropping_out = True  # once: leaving may be what fails
            text = self._named(f"{name} failed: {''.join(traceback.format_exception(error))}")
            self._tasks.spawn(self._drop_out(text), "leave after a failure")

    async def _drop_out(self, why: str) -> None:
        try:
            self.job.left = await self.leave()
        finally:
            self.end("failed", why, now=True, tell=not self.job.left)
