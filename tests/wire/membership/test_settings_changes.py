"""C3: a history goes over to other settings in a generation: from which round on, and who may ask for it."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.collectives.strategy import topology_after
from meshwire.limits import SETTINGS_CHANGES_MAX
from meshwire.membership.inputs import SettingsAsked
from meshwire.membership.proposal_checks import change_refusal, changes_wrong, enter_wrong
from meshwire.membership.proposals import enter_message
from meshwire.messages.generation import Enter, Promised, Propose
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.settings_changes import (
    SettingsChange,
    SettingsWish,
    changed,
    codecs_by_round,
    local_steps,
    newest_codec,
    newest_sync,
    told_of,
)
from tests.sim.clusterrounds import job_spec
from tests.wire.membership.test_membership import machine, sent
from tests.wire.membership.test_proposing import JOB, generation, member, standing

INT8 = SettingsChange(first=20, codec="int8")
TO_INT8 = SettingsWish(codec="int8")
NONE = (SettingsChange(first=20, codec="none"),)
POWERSGD = (SettingsChange(first=20, codec="powersgd"),)
SPEC = job_spec(JOB, member(0).device, sync_settings("ssp:2"))


def wish_of(codec: str | None, by: Literal["person", "plan"] = "person") -> SettingsWish | None:
    return None if codec is None else SettingsWish(codec=codec, by=by)


def asking(complete: int, codec: str | None = None, codecs: tuple[SettingsChange, ...] = (), number: int = 1) -> object:
    held = standing(number, complete, linked=(0, 1, 2, 3))
    return held.model_copy(update={"asks": wish_of(codec), "changes": codecs, "ahead": 3})


def enter_by(*standings: object, learning: bool = True) -> Enter:
    proposed = generation(9, tuple(range(len(standings))))
    proposed = proposed if learning else proposed.model_copy(update={"learning": ()})
    return enter_message(proposed, dict(enumerate(standings)), 0)  # type: ignore[arg-type]


def test_a_change_begins_above_all_that_may_be_bound() -> None:
    """R1: with the cut at 12 and a bound of 2 a member has bound round 15 at most, before it enters."""
    assert enter_by(asking(12), asking(11, "int8")).changes == (SettingsChange(first=16, codec="int8"),)


def test_of_several_who_ask_the_lowest_rank_is_heard() -> None:
    """And the others ask again."""
    assert [change.codec for change in enter_by(asking(3, "fp16"), asking(3, "int8")).changes] == ["fp16"]


def test_a_person_is_heard_before_the_plan() -> None:
    """Whatever their ranks; and it is told who has asked."""
    planned = asking(3).model_copy(update={"asks": wish_of("fp16", "plan")})  # type: ignore[attr-defined]
    assert enter_by(planned, asking(3, "int8")).changes == (SettingsChange(first=7, codec="int8"),)
    assert enter_by(planned, asking(3)).changes == (SettingsChange(first=7, codec="fp16", by="plan"),)


def test_nothing_changes_while_no_learner_computes() -> None:
    """All may have to go back then, and nothing says how far."""
    assert enter_by(asking(12, "int8"), asking(12), learning=False).changes == ()


def test_the_changes_of_the_history_that_is_kept_are_kept() -> None:
    """G4: not those of a member that comes over to it."""
    ahead, apart = asking(18, codecs=(INT8,), number=2), asking(18, codecs=(SettingsChange(first=9, codec="fp16"),))
    assert enter_by(apart, ahead).changes == (INT8,)


def test_who_is_told_to_change_what_it_may_have_bound_does_not_enter() -> None:
    """G6: its part in that round is encoded as it was."""
    held = asking(12)
    enter = enter_by(held, asking(12, "int8"))
    sooner = enter.model_copy(update={"changes": (SettingsChange(first=15, codec="int8"),)})
    assert enter_wrong(enter, generation(9, (0, 1)), 0, held) is None  # type: ignore[arg-type]
    assert "may have bound" in (enter_wrong(sooner, generation(9, (0, 1)), 0, held) or "")  # type: ignore[arg-type]


CHANGES = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["fp32", "int8", "topk"]) | st.none()), max_size=30)


@given(CHANGES, st.integers(1, 4))
def test_rounds_that_may_be_bound_keep_their_codec_through_all_changes(
    changes: list[tuple[int, str | None]], ahead: int
) -> None:
    """C1; and however often is asked for another one, no more is told than a message holds."""
    codecs: tuple[SettingsChange, ...] = ()
    cut = 0

    def codec(number: int) -> str:
        return newest_codec("first", [change for change in codecs if change.first <= number])

    for rounds, asked in changes:
        cut += rounds
        before = {number: codec(number) for number in range(cut + 1, cut + ahead + 1)}
        codecs = changed(codecs, cut, ahead, wish_of(asked))
        assert {number: codec(number) for number in before} == before
        assert asked is None or newest_codec("first", codecs) == asked
        assert len(codecs) <= min(ahead + 2, SETTINGS_CHANGES_MAX)
        assert [change.first for change in codecs] == sorted({change.first for change in codecs})


def test_who_is_asked_proposes_until_it_is_done() -> None:
    """A person's word to one member is enough, and is not heard twice."""
    one = machine(0)
    (_, propose), *_ = sent(one.handle(SettingsAsked(SettingsWish(codec="int8")), 1.0), Propose)
    assert propose.generation.number == 2
    assert one.why_proposed == "peer0 asks for --codec int8"
    other = machine(0)
    assert not sent(other.handle(SettingsAsked(None), 1.0), Propose)


