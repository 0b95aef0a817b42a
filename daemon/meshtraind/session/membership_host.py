"""This device's way through the generations of one job: its rounds, made anew where its history is not kept.

And what members that lack rounds, or load a state, ask of it.
"""

import asyncio
import contextlib
import importlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from meshtraind.job_start.beginning import JobBeginning
from meshtraind.job_start.prepared import DescribedModel, described_model
from meshtraind.recovery.checkpointer import END_TIMEOUT_S, Checkpointer, Written
from meshtraind.recovery.join_requests import START_TIMEOUT_S, ArrivingStates, Giver, JoinRequests
from meshtraind.recovery.state_donor import StateDonor
from meshtraind.rounds.catchup import Beginning
from meshtraind.rounds.history import Entry
from meshtraind.runtime.tasks import TaskSet
from meshtraind.session.barriers import Barriers
from meshtraind.session.history_source import AskedOfHistory, HistorySource
from meshtraind.session.learner_handler import LearnerHandler
from meshtraind.session.membership_driver import MemberNode, MembershipDriver
from meshtraind.session.membership_recorder import MembershipWitness
from meshtraind.storage.job_record import Job
from meshtraind.transport.messenger import Messenger
from meshtraind.transport.requests import ConnectionEnded, RequestFailed
from meshwire.message_base import Wire
from meshwire.messages.generation import AskState, Enter, Holding, KeepState, KeptByHub, Model, SavedState, Wish
from meshwire.messages.group import NOT_PREPARED, GroupWorld, WorldHere
from meshwire.messages.job import Generation
from meshwire.messages.learner import LearnerModel
from meshwire.model.manifest import ModelManifest
from meshwire.sync_modes.settings_changes import SettingsWish

if TYPE_CHECKING:
    from meshtraind.rounds.driver import Rounds, RoundsOwner
    from meshtraind.rounds.generation_change import GenerationChange

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 3.0
KEEP_TIMEOUT_S = END_TIMEOUT_S + 3.0  # for a hub's answer, which has fetched a state by then, or gives that up

Asked = AskedOfHistory | AskState | KeepState


class LearnerKeeper(Protocol):
    """Whoever keeps the learner's process, as far as a change of generation asks something of it: the session."""

    @property
    def learner_comes(self) -> bool:
        """Whether a process runs, or will be started."""

    @property
    def learner_given_up(self) -> bool:
        """None will be started, for it would fail again."""

    def begin_learner(self) -> None:
        """Starts a process, and ends the one that runs."""

    def end_learner(self) -> None:
        """Ends it; none is to run until `begin_learner`."""

    def generation_changed(self) -> None:
        """Another generation was entered."""

    def world(self) -> WorldHere | None:
        """Of a job that restarts its scripts: the newest world that this device was in (P6)."""

    def world_entered(self, world: GroupWorld) -> None:
        """All that take part have agreed on this world, which may be the one of now. Of it nothing is sent yet."""

    def world_begins(self) -> None:
        """All have entered it: its scripts are to run."""

    @property
    def learner_failed(self) -> bool:
        """Whether the last process ended by an error of the script's own."""

    def fail(self, reason: str) -> None:
        """Ends the job with a reason."""

    def lie_down(self) -> None:
        """No base of the job is left on any device: it begins again from what lies on their disks (J5)."""

    def why_none_learns(self) -> str:
        """Why learners have failed, as far as is known."""

    def turned_away(self, reason: str) -> None:
        """Ends the job here alone: the others have taken as many devices as they may."""


class KeptBase(Protocol):
    """Where a learner keeps its base for the process after it (J3). `KeptMemory` is one.

    Attributes:
        trusted: what it holds may be used, if it says so itself.
    """

    trusted: bool

    def round(self) -> int | None:
        """The round after which the base is that lies there; None where none could be used."""

    def clear(self) -> None:
        """What it holds is of no use."""


class LearnerMemory(Protocol):
    """Memory that a learner's process shares with this daemon. `SharedMemory` is one."""

    @property
    def kept(self) -> KeptBase:
        """What it keeps for the process after it."""

    def close(self) -> None:
        """Gives it back."""


