"""G4: how a member that lacks rounds, or brings no history, gets what it needs from the source of a generation."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from meshtraind.rounds.history import Entry
from meshtraind.transport.messenger import Messenger
from meshtraind.transport.requests import RequestFailed
from meshwire import limits
from meshwire.messages.generation import (
    AskModel,
    CatchUp,
    CaughtUp,
    DealState,
    Enter,
    FetchRound,
    Model,
    PathStep,
    ServedRound,
    Standing,
)
from meshwire.messages.job import Fetched
from meshwire.messages.learner import SampleSpace
from meshwire.sync_modes.settings_changes import SettingsChanges

REQUEST_TIMEOUT_S = 10.0
ROUNDS_AT_ONCE = 8  # all others wait, and one after the other each would cost them a round trip


class FalseRoundError(RequestFailed):
    """The source of a generation serves what is no round: it broke the protocol (G10)."""


class RoundBytes(Protocol):
    """A complete round as it is served. `meshtraind.contributions.results.EncodedRound` is one."""

    @property
    def size_bytes(self) -> int:
        """How long its bytes are, all together."""

    def read(self, offset_bytes: int, max_bytes: int) -> bytes:
        """A piece; shorter, or empty, where it ends."""


class RoundsAtCut(Protocol):
    """The rounds of one job while a generation changes, as `GenerationChange` leads them."""

    @property
    def deal(self) -> DealState | None:
        """What the ledger of samples held at the cut."""

    @property
    def samples(self) -> int:
        """In the rounds up to the cut."""

    def standing(self) -> Standing:
        """What is held here."""

    def take_changes(self, changes: SettingsChanges) -> None:
        """C3: which rounds of the history that is kept go by which settings."""

    def served_after(self, complete: int) -> tuple[ServedRound, ...]:
        """The next rounds after `complete`. Raises KeyError when they are gone."""

    def encoded(self, round_: int) -> RoundBytes:
        """A complete round's bytes. Raises KeyError when they are gone."""

    def place_for(self, served: ServedRound) -> memoryview:
        """Where the bytes of a round that is lacking are to be put. Raises FalseRoundError."""

    def take_served(self, served: ServedRound) -> None:
        """A round whose bytes lie in their place. Raises FalseRoundError."""


class HeldRounds(Protocol):
    """The rounds of one job that a member holds, as far as others catch up with them."""

    @property
    def complete(self) -> int:
        """The newest."""

    @property
    def sample_space(self) -> SampleSpace | None:
        """What the prepared loaders read."""

    @property
    def crossing(self) -> RoundsAtCut:
        """What is asked of them while a generation changes."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a member without history begins from, as the source of a generation has told it."""

    model: Model
    samples: SampleSpace | None
    entry: Entry
    barrier: int
    """The newest that all have passed."""
    path: tuple[PathStep, ...] = ()
    """What the history of the cut has gone through."""


async def fetch_rounds(rounds: HeldRounds, source: Messenger, job: str, enter: Enter) -> None:
    """Takes every round up to the cut that this member lacks. Raises RequestFailed, ConnectionEnded, TimeoutError."""
    rounds.crossing.take_changes(enter.changes)
    while rounds.complete < enter.cut:
        before = rounds.complete
        asked = CatchUp(job=job, generation=enter.generation, complete=before, cut=enter.cut)
        reply = await source.request(asked, timeout_s=REQUEST_TIMEOUT_S, name=f"rounds after {before}")
        if not isinstance(reply, CaughtUp):
            raise RequestFailed(f"the source answered with {type(reply).__name__}")
        for number, served in enumerate(reply.rounds, start=before + 1):
            if served.round != number or number > enter.cut:
                raise FalseRoundError(
                    f"the source served round {served.round} after round {number - 1}, and the cut is {enter.cut}"
                )
        for first in range(0, len(reply.rounds), ROUNDS_AT_ONCE):
            await _fetch_together(rounds, reply.rounds[first : first + ROUNDS_AT_ONCE], source, job)
        if rounds.complete == before:
            raise RequestFailed(f"the source does not hold round {before + 1} any more")
    if rounds.crossing.standing().chains[-1] != enter.chain:
        raise RequestFailed(f"the rounds up to {enter.cut} are not those that the others hold")


