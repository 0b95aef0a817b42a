"""K7: which devices take part in a job: those that are all linked with each other. Who is left out is named."""

import asyncio
import itertools
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtraind.peers import selection
from meshtraind.peers.selection import (
    absences,
    ask_who_is_linked,
    choose_members,
    devices_together,
    hubs_for,
    linked_together,
)
from meshtraind.transport.connection import ConnectionEnded, RequestFailed
from meshwire.message_base import Wire
from meshwire.messages.job import Member
from meshwire.messages.link import AskLinked, LinkedDevices, Software

SOFTWARE = Software(meshtrain="1", python="3.11.1", torch="2.0", system="Linux")
ANNA, BERT, CARL, DORA = ("a" * 64, "b" * 64, "c" * 64, "d" * 64)
NAMES = {ANNA: "anna", BERT: "bert", CARL: "carl", DORA: "dora"}


def all_linked(*devices: str) -> dict[str, set[str]]:
    return {one: set(devices) - {one} for one in devices}


def node(*others: str, hubs: Collection[str] = ()) -> Any:
    """Anna, linked with these."""
    links = {
        device: SimpleNamespace(
            device=device,
            hello=SimpleNamespace(name=NAMES[device], incarnation=1, software=SOFTWARE),
            member=Member(device=device, incarnation=1, name=NAMES[device], hub=device in hubs),
        )
        for device in others
    }
    member = Member(device=ANNA, incarnation=1, name="anna")
    return SimpleNamespace(device=ANNA, member=member, software=SOFTWARE, links=links)


def chosen(found: tuple[tuple[Member, ...], list[str]]) -> list[str]:
    return [member.name for member in found[0]]


def without(linked: dict[str, set[str]], *pairs: tuple[str, str]) -> dict[str, set[str]]:
    for one, other in pairs:
        linked[one].discard(other)
        linked[other].discard(one)
    return linked


def test_who_is_not_linked_with_all_others_is_left_out_and_named() -> None:
    """Carl and dora do not know each other: one of them stays, and the other is told of with what helps."""
    linked = without(all_linked(ANNA, BERT, CARL, DORA), (CARL, DORA))
    members, notes = choose_members(node(BERT, CARL, DORA), (), None, None, linked)
    assert [member.name for member in members] == ["anna", "bert", "carl"]
    (note,) = notes
    assert note.startswith("dora is left out: it has no link to carl: `meshtrain peers` on it says why")


def test_one_that_hardly_anybody_is_linked_with_costs_no_other_its_place() -> None:
    linked = without(all_linked(ANNA, BERT, CARL, DORA), (BERT, CARL), (BERT, DORA))
    assert chosen(choose_members(node(BERT, CARL, DORA), (), None, None, linked)) == ["anna", "carl", "dora"]


def test_of_those_that_are_named_each_must_be_linked_with_all() -> None:
    linked = without(all_linked(ANNA, BERT, CARL), (BERT, CARL))
    with pytest.raises(RequestFailed, match="--on: carl is left out: it has no link to bert"):
        choose_members(node(BERT, CARL), ("bert", "carl"), None, None, linked)
    assert chosen(choose_members(node(BERT, CARL), ("anna", "carl"), None, None, linked)) == ["anna", "carl"]


def test_too_few_say_who_was_left_out() -> None:
    linked = without(all_linked(ANNA, BERT, CARL), (BERT, CARL))
    with pytest.raises(RequestFailed, match=r"only 2 devices .* linked with each other.*carl is left out"):
        choose_members(node(BERT, CARL), (), 3, None, linked)


def test_who_does_not_answer_is_left_out() -> None:
    linked = all_linked(ANNA, BERT)
    members, notes = choose_members(node(BERT, CARL), (), None, None, linked)
    assert [member.name for member in members] == ["anna", "bert"]
    assert notes == ["carl is left out: it did not say within 5 s whom it is linked with; try again"]


@given(st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7))), st.integers(1, 8))
def test_those_that_are_chosen_are_linked_with_each_other_and_nobody_is_left_out_for_nothing(
    missing: set[tuple[int, int]], count: int
) -> None:
    """Whatever links are missing, also those that one end alone has."""
    devices = [f"{number}" for number in range(count)]
    linked = {
        one: {other for other in devices if other != one and (int(one), int(other)) not in missing} for one in devices
    }
    kept, left_out = linked_together(devices, linked)
    assert all(b in linked[a] and a in linked[b] for a, b in itertools.combinations(kept, 2))
    assert set(kept) | set(left_out) == set(devices)
    assert all(left_out.values()), "each is left out for somebody that it has no link with"
    assert list(kept) == sorted(kept)