class RoundsMaker(Protocol):
    """Makes the rounds of the job, one history after the other, and the memory that each shares with the learner.
    `RoundsFactory` is one."""

    @property
    def manifest(self) -> ModelManifest:
        """Of the model that is trained, once rounds were made."""

    @property
    def memory(self) -> LearnerMemory:
        """Of the rounds of now, or of those that are made next."""

    def new_memory(self) -> None:
        """Rounds that are made next share another memory with another process."""

    def first(
        self, owner: "RoundsOwner", prepared: DescribedModel, generation: Generation, beginning: Entry
    ) -> "Rounds":
        """Those of a job that begins. Raises RequestFailed."""

    def loading(self, owner: "RoundsOwner", generation: Generation, beginning: Beginning) -> "Rounds":
        """Those of a member that is taken in, or goes back. Raises RequestFailed when this device cannot have them."""

    def model(self) -> Model:
        """That is trained, once rounds were made."""

    def close(self) -> None:
        """Nobody looks at them any more."""


class MemberConnection(Messenger, Protocol):
    """The way to another member, as far as whoever follows the membership needs it. `Connection` is one."""

    @property
    def chunk_payload_bytes_sent(self) -> int:
        """Chunks that it has carried, without their headers."""


C = TypeVar("C", bound=MemberConnection)


@dataclass(frozen=True, slots=True)
class JobPlace(Generic[C]):
    """A job on this device, among the others that take part in it.

    Attributes:
        links: the connection to each other member of the generation, by rank; kept up to date by the membership.
        rtt_s: to the farthest member, when the job began here.
        tasks: of the job; whatever still runs in them ends with it.
        states: where states lie that learners load.
        witness: sees all that the membership is told and decides; None: nobody looks.
    """

    node: MemberNode[C]
    job: Job
    links: dict[int, C]
    rtt_s: float
    tasks: TaskSet
    states: ArrivingStates
    witness: MembershipWitness | None = None


