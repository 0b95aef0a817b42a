"""What a learner that joins a running job asks for: the job's model, and a state to begin from (J1, J3).

The counterpart of `Preparation`, which serves the learners that begin a job together.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from meshtraind.storage.background_pacing import Pacer
from meshtraind.storage.fetch import Pace
from meshtraind.transport.connection import Emit
from meshtraind.transport.messenger import Messenger
from meshtraind.transport.requests import ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.messages.generation import AskState, SavedState
from meshwire.messages.job import BlobRef
from meshwire.messages.learner import LearnerModel, LearnerState, StateTask, Waiting
from meshwire.model.manifest import ModelManifest, first_difference

if TYPE_CHECKING:
    from meshtraind.rounds.driver import Rounds

STATE_TIMEOUT_S = 600.0  # a donor's learner may be in the middle of a long step or of an evaluation
DONOR_TIMEOUT_S = 60.0  # for one to be linked
COMPLETE_TIMEOUT_S = 600.0
POLL_S = 0.2


class _NotKeptError(RequestFailed):
    """A state whose newest round is not on the history that is kept."""


class _NotNowError(RequestFailed):
    """A member has no state to give, yet."""


class JoiningHost(Protocol):
    """Whoever has a learner join: from whom it may get a state, and who hears that it has. `MembershipHost` is one."""

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

    def loaded(self, joining: "JoinRequests", round_: int) -> None:
        """The learner holds the base after this round."""


class ArrivingStates(Protocol):
    """Where a state comes to lie that a learner loads. `meshtraind.storage.state_transfer.StateFiles` is one."""

    @property
    def folder(self) -> Path:
        """Where the learner reads it."""

    async def fetch(self, units: Sequence[BlobRef], donor: Messenger, emit: Emit, pace: Pace) -> None:
        """Gets a state that the donor lends. Raises BlobError, RequestFailed, ConnectionEnded, TimeoutError."""

    async def lay_out(self, units: Sequence[BlobRef]) -> None:
        """Puts a state there that lies on this device already. Raises BlobError."""


class JoinRequests:
    """Answers what a learner asks for that comes into a job that runs: the model, then a state of a member.

    Every method raises RequestFailed with a text for the script.

    Args:
        job: its id.
        manifest: the model that the others train.
        kept: the learner of before has left the base after this round in memory (J3).
    """

    def __init__(
        self,
        job: str,
        rounds: "Rounds",
        manifest: ModelManifest,
        host: JoiningHost,
        states: ArrivingStates,
        kept: int | None = None,
    ) -> None:
        self._job = job
        self._rounds = rounds
        self._manifest = manifest
        self._host = host
        self._states = states
        self._kept = kept
        self._told_kept = False
        self._round = 0
        self._pace: Pacer | None = None  # while a state is on its way
        # Of the rounds since a state was asked for: what comes must be the base of one.
        self._chains: dict[int, bytes | None] = {}

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
        difference = first_difference(self._manifest, body.manifest)
        if difference is not None:
            raise RequestFailed(f"the model of this peer is not the one that the others train: {difference}")
        if body.samples != self._rounds.sample_space:
            raise RequestFailed(f"the loader reads {body.samples}, the others' {self._rounds.sample_space}")

    async def state(self, body: LearnerState, emit: Emit) -> StateTask:
        """Gets a state of what is complete now, or later, from a member that computes, if memory holds none."""
        if self._kept is not None:
            self._told_kept = True
            self._round = self._kept
            units = tuple(range(len(body.units)))
            return StateTask(units=units, folder=str(self._states.folder), write=False, round=self._kept, kept=True)
        after_round = self._rounds.learner.loads()
        asked = AskState(job=self._job, after_round=after_round)
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
                    asked = AskState(job=self._job, after_round=self._rounds.learner.loads_anew())
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
            saved = await donor.request(asked, timeout_s=STATE_TIMEOUT_S, name=f"state of {donor.name}")
        except RequestFailed as error:
            raise _NotNowError(str(error)) from None
        if not isinstance(saved, SavedState):
            raise RequestFailed(f"it answered with {type(saved).__name__}")
        if saved.round < asked.after_round:
            raise RequestFailed(f"it offers the state after round {saved.round}, not after {asked.after_round}")
        if len(saved.units) != units:
            raise RequestFailed(f"it has {len(saved.units)} units of state, this peer {units}")
        await self._check_history(saved, donor, emit)
        self._pace = Pacer(self)
        try:
            await self._states.fetch(saved.units, donor, emit, self._pace)
        finally:
            self._pace = None
        return self._task(saved)

    def _task(self, saved: SavedState) -> StateTask:
        self._round = saved.round
        self._chains.clear()
        units = tuple(range(len(saved.units)))
        return StateTask(units=units, folder=str(self._states.folder), write=False, round=saved.round)

    async def _load_own(self, asked: AskState, units: int) -> StateTask | None:
        """From what is on this disk; None: there is nothing of the history that is kept."""
        try:
            saved = await self._host.own_state(asked)
        except RequestFailed:
            return None
        if len(saved.units) != units or self._rounds.chain_after(saved.round) != saved.chain:
            return None
        await self._states.lay_out(saved.units)
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
        """No more rounds can be kept for the learner: all members wait for it (R5, M1)."""
        return self._rounds.hold_others_up

    def round_complete(self, round_: int) -> None:
        """The next round is complete here."""
        if self._pace is not None:
            self._pace.round_complete()
        if self._chains:
            self._note_chain(round_)

    def _note_chain(self, round_: int) -> None:
        self._chains[round_] = self._rounds.chain_after(round_)

    async def ready(self, emit: Emit) -> None:
        """The learner holds the state: it is taken in with the next generation."""
        self._host.loaded(self, self._round)
