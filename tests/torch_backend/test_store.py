"""The job's store (P3), and what a daemon's relay lets through (P1, P4)."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.process_group.relay import GroupRelay
from meshtraind.process_group.store import KeyValueStore
from meshtraind.transport.requests import RequestFailed
from meshwire import limits
from meshwire.frames.header import GROUP_BREAKS, GROUP_ENDS, Header, Kind
from meshwire.messages.group import GroupBegin, MemberLost, StoreAnswer, StoreAsk
from meshwire.messages.job import Member
from tests.torch_backend.specs import SPEC


def ask(op: str, *keys: str, **fields: Any) -> StoreAsk:
    return StoreAsk(job=SPEC.job, op=cast(Any, op), keys=keys, **fields)


@pytest.mark.asyncio
async def test_a_store_does_what_torchs_do() -> None:
    store = KeyValueStore()
    await store.answer(ask("set", "a", value=b"1"))
    assert (await store.answer(ask("get", "a"))).values == (b"1",)
    assert (await store.answer(ask("add", "a", amount=41))).number == 42
    assert (await store.answer(ask("add", "new", amount=-1))).number == -1
    await store.answer(ask("append", "a", value=b"0"))
    assert (await store.answer(ask("get", "a", "new"))).values == (b"420", b"-1")
    assert (await store.answer(ask("compare_set", "a", expected=b"x", value=b"y"))).values == (b"420",)
    assert (await store.answer(ask("compare_set", "a", expected=b"420", value=b"y"))).values == (b"y",)
    assert (await store.answer(ask("compare_set", "b", expected=b"x", value=b"y"))).values == (b"x",)
    assert (await store.answer(ask("compare_set", "b", value=b"z"))).values == (b"z",)
    assert (await store.answer(ask("check", "a", "b"))).number == 1
    assert (await store.answer(ask("check", "a", "c"))).number == 0
    assert (await store.answer(ask("count"))).number == 3
    assert [(await store.answer(ask("delete", "b"))).number for _ in range(2)] == [1, 0]
    with pytest.raises(RequestFailed, match="'a' is no number"):
        await store.answer(ask("add", "a", amount=1))
    with pytest.raises(RequestFailed, match="set of 0 keys"):
        await store.answer(ask("set"))


@pytest.mark.asyncio
async def test_who_waits_for_a_key_gets_it_or_is_told_which_is_missing() -> None:
    store = KeyValueStore()
    waiting = asyncio.gather(*(store.answer(ask("wait", "a", "b", timeout_s=5.0)) for _ in range(3)))
    await asyncio.sleep(0)
    await store.answer(ask("set", "a"))
    await store.answer(ask("set", "b"))
    assert await waiting == [StoreAnswer()] * 3
    with pytest.raises(RequestFailed, match=r"nobody has set c in the job's store within 0.01 s"):
        await store.answer(ask("get", "a", "c", timeout_s=0.01))
    late = asyncio.gather(store.answer(ask("wait", "c", timeout_s=5.0)), return_exceptions=True)
    await asyncio.sleep(0)
    store.close()
    (error,) = await late
    assert "the job has ended" in str(error)


@pytest.mark.asyncio
async def test_a_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STORE_BYTES_MAX", 100)
    store = KeyValueStore()
    await store.answer(ask("set", "a", value=bytes(90)))
    with pytest.raises(RequestFailed, match="store is full"):
        await store.answer(ask("set", "b", value=bytes(20)))
    await store.answer(ask("set", "a", value=b""))
    await store.answer(ask("set", "b", value=bytes(20)))


class End:
    """A link, or a learner's connection."""

    def __init__(self) -> None:
        self.writable = True
        self.closing = False
        self.sent: list[tuple[Header, bytes]] = []
        self.told: list[Any] = []
        self.wake: Any = None

    def on_writable(self, callback: Any) -> Any:
        self.wake = callback
        return lambda: None

    def send_chunk(self, header: Header, payload: memoryview | None) -> None:
        self.sent.append((header, bytes(payload or b"")))

    def notify(self, body: Any) -> None:
        self.told.append(body)

    def close(self, reason: str) -> None:
        self.closing = True


class Desk:
    """The relay of rank 0 of three, with its learner attached."""

    def __init__(self) -> None:
        members = tuple(Member(device=f"{rank:064x}", incarnation=1, name=f"n{rank}") for rank in range(3))
        self.job = SimpleNamespace(spec=SPEC, rank=0, members=members, ending=False)
        self.links = {1: End(), 2: End()}
        self.learner = End()
        self.relay = GroupRelay(cast(Any, self.job), cast(Any, self.links))

    def attach(self) -> None:
        self.relay.attach(cast(Any, self.learner))
        self.relay.begin(GroupBegin(instance=5))

    def say(self, rank: int, payload: bytes) -> str | None:
        header = Header(Kind.RELAYED, len(payload), job=1, round=5, contributors=1 << rank)
        place = self.relay.announced_by_learner(header)
        if isinstance(place, str):
            return place
        place[:] = payload
        self.relay.received_from_learner(header)
        return None

    def hear(self, rank: int, payload: bytes, step: int = 0) -> str | None:
        header = Header(Kind.RELAYED, len(payload), job=1, round=5, step=step)
        place = self.relay.announced(rank, header)
        if place is None or isinstance(place, str):
            return place
        place[:] = payload
        self.relay.received(rank, header)
        return None


