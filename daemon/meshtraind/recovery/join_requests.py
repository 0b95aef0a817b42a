"""What a learner asks for on its way into a job: that its model is the job's, and a state to begin from (G9, J1, J3).

At a job's beginning all learners come in so, and together: one of them, the giver, begins from its own state, and
all others have that. In a job that runs a state is that of a learner which computes.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from meshtraind.job_start.beginning import JobBeginning
from meshtraind.runtime.tasks import TaskSet, told_elsewhere
from meshtraind.storage.background_pacing import Pacer
from meshtraind.storage.fetch import Pace
from meshtraind.transport.connection import Emit
from meshtraind.transport.messenger import Messenger
from meshtraind.transport.requests import ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.generation import AskModel, AskState, Model, SavedState
from meshwire.messages.job import BlobRef
from meshwire.messages.learner import LearnerModel, LearnerState, StateTask, Waiting
from meshwire.model.manifest import ModelManifest, first_difference

if TYPE_CHECKING:
    from meshtraind.rounds.driver import Rounds

START_TIMEOUT_S = 1800.0  # a slow laptop may import its libraries and load its data for long
MODEL_TIMEOUT_S = 10.0
STATE_TIMEOUT_S = 600.0  # a donor's learner may be in the middle of a long step or of an evaluation
DONOR_TIMEOUT_S = 60.0  # for one to be linked
COMPLETE_TIMEOUT_S = 600.0
HELD_UP_S = 5.0  # all may wait so long for an answer; each next time twice as long
POLL_S = 0.2


class _NotKeptError(RequestFailed):
    """A state whose newest round is not on the history that is kept."""


class _NotNowError(RequestFailed):
    """A member has no state to give, yet."""


class _OtherStateError(RequestFailed):
    """A state that no learner of this script could load."""


@dataclass(frozen=True, slots=True)
class Giver:
    """G9: the member whose state all start from, as this one knows it in the generation of now.

    Attributes:
        own: it is this device.
        link: the way to it; None where there is none, or it is this device.
        start: which start it gives, unlike any other of this job's: who has loaded another one begins anew.
        decided: all members know that it is the giver, and no learner that it had is lost with what it gave.
        gone: its script has ended for good.
    """

    rank: int
    name: str
    own: bool
    link: Messenger | None
    start: int
    decided: bool
    gone: bool

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name})"


class JoiningHost(Protocol):
    """Whoever has a learner join: from whom it may get a state, and who hears that it has. `MembershipHost` is one."""

    @property
    def who(self) -> str:
        """This rank and device, for texts."""

    @property
    def beginning(self) -> JobBeginning:
        """Where the job has begun."""

    @property
    def giver(self) -> Giver | None:
        """Whose state all start from; None once learners compute."""

    @property
    def manifest(self) -> ModelManifest:
        """Of the model that the rounds here are of."""

    @property
    def computing(self) -> Sequence[Messenger]:
        """The way to the members whose learners compute, best first."""

    @property
    def others(self) -> Sequence[Messenger]:
        """To all other members: where nobody computes, each may have a state still (J3)."""

    async def own_state(self, asked: AskState) -> SavedState:
        """This device's, of after a round or later, from what its learner of before has left. Raises RequestFailed,
        BlobError."""

    @property
    def carried_bytes(self) -> int:
        """The chunks that this device has passed on so far."""

    async def first_rounds(self, body: LearnerModel) -> "Rounds":
        """Makes the job's first rounds here, of the model that a learner has described. Raises RequestFailed."""

    def plan_digest(self) -> bytes:
        """Of the bucket plan of the rounds here."""

    def loaded(self, joining: "JoinRequests", round_: int) -> None:
        """The learner holds the base after this round."""


class ArrivingStates(Protocol):
    """Where a state comes to lie that a learner loads. `meshtraind.storage.state_transfer.StateFiles` is one."""

    @property
    def folder(self) -> Path:
        """Where the learner reads it."""

    async def fetch(self, units: Mapping[int, BlobRef], donor: Messenger, emit: Emit, pace: Pace) -> None:
        """Gets a state that the donor lends. Raises BlobError, RequestFailed, ConnectionEnded, TimeoutError."""

    async def lay_out(self, units: Mapping[int, BlobRef]) -> None:
        """Puts a state there that lies on this device already. Raises BlobError."""


