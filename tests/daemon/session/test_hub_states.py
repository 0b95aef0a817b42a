"""H3: whom a hub asks for a state, and which it takes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from meshtraind.recovery.hub_states import HubStates
from meshtraind.storage.blob_writer import BlobError
from meshtraind.transport.requests import ConnectionEnded, RequestFailed
from meshwire.messages.generation import AskState, SavedState
from meshwire.messages.job import BlobRef

JOB = "j" + "0" * 11
CHAIN = bytes(16)
UNIT = BlobRef(sha256=bytes(32), size_bytes=8)
GOOD = SavedState(round=9, chain=CHAIN, units=(UNIT, UNIT))


class Donor:
    """A member that computes, and answers so."""

    def __init__(self, name: str, answer: SavedState | Exception) -> None:
        self.name = name
        self._answer = answer
        self.asked: list[AskState] = []

    async def request(self, body: AskState, *, timeout_s: float, name: str) -> SavedState:
        self.asked.append(body)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Files:
    """Where states come to lie."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.moved: list[int] = []

    async def fetch(self, units: Mapping[int, BlobRef], donor: object, emit: object, pace: object) -> None:
        if self._error is not None:
            raise self._error

    async def move(self, units: int, folder: Path) -> None:
        self.moved.append(units)


class Members:
    def __init__(self, *donors: Donor) -> None:
        self.donors = cast(Any, donors)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "first",
    [
        RequestFailed("its learner is busy"),
        ConnectionEnded("the link has ended"),
        TimeoutError("no answer"),
        GOOD.model_copy(update={"round": 8}),
        GOOD.model_copy(update={"units": ()}),
        GOOD.model_copy(update={"units": (UNIT,), "left_out": (1,)}),
    ],
    ids=["refuses", "is lost", "is silent", "is too old", "is empty", "leaves something out"],
)
async def test_who_gives_no_whole_state_is_followed_by_the_next(first: SavedState | Exception, tmp_path: Path) -> None:
    donors, files = (Donor("anna", first), Donor("bert", GOOD)), Files()
    states = HubStates(JOB, Members(*donors), files)
    saved = await states.save(9, tmp_path)
    assert (saved.round, saved.units) == (9, 2)
    assert [donor.asked for donor in donors] == [[AskState(job=JOB, after_round=9)]] * 2
    await states.bring(CHAIN, tmp_path)
    assert files.moved == [2]
    with pytest.raises(RequestFailed, match="anna"):
        await HubStates(JOB, Members(donors[0]), files).save(9, tmp_path)
    with pytest.raises(RequestFailed, match="no member computes"):
        await HubStates(JOB, Members(), files).save(9, tmp_path)


@pytest.mark.asyncio
async def test_a_state_of_another_history_or_one_that_does_not_come_is_none(tmp_path: Path) -> None:
    """G4, J1: the chain is that of the hub's own rounds."""
    files = Files()
    states = HubStates(JOB, Members(Donor("anna", GOOD)), files)
    await states.save(9, tmp_path)
    with pytest.raises(RequestFailed, match="round 9 of anna is not that of this hub"):
        await states.bring(b"x" * 16, tmp_path)
    assert not files.moved
    for error in (BlobError("no place"), ConnectionEnded("gone"), TimeoutError("late"), OSError("disk")):
        states = HubStates(JOB, Members(Donor("anna", GOOD)), Files(error))
        await states.save(9, tmp_path)
        with pytest.raises(RequestFailed, match=str(error)):
            await states.bring(CHAIN, tmp_path)