def test_frames_reach_whom_they_are_for_in_order() -> None:
    desk = Desk()
    assert desk.hear(2, b"early") is None, "before the learner here has called"
    desk.attach()
    desk.links[1].writable = False
    for payload in (b"a", b"b"):
        assert desk.say(1, payload) is None
    assert desk.say(2, b"c") is None
    assert [payload for _, payload in desk.links[2].sent] == [b"c"]
    assert not desk.links[1].sent
    desk.links[1].writable = True
    desk.links[1].wake()
    assert [payload for _, payload in desk.links[1].sent] == [b"a", b"b"]
    desk.hear(1, b"d")
    assert [(header.contributors, payload) for header, payload in desk.learner.sent] == [(4, b"early"), (2, b"d")]


@pytest.mark.parametrize("ranks", [0, 1, 0b110, 0b1000])
def test_a_learner_sends_to_one_other_rank(ranks: int) -> None:
    desk = Desk()
    desk.attach()
    header = Header(Kind.RELAYED, 1, contributors=ranks)
    assert isinstance(desk.relay.announced_by_learner(header), str)
    assert isinstance(desk.relay.announced_by_learner(Header(Kind.CHUNK, 1, contributors=2)), str)


def test_what_nobody_takes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RELAY_QUEUE_BYTES_MAX", 100)
    desk = Desk()
    assert [desk.hear(1, bytes(50)) is None for _ in range(3)] == [True, True, False]
    assert desk.hear(2, bytes(50)) is None, "each rank has its own"
    desk.attach()
    desk.links[1].writable = False
    assert [desk.say(1, bytes(60)) is None for _ in range(3)] == [True, True, False]
    desk.learner.writable = False
    heard = [desk.hear(1, bytes(90)) is None for _ in range(6)]
    assert heard == [True] * 4 + [False] * 2


def test_a_lost_link_and_a_learner_that_leaves_are_told() -> None:
    desk = Desk()
    desk.attach()
    desk.say(1, b"x")
    desk.links[1].closing = True
    desk.relay.link_lost(1, "the connection broke")
    assert desk.learner.told == [MemberLost(rank=1, reason="the connection broke")]
    assert desk.relay.loss == "rank 1 (n1) is gone: the connection broke"
    assert desk.hear(1, b"y") is None
    assert not desk.learner.sent, "nothing more comes from it"
    desk.relay.learner_lost(cast(Any, desk.learner))
    (header, why), *others = desk.links[2].sent
    assert (header.step, header.round, why.decode(), others) == (GROUP_BREAKS, 5, desk.relay.loss, [])
    with pytest.raises(RequestFailed, match=r"rank 1 \(n1\) is gone"):
        desk.relay.attach(cast(Any, End()))


@pytest.mark.parametrize("in_order", [False, True])
def test_who_leaves_behind_another_rank_names_it(in_order: bool) -> None:
    """P4: a third rank may hear of this one first, and would take it for the culprit."""
    desk = Desk()
    desk.attach()
    desk.hear(2, b"its process was lost", GROUP_BREAKS)
    desk.hear(1, b"its script has ended, after rank 2 (n2) had left it", GROUP_ENDS)
    if in_order:
        desk.relay.leaves()
    desk.relay.learner_lost(cast(Any, desk.learner))
    (header, why), *others = desk.links[1].sent
    own = "its script has ended, or destroyed it" if in_order else "its process was lost"
    assert (header.step, others) == (GROUP_ENDS if in_order else GROUP_BREAKS, [])
    assert why.decode() == f"{own}, after rank 2 (n2) had left it: its process was lost"


def test_nothing_comes_before_the_welcome() -> None:
    """Of a process that has ended there may be frames yet, when the next one calls: they are no answer to its call."""
    desk = Desk()
    desk.hear(1, b"before")
    desk.relay.attach(cast(Any, desk.learner))
    desk.hear(2, b"between")
    assert not desk.learner.sent
    desk.relay.begin(GroupBegin(instance=5))
    assert [payload for _, payload in desk.learner.sent] == [b"before", b"between"]


def test_a_script_says_whether_it_survives_losses() -> None:
    """P8: its end is told by the number of its process."""
    desk = Desk()
    desk.attach()
    assert not desk.relay.survives_losses
    desk.relay.begin(GroupBegin(instance=9, survives_losses=True))
    assert desk.relay.survives_losses
    desk.relay.learner_lost(cast(Any, desk.learner))
    assert [header.round for link in desk.links.values() for header, _ in link.sent] == [9, 9]


def test_who_leaves_in_order_says_so_first() -> None:
    """P4: of one that does not, no collective is waited for any more."""
    desk = Desk()
    desk.attach()
    desk.relay.leaves()
    desk.relay.learner_lost(cast(Any, desk.learner))
    assert [header.step for header, _ in desk.links[1].sent] == [GROUP_ENDS]


def test_a_second_connection_is_refused_while_there_is_one() -> None:
    desk = Desk()
    desk.attach()
    with pytest.raises(RequestFailed, match="one rank a device"):
        desk.relay.attach(cast(Any, End()))