class MembershipHost(Generic[C]):
    """What a job on this device does where its membership decides: its rounds are made, dropped and begun anew, its
    learner is told, and members that lack rounds or load a state are answered.

    Args:
        learner: what the process says and hears; its `rounds` are set here.

    Attributes:
        beginning: where the job has begun.
        generations: the membership itself; None before `begin_with_all` or `come_back`.
    """

    def __init__(
        self,
        place: JobPlace[C],
        learner: LearnerHandler,
        barriers: Barriers,
        donor: StateDonor,
        checkpointing: Checkpointer,
        maker: RoundsMaker,
        keeper: LearnerKeeper,
    ) -> None:
        self._place = place
        self._node, self._job, self._links = place.node, place.job, place.links
        self._learner = learner
        self._barriers = barriers
        self._donor = donor
        self._checkpointing = checkpointing
        self._maker = maker
        self._keeper = keeper
        self._source = HistorySource(place.node.member.name, place.job.spec.job, self)
        self._without_learner = False  # none runs, and one is wanted as soon as this device is taken in
        self.beginning = JobBeginning(place.job)
        self._begun = True  # False: it has gone on in no generation in which learners compute
        self._start = 0  # number of the start state: another one, where the giver's is lost before it was given
        self._lost_start: int | None = None  # the newest that a learner of here had, or was to load, when it ended
        self._ready_since_s: float | None = None  # its learner, and those of others are not
        self._left = asyncio.Event()
        self._refusing: dict[int, str] = {}  # members, and why, in this turn of the loop
        self.generations: MembershipDriver[C] | None = None

    def is_member(self, device: str) -> bool:
        """Whether it was ever in the job, or is to be from the next generation on."""
        coming = self.generations is not None and self.generations.lists(device)
        return coming or self._job.rank_of(device) is not None

    @property
    def rounds(self) -> "Rounds | None":
        """None before its learner has described its model, and while this member has no history."""
        return self._learner.rounds

    async def first_rounds(self, body: LearnerModel) -> "Rounds":
        """Those of a job that begins, of the model that its learner has described. Raises RequestFailed."""
        if self._job.spec.restarts_max is not None:
            why = f"the script uses {NOT_PREPARED}"
            self._keeper.fail(f"{self.who}: {why}")
            raise RequestFailed(why)
        prepared = await described_model(self._job, body)
        await self.beginning.read(body)
        if self.rounds is not None:
            return self.rounds
        generation = self._job.generation
        if not self.founding or generation is None or self.generations is None or self._job.ending:
            raise RequestFailed("this device does not begin the job with the others any more")
        rounds = self._learner.rounds = self._maker.first(self, prepared, generation, self.beginning.entry)
        self.generations.lead(rounds.crossing)
        return rounds

    @property
    def manifest(self) -> ModelManifest:
        """Of the model that is trained, once there are rounds."""
        return self._maker.manifest

    def plan_digest(self) -> bytes:
        """Of the bucket plan, once there are rounds."""
        return self._maker.model().plan

    @property
    def who(self) -> str:
        """This rank and device, for texts."""
        return f"rank {self._job.rank} ({self._node.member.name})"

    @property
    def giver(self) -> Giver | None:
        """Whose state all start from; None once learners compute."""
        if self.generations is None or self._begun:
            return None
        enter = self.generations.enter_of_now
        if enter is None or not enter.awaited:
            return None
        rank = enter.giver
        own = rank == self._job.rank
        link = None if own else self._links.get(rank)
        # Others may have what a process gave that has ended here: then the next generation says who is the giver.
        lost = own and (enter.given or self._lost_start == self._start)
        decided = self.generations.running and not lost
        return Giver(rank, self._job.members[rank].name, own, link, self._start, decided, rank in self._job.gone)

    def model(self) -> Model:
        """That is trained, once there are rounds."""
        return self._maker.model()

    @property
    def barrier_passed(self) -> int:
        """The newest that all have passed."""
        return self._barriers.passed

    def begin_with_all(self) -> None:
        """The first generation is entered; learners are about to prepare."""
        self._begun = False
        self._serve_next(None, None)
        self._watch_members()

    @property
    def founding(self) -> bool:
        """Whether the job is at its beginning here: it has gone on in no generation in which learners compute (G9)."""
        return not self._begun

    @property
    def crossing(self) -> "GenerationChange | None":
        """What leads from one generation into the next; None: there are no rounds here."""
        return self.rounds.crossing if self.rounds is not None else None

    async def come_back(self) -> None:
        """Asks to be taken into a job with which others have gone on."""
        # In a thread, and now: the others stand still while this device enters.
        await asyncio.to_thread(importlib.import_module, "meshtraind.rounds.driver")
        self._without_learner = True
        self._watch_members()

    @property
    def may_leave(self) -> bool:
        """Whether others can go on with the job."""
        if self.generations is None:
            return False
        if self.rounds is None and not self.founding:
            return True  # they have
        return bool(set(self._job.counted) - {self._job.rank})

    async def save(self) -> None:
        """A checkpoint of now, before a person ends the job."""
        if self.rounds is not None and not self.founding:
            await self._checkpointing.before_the_end(self.rounds)

    @property
    def saved(self) -> bool:
        """Whether the learner here has written a checkpoint of this history."""
        return self._checkpointing.newest is not None

    async def hand_over(self) -> bool:
        """Has each hub save the state of now, where hubs alone are left without this device (H3). Returns whether one
        of them has a state; training goes on meanwhile."""
        generation = self._job.generation
        last = generation is not None and generation.trainers == (self._job.rank,)
        if not last or self.is_out or self.founding:
            return False
        return any(await asyncio.gather(*(self._handed_to(hub) for hub in self.others)))

    async def _handed_to(self, hub: C) -> bool:
        job = self._job.spec.job
        try:
            await hub.request(KeepState(job=job), timeout_s=KEEP_TIMEOUT_S, name=f"state to {hub.name}")
        except (RequestFailed, ConnectionEnded, TimeoutError) as error:
            log.warning("job %s: the hub %s does not keep its state: %s", job, hub.name, error)
            return False
        return True

    async def _keep(self) -> KeptByHub:
        """Saves the state of now on this hub. Raises RequestFailed where it has none then."""
        if not self._node.member.hub:
            raise RequestFailed(f"{self._node.member.name} is no hub")
        await self.save()
        if (newest := self._checkpointing.newest) is None:
            raise RequestFailed(f"{self._node.member.name} has no state of job {self._job.spec.job}")
        return KeptByHub(round=newest.round)

    async def write_given_up(self) -> Written:
        """The base of a history that is not kept, before its learner is ended."""
        rounds = self.rounds
        assert rounds is not None
        rounds.learner.part("its history is not kept")
        return await self._checkpointing.write_given_up(rounds)

    async def leave(self) -> None:
        """The others take out of the job what this device has not completed, and go on."""
        if self.generations is None:
            return
        self._left.clear()
        taking_part = self.rounds is not None or self.founding
        self.generations.wish("leave")
        if taking_part:
            with contextlib.suppress(TimeoutError):  # then they notice when the links close
                async with asyncio.timeout(LEAVE_TIMEOUT_S):
                    await self._left.wait()

    def _watch_members(self) -> None:
        place = self._place
        self.generations = MembershipDriver(
            place.node, place.job, place.links, self, place.rtt_s, place.tasks, place.witness
        )
        self.generations.start()

    # What the learner's process does

    def learner_died(self, *, failed: bool) -> bool:
        """What it had bound is void; another one finds the base in memory, or loads a state. False where there is
        nothing to go on with.

        Args:
            failed: by an error, and not killed.
        """
        if self.generations is not None and self.generations.end_parting():
            return True  # the next one is started when this device is taken in
        rounds, requests = self.rounds, self._learner.requests
        if self.generations is None or (rounds is None and self._begun):
            return False
        kept = None
        if rounds is not None:
            if failed and requests is not None and requests.kept and not self._learner.was_ready:
                self.distrust_memory()  # what is there could not be taken over
            kept = self._maker.memory.kept.round() if self._keeper.learner_comes else None
            if kept is not None and not rounds.learner.could_hold(kept):
                kept = None
            rounds.learner.dead("its process has ended", kept)
        self._serve_next(rounds, kept)
        self.generations.wish("rest")
        self.generations.look_again()
        return True

    def distrust_memory(self) -> None:
        """The base that the learner of now holds is not to be gone on from, nor one that it has left."""
        self._maker.memory.kept.trusted = False
        joining = self._learner.requests
        if self.rounds is not None and joining is not None and joining.may_forget_kept:
            self._forget_kept(self.rounds, joining, "its process has ended, and its base was not that of the others")
            if self.generations is not None:
                self.generations.look_again()

    def _forget_kept(self, rounds: "Rounds", joining: JoinRequests, reason: str) -> None:
        """The next process loads a state of the others."""
        joining.forget_kept()
        self._maker.memory.kept.clear()
        rounds.learner.dead(reason)

    def _serve_next(self, rounds: "Rounds | None", kept: int | None) -> None:
        """The next process begins with what is in memory, or gets a state."""
        if rounds is not None and kept is None:
            self._maker.memory.kept.clear()
        self._ready_since_s = None
        if (before := self._learner.requests) is not None and before.start is not None:
            self._lost_start = before.start
        self._learner.begin_anew(rounds, JoinRequests(self._job.spec.job, rounds, self, self._place.states, kept))

    @property
    def computing(self) -> list[C]:
        """The way to the members whose learners compute, best first."""
        generation = self._job.generation
        return self._linked(generation.learning if generation is not None else ())

    @property
    def others(self) -> list[C]:
        """To all other members."""
        generation = self._job.generation
        return self._linked(generation.ranks if generation is not None else ())

    def _linked(self, ranks: tuple[int, ...]) -> list[C]:
        return [self._links[rank] for rank in ranks if rank in self._links]

    async def own_state(self, asked: AskState) -> SavedState:
        """What this device's learner of before has left of its state. Raises RequestFailed, BlobError."""
        return await self._state(self._node.device, asked)

    def loaded(self, joining: JoinRequests, round_: int) -> None:
        """A learner holds the base after this round: it is to be taken in, unless it was replaced."""
        rounds, replaced = self.rounds, self._learner.requests is not joining
        if rounds is not None and not replaced and self.generations is not None and not self._job.ended:
            rounds.learner.loaded(round_)
            self.generations.wish("learn")

    def holding(self) -> Holding:
        """What there is here to go on from where no learner computes (J3)."""
        rounds, comes, failed = self.rounds, self._keeper.learner_comes, self._keeper.learner_failed
        if self._job.spec.restarts_max is not None:  # a script can always be begun again from its own checkpoint
            return Holding(loads_after=self.beginning.round, prepared=False)
        if self._node.member.hub:  # H3: what it has saved, and nothing that would take a learner
            newest = self._checkpointing.newest
            saved = None if newest is None else (newest.round, bytes.fromhex(newest.manifest.chain))
            return Holding(state=self._donor.newest_round(), saved=saved if rounds is not None else None)
        if rounds is None and self._begun:
            return Holding(loads_after=0 if comes else None, failed=failed)
        newest, has_base = self._checkpointing.newest, comes and self._learner.has_base
        saved = None if newest is None else (newest.round, bytes.fromhex(newest.manifest.chain))
        way_back = self.beginning.way_back(self.beginning.round if rounds is None else rounds.complete)
        loads_after = self.beginning.round if rounds is None else rounds.learner.loads_after
        return Holding(
            base=has_base,
            loads_after=loads_after if comes else None,
            state=self._donor.newest_round(),
            saved=saved or way_back,
            begins=saved is None and way_back is not None,
            prepared=None if self._begun else has_base,
            failed=failed,
        )

    def world(self) -> WorldHere | None:
        """Of a job that restarts its scripts: the newest world that this device was in (P6)."""
        return None if self._job.spec.restarts_max is None else self._keeper.world()

    def want_world(self) -> None:
        """The world of now cannot go on: another generation brings the next one, unless one is coming anyway."""
        if self.generations is not None and not self.generations.fenced:
            self.generations.look_again()

    def saved_beginning(self, enter: Enter) -> Beginning:
        """The own checkpoint of the cut. Raises RequestFailed when it is gone."""
        newest = self._checkpointing.newest
        if newest is None or newest.round != enter.cut or bytes.fromhex(newest.manifest.chain) != enter.chain:
            raise RequestFailed(f"the checkpoint after round {enter.cut} is gone")
        saved = newest.manifest
        entry = Entry(enter.cut, enter.chain, saved.samples, saved.deal, anew=True, changes=enter.changes)
        return Beginning(self._maker.model(), saved.space, entry, self._barriers.passed)

    @property
    def carried_bytes(self) -> int:
        """The chunks that this device has passed on so far."""
        return sum(link.chunk_payload_bytes_sent for link in self._links.values())

    # What the rounds say to their owner

    def notify(self, body: Wire, /) -> None:
        """Sends the learner a notice."""
        self._learner.notify(body)

    def fail(self, reason: str, /) -> None:
        """Ends this device's part."""
        self._keeper.fail(f"{self.who}: {reason}")

    def round_complete(self, rounds: "Rounds", round_: int, /) -> None:
        """The next round is complete."""
        if self.beginning.is_passed(round_):
            self._place.tasks.spawn(self.beginning.delete_files(), "checkpoint that the job has begun from")
        self._checkpointing.round_complete(rounds, round_)
        joining = self._learner.requests
        if joining is not None and rounds is self.rounds:
            joining.round_complete(round_)
            if joining.may_forget_kept and rounds.hold_others_up:
                # Others compute: it loads their state, and keeps nobody waiting.
                self._forget_kept(rounds, joining, "its process has ended, and the others have gone on")

    # What a change of generation brings

    def begin_loading(self, generation: Generation, beginning: Beginning) -> None:
        """This member takes part from the cut on, and its learner is to load a state of after it."""
        self._begun = True
        goes_back = beginning.entry.anew
        if goes_back:
            self._without_learner = self._keeper.learner_comes
            self._keeper.end_learner()
        self._donor.forget()
        self._checkpointing.forget(above=beginning.entry.complete if goes_back else -1)
        self._drop_rounds()
        self._job.take(generation)
        self._maker.new_memory()
        try:
            rounds = self._maker.loading(self, generation, beginning)
        except RequestFailed as error:
            raise RequestFailed(f"{self._node.member.name} cannot take part: {error}") from error
        self._barriers.begin_anew(beginning.barrier)
        self._serve_next(rounds, None)

    def entered(self, generation: Generation) -> None:
        """This device is in a new generation."""
        self._barriers.entered()
        self._donor.entered(generation)
        assert self.generations is not None
        enter = self.generations.enter_of_now
        if enter is not None and enter.awaited:
            self._begun = False  # also of a device that is taken in
            if not enter.given:
                self._begin_from_another()
        if enter is not None and enter.world is not None and self._job.spec.restarts_max is not None:
            self._without_learner = False
            self._keeper.world_entered(enter.world)
        elif self._without_learner and self._job.rank not in generation.learning:
            self._without_learner = False
            self._keeper.begin_learner()
        self._keeper.generation_changed()

    def resumed(self) -> None:
        """All members have entered: each tells how far it is (G5)."""
        generation, generations = self._job.generation, self.generations
        assert generations is not None
        if self._job.spec.restarts_max is not None:
            if not self._job.ending:
                self._keeper.world_begins()
        elif self.founding and generation is not None and not self._job.ending:
            if generation.learning:
                self._begun = True
                generations.begun()
                if self.rounds is None:
                    generations.step_out("its learner had not prepared when the others began")
            elif self._keeper.learner_given_up and not self._node.member.hub:
                generations.step_out("its learner has ended before round 1")
            elif self._learner.ready:
                generations.wish("learn")  # it was void, where another state is to be given
        self._keeper.generation_changed()

    def _begin_from_another(self) -> None:
        """G9: nobody who is left has the state that learners were to start from. One that has begun to load it begins
        anew; the giver's own is the one to start from now."""
        self._start += 1
        self._donor.forget()  # what it has lent is of the start before
        rounds, requests, giver = self.rounds, self._learner.requests, self.giver
        if rounds is None or requests is None or giver is None:
            return
        if requests.may_forget_kept:
            self._forget_kept(rounds, requests, "its process has ended, and all begin from another state")
        if requests.start is None:
            return
        if giver.own and requests.own_start:
            requests.start = self._start
            return
        log.info("job %s: the script begins anew, for whose state it has loaded was lost", self._job.spec.job)
        rounds.learner.dead("it begins from another state")
        self._serve_next(rounds, None)
        self._keeper.begin_learner()

    def _look_at_beginning(self) -> None:
        """Ends a job that cannot begin: this learner is ready, and another one will never be."""
        if not self.founding or self.generations is None or not self._learner.ready:
            return
        now_s = asyncio.get_running_loop().time()
        self._ready_since_s = now_s if self._ready_since_s is None else self._ready_since_s
        ranks = [self._job.rank_of(member.device) for member in self.generations.machine.unprepared]
        missing = [rank for rank in ranks if rank is not None]
        for rank in missing:
            name = f"rank {rank} ({self._job.members[rank].name})"
            if rank in self._job.gone:
                self.fail(f"{name} ended its script; waiting for it to prepare the same model is in vain")
                return
            if now_s > self._ready_since_s + START_TIMEOUT_S:
                self.fail(f"waited {START_TIMEOUT_S:.0f} s for {name} to prepare the same model")
                return

    def samples_at_beginning(self, enter: Enter) -> int | None:
        """Where all go back to where the job has begun: the samples in the rounds up to there. None: somewhere else."""
        return self.beginning.entry.samples if self.beginning.is_cut_of(enter) else None

    def begin_anew(self, generation: Generation) -> None:
        """Every learner is lost, and all begin where the job has begun."""
        if self._job.spec.restarts_max is None:
            log.info("job %s: every learner was lost: all prepare anew", self._job.spec.job)
        if self.rounds is not None:
            beginning = Beginning(self._maker.model(), self.rounds.sample_space, self.beginning.entry, 0)
            self.begin_loading(generation, beginning)
        else:
            self._job.take(generation)
            if self._without_learner:  # it was left out before, and the memory was given back
                self._maker.new_memory()
            self._serve_next(None, None)
        self._begun = False

    def left_out(self, reason: str) -> None:
        """What this member has is not on the history that is kept: its learner will load another base."""
        self._without_learner = self._begun = True
        self._job.drop_out()
        self._learner.let_go(f"this device was left out: {reason}")
        self._drop_rounds()
        self._keeper.end_learner()
        self._left.set()

    def turned_away(self, reason: str) -> None:
        """This device wanted to join, and there is no room any more."""
        self._keeper.turned_away(reason)

    def refuse(self, rank: int, reason: str, /) -> None:
        """A member broke the protocol (G10): the others go on without it. Not at once: it may be found in the middle of
        what a change of generation takes away."""
        self._refusing.setdefault(rank, reason)
        asyncio.get_running_loop().call_soon(self._refuse_now)

    def _refuse_now(self) -> None:
        refusing, self._refusing = self._refusing, {}
        for rank, reason in refusing.items():
            if self.generations is not None and not self._job.ending and rank != self._job.rank:
                self.generations.refuse(self._job.members[rank].device, reason)

    def look_for_stalls(self) -> None:
        """About once a second: a member that holds a round up by sending nothing is left out like one that lies."""
        self._look_at_beginning()
        if self.rounds is not None and not self._job.ending:
            stalled = self.rounds.stalled(self._job.reports)
            if stalled is not None:
                self.refuse(*stalled)

    def goes(self, rank: int) -> None:
        """A member's part has failed, and it is to be left out."""
        if self.generations is not None:
            device = self._job.members[rank].device
            self.generations.notice(device, Wish(job=self._job.spec.job, kind="leave"))

    @property
    def computes_now(self) -> bool:
        """Rounds go on in a generation in which this device's learner computes."""
        generation = self._job.generation
        running = self.generations is not None and self.generations.running
        return running and generation is not None and self._job.rank in self._job.counted

    @property
    def computes_somewhere(self) -> bool:
        """This device is in a generation in which learners compute."""
        generation = self._job.generation
        return not self.is_out and generation is not None and bool(generation.learning)

    def ask_settings(self, wish: SettingsWish | None) -> None:
        """Other settings are asked for here (C3), or that is taken back."""
        if self.generations is not None:
            self.generations.ask_settings(wish)

    @property
    def asks_settings(self) -> bool:
        """They are not agreed on yet, by all members of a generation."""
        return self.generations is not None and self.generations.asks_settings

    @property
    def is_out(self) -> bool:
        """This device is in no generation, and asks in."""
        return self.generations is None or self.generations.out

    def hears(self, rank: int) -> bool:
        """Whether what a member says of the rounds belongs to them: not if it broke the protocol."""
        refused = self.generations is not None and self.generations.refuses(self._job.members[rank].device)
        return rank not in self._refusing and not refused

    def nobody_learns(self, *, failed: bool) -> None:
        """No learner is left anywhere that holds the base. `failed`: by errors of the script."""
        if failed:
            self._keeper.fail(self._keeper.why_none_learns())
        else:
            self._keeper.lie_down()

    def _drop_rounds(self) -> None:
        self._job.hashes.forget()
        if self.rounds is not None:
            self.rounds.close()
        self._learner.rounds = None
        self._maker.memory.close()

    # Links, and what comes on them

    def link_made(self, device: str, incarnation: int) -> None:
        """There is a new link to a device that is or was a member."""
        if self.generations is not None:
            self.generations.link_made(device, incarnation)

    def link_lost(self, device: str, reason: str) -> None:
        """A link has ended; there may be a newer one."""
        if self.generations is not None and device not in self._node.links:
            self.generations.link_lost(device, reason)

    def was_away(self) -> None:
        """This machine slept, stood still or changed networks."""
        if self.generations is not None:
            self.generations.away()

    def peer_gone(self, device: str, incarnation: int) -> None:
        """A device's daemon has ended."""
        if self.generations is not None:
            self.generations.gone(device, incarnation)

    async def asked(self, device: str, body: Asked) -> Wire:
        """What a member's device that lacks rounds, or loads, asks for. Raises RequestFailed."""
        if isinstance(body, KeepState):
            return await self._keep()
        if not isinstance(body, AskState):
            return await self._source.answer(body)
        if self.rounds is None:
            raise RequestFailed(f"{self._node.member.name} has no history of job {self._job.spec.job}")
        if self.founding and self.generations is not None and self.generations.fenced:
            raise RequestFailed("it may be that another one is to give its state")
        return await self._state(device, body)

    async def _state(self, device: str, body: AskState) -> SavedState:
        promised = None if self.generations is None else self.generations.newest
        return await self._donor.state(device, body, promised)

    def close(self) -> None:
        """Lets go of timer, trace and memory."""
        if self.generations is not None:
            self.generations.close()
        self._maker.close()
        self._maker.memory.close()