def test_codecs_that_build_on_their_own_rounds_are_refused_by_name() -> None:
    """C3: there is nothing that others could go on from, or that would be sent once. All others go over."""
    refused = {name for name in FAMILIES if change_refusal(SPEC, SettingsWish(codec=name)) is not None}
    assert refused == {"dgc", "powersgd", "lgc"}
    for typed in ("powersgd", "topk:decay=0.9"):
        assert "takes a new job" in (
            change_refusal(SPEC.model_copy(update={"codec": typed}), SettingsWish(codec="int8")) or ""
        )
    assert "there is no codec" in (change_refusal(SPEC, SettingsWish(codec="none")) or "")
    over_tree = SPEC.model_copy(update={"topology": "tree"})
    assert "--topology tree is not for --codec int8" in (change_refusal(over_tree, SettingsWish(codec="int8")) or "")
    sparse = SPEC.model_copy(update={"sync": sync_settings("demo"), "codec": "dct"})
    assert change_refusal(sparse, SettingsWish(codec="int8")) is not None


def test_the_usual_topology_of_one_codec_becomes_that_of_the_next() -> None:
    """And one that was chosen stays where it can."""
    fp32, int8 = parse_codec("fp32"), parse_codec("int8")
    assert topology_after("ring", fp32, int8) == topology_after(None, fp32, int8) == "sharded"
    assert topology_after("star:2", fp32, int8) == "star:2"
    assert topology_after("sharded:0,1", int8, fp32) == "sharded:0,1"


def test_a_proposer_that_makes_rounds_travel_in_no_codec_breaks_the_rules() -> None:
    """G10: it is refused before anything is made of it."""
    enter = enter_by(asking(12), asking(12, "int8"))
    assert changes_wrong(enter, SPEC) is None
    for codecs in (
        (INT8, INT8),
        (SettingsChange(first=20, codec="none"),),
        (SettingsChange(first=20, codec="powersgd"),),
    ):
        assert changes_wrong(enter.model_copy(update={"changes": codecs}), SPEC) is not None
    for held in (asking(12, "none"), asking(12, "powersgd"), asking(12, codecs=(INT8, INT8))):
        promised = Promised(job=JOB, generation=generation(9, (0, 1)).hash64(), standing=held)
        assert changes_wrong(promised, SPEC) is not None, "or whoever proposes would be refused for it"
    fine = Promised(job=JOB, generation=1, standing=asking(12, "int8", (INT8,)))
    assert changes_wrong(fine, SPEC) is None
    assert parse_codec("int8").error_feedback, "or what is owed would not be asked for"


LOCAL = SPEC.model_copy(update={"sync": sync_settings("local:8")})


def test_codec_and_period_change_one_by_one_or_together() -> None:
    """What is not asked for stays as it is, also where that was changed before."""
    first = changed((), 10, 1, SettingsWish(period=16))
    second = changed(first, 20, 1, SettingsWish(codec="int8"))
    assert second == (SettingsChange(first=12, period=16), SettingsChange(first=22, codec="int8", period=16))
    third = changed(second, 30, 1, SettingsWish(codec="fp16", period=4))
    assert third == (second[1], SettingsChange(first=32, codec="fp16", period=4))
    assert changed(third, 40, 1, SettingsWish(period=4)) == (third[1],), "once: it is so already"
    assert [local_steps(LOCAL.sync, third, round_) for round_ in (21, 22, 31, 32)] == [8, 16, 16, 4]
    assert newest_sync(LOCAL.sync, third).text() == "local:4"
    assert codecs_by_round("fp32", second) == ((0, "fp32"), (22, "int8")), "a change of the period alone is none"


def test_rounds_of_one_step_each_come_first_as_before() -> None:
    """R9: post-local SGD counts rounds; what is changed is the period behind them."""
    sync = sync_settings("local:8,after=20")
    changes = (SettingsChange(first=12, period=16),)
    assert [local_steps(sync, changes, round_) for round_ in (11, 12, 20, 21)] == [1, 1, 1, 16]
    assert local_steps(sync_settings("bsp"), (), 5) == 1


