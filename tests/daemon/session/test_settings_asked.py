"""C3: a person asks a session for other settings: what is refused and how, what is waited for, and that a wish which
came to nothing is taken back."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.session import session as session_module
from meshtraind.session.session import JobSession
from meshtraind.storage.job_record import Job
from meshtraind.transport.connection import RequestFailed
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.settings_changes import (
    SettingsChange,
    SettingsChanges,
    SettingsInForce,
    SettingsWish,
    newest_codec,
    newest_sync,
)

JOB = "0" * 11 + "1"


class Passage:
    """The members, who agree with the `agrees`-th look, or never."""

    rounds: Any = "some"
    computes_somewhere = True
    manifest = SimpleNamespace(several_optimizers=False)

    def __init__(self, agrees: int = 1000) -> None:
        self.wishes: list[SettingsWish | None] = []
        self.left = agrees

    def ask_settings(self, wish: SettingsWish | None) -> None:
        self.wishes.append(wish)

    @property
    def asks_settings(self) -> bool:
        self.left -= 1
        return self.left > 0


class Record:
    """What a session reads of its job."""

    ending = False
    waiting = "bert to enter generation 2"

    def __init__(self, sync: str = "local:8", codec: str = "fp32", changes: SettingsChanges = ()) -> None:
        self.spec = SimpleNamespace(job=JOB, sync=sync_settings(sync), codec=codec, topology=None)
        self.changes = changes

    def in_force(self) -> SettingsInForce:
        return SettingsInForce(
            codec=newest_codec(self.spec.codec, self.changes), period=newest_sync(self.spec.sync, self.changes).period
        )

    async def news(self, _timeout_s: float) -> None:
        await asyncio.sleep(0)


def session_of(record: Record, passage: Passage) -> JobSession:
    session = JobSession.__new__(JobSession)
    session.job = cast(Job, record)
    session.passage = cast(Any, passage)
    session._changing = False
    return session


@pytest.mark.parametrize(
    ("sync", "wish", "told"),
    [
        ("local:8", SettingsWish(), "nothing is named that is to change"),
        ("bsp", SettingsWish(period=4), "with --sync bsp each step is a round.*--sync local:4.*muloco:H and sma:H"),
        ("ssp:2", SettingsWish(period=4), "with --sync ssp:2 each step is a round"),
        ("diloco:8,stream=4", SettingsWish(period=6), "use a multiple of 4 from 4 on"),
        ("diloco:8,stream=4,tau=2", SettingsWish(period=4), "use a multiple of 4 from 8 on"),
        ("local:8,ssp:1", SettingsWish(period=1), "periods from 2 to 500"),
        ("local:1,ssp:1", SettingsWish(period=2), "periods of 1 alone"),
        ("local:8,stream=4,random", SettingsWish(codec="topk:0.1"), "other values travel in every round: use fp32, "),
        ("local:8,stream=4,random", SettingsWish(codec="onebit", period=4), "other values travel in every round"),
        ("sma:4", SettingsWish(codec="onebit"), "use fp32, fp16, bf16, int8 or int4, or --sync local:4"),
        ("local:8", SettingsWish(codec="powersgd"), "takes a new job"),
        ("local:8", SettingsWish(codec="dgc"), "takes a new job"),
        ("local:8", SettingsWish(codec="zip"), "there is no codec"),
        ("sparseloco:8", SettingsWish(codec="int8"), "takes a new job"),
        ("local:8", SettingsWish(period=8), "go by --period 8 already"),
        ("local:8", SettingsWish(codec="fp32", period=8), "go by --codec fp32 --period 8 already"),
    ],
)
@pytest.mark.asyncio
async def test_what_cannot_change_is_refused_with_what_can(sync: str, wish: SettingsWish, told: str) -> None:
    passage = Passage()
    codec = "topk:0.015625,chunk=4096,senders,decay=0.95+2bit" if sync.startswith("sparse") else "fp32"
    with pytest.raises(RequestFailed, match=told):
        await session_of(Record(sync, codec), passage).change_settings(wish)
    assert not passage.wishes, "nobody is asked"


@pytest.mark.asyncio
async def test_where_optimizers_take_turns_nothing_is_left_for_a_later_round() -> None:
    """O11: it would be sent in the other one's round, and be lost."""
    passage = Passage()
    passage.manifest = SimpleNamespace(several_optimizers=True)
    with pytest.raises(RequestFailed, match=r"--codec topk:0\.1 with several optimizers.*fp32, fp16 or bf16"):
        await session_of(Record("bsp"), passage).change_settings(SettingsWish(codec="topk:0.1"))
    assert not passage.wishes
    record, agreed = Record("bsp"), Passage(agrees=3)
    agreed.manifest = passage.manifest

    async def news(_timeout_s: float) -> None:
        record.changes = (SettingsChange(first=7, codec="fp16", period=None),)

    record.news = news  # type: ignore[method-assign]
    await session_of(record, agreed).change_settings(SettingsWish(codec="fp16"))
    assert agreed.wishes == [SettingsWish(codec="fp16"), None]


