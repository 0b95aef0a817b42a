"""What members that lack rounds, or bring no history, ask of this one: rounds, their bytes, where to begin (G4, J1)."""

import asyncio
from typing import Protocol

from meshtraind.rounds.catchup import HeldRounds, answer_catch_up, answer_fetch_round
from meshtraind.transport.requests import RequestFailed
from meshwire.message_base import Wire
from meshwire.messages.generation import AskModel, CatchUp, FetchRound, Model, PathStep

GO_BACK_TIMEOUT_S = 5.0  # until the source of a saved state has gone back to it
GO_BACK_POLL_S = 0.02

AskedOfHistory = CatchUp | FetchRound | AskModel


class PromisedPath(Protocol):
    """Where this member is among the generations. `MembershipDriver` knows."""

    @property
    def path(self) -> tuple[PathStep, ...]:
        """What its history has gone through."""

    def promised(self, generation: int) -> bool:
        """Whether the generation with this hash is the newest that it has promised."""


class HistoryOwner(Protocol):
    """Whoever has the history of a job on this device."""

    @property
    def rounds(self) -> HeldRounds | None:
        """None while this member brings no history."""

    @property
    def generations(self) -> PromisedPath | None:
        """None before it takes part in any."""

    @property
    def barrier_passed(self) -> int:
        """The newest that all have passed."""

    def model(self) -> Model:
        """That is trained, once there are rounds."""


class HistorySource:
    """Answers them.

    Args:
        name: of this device.
        job: its id.
    """

    def __init__(self, name: str, job: str, owner: HistoryOwner) -> None:
        self._name = name
        self._job = job
        self._owner = owner

    async def answer(self, body: AskedOfHistory) -> Wire:
        """Raises RequestFailed."""
        if isinstance(body, CatchUp) and body.complete is None and body.cut is not None:
            await self._at_cut(body.cut)
        rounds, generations = self._owner.rounds, self._owner.generations
        if rounds is None:
            raise RequestFailed(f"{self._name} has no history of job {self._job}")
        match body:
            case CatchUp():
                begins_at_cut = body.complete is None  # and a later one has another deal of samples
                if begins_at_cut and (generations is None or not generations.promised(body.generation)):
                    raise RequestFailed(f"{self._name} has promised another generation meanwhile")
                path = () if generations is None else generations.path
                return answer_catch_up(rounds, body, self._owner.barrier_passed, path)
            case FetchRound():
                return answer_fetch_round(rounds, body)
            case AskModel():
                return self._owner.model()

    async def _at_cut(self, cut: int) -> None:
        """Where all go back to a state of this member, who asks may be quicker. Raises RequestFailed."""
        loop, owner = asyncio.get_running_loop(), self._owner
        deadline_s = loop.time() + GO_BACK_TIMEOUT_S
        while owner.rounds is not None and owner.rounds.complete > cut and loop.time() < deadline_s:
            await asyncio.sleep(GO_BACK_POLL_S)
        if owner.rounds is not None and owner.rounds.complete != cut:
            raise RequestFailed(f"{self._name} is at round {owner.rounds.complete}, not {cut}")