async def _fetch_together(rounds: HeldRounds, served: Sequence[ServedRound], source: Messenger, job: str) -> None:
    """They are on their way at the same time, and taken in order; those before one that does not come are kept."""
    places = [(each, rounds.crossing.place_for(each)) for each in served if not each.void]
    coming = [_fetch_bytes(place, each, source, job) for each, place in places]
    came = await asyncio.gather(*coming, return_exceptions=True)
    failed = {each.round: error for (each, _), error in zip(places, came, strict=True) if error is not None}
    for each in served:
        if each.round in failed:
            raise failed[each.round]
        rounds.crossing.take_served(each)


async def _fetch_bytes(area: memoryview, served: ServedRound, source: Messenger, job: str) -> None:
    for offset in range(0, len(area), limits.FETCH_BYTES_MAX):
        size_bytes = min(limits.FETCH_BYTES_MAX, len(area) - offset)
        piece = FetchRound(job=job, round=served.round, offset_bytes=offset, max_bytes=size_bytes)
        reply = await source.request(piece, timeout_s=REQUEST_TIMEOUT_S, name=f"bytes of round {served.round}")
        if not isinstance(reply, Fetched) or len(reply.data) != size_bytes:
            raise RequestFailed(f"the source sent no {size_bytes} bytes of round {served.round}")
        area[offset : offset + size_bytes] = reply.data


async def fetch_beginning(source: Messenger, job: str, enter: Enter, *, from_start: bool = False) -> Beginning:
    """What a member needs to take part from the cut on. `from_start`: that is where the job begins.

    Raises RequestFailed, ConnectionEnded, TimeoutError.
    """
    model = await source.request(AskModel(job=job), timeout_s=REQUEST_TIMEOUT_S, name="the job's model")
    asked = CatchUp(job=job, generation=enter.generation, complete=None, cut=enter.cut)
    reply = await source.request(asked, timeout_s=REQUEST_TIMEOUT_S, name="the deal of samples")
    if not isinstance(model, Model) or not isinstance(reply, CaughtUp):
        raise RequestFailed(f"the source answered with {type(model).__name__} and {type(reply).__name__}")
    anew = enter.way == "back" or bool(enter.awaited) or from_start
    entry = Entry(enter.cut, enter.chain, reply.seen, reply.deal, enter.counted, enter.learning, anew, enter.changes)
    return Beginning(model, reply.samples, entry, reply.barrier, reply.path)


def answer_catch_up(rounds: HeldRounds, body: CatchUp, barrier: int, path: tuple[PathStep, ...]) -> CaughtUp:
    """The source's side. Raises RequestFailed when it cannot serve."""
    if body.complete is None:
        return CaughtUp(
            rounds=(),
            samples=rounds.sample_space,
            deal=rounds.crossing.deal,
            seen=rounds.crossing.samples,
            barrier=barrier,
            path=path,
        )
    try:
        return CaughtUp(rounds=rounds.crossing.served_after(body.complete))
    except KeyError as error:
        raise RequestFailed(f"round {error} is not kept here any more") from None


def answer_fetch_round(rounds: HeldRounds, body: FetchRound) -> Fetched:
    """Bytes of a complete round. Raises RequestFailed when they are gone."""
    try:
        held = rounds.crossing.encoded(body.round)
    except KeyError:
        raise RequestFailed(f"round {body.round} is not kept here any more") from None
    data = held.read(body.offset_bytes, body.max_bytes)
    return Fetched(data=data, total_bytes=held.size_bytes, end=body.offset_bytes + len(data) >= held.size_bytes)