@pytest.mark.asyncio
async def test_where_no_rounds_go_on_or_another_change_is_on_its_way_it_is_said() -> None:
    wish = SettingsWish(period=4)
    for change in ({"rounds": None}, {"computes_somewhere": False}):
        passage = Passage()
        vars(passage).update(change)
        with pytest.raises(RequestFailed, match="has no rounds now: ask again when its learners compute"):
            await session_of(Record(), passage).change_settings(wish)
    record = Record()
    record.ending = True
    with pytest.raises(RequestFailed, match="has no rounds now"):
        await session_of(record, Passage()).change_settings(wish)
    busy = session_of(Record(), Passage())
    busy._changing = True
    with pytest.raises(RequestFailed, match="is about to go over to other settings: ask again in a moment"):
        await busy.change_settings(wish)


@pytest.mark.parametrize("sync", ["local:8", "sma:8", "diloco:8,stream=4", "diloco:8,stream=4,tau=2"])
@pytest.mark.asyncio
async def test_when_all_have_agreed_it_is_told_from_which_round_on(sync: str) -> None:
    passage, record = Passage(agrees=3), Record(sync)

    async def news(_timeout_s: float) -> None:
        record.changes = (SettingsChange(first=7, codec="int8", period=16),)

    record.news = news  # type: ignore[method-assign]
    taken = await session_of(record, passage).change_settings(SettingsWish(codec="int8", period=16))
    assert (taken.first, taken.now, taken.before) == (
        7,
        SettingsInForce(codec="int8", period=16),
        SettingsInForce(codec="fp32", period=8),
    )
    assert passage.wishes == [SettingsWish(codec="int8", period=16), None]


@pytest.mark.parametrize("how", ["others", "time", "end"])
@pytest.mark.asyncio
async def test_a_wish_that_comes_to_nothing_is_taken_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be proposed for ever, and come long after its person was told that it does not."""
    monkeypatch.setattr(session_module, "CHANGE_TIMEOUT_S", 0.05)
    record = Record(changes=(SettingsChange(first=3, codec="int4"),))
    passage = Passage(agrees=2 if how == "others" else 1_000_000)
    session = session_of(record, passage)
    told = {
        "others": "has gone over to other settings meanwhile: ask again",
        "time": "have not agreed within 0 s: it waits for bert to enter generation 2",
        "end": "has ended before its members had agreed",
    }[how]

    async def news(_timeout_s: float) -> None:
        record.ending = how == "end"
        await asyncio.sleep(0)

    record.news = news  # type: ignore[method-assign]
    with pytest.raises(RequestFailed, match=told):
        await session.change_settings(SettingsWish(codec="int8", period=16))
    assert passage.wishes == [SettingsWish(codec="int8", period=16), None]
    assert not session._changing