def test_people_are_told_what_is_otherwise() -> None:
    changes = changed(changed((), 10, 1, SettingsWish(period=16)), 10, 2, SettingsWish(codec="int8"))
    assert [told_of(changes, one) for one in changes] == [
        "from round 12 on a period has 16 local steps",
        "from round 13 on gradients travel in int8",
    ]
    both = SettingsChange(first=9, codec="fp16", period=1)
    assert told_of((both,), both) == "from round 9 on gradients travel in fp16 and a period has 1 local step"
    assert SettingsWish(codec="int8", period=4).text() == "--codec int8 --period 4"


@pytest.mark.parametrize(
    ("sync", "period", "why"),
    [
        ("bsp", 4, "--sync local:4"),
        ("ssp:2", 4, "changes the period of local:H"),
        ("local:1,ssp:1", 4, "periods of 1 alone"),
        ("local:4,ssp:1", 1, "periods from 2 to 500"),
        ("local:1", 4, None),
        ("diloco:4", 1, None),
        ("muloco:4,ssp:1", 16, None),
        ("sparseloco:4", 16, None),
        ("local:8,gossip=4", 4, "mixed after each 4 steps of a period: use one from 5 on"),
        ("local:8,gossip=4", 16, None),
    ],
)
def test_what_cannot_have_another_period_is_refused_by_name(sync: str, period: int, why: str | None) -> None:
    spec = SPEC.model_copy(update={"sync": sync_settings(sync)})
    refused = change_refusal(spec, SettingsWish(period=period))
    assert why in (refused or "") if why is not None else refused is None


def test_a_wish_for_nothing_is_none() -> None:
    assert "nothing is named" in (change_refusal(LOCAL, SettingsWish()) or "")
    held = asking(12).model_copy(update={"asks": SettingsWish()})  # type: ignore[attr-defined]
    assert changes_wrong(Promised(job=JOB, generation=1, standing=held), LOCAL) is not None, "G10"
    for period in (0, 501):
        with pytest.raises(ValidationError):
            SettingsWish(period=period)


def test_who_is_told_to_forget_what_it_may_have_bound_does_not_enter() -> None:
    """G6: a change that is left out, or another one at its round, is as wrong as one that comes too soon."""
    before = (SettingsChange(first=14, period=16),)
    held = asking(12, codecs=before)
    enter = enter_by(held, asking(12, codecs=before))
    assert enter.changes == before
    for changes in ((), (SettingsChange(first=14, period=8),), (SettingsChange(first=15, period=16),)):
        told = enter.model_copy(update={"changes": changes})
        assert "round 14" in (enter_wrong(told, generation(9, (0, 1)), 0, held) or "")  # type: ignore[arg-type]


def test_who_lacks_rounds_is_told_what_they_go_by() -> None:
    """G4: two changes lie in what a member is to be served, and the one before them, by which its next round goes."""
    changes = tuple(
        SettingsChange(first=first, codec=codec) for first, codec in ((5, "int8"), (9, "fp16"), (11, "int4"))
    )
    assert enter_by(asking(12, codecs=changes), asking(7)).changes == changes
    assert enter_by(asking(12, codecs=changes), asking(8)).changes == changes[1:]
    assert enter_by(asking(12, codecs=changes), asking(12)).changes == changes[2:]


def test_who_was_asked_asks_until_all_have_entered() -> None:
    """G2: others may go on without those that have entered a generation, and then what it brought is gone."""
    one = machine(0)
    one.handle(SettingsAsked(TO_INT8), 1.0)
    assert one.asks_settings
    one.handle(SettingsAsked(None), 1.1)
    assert not one.asks_settings


@pytest.mark.parametrize(
    ("newest", "met"),
    [
        (None, False),
        (SettingsChange(first=3, codec="int8", period=16), True),
        (SettingsChange(first=3, codec="int8", period=8), False),
        (SettingsChange(first=3, codec="int8"), False),
        (SettingsChange(first=3, codec="int4", period=16), False),
        (SettingsChange(first=3, period=16), False),
    ],
)
def test_a_wish_for_both_is_met_by_both_alone(newest: SettingsChange | None, met: bool) -> None:
    """Else who asks would be told that all have agreed, and be asked for nothing more."""
    history = () if newest is None else (SettingsChange(first=1, codec="int8", period=16), newest)
    wish = SettingsWish(codec="int8", period=16)
    assert wish.is_met(history) == met
    after = changed(history, 10, 1, wish)
    assert wish.is_met(after)
    assert (after[-1].first == 12) == (not met)