def test_paired_devices_that_are_away_are_named_with_what_is_known() -> None:
    away = {BERT: "bert", CARL: "carl", DORA: "dora"}
    notes = absences(away, {CARL: "carl speaks wire version 7, anna 6: update meshtrain on anna"})
    assert notes[0] == "carl is left out: carl speaks wire version 7, anna 6: update meshtrain on anna"
    assert notes[1].startswith("left out, for there is no link: bert, dora. ")
    assert len(notes) == 2
    assert absences({}, {}) == []
    many = {f"{number:064x}": f"laptop{number}" for number in range(200)}
    assert "laptop101 and 195 more" in absences(many, {})[0]


@pytest.mark.asyncio
async def test_all_are_asked_at_once_and_a_silent_one_costs_its_deadline_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has answered is linked with this one, whatever it says."""
    monkeypatch.setattr(selection, "ASK_TIMEOUT_S", 0.05)
    everybody = asyncio.Barrier(3)

    def link(answer: Wire | Exception | None) -> Any:
        async def request(body: Wire, *, timeout_s: float, **_: object) -> Wire:
            assert body == AskLinked()
            await everybody.wait()
            if answer is None:
                async with asyncio.timeout(timeout_s):
                    await asyncio.Event().wait()
            if isinstance(answer, Exception):
                raise answer
            assert answer is not None
            return answer

        hello = SimpleNamespace(name="x", incarnation=1, software=SOFTWARE)
        return SimpleNamespace(hello=hello, connection=SimpleNamespace(request=request))

    known = node()
    known.links = {BERT: link(LinkedDevices(devices=(CARL,))), CARL: link(None), DORA: link(ConnectionEnded("gone"))}
    assert await ask_who_is_linked(known) == {ANNA: {BERT}, BERT: {ANNA, CARL}}


@pytest.mark.asyncio
async def test_a_plan_is_for_those_that_submit_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ring order; who has no torch, or lacks a link, is not among them."""
    anna = node(CARL, BERT, DORA)
    anna.links[DORA].hello.software = SOFTWARE.model_copy(update={"torch": None})
    for device, link in anna.links.items():
        link.device = device

    async def linked(_: Any) -> dict[str, set[str]]:
        return all_linked(ANNA, BERT, CARL, DORA)

    monkeypatch.setattr(selection, "ask_who_is_linked", linked)
    assert await devices_together(anna) == (ANNA, BERT, CARL)

    async def apart(_: Any) -> dict[str, set[str]]:
        return without(all_linked(ANNA, BERT, CARL, DORA), (BERT, CARL))

    monkeypatch.setattr(selection, "ask_who_is_linked", apart)
    assert await devices_together(anna) == (ANNA, BERT)
    with_hub = node(BERT, CARL, hubs=[BERT])
    monkeypatch.setattr(selection, "ask_who_is_linked", linked)
    assert await devices_together(with_hub) == (ANNA, CARL, BERT), "hubs stand behind those that train"
    monkeypatch.setattr(selection, "ask_who_is_linked", apart)
    assert await devices_together(with_hub) == (ANNA, CARL)


def test_a_hub_is_none_of_those_that_train_and_stands_behind_them() -> None:
    """H1: neither taken nor counted as a laptop; one that is named comes last, for the scripts' ranks begin at 0."""
    linked = all_linked(ANNA, BERT, CARL)
    here = node(BERT, CARL, hubs={BERT})
    members, _ = choose_members(here, (), None, None, linked)
    assert [member.name for member in members] == ["anna", "carl"]
    with pytest.raises(RequestFailed, match="only 2 devices"):
        choose_members(here, (), 3, None, linked)
    named, _ = choose_members(here, ("bert", "carl", "anna"), None, None, linked)
    assert [(member.name, member.hub) for member in named] == [("carl", False), ("anna", False), ("bert", True)]
    with pytest.raises(RequestFailed, match="which train nothing: name a laptop, too"):
        choose_members(here, ("bert",), None, None, linked)


def test_a_hub_without_torch_is_taken_and_a_laptop_without_is_told_of_hubs() -> None:
    here = node(BERT, CARL, hubs={BERT})
    for device in (BERT, CARL):
        here.links[device].hello.software = SOFTWARE.model_copy(update={"torch": None})
    linked = all_linked(ANNA, BERT, CARL)
    members, notes = choose_members(here, ("anna", "bert"), None, None, linked)
    assert ([member.name for member in members], notes) == (["anna", "bert"], [])
    with pytest.raises(RequestFailed, match=r"carl has no torch: .* let it be a hub: .*meshtrain up --hub"):
        choose_members(here, ("anna", "carl"), None, None, linked)


def test_only_a_hub_that_is_linked_with_all_is_beside_them() -> None:
    """K7"""
    here = node(BERT, CARL, DORA, hubs={CARL, DORA})
    members, _ = choose_members(here, (), None, None, all_linked(ANNA, BERT, CARL, DORA))
    linked = all_linked(ANNA, BERT, CARL, DORA)
    linked[BERT].discard(CARL)
    assert [hub.name for hub in hubs_for(here, members, linked)] == ["dora"]