class JoinRequests:
    """Answers what one process of a learner asks for: whether its model is the job's, and a state to begin from.

    Every method raises RequestFailed with a text for the script.

    Args:
        job: its id.
        rounds: of this device; None where no learner of the job has described its model here.
        kept: the learner of before has left the base after this round in memory (J3).

    Attributes:
        broken: the members cannot begin, and no other learner of the same script would.
        start: which of the giver's its learner has, or was told to load; None: none.
        own_start: that is its own.
    """

    def __init__(
        self, job: str, rounds: "Rounds | None", host: JoiningHost, states: ArrivingStates, kept: int | None = None
    ) -> None:
        self._job = job
        self._joins: Rounds | None = rounds
        self._host = host
        self._states = states
        self._kept = kept
        self._told_kept = False
        self._round = 0
        self._digests: tuple[bytes, ...] = ()  # of the learner's own state, by unit
        self._pace: Pacer | None = None  # while a state is on its way
        self._held_up_s_max = HELD_UP_S
        # Of the rounds since a state was asked for: what comes must be the base of one.
        self._chains: dict[int, bytes | None] = {}
        self.broken = False
        self.start: int | None = None
        self.own_start = False

    @property
    def _rounds(self) -> "Rounds":
        if self._joins is None:
            raise RequestFailed("the learner is ready before it has described its model")
        return self._joins

    @property
    def kept(self) -> bool:
        """The learner has found the base in memory, or will."""
        return self._kept is not None

    @property
    def may_forget_kept(self) -> bool:
        """Its learner has not begun to take it over."""
        return self.kept and not self._told_kept

    def forget_kept(self) -> None:
        """A state is loaded like any other learner's."""
        self._kept = None

    async def model(self, body: LearnerModel, emit: Emit) -> None:
        """Raises RequestFailed when it is another model than the others'."""
        if self._joins is None:
            self._joins = await self._host.first_rounds(body)
        difference = first_difference(self._host.manifest, body.manifest)
        if difference is not None:
            raise RequestFailed(f"the model of this peer is not the one that the others train: {difference}")
        if body.samples != self._rounds.sample_space:
            raise RequestFailed(f"the loader reads {body.samples}, the others' {self._rounds.sample_space}")
        await self._compare(body.manifest, emit)

    async def _compare(self, own: ModelManifest, emit: Emit) -> None:
        """At the job's beginning: with the giver's."""
        deadline_s = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while (giver := self._host.giver) is not None and not giver.own:
            if giver.link is not None:
                try:
                    model = await giver.link.request(
                        AskModel(job=self._job), timeout_s=MODEL_TIMEOUT_S, name=f"model of {giver.name}"
                    )
                except (RequestFailed, ConnectionEnded, TimeoutError):
                    pass  # not yet; or another one is the giver soon
                else:
                    self._same(own, model, giver)
                    return
            await self._await_giver(giver, "to prepare the same model", emit, deadline_s)

    def _same(self, own: ModelManifest, model: object, giver: Giver) -> None:
        if not isinstance(model, Model):
            raise RequestFailed(f"{giver} answered with {type(model).__name__}")
        difference = first_difference(model.manifest, own)
        if difference is not None:
            self.broken = True
            raise RequestFailed(f"the models of {giver} and {self._host.who} differ: {difference}")
        if model.plan != self._host.plan_digest():
            self.broken = True
            raise RequestFailed(
                f"{self._host.who} plans its buckets differently from {giver}: "
                "install the same version of meshtraind on both"
            )

    async def _await_giver(self, giver: Giver, what: str, emit: Emit, deadline_s: float) -> None:
        """A moment. Raises RequestFailed where the giver will never come."""
        if giver.gone:
            self.broken = True
            raise RequestFailed(f"{giver} ended its script; waiting {what} is in vain")
        if asyncio.get_running_loop().time() > deadline_s:
            self.broken = True
            raise RequestFailed(f"waited {START_TIMEOUT_S:.0f} s for {giver} {what}")
        emit(Waiting(reason=f"waiting for {giver} {what}"))
        await asyncio.sleep(POLL_S)

    async def state(self, body: LearnerState, emit: Emit) -> StateTask:
        """Gets a state of what is complete now, or later, from a member that computes, if memory holds none; at the
        job's beginning that of the giver."""
        self._digests = body.units
        giver = self._host.giver
        if self._kept is not None:
            self._told_kept = True
            self._round = self._kept
            self.start = None if giver is None else giver.start
            units = tuple(range(len(body.units)))
            return StateTask(units=units, folder=str(self._states.folder), round=self._kept, kept=True)
        if giver is not None:
            task = await self._begin(body, emit)
            if task is not None:
                return task
        return await self._join(body, emit)

    async def _begin(self, body: LearnerState, emit: Emit) -> StateTask | None:
        """G9. None: others compute already."""
        deadline_s = asyncio.get_running_loop().time() + START_TIMEOUT_S
        after_round = self._rounds.learner.loads()
        if (task := self._host.beginning.task(body)) is not None:
            self._round = after_round
            return task
        asked = AskState(job=self._job, after_round=after_round, digests=self._digests)
        while (giver := self._host.giver) is not None:
            if giver.own and giver.decided:
                self.start, self.own_start, self._round = giver.start, True, after_round
                return StateTask(units=(), folder=str(self._states.folder), round=after_round)
            try:
                if giver.link is not None and giver.decided:
                    task = await self._load_from(giver.link, asked, len(body.units), emit)
                    now = self._host.giver
                    if now is None or now.start == giver.start:
                        self.start = giver.start
                        return task
            except _OtherStateError as error:
                self.broken = True
                raise RequestFailed(f"the state of {giver}: {error}") from None
            except (RequestFailed, ConnectionEnded, TimeoutError) as error:  # not yet; or another one gives it soon
                emit(Waiting(reason=f"the state of {giver}: {error}"[: limits.ERROR_CHARS_MAX]))
            await self._await_giver(giver, "to give its state", emit, deadline_s)
        return None

    async def _join(self, body: LearnerState, emit: Emit) -> StateTask:
        after_round = self._rounds.learner.loads()
        asked = AskState(job=self._job, after_round=after_round, digests=self._digests)
        self._note_chain(after_round)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        deadline_s = began_s + DONOR_TIMEOUT_S
        last = ""
        while True:
            errors, computing = [], self._host.computing
            if not computing:  # another may begin, or all will go on from something else
                deadline_s = max(deadline_s, began_s + STATE_TIMEOUT_S)
                if (task := await self._load_own(asked, len(body.units))) is not None:
                    return task
            for donor in computing or self._host.others:
                if computing and self._rounds.hold_others_up:  # the one of now may wait for this device, too
                    asked = asked.model_copy(update={"after_round": self._rounds.learner.loads_anew()})
                    self._note_chain(asked.after_round)
                try:
                    return await self._load_from(donor, asked, len(body.units), emit)
                except _NotNowError as error:
                    emit(Waiting(reason=f"a state of {donor.name}: {error}"[: limits.ERROR_CHARS_MAX]))
                    last = f": {donor.name}: {error}"
                except _NotKeptError as error:  # it will hear so, and compute no more, or give a later one
                    emit(Waiting(reason=f"another state than that of {donor.name}: {error}"))
                except (RequestFailed, TimeoutError) as error:
                    errors.append(f"{donor.name}: {error}")
                except ConnectionEnded as error:  # there may be another link soon
                    emit(Waiting(reason=f"another link to {donor.name}: {error}"[: limits.ERROR_CHARS_MAX]))
                    deadline_s = loop.time() + DONOR_TIMEOUT_S
            if errors or loop.time() > deadline_s:
                raise RequestFailed("no peer has given its state: " + ("; ".join(errors) or f"none computes{last}"))
            emit(Waiting(reason="a peer whose learner computes"))
            await asyncio.sleep(POLL_S)

    async def _load_from(self, donor: Messenger, asked: AskState, units: int, emit: Emit) -> StateTask:
        emit(Waiting(reason=f"the state of {donor.name}"))
        try:
            saved = await self._ask(donor, asked)
        except RequestFailed as error:
            raise _NotNowError(str(error)) from None
        if not isinstance(saved, SavedState):
            raise RequestFailed(f"it answered with {type(saved).__name__}")
        if saved.round < asked.after_round:
            raise RequestFailed(f"it offers the state after round {saved.round}, not after {asked.after_round}")
        if saved.count != units or len(saved.by_number) != len(saved.units):
            raise _OtherStateError(f"it has {saved.count} units of state, this peer {units}")
        await self._check_history(saved, donor, emit)
        self._pace = Pacer(self)
        try:
            if saved.units:
                await self._states.fetch(saved.by_number, donor, emit, self._pace)
        finally:
            self._pace = None
        return self._task(saved)

    async def _ask(self, donor: Messenger, asked: AskState) -> Wire:
        """The donor's answer. Raises _NotNowError when none comes and nothing more can be kept meanwhile (M1): with s=0
        the donor's round may wait for this device, and at no boundary is a state to be had (J1)."""
        name = f"state of {donor.name}"
        tasks = TaskSet(f"job {self._job}", told_elsewhere)
        answer = tasks.spawn(donor.request(asked, timeout_s=STATE_TIMEOUT_S, name=name), name)
        held_up_s = 0.0
        try:
            while not (await asyncio.wait({answer}, timeout=POLL_S))[0]:
                held_up_s = held_up_s + POLL_S if self._rounds.hold_others_up else 0.0
                if held_up_s >= self._held_up_s_max:
                    self._held_up_s_max *= 2
                    raise _NotNowError("all wait for this device")
            return answer.result()
        finally:
            await tasks.close()

    def _task(self, saved: SavedState) -> StateTask:
        self._round = saved.round
        self._chains.clear()
        return StateTask(units=tuple(saved.by_number), folder=str(self._states.folder), round=saved.round)

    async def _load_own(self, asked: AskState, units: int) -> StateTask | None:
        """From what is on this disk; None: there is nothing of the history that is kept."""
        try:
            saved = await self._host.own_state(asked)
        except RequestFailed:
            return None
        if saved.count != units or self._rounds.chain_after(saved.round) != saved.chain:
            return None
        await self._states.lay_out(saved.by_number)
        return self._task(saved)

    async def _check_history(self, saved: SavedState, donor: Messenger, emit: Emit) -> None:
        """G4: the donor may have completed a round that no other holds, and then be lost: the round counts for nobody.

        Raises _NotKeptError; ConnectionEnded when the donor was lost before the others had completed the round.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + COMPLETE_TIMEOUT_S
        while self._rounds.complete < saved.round:
            if donor.closing:
                raise ConnectionEnded(f"it was lost before others held round {saved.round}")
            if loop.time() > deadline_s:
                raise RequestFailed(f"waited {COMPLETE_TIMEOUT_S:.0f} s for round {saved.round}")
            emit(Waiting(reason=f"round {saved.round}, after which the state of {donor.name} was read"))
            await asyncio.sleep(POLL_S)
        own = self._chains.get(saved.round) or self._rounds.chain_after(saved.round)
        if own != saved.chain:
            raise _NotKeptError(f"round {saved.round} is not there what it is here")

    @property
    def carried_bytes(self) -> int:
        """The chunks that this device has passed on while it joins."""
        return self._host.carried_bytes

    @property
    def hold_others_up(self) -> bool:
        """All members wait for the learner: no more rounds can be kept for it (R5, M1), or none has begun."""
        return self._rounds.hold_others_up or self._host.giver is not None

    def round_complete(self, round_: int) -> None:
        """The next round is complete here."""
        if self._pace is not None:
            self._pace.round_complete()
        if self._chains:
            self._note_chain(round_)

    def _note_chain(self, round_: int) -> None:
        self._chains[round_] = self._rounds.chain_after(round_)

    def ready(self) -> None:
        """The learner holds the state: it is taken in with the next generation."""
        self._host.loaded(self, self._round)
