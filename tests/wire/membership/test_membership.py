"""The membership machine step by step, and what it makes of bad input."""

import itertools
from typing import Any

import pytest

from meshwire import limits
from meshwire.membership.effects import (
    CatchUpFrom,
    Effect,
    EnterGeneration,
    Fence,
    HistoryLeft,
    MembershipPhase,
    Message,
    NobodyLearns,
    Resume,
    Send,
    Shunned,
    TurnedAway,
    WaitingFor,
)
from meshwire.membership.inputs import (
    CannotCatchUp,
    CaughtUpToCut,
    HoldingLost,
    LinkDown,
    LinkUp,
    MessageFrom,
    PeerGone,
    RequestMade,
    RoundsCounted,
    SteppedOut,
    TimerDue,
    WasAway,
)
from meshwire.membership.links import MemberLinks
from meshwire.membership.machine import Membership
from meshwire.membership.quorum import electorate_of, is_entitled
from meshwire.membership.requests import MemberRequests
from meshwire.messages.generation import (
    AskIn,
    Enter,
    Entered,
    Holding,
    Promised,
    Propose,
    Refused,
    Standing,
    Where,
    Wish,
)
from meshwire.messages.job import Generation, Member
from meshwire.timeouts import Timeouts
from tests.computing import computing

JOB = "j" + "0" * 11
MEMBERS = tuple(Member(device=f"{n + 1:064x}", incarnation=n + 10, name=f"peer{n}") for n in range(3))
ONE, TWO, THREE = (member.device for member in MEMBERS)
FIRST = computing(JOB, ONE, MEMBERS)
TIMEOUTS = Timeouts(5.0, 0.01)
BEGUN = {"history": electorate_of(FIRST, entered=True), "votes": (electorate_of(FIRST, entered=True),)}
HELD = Standing(
    generation=0,
    number=0,
    complete=4,
    chains=(b"c" * 16, b"d" * 16),
    samples=40,
    linked=(),
    holding=Holding(base=True),
)


def machine(rank: int, generation: Generation | None = FIRST) -> Membership:
    """Linked to all others, at 0 s."""
    known = [member.device for member in MEMBERS]
    made = Membership(MEMBERS[rank], JOB, TIMEOUTS, 0.0, generation=generation, known=known)
    for member in MEMBERS:
        if member != MEMBERS[rank]:
            made.handle(LinkUp(member.device, member.incarnation), 0.0)
    return made


def without_learner(rank: int) -> Membership:
    """The same, and its learner has just been lost."""
    made = machine(rank)
    made.handle(RequestMade("rest"), 0.0)
    return made


def following(number: int, proposer: int, **changes: Any) -> Generation:
    update = {
        "number": number,
        "proposer": MEMBERS[proposer].device,
        "parent": FIRST.digest(),
        "root": number,
        **changes,
    }
    generation = FIRST.model_copy(update=update)
    if not generation.provisional and "counted" not in changes:
        generation = generation.model_copy(update={"counted": generation.learning or generation.ranks})
    return Generation.load(generation.model_dump())


def sent(effects: list[Effect], kind: type[Any]) -> list[tuple[str, Any]]:
    return [(e.device, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def kinds(effects: list[Effect]) -> list[type[Any]]:
    return [type(effect.message) if isinstance(effect, Send) else type(effect) for effect in effects]


def phase(made: Membership) -> MembershipPhase:
    return made.phase


def promise_of(generation: Generation, rank: int, **changes: Any) -> Promised:
    linked = tuple(other for other in generation.ranks if other != rank)
    entered = {"generation": FIRST.hash64(), "number": 1, "linked": linked, **BEGUN}
    return Promised(job=JOB, generation=generation.hash64(), standing=HELD.model_copy(update={**entered, **changes}))


def enter_of(generation: Generation, **changes: Any) -> Enter:
    enter = Enter(
        job=JOB,
        generation=generation.hash64(),
        cut=4,
        chain=b"d" * 16,
        source=generation.ranks[0],
        complete=tuple((rank, 4) for rank in generation.ranks),
        reload=(),
    )
    return enter.model_copy(update=changes)


def entered(told: Enter) -> Entered:
    """What a member says that goes by this word."""
    return Entered(job=JOB, generation=told.generation, told=told.digest())


def word(effects: list[Effect]) -> Enter:
    """To enter, that is told to all."""
    enter = sent(effects, Enter)[-1][1]
    assert isinstance(enter, Enter)
    return enter


def test_a_lost_member_is_proposed_away_by_the_lowest_live_rank() -> None:
    """G2, G7: after the grace, at once; the proposer fences last, so that a shell may answer within the effect."""
    one = machine(0)
    assert not sent(one.handle(LinkDown(THREE, "closed"), 1.0), Propose)
    assert one.deadline() == pytest.approx(1.0 + TIMEOUTS.relink_grace_s)
    effects = one.handle(TimerDue(), 1.0 + TIMEOUTS.relink_grace_s)
    ((device, proposed),) = sent(effects, Propose)
    assert (device, proposed.generation.ranks, proposed.generation.number) == (TWO, (0, 1), 2)
    assert isinstance(effects[-1], Fence)
    assert phase(one) is MembershipPhase.PROMISED
    assert "peer1" in one.waiting()
    assert not sent(one.handle(HELD, 1.3), Enter), "all promise, the others too"
    effects = one.handle(MessageFrom(TWO, promise_of(proposed.generation, 1)), 1.4)
    assert kinds(effects) == [*kinds(effects)[:1], Enter, EnterGeneration, Entered]
    assert phase(one) is MembershipPhase.ENTERED
    effects = one.handle(MessageFrom(TWO, entered(word(effects))), 1.5)
    assert Resume(proposed.generation) in effects
    assert one.waiting() == ""
    assert one.deadline() is None


def test_where_learners_are_to_begin_it_is_said_that_mt_prepare_is_waited_for() -> None:
    """G9: of scripts with process groups, which never come there, nobody is to be told so (P5)."""
    made = Membership(MEMBERS[0], JOB, TIMEOUTS, 0.0, generation=Generation.first(JOB, ONE, MEMBERS), known=())
    told = [
        effect
        for member in MEMBERS[1:]
        for effect in made.handle(LinkUp(member.device, member.incarnation), 0.0)
        if isinstance(effect, WaitingFor)
    ]
    assert told[-1].reason.endswith("to prepare; then the first round begins")
    assert told[-1].to_prepare
    made.handle(LinkDown(THREE, "closed"), 1.0)
    lost = made.handle(TimerDue(), 1.0 + TIMEOUTS.relink_grace_s)
    waits = [effect for effect in lost if isinstance(effect, WaitingFor)]
    assert waits
    assert not any(effect.to_prepare for effect in waits), "of a change of generation all are told"


def test_the_next_rank_waits_a_turn() -> None:
    """G7."""
    two = machine(1)
    two.handle(LinkDown(THREE, "closed"), 1.0)
    grace_s = TIMEOUTS.relink_grace_s
    assert not sent(two.handle(TimerDue(), 1.0 + grace_s), Propose)
    assert sent(two.handle(TimerDue(), 1.0 + grace_s + TIMEOUTS.turn_s), Propose)


def test_a_link_within_the_grace_leads_to_the_same_members_anew() -> None:
    """G6: frames of the old link may be lost."""
    one = machine(0)
    one.handle(LinkDown(TWO, "closed"), 1.0)
    effects = one.handle(LinkUp(TWO, MEMBERS[1].incarnation), 1.1)
    assert {proposed.generation.ranks for _, proposed in sent(effects, Propose)} == {(0, 1, 2)}


def test_a_restarted_member_comes_back_under_its_rank_and_loads() -> None:
    """G1, G4: with another incarnation it is another member; it has no history, and does not learn at first."""
    one = machine(0)
    one.handle(LinkDown(THREE, "closed"), 1.0)
    back = MEMBERS[2].model_copy(update={"incarnation": 99})
    effects = one.handle(LinkUp(THREE, 99), 1.1) + one.handle(
        MessageFrom(THREE, AskIn(job=JOB, member=back, linked=(ONE, TWO))), 1.1
    )
    proposed = sent(effects, Propose)[-1][1].generation
    if proposed.ranks == (0, 1):  # it was proposed away before it could ask
        one.handle(HELD, 1.2)
        told = word(one.handle(MessageFrom(TWO, promise_of(proposed, 1)), 1.2))
        effects = one.handle(MessageFrom(TWO, entered(told)), 1.3)
        effects += one.handle(MessageFrom(THREE, AskIn(job=JOB, member=back, linked=(ONE, TWO))), 1.4)
        proposed = sent(effects, Propose)[-1][1].generation
    assert (proposed.members[2], proposed.ranks, proposed.learning) == (back, (0, 1, 2), (0, 1))


def guest(number: int) -> Member:
    return Member(device=f"{number + 1:064x}", incarnation=1, name=f"peer{number}")


def ask_in(one: Membership, member: Member, *linked: str, now_s: float = 1.0) -> list[Generation]:
    """What is proposed when a device asks in."""
    effects = one.handle(LinkUp(member.device, member.incarnation), now_s)
    effects += one.handle(MessageFrom(member.device, AskIn(job=JOB, member=member, linked=linked)), now_s)
    return [proposed.generation for _, proposed in sent(effects, Propose)]


def test_who_cannot_reach_all_members_is_not_taken_in_and_disturbs_nobody() -> None:
    """G7: every proposal fences the rounds, and this one could only fail. It repeats its ask when it has the links."""
    one, newcomer = machine(0), guest(5)
    assert not ask_in(one, newcomer, ONE, TWO)
    assert phase(one) is MembershipPhase.RUNNING
    assert one.deadline() is None
    assert ask_in(one, newcomer, ONE, TWO, THREE)[0].ranks == (0, 1, 2, 3)


def test_of_devices_that_ask_in_those_are_taken_that_reach_each_other() -> None:
    """G7."""
    links, requests, first, second = MemberLinks(MEMBERS[0]), MemberRequests(), guest(5), guest(6)
    for member in (*MEMBERS, first, second):
        links.opened(member.device, member.incarnation)

    def ask(member: Member, *linked: str) -> tuple[Member, ...]:
        requests.ask(AskIn(job=JOB, member=member, linked=linked), 1.0)
        return requests.joining(links, MEMBERS, {ONE, TWO}, 5)

    assert ask(first, ONE, TWO) == (first,)
    assert ask(second, ONE, TWO, first.device) == (first,)
    assert ask(first, ONE, TWO, second.device) == (first, second)
    assert requests.joining(links, MEMBERS, {ONE, TWO}, 4) == (first,), "there is room for one"


def test_who_says_that_it_reaches_all_and_does_not_is_listed_once() -> None:
    """G7: a link may be up on one side only. Before it asks again, the members go on without it."""
    one, newcomer = machine(0), guest(5)
    (proposed, *_) = ask_in(one, newcomer, ONE, TWO, THREE)
    one.handle(HELD, 1.0)
    for device, rank in ((TWO, 1), (THREE, 2)):
        one.handle(MessageFrom(device, promise_of(proposed, rank, linked=tuple({0, 1, 2} - {rank}))), 1.1)
    standing = Standing(generation=None, number=0, complete=0, chains=(), samples=0, linked=(0,))
    promised = Promised(job=JOB, generation=proposed.hash64(), standing=standing)
    effects = one.handle(MessageFrom(newcomer.device, promised), 1.2)
    ((_, again), *_) = sent(effects, Propose)
    assert again.generation.ranks == (0, 1, 2)
    one.handle(HELD, 1.2)
    for device, rank in ((TWO, 1), (THREE, 2)):
        effects = one.handle(MessageFrom(device, promise_of(again.generation, rank)), 1.3)
    told = word(effects)
    for device in (TWO, THREE):
        effects += one.handle(MessageFrom(device, entered(told)), 1.4)
    assert Resume(again.generation) in effects
    assert not sent(effects + one.handle(TimerDue(), 100.0), Propose)


def test_a_device_that_asks_in_tells_of_every_link_that_comes_later_and_of_none_twice() -> None:
    """G7: else it would wait for the next time, up to a minute, or ask as often as its links flap."""
    known = [member.device for member in MEMBERS]
    three = Membership(MEMBERS[2], JOB, TIMEOUTS, 0.0, generation=None, known=known)
    ((device, ask),) = sent(three.handle(LinkUp(ONE, MEMBERS[0].incarnation), 0.0), AskIn)
    assert (device, ask.linked) == (ONE, (ONE,))
    asks = sent(three.handle(LinkUp(TWO, MEMBERS[1].incarnation), 0.1), AskIn)
    assert [(device, set(ask.linked)) for device, ask in asks] == [(ONE, {ONE, TWO}), (TWO, {ONE, TWO})]
    assert three.deadline() == pytest.approx(1.0)
    for now_s in (0.2, 0.4):
        three.handle(LinkDown(TWO, "closed"), now_s)
        assert not sent(three.handle(LinkUp(TWO, MEMBERS[1].incarnation), now_s + 0.1), AskIn)


def test_a_device_that_cannot_begin_where_the_others_are_asks_ever_less_often() -> None:
    """G7: each time all stand still for it, and what is wrong (its memory, its version) does not mend itself."""
    three, now_s, asked_s = machine(2, None), 0.0, [0.0]
    for number in range(2, 16):
        proposed = following(number, 0, learning=(0, 1))
        three.handle(MessageFrom(ONE, Propose(generation=proposed)), now_s)
        three.handle(HELD.model_copy(update={"generation": None}), now_s)
        three.handle(MessageFrom(ONE, enter_of(proposed, reload=(2,))), now_s)
        assert HistoryLeft in kinds(three.handle(CannotCatchUp("no memory"), now_s))
        at_s = three.deadline()
        assert at_s is not None
        now_s = at_s
        assert sent(three.handle(TimerDue(), now_s), AskIn)
        asked_s.append(now_s)
    waits_s = [after - before for before, after in itertools.pairwise(asked_s)]
    assert waits_s[:3] == [1.0, 2.0, 4.0]
    assert waits_s == sorted(waits_s)
    assert waits_s[-1] == 3840.0


def test_a_better_proposal_withdraws_a_promise() -> None:
    """G2: the higher number, or the lower rank; the earlier proposer is told."""
    three = machine(2)
    worse, better = following(2, 1), following(2, 0)
    three.handle(MessageFrom(TWO, Propose(generation=worse)), 1.0)
    assert sent(three.handle(HELD, 1.0), Promised)[0][0] == TWO
    effects = three.handle(MessageFrom(ONE, Propose(generation=better)), 1.1)
    assert [device for device, _ in sent(effects, Refused)] == [TWO]
    assert sent(three.handle(HELD, 1.1), Promised)[0][0] == ONE
    assert sent(three.handle(MessageFrom(TWO, Propose(generation=worse)), 1.2), Refused)
    assert not kinds(three.handle(MessageFrom(TWO, enter_of(worse)), 1.3)), (
        "a withdrawn promise: no error, and nothing happens"
    )


def test_receiving_is_on_before_entered_is_told_and_rounds_go_on_when_all_have() -> None:
    """Nobody sends in a generation before all have entered it; one may enter earlier than this one."""
    two, proposed = machine(1), following(2, 0)
    two.handle(MessageFrom(ONE, Propose(generation=proposed)), 1.0)
    two.handle(HELD, 1.0)
    told = enter_of(proposed)
    two.handle(MessageFrom(THREE, entered(told)), 1.1)
    effects = two.handle(MessageFrom(ONE, told), 1.1)
    order = kinds(effects)
    assert order.index(EnterGeneration) < order.index(Entered)
    assert Resume not in order
    assert Resume(proposed) in two.handle(MessageFrom(ONE, entered(told)), 1.2)


@pytest.mark.parametrize("reload", [False, True])
def test_whoever_lacks_rounds_or_reloads_catches_up_first(reload: bool) -> None:
    """G4."""
    two, proposed = machine(1), following(2, 0)
    two.handle(MessageFrom(ONE, Propose(generation=proposed)), 1.0)
    two.handle(HELD, 1.0)
    held = 6 if reload else 4
    enter = enter_of(
        proposed, cut=6, chain=b"f" * 16, complete=((0, 6), (1, held), (2, 6)), reload=(1,) if reload else ()
    )
    effects = two.handle(MessageFrom(ONE, enter), 1.1)
    (catch_up,) = (effect for effect in effects if isinstance(effect, CatchUpFrom))
    assert (catch_up.device, catch_up.reload) == (ONE, reload)
    assert phase(two) is MembershipPhase.CATCHING_UP
    assert (two.generation is None) == reload
    assert EnterGeneration in kinds(two.handle(CaughtUpToCut(), 1.5))


def test_a_member_that_is_told_of_a_newer_generation_without_it_is_left_out_and_asks() -> None:
    """G7: at once, then it backs off; only when it is linked to all members."""
    three = machine(2)
    newer = following(2, 0, ranks=(0, 1), learning=(0, 1))
    where = Where(job=JOB, generation=newer, ancestors=(FIRST.hash64(),), samples=50)
    effects = three.handle(MessageFrom(ONE, where), 1.0)
    assert HistoryLeft in kinds(effects)
    assert {device for device, _ in sent(effects, AskIn)} == {ONE, TWO}
    assert three.deadline() == pytest.approx(2.0)
    three.handle(LinkDown(TWO, "closed"), 1.5)
    three.handle(MessageFrom(ONE, where), 1.5)
    assert not sent(three.handle(TimerDue(), 2.0), AskIn)
    assert "no link to peer1" in three.waiting()


def alone(rank: int, now_s: float = 1.0) -> Membership:
    """It has lost its links to all others, and its grace is over."""
    made = machine(rank)
    for member in MEMBERS:
        if member != MEMBERS[rank]:
            made.handle(LinkDown(member.device, "silent"), now_s)
    made.handle(TimerDue(), now_s + TIMEOUTS.relink_grace_s)
    return made


def provisional(number: int, rank: int) -> Generation:
    """Of one who went on alone."""
    return following(number, rank, ranks=(rank,), learning=(rank,), root=1)


def test_of_two_provisional_parts_the_one_with_fewer_samples_leaves() -> None:
    """G4."""
    for samples, leaves in ((10, False), (99, True)):
        one = alone(0)
        one.handle(RoundsCounted(50), 0.0)
        at_s = 1.0 + TIMEOUTS.relink_grace_s + TIMEOUTS.provisional_s
        fences = [effect for effect in one.handle(TimerDue(), at_s) if isinstance(effect, Fence)]
        assert [(fence.generation.root, fence.generation.counted) for fence in fences] == [(1, (0, 1, 2))]
        one.handle(HELD, at_s)
        assert phase(one) is MembershipPhase.RUNNING, one.waiting()
        one.handle(LinkUp(TWO, MEMBERS[1].incarnation), 41.0)
        where = Where(job=JOB, generation=provisional(2, 1), ancestors=(FIRST.hash64(),), samples=samples)
        effects = one.handle(MessageFrom(TWO, where), 41.0)
        assert (HistoryLeft in kinds(effects)) == leaves
        assert [effect.kept.samples for effect in effects if isinstance(effect, HistoryLeft) and effect.kept] == (
            [99] if leaves else []
        ), "by what is kept it is known what is given up"


def test_who_was_entitled_keeps_its_history_however_few_samples_it_has() -> None:
    """G4: a lone laptop that went on for minutes does not reset those that were more."""
    for rank, other, leaves in (
        (0, following(2, 1, ranks=(1, 2), learning=(1, 2)), True),
        (1, provisional(9, 2), False),
    ):
        made = machine(rank)
        if not leaves:
            followed(made, following(2, 0, ranks=(0, 1), learning=(0, 1)), 0.5)
        made.handle(RoundsCounted(99 if leaves else 1), 0.0)
        device, samples = other.proposer, 1 if leaves else 99
        effects = made.handle(MessageFrom(device, Where(job=JOB, generation=other, ancestors=(), samples=samples)), 1.0)
        assert (HistoryLeft in kinds(effects)) == leaves


def test_who_is_not_entitled_waits_and_goes_on_all_the_same() -> None:
    """One of three: six times patience, or as long as the job says; then it is provisional (G4)."""
    one = alone(0)
    assert phase(one) is MembershipPhase.RUNNING
    assert "1 of 3 that count are here" in one.waiting()
    assert "goes on provisionally after 30 s" in one.waiting()
    at_s = 1.0 + TIMEOUTS.relink_grace_s + TIMEOUTS.provisional_s
    assert one.deadline() == pytest.approx(at_s)
    (fence,) = [effect for effect in one.handle(TimerDue(), at_s) if isinstance(effect, Fence)]
    assert (fence.generation.ranks, fence.generation.root, fence.generation.provisional) == ((0,), 1, True)


def test_a_job_can_wait_for_ever() -> None:
    """`submit --partition-wait never`."""
    one = Membership(MEMBERS[0], JOB, Timeouts(5.0, 0.01, float("inf")), 0.0, generation=FIRST)
    assert Fence not in kinds(one.handle(TimerDue(), 10.0) + one.handle(TimerDue(), 10.0**6))
    assert one.deadline() is None
    assert "may be together elsewhere" in one.waiting()


def test_half_goes_on_at_once_with_the_lowest_rank_and_else_waits() -> None:
    """G4: of two laptops that lose each other rank 0 goes on, and rank 1 waits for it; so not both are reset."""
    two = computing(JOB, ONE, MEMBERS[:2])
    for rank, goes_on in ((0, True), (1, False)):
        made = Membership(MEMBERS[rank], JOB, TIMEOUTS, 0.0, generation=two)
        other = MEMBERS[1 - rank]
        made.handle(LinkUp(other.device, other.incarnation), 0.0)
        made.handle(LinkDown(other.device, "silent"), 1.0)
        assert (Fence in kinds(made.handle(TimerDue(), 2.0))) == goes_on
        if not goes_on:
            assert made.deadline() == pytest.approx(2.0 + TIMEOUTS.provisional_s, abs=1.0)


@pytest.mark.parametrize("how", ["goodbye", "restarted", "refused"])
def test_who_is_gone_is_not_waited_for(how: str) -> None:
    """G4: rank 1 goes on at once when rank 0 has said goodbye, is there as another incarnation, or listens no more."""
    made = Membership(MEMBERS[1], JOB, TIMEOUTS, 0.0, generation=computing(JOB, ONE, MEMBERS[:2]))
    made.handle(LinkUp(ONE, MEMBERS[0].incarnation), 0.0)
    effects = made.handle(MessageFrom(ONE, Wish(job=JOB, kind="leave")), 1.0) if how == "goodbye" else []
    effects += made.handle(LinkDown(ONE, "closed"), 1.0)
    if how == "restarted":
        effects += made.handle(LinkUp(ONE, 99), 1.2)
    elif how == "refused":
        assert Fence not in kinds(made.handle(TimerDue(), 1.4))
        effects += made.handle(PeerGone(ONE, MEMBERS[0].incarnation), 1.5)
    effects += made.handle(TimerDue(), 2.0)
    (fence,) = [effect for effect in effects if isinstance(effect, Fence)]
    assert (fence.generation.ranks, fence.generation.provisional) == ((1,), False)


def test_who_only_gives_its_history_up_is_not_gone() -> None:
    """It asks in somewhere, and its vote counts there."""
    made = Membership(MEMBERS[1], JOB, TIMEOUTS, 0.0, generation=computing(JOB, ONE, MEMBERS[:2]))
    made.handle(LinkUp(ONE, MEMBERS[0].incarnation), 0.0)
    effects = made.handle(MessageFrom(ONE, Wish(job=JOB, kind="leave", returns=True)), 1.0) + made.handle(
        TimerDue(), 3.0
    )
    assert Fence not in kinds(effects)
    leaver = machine(0)
    for _, wish in sent(leaver.handle(SteppedOut("its state is lost"), 1.0), Wish):
        assert (wish.kind, wish.returns) == ("leave", True)


def test_what_went_on_apart_is_settled_by_the_next_generation() -> None:
    """G4: with those that went on apart in it, it needs no other one after it."""
    one = machine(0)
    apart = provisional(2, 1)
    one.handle(MessageFrom(TWO, Where(job=JOB, generation=apart, ancestors=(FIRST.hash64(),), samples=9)), 1.0)
    assert "generation 2 went on apart" in one.why_proposed
    together = following(7, 1)
    one.handle(MessageFrom(TWO, Propose(generation=together)), 1.0)
    one.handle(HELD, 1.0)
    effects = one.handle(MessageFrom(TWO, enter_of(together)), 1.1)
    assert EnterGeneration in kinds(effects)
    for member in MEMBERS[1:]:
        one.handle(MessageFrom(member.device, entered(enter_of(together))), 1.2)
    assert phase(one) is MembershipPhase.RUNNING
    assert (one.waiting(), one.deadline()) == ("", None)


def test_who_waits_joins_a_provisional_part_when_the_rest_does_not_come() -> None:
    """Liveness: it keeps its history for a patience, so that those that are entitled together can still find each
    other; then it asks in."""
    one = alone(0)
    ((_, proposed),) = sent(one.handle(LinkUp(TWO, MEMBERS[1].incarnation), 2.0), Propose)
    one.handle(HELD, 2.0)
    where = Where(job=JOB, generation=provisional(2, 1), ancestors=(FIRST.hash64(),), samples=9)
    refused = Refused(job=JOB, generation=proposed.generation.hash64(), number=2, reason="it went on")
    effects = (
        one.handle(MessageFrom(TWO, where), 2.1)
        + one.handle(MessageFrom(TWO, refused), 2.1)
        + one.handle(TimerDue(), 2.1 + TIMEOUTS.turn_s)
    )
    assert not {HistoryLeft, Propose} & {*kinds(effects)}
    effects = one.handle(TimerDue(), 2.2 + TIMEOUTS.turn_s + TIMEOUTS.yield_s)
    assert HistoryLeft in kinds(effects)
    assert [device for device, _ in sent(effects, AskIn)] == [TWO]


def test_a_provisional_part_yields_to_those_that_are_entitled_without_it() -> None:
    """G4: they go on at once, and do not load what it has made."""
    one = alone(0)
    one.handle(LinkUp(TWO, MEMBERS[1].incarnation), 2.0)
    one.handle(
        MessageFrom(TWO, Where(job=JOB, generation=provisional(2, 1), ancestors=(FIRST.hash64(),), samples=9)), 2.0
    )
    effects = one.handle(LinkUp(THREE, MEMBERS[2].incarnation), 2.1)
    effects += one.handle(TimerDue(), 2.1 + TIMEOUTS.relink_grace_s + 2 * TIMEOUTS.turn_s)
    ((device, proposed),) = sent(effects, Propose)
    assert (device, proposed.generation.ranks, proposed.generation.provisional) == (THREE, (0, 2), False)


def test_who_was_away_looks_for_the_others_before_it_goes_on() -> None:
    """G4: rank 0 wakes up, and rank 1 went on provisionally for hours: it joins, and does not end that."""
    for meets in (False, True):
        made = Membership(MEMBERS[0], JOB, TIMEOUTS, 0.0, generation=computing(JOB, ONE, MEMBERS[:2]))
        made.handle(LinkUp(TWO, MEMBERS[1].incarnation), 0.0)
        made.handle(WasAway(), 1.0)
        made.handle(LinkDown(TWO, "silent"), 1.0)
        assert Fence not in kinds(made.handle(TimerDue(), 2.0))
        if meets:
            ((_, proposed),) = sent(made.handle(LinkUp(TWO, MEMBERS[1].incarnation), 3.0), Propose)
            made.handle(HELD, 3.0)
            refused = Refused(job=JOB, generation=proposed.generation.hash64(), number=2, reason="it went on")
            made.handle(MessageFrom(TWO, Where(job=JOB, generation=apart(), ancestors=(), samples=9)), 3.0)
            made.handle(MessageFrom(TWO, refused), 3.0)
            assert HistoryLeft in kinds(made.handle(TimerDue(), 4.0) + made.handle(TimerDue(), 1.0 + TIMEOUTS.doubt_s))
        else:
            (fence,) = [
                effect for effect in made.handle(TimerDue(), 1.0 + TIMEOUTS.back_s) if isinstance(effect, Fence)
            ]
            assert not fence.generation.provisional, "nobody is there: it goes on, as it is entitled to"


def test_who_waits_to_go_on_provisionally_and_sleeps_looks_again() -> None:
    """G4: the wait has run out while it slept; the others may have gone on together meanwhile."""
    one = alone(0)
    one.handle(TimerDue(), 1.0 + TIMEOUTS.provisional_s)
    assert Fence not in kinds(one.handle(WasAway(), 500.0) + one.handle(TimerDue(), 499.0 + TIMEOUTS.back_s))
    (fence,) = [effect for effect in one.handle(TimerDue(), 500.0 + TIMEOUTS.back_s) if isinstance(effect, Fence)]
    assert fence.generation.provisional


def apart() -> Generation:
    """Of two, rank 1 went on provisionally."""
    first = computing(JOB, ONE, MEMBERS[:2])
    return first.model_copy(update={"number": 2, "proposer": TWO, "ranks": (1,), "learning": (1,)})


def test_who_is_gone_may_have_voted_elsewhere() -> None:
    """G4: one of three is gone and one is silent: those two may have gone on before; so the third waits."""
    made = alone(1)
    made.handle(PeerGone(ONE, MEMBERS[0].incarnation), 1.5)
    assert Fence not in kinds(made.handle(TimerDue(), 5.0))
    assert Fence in kinds(made.handle(PeerGone(THREE, MEMBERS[2].incarnation), 6.0) + made.handle(TimerDue(), 6.0))


@pytest.mark.parametrize("heard", [True, False])
def test_who_was_lost_before_it_entered_may_have_promised_another_generation(heard: bool) -> None:
    """G4: rank 2 enters a generation with 0; 0 is gone before it says that it has entered it, too: 0 and 1, who is
    silent, may be in another one, of a better ballot. If it goes on provisionally, 1 counts there still."""
    made, newer = machine(2), following(2, 0, ranks=(0, 2), learning=(0, 2))
    made.handle(LinkDown(TWO, "silent"), 1.0)
    made.handle(MessageFrom(ONE, Propose(generation=newer)), 1.0)
    made.handle(HELD, 1.0)
    assert EnterGeneration in kinds(made.handle(MessageFrom(ONE, enter_of(newer)), 1.1))
    if heard:
        made.handle(MessageFrom(ONE, entered(enter_of(newer))), 1.2)
    made.handle(LinkDown(ONE, "closed"), 1.3)
    effects = made.handle(PeerGone(ONE, MEMBERS[0].incarnation), 1.4) + made.handle(TimerDue(), 3.0)
    if not heard:
        assert Fence not in kinds(effects)
        assert "1 of 2 that count" in made.waiting()
        effects = made.handle(TimerDue(), 3.0 + TIMEOUTS.provisional_s)
    (fence,) = [effect for effect in effects if isinstance(effect, Fence)]
    assert (fence.generation.ranks, fence.generation.provisional) == ((2,), not heard)
    assert (fence.generation.counted, fence.generation.gone) == (((2,), ()) if heard else ((1, 2), (0,)))


def test_a_proposal_that_is_given_up_is_no_promise_that_hangs() -> None:
    """G4: its proposer knows that nobody was told to enter it."""
    one = alone(0)
    one.handle(LinkUp(TWO, MEMBERS[1].incarnation), 2.0)
    assert len(one._state.votes.told) == 2
    one.handle(LinkDown(TWO, "closed"), 2.1)
    one.handle(TimerDue(), 2.1 + TIMEOUTS.relink_grace_s)
    assert len(one._state.votes.told) == 1


def test_what_the_members_say_decides_and_not_what_was_thought_of_them() -> None:
    """G4: 0 and 2 are most of the first three; then 2 says that it has entered another one with 1, who is not here."""
    one, newer = alone(0), following(2, 2, ranks=(1, 2), learning=(1, 2))
    ((_, proposed),) = sent(one.handle(LinkUp(THREE, MEMBERS[2].incarnation), 2.0), Propose)
    one.handle(HELD, 2.0)
    electorate = electorate_of(newer, entered=True)
    told = {"generation": newer.hash64(), "number": 2, "history": electorate, "votes": (electorate,), "linked": (0,)}
    one.handle(
        MessageFrom(THREE, Refused(job=JOB, generation=proposed.generation.hash64(), number=2, reason="promised")), 2.1
    )
    ((_, again),) = sent(one.handle(TimerDue(), 2.1 + TIMEOUTS.turn_s), Propose)
    assert (again.generation.number, again.generation.provisional) == (3, False)
    one.handle(HELD, 2.4)
    standing = HELD.model_copy(update=told)
    effects = one.handle(
        MessageFrom(THREE, Promised(job=JOB, generation=again.generation.hash64(), standing=standing)), 2.5
    )
    assert not {Enter, Propose} & {*kinds(effects)}
    assert "not entitled" in one.waiting()


def test_two_proposers_that_do_not_hear_each_other_outbid_each_other_a_few_times_at_most() -> None:
    """Liveness: the link between 0 and 1 has stalled, and 2 promises to each in turn. Until it is closed each proposes
    only so often that 2 remembers all that it has promised; once rounds go on, a turn is enough again."""
    one = machine(0)
    ((_, proposed), *_) = sent(one.handle(RequestMade("rest"), 0.0), Propose)

    def outbid(now_s: float) -> float:
        """Returns when it proposes again."""
        nonlocal proposed
        number = proposed.generation.number + 1
        refused = Refused(job=JOB, generation=proposed.generation.hash64(), number=number, reason="promised")
        one.handle(MessageFrom(THREE, refused), now_s)
        at_s = one.deadline()
        assert at_s is not None
        ((_, proposed), *_) = sent(one.handle(TimerDue(), at_s), Propose)
        return at_s

    turns, at_s = [0.0], 0.0
    while len(turns) < 10:
        turns.append(outbid(at_s) - at_s)
        at_s += turns[-1]
    doubled = [min(TIMEOUTS.turn_s * 2**tries, TIMEOUTS.answer_s) for tries in range(9)]
    assert turns[1:] == pytest.approx(doubled)
    until_closed = sum(sum(turns[: tries + 1]) <= TIMEOUTS.silence_s for tries in range(10))
    assert 2 * until_closed < limits.ATTEMPTS_MAX
    one.handle(HELD, at_s)
    for rank in (1, 2):
        effects = one.handle(MessageFrom(MEMBERS[rank].device, promise_of(proposed.generation, rank)), at_s)
    told = word(effects)
    for rank in (1, 2):
        one.handle(MessageFrom(MEMBERS[rank].device, entered(told)), at_s)
    assert phase(one) is MembershipPhase.RUNNING
    ((_, proposed), *_) = sent(one.handle(MessageFrom(TWO, Wish(job=JOB, kind="rest")), at_s), Propose)
    assert outbid(at_s) - at_s == pytest.approx(TIMEOUTS.turn_s)


def test_a_promise_that_hangs_makes_no_two_majorities() -> None:
    """G4: rank 2 has promised a generation of 0 and 2, and does not know whether it was entered: with 1 it is most of
    the first one, and not entitled all the same. With 0, who has made it and given it up, it is."""
    for with_proposer in (False, True):
        three = machine(2)
        hanging = following(2, 0, ranks=(0, 2), learning=(0, 2))
        three.handle(MessageFrom(ONE, Propose(generation=hanging)), 1.0)
        three.handle(HELD, 1.0)
        standing = three._state.would_say(HELD)
        assert [vote.generation for vote in standing.votes] == [FIRST.hash64(), hanging.hash64()]
        other = HELD.model_copy(update=BEGUN)
        rank = 0 if with_proposer else 1
        part = {2: MEMBERS[2].incarnation, rank: MEMBERS[rank].incarnation}
        assert is_entitled(part, {2: standing, rank: other}, ()) == with_proposer


def test_a_promise_that_finds_no_room_beside_a_newer_root_is_told_as_forgotten() -> None:
    three = machine(2)
    three._state.note_root(following(40, 0, ranks=(0, 1), learning=(0, 1)))
    for number in range(41, 41 + limits.ATTEMPTS_MAX):
        three._state.votes.promise(following(number, 0, ranks=(0, 2), learning=(0, 2)))
    standing = three._state.would_say(HELD)
    assert standing.votes[0].number == 40
    assert standing.votes[-1].number < 40 + limits.ATTEMPTS_MAX == standing.forgot


def test_promises_older_than_a_newer_root_take_no_room() -> None:
    """Who was kept out of a job for long has promised much that came to nothing; it may be taken in nevertheless."""
    three = machine(2)
    for number in range(2, 3 * limits.ATTEMPTS_MAX):
        three._state.votes.promise(following(number, 0, ranks=(0, 2), learning=(0, 2)))
    root, change = following(100, 0, ranks=(0, 1), learning=(0, 1)), following(101, 0, learning=(0, 1))
    three._state.note_root(root)
    three._state.votes.promise(change)
    standing = three._state.would_say(HELD)
    assert [vote.generation for vote in standing.votes] == [root.hash64(), FIRST.hash64(), change.hash64()]
    assert standing.forgot < root.root, "what was forgotten before it does not count either"


def test_a_wish_is_repeated_until_it_is_fulfilled() -> None:
    two, proposed = machine(1), following(2, 0)
    assert {device for device, _ in sent(two.handle(RequestMade("rest"), 1.0), Wish)} == {ONE, THREE}
    two.handle(MessageFrom(ONE, Propose(generation=proposed)), 1.1)
    two.handle(HELD, 1.1)
    two.handle(MessageFrom(ONE, enter_of(proposed)), 1.2)
    two.handle(MessageFrom(ONE, entered(enter_of(proposed))), 1.3)
    assert sent(two.handle(MessageFrom(THREE, entered(enter_of(proposed))), 1.3), Wish)


@pytest.mark.parametrize("way", ["on", "lost", "failed"])
def test_the_shell_is_told_when_nothing_is_left_to_go_on_from(way: str) -> None:
    """J3: not yet when no learner computes."""
    two, proposed = without_learner(1), following(2, 0, learning=())
    two.handle(MessageFrom(ONE, Propose(generation=proposed)), 1.0)
    two.handle(HELD, 1.0)
    effects = two.handle(MessageFrom(ONE, enter_of(proposed, way=way)), 1.1)
    told = [effect for effect in effects if isinstance(effect, NobodyLearns)]
    assert told == ([] if way == "on" else [NobodyLearns(proposed, failed=way == "failed")])


def gone_back(rank: int) -> tuple[Membership, Generation, list[Effect]]:
    """This member is told that all go back to what peer0 has saved after round 2."""
    one, proposed = without_learner(rank), following(2, 0, learning=())
    one.handle(MessageFrom(ONE, Propose(generation=proposed)), 1.0)
    one.handle(HELD, 1.0)
    back = {"way": "back", "cut": 2, "chain": b"b" * 16, "reload": (0, 1, 2), "complete": ((0, 2), (1, 2), (2, 2))}
    return one, proposed, one.handle(MessageFrom(ONE, enter_of(proposed, **back)), 1.1)


def test_all_go_back_to_a_saved_state() -> None:
    """J3: from the source, which has the deal of samples of that round, and then they are where it is."""
    two, proposed, effects = gone_back(1)
    (catch_up,) = [effect for effect in effects if isinstance(effect, CatchUpFrom)]
    assert (catch_up.device, catch_up.reload, catch_up.enter.cut) == (ONE, True, 2)
    assert phase(two) is MembershipPhase.CATCHING_UP
    assert EnterGeneration(proposed, catch_up.enter) in two.handle(CaughtUpToCut(), 1.2)


def test_who_has_the_state_is_lost_before_others_are_there() -> None:
    """J3: then the history of before counts still, and all decide anew."""
    two, _, _ = gone_back(1)
    two.handle(LinkDown(ONE, "closed"), 1.2)
    ((_, proposed),) = sent(two.handle(TimerDue(), 1.2 + TIMEOUTS.relink_grace_s + TIMEOUTS.turn_s), Propose)
    assert proposed.generation.ranks == (1, 2)
    standing = two.handle(HELD, 1.3)
    assert phase(two) is MembershipPhase.PROMISED
    assert not [effect for effect in standing if isinstance(effect, HistoryLeft)]
    three = promise_of(proposed.generation, 2)
    (enter,) = {enter for _, enter in sent(two.handle(MessageFrom(THREE, three), 1.4), Enter)}
    assert (enter.cut, enter.reload) == (4, ())


def test_a_member_whose_state_is_lost_makes_all_look_again() -> None:
    """J3: what it has told in its promise is so no more. Where somebody computes that changes nothing."""
    one = machine(0)
    assert not sent(one.handle(HoldingLost(), 1.0), Propose)
    quiet = machine(0, following(2, 0, learning=()))
    ((_, proposed), _) = sent(quiet.handle(HoldingLost(), 1.0), Propose)
    assert (proposed.generation.number, proposed.generation.learning) == (3, ())
    two = machine(1, following(2, 0, learning=()))
    assert {wish.kind for _, wish in sent(two.handle(HoldingLost(), 1.0), Wish)} == {"anew"}
    assert sent(quiet.handle(HELD, 1.0), Propose) == []


def test_rounds_of_a_learner_that_computes_are_not_given_up() -> None:
    """J3: whoever says so is not believed."""
    two, proposed = machine(1), following(2, 0)
    two.handle(MessageFrom(ONE, Propose(generation=proposed)), 1.0)
    two.handle(HELD, 1.0)
    back = {"way": "back", "cut": 2, "reload": (0, 1, 2), "complete": ((0, 2), (1, 2), (2, 2))}
    (refusal,) = [e for e in two.handle(MessageFrom(ONE, enter_of(proposed, **back)), 1.1) if isinstance(e, Shunned)]
    assert "it gives rounds up that a learner has computed with" in refusal.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"history": None},
        {"history": electorate_of(following(9, 0), entered=True)},  # its root comes after it
        {"votes": (electorate_of(following(9, 0), entered=True),)},  # of later than was proposed
        {"number": 2},
    ],
)
def test_a_promise_that_cannot_be_is_an_error_of_its_sender(changes: dict[str, Any]) -> None:
    """G4: it would have those that go on named after a generation that there is not."""
    one = machine(0)
    one.handle(LinkDown(THREE, "closed"), 1.0)
    ((_, proposed),) = sent(one.handle(TimerDue(), 2.0), Propose)
    one.handle(HELD, 2.0)
    effects = one.handle(MessageFrom(TWO, promise_of(proposed.generation, 1, **changes)), 2.1)
    assert Shunned in kinds(effects)
    assert Enter not in kinds(effects)


STRANGER = Member(device="f" * 64, incarnation=1, name="stranger")


@pytest.mark.parametrize(
    "proposed",
    [
        following(2, 0, ranks=(0, 2), learning=()),  # this device is not listed
        following(2, 2),  # not by its sender
        following(2**31, 0),  # a number that would use them up
        following(2, 0, members=(MEMBERS[0], MEMBERS[1], STRANGER)),  # the list of all times is altered
        following(2, 0, members=(MEMBERS[0], MEMBERS[1].model_copy(update={"incarnation": 5}), MEMBERS[2])),
        following(2, 0, members=(MEMBERS[0].model_copy(update={"incarnation": 5}), *MEMBERS[1:])),
        following(2, 0, ranks=(1, 0, 2)),
        following(2, 0, learning=(7,)),
        following(2, 0, job="k" + "0" * 11),
    ],
)
def test_a_proposal_that_cannot_be_is_an_error_of_its_sender(proposed: Generation) -> None:
    two = machine(1)
    effects = two.handle(MessageFrom(ONE, Propose(generation=proposed)), 1.0)
    assert [effect.device for effect in effects if isinstance(effect, Shunned)] == [ONE]
    assert two.promised is not None
    assert two.promised.ranks == (1, 2), "it goes on without it (G10)"


@pytest.mark.parametrize(
    "message",
    [
        enter_of(following(2, 0)),  # without a promise
        AskIn(job=JOB, member=STRANGER, linked=()),  # for another device
        Where(job=JOB, generation=following(2, 0, ranks=(2, 1)), ancestors=(), samples=0),
        Where(job=JOB, generation=following(2**31, 0), ancestors=(), samples=0),
        Refused(job=JOB, generation=1, number=2**31, reason=""),
    ],
)
def test_other_messages_that_cannot_be_are_errors_too(message: Message) -> None:
    two = machine(1)
    assert Shunned in kinds(two.handle(MessageFrom(ONE, message), 1.0))
    assert two.promised is not None
    assert two.promised.ranks == (1, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"cut": 3},  # below what this member holds
        {"chain": b"x" * 16},  # another history than its own
        {"complete": ((0, 4), (1, 4))},
        {"complete": ((0, 4), (1, 3), (2, 4))},
        {"source": 9},
        {"reload": (0, 1)},  # the source among them
    ],
)
def test_a_commit_that_does_not_fit_the_promise_is_refused(changes: dict[str, Any]) -> None:
    two, proposed = machine(1), following(2, 0)
    two.handle(MessageFrom(ONE, Propose(generation=proposed)), 1.0)
    two.handle(HELD, 1.0)
    assert Shunned in kinds(two.handle(MessageFrom(ONE, enter_of(proposed, **changes)), 1.1))
    assert two.promised is not None
    assert two.promised.ranks == (1, 2), "what it proposed is not entered"


def test_who_commits_the_proposal_of_another_is_refused() -> None:
    """G2, G10."""
    two, proposed = machine(1), following(2, 0)
    two.handle(MessageFrom(ONE, Propose(generation=proposed)), 1.0)
    two.handle(HELD, 1.0)
    assert Shunned in kinds(two.handle(MessageFrom(THREE, enter_of(proposed)), 1.1)), (
        "by somebody else than the proposer"
    )
    assert phase(two) is MembershipPhase.PROMISED


def test_messages_of_nobody_and_of_the_past_change_nothing() -> None:
    two = machine(1)
    assert not two.handle(MessageFrom(STRANGER.device, Propose(generation=following(2, 0))), 1.0)
    assert not two.handle(MessageFrom(ONE, Entered(job=JOB, generation=77, told=bytes(32))), 1.0)
    assert not two.handle(MessageFrom(ONE, promise_of(following(2, 1), 0)), 1.0)
    assert not two.handle(CaughtUpToCut(), 1.0) + two.handle(HELD, 1.0) + two.handle(TimerDue(), 1.0)
    assert not two.handle(MessageFrom(ONE, Propose(generation=FIRST)), 1.0), "replayed"
    linked = two.handle(LinkUp(STRANGER.device, 1), 1.0)
    assert kinds(linked) == [Where]
    stranger = following(2, 0, members=(*MEMBERS, STRANGER), ranks=(0, 1, 3), learning=())
    stranger = stranger.model_copy(update={"proposer": STRANGER.device})
    answers: list[type[Any]] = [Refused, Where]
    assert kinds(two.handle(MessageFrom(STRANGER.device, Propose(generation=stranger)), 1.0)) == answers
    assert phase(two) is MembershipPhase.RUNNING


def test_whoever_leaves_is_in_what_it_proposes() -> None:
    """Its first proposal fails while it wishes to leave: the next one lists it too, for nobody else could commit it."""
    made = machine(0)
    made.handle(LinkDown(THREE, "closed"), 1.0)
    made.handle(TimerDue(), 2.0)
    made.handle(HELD, 2.0)
    made.handle(RequestMade("leave"), 2.1)
    made.handle(LinkDown(TWO, "closed"), 2.2)
    effects = [effect for at_s in (3.0, 40.0) for effect in made.handle(TimerDue(), at_s)]
    ((_, first),) = [(fence, fence.generation) for fence in effects if isinstance(fence, Fence)]
    assert (first.ranks, first.proposer) == ((0,), ONE)


def test_no_more_devices_join_than_the_job_takes() -> None:
    """`--peers N:MAX`: of two that ask at once the one with the lower id gets the last rank, the other is told so."""
    newcomers = [Member(device=f"{n:064x}", incarnation=n + 10, name=f"peer{n}") for n in (8, 9)]
    made = Membership(MEMBERS[0], JOB, TIMEOUTS, 0.0, generation=FIRST, members_max=4)
    for member in (*MEMBERS[1:], *newcomers):
        made.handle(LinkUp(member.device, member.incarnation), 0.0)
    made.handle(LinkDown(THREE, "closed"), 0.0)  # a member that is lost keeps its rank
    effects = made.handle(TimerDue(), TIMEOUTS.relink_grace_s)
    (*_, (_, away)) = sent(effects, Propose)
    assert away.generation.ranks == (0, 1)
    linked = (ONE, TWO, *(newcomer.device for newcomer in newcomers))
    for newcomer in reversed(newcomers):
        made.handle(MessageFrom(newcomer.device, AskIn(job=JOB, member=newcomer, linked=linked)), 1.0)
    made.handle(HELD, 1.0)
    effects = made.handle(MessageFrom(TWO, promise_of(away.generation, 1)), 1.0)
    effects += made.handle(MessageFrom(TWO, entered(word(effects))), 1.1)
    proposed = {device: propose.generation for device, propose in sent(effects, Propose)}
    assert newcomers[1].device not in proposed
    full = proposed[newcomers[0].device]
    assert (full.members, full.ranks, full.learning) == ((*MEMBERS, newcomers[0]), (0, 1, 3), (0, 1))

    late = Membership(newcomers[1], JOB, TIMEOUTS, 0.0, known=[ONE], members_max=4)
    late.handle(LinkUp(ONE, MEMBERS[0].incarnation), 0.0)
    where = Where(job=JOB, generation=full, ancestors=(), samples=0)
    (turned_away,) = [effect for effect in late.handle(MessageFrom(ONE, where), 1.0) if isinstance(effect, TurnedAway)]
    assert "all the 4 devices" in turned_away.reason


def test_a_device_that_may_still_join_or_that_returns_is_not_turned_away() -> None:
    newcomer = Member(device=f"{9:064x}", incarnation=19, name="peer9")
    for me, members_max in ((newcomer, 4), (MEMBERS[1], 3)):
        made = Membership(me, JOB, TIMEOUTS, 0.0, known=[ONE], members_max=members_max)
        made.handle(LinkUp(ONE, MEMBERS[0].incarnation), 0.0)
        where = Where(job=JOB, generation=following(2, 0, ranks=(0, 2), learning=(0, 2)), ancestors=(), samples=0)
        assert TurnedAway not in kinds(made.handle(MessageFrom(ONE, where), 1.0))


def test_a_proposal_from_before_the_newest_members_is_outdated_and_no_offence() -> None:
    """After a partition its proposer may not know of a newcomer: it hears of the newer one, and keeps its link."""
    newcomer = Member(device=f"{9:064x}", incarnation=19, name="peer3")
    made = machine(1)
    entered = following(3, 0, members=(*MEMBERS, newcomer), ranks=(0, 1), learning=(0, 1))
    made.handle(MessageFrom(ONE, Propose(generation=entered)), 1.0)
    made.handle(HELD, 1.0)
    made.handle(MessageFrom(ONE, enter_of(entered)), 1.1)
    effects = made.handle(MessageFrom(THREE, Propose(generation=following(2, 2, ranks=(1, 2), learning=(1, 2)))), 2.0)
    assert [device for device, _ in sent(effects, Refused)] == [THREE]
    assert Shunned not in kinds(effects)
    altered = following(9, 0, members=MEMBERS, ranks=(0, 1), learning=(0, 1))
    assert Shunned in kinds(made.handle(MessageFrom(ONE, Propose(generation=altered)), 2.1)), (
        "if it is newer, it is one"
    )


def test_a_learner_of_a_history_that_is_not_kept_is_not_ready() -> None:
    """J1: what was wished before this device was left out is void: the next learner is to load first."""
    made = machine(1)
    made.handle(RequestMade("learn"), 0.5)
    gone_on = following(2, 0, ranks=(0, 2), learning=(0, 2))
    effects = made.handle(
        MessageFrom(ONE, Where(job=JOB, generation=gone_on, ancestors=(FIRST.hash64(),), samples=50)), 1.0
    )
    assert HistoryLeft in kinds(effects)
    returned = following(3, 0, learning=(0, 2), parent=gone_on.digest())
    made.handle(MessageFrom(ONE, Propose(generation=returned)), 2.0)
    made.handle(HELD.model_copy(update={"generation": None, "complete": 0, "chains": ()}), 2.0)
    made.handle(MessageFrom(ONE, enter_of(returned, reload=(1,))), 2.1)
    made.handle(CaughtUpToCut(), 2.2)
    told = enter_of(returned, reload=(1,))
    made.handle(MessageFrom(ONE, entered(told)), 2.3)
    effects = made.handle(MessageFrom(THREE, entered(told)), 2.3)
    assert Resume in kinds(effects)
    assert not sent(effects, Wish)
    assert sent(made.handle(RequestMade("learn"), 3.0), Wish), "now it has"


def followed(made: Membership, generation: Generation, at_s: float, **entering: Any) -> list[Effect]:
    """This member promises `generation` of the first one, enters it, and all others have."""
    made.handle(MessageFrom(ONE, Propose(generation=generation)), at_s)
    lost = 1 in entering.get("reload", ())
    made.handle(HELD.model_copy(update={"generation": None, "complete": 0, "chains": ()}) if lost else HELD, at_s)
    made.handle(MessageFrom(ONE, enter_of(generation, **entering)), at_s)
    if lost:
        made.handle(CaughtUpToCut(), at_s)
    told = enter_of(generation, **entering)
    made.handle(MessageFrom(ONE, entered(told)), at_s)
    return made.handle(MessageFrom(THREE, entered(told)), at_s)


def wishes(effects: list[Effect]) -> set[str]:
    return {wish.kind for _, wish in sent(effects, Wish)}


def test_a_rank_rests_before_its_next_learner_computes() -> None:
    """X3: that learner was ready before the others had a generation in which it rested, and was told nothing of it."""
    two = machine(1)
    assert wishes(two.handle(RequestMade("rest"), 1.0)) == {"rest"}
    assert wishes(two.handle(RequestMade("learn"), 1.1)) == {"rest"}
    assert wishes(followed(two, following(2, 0), 2.0)) == {"rest"}, "the others had not heard it"
    resting = following(3, 0, learning=(0, 2), parent=following(2, 0).digest())
    assert wishes(followed(two, resting, 3.0)) == {"learn"}
    taken_in = following(4, 0, parent=resting.digest())
    assert Resume(taken_in, begins=True) in followed(two, taken_in, 4.0)


def test_whoever_returns_and_is_listed_as_computing_rests_first() -> None:
    """J1, X3: who proposes may not know yet that it was left out; all waited for a learner that nobody had started."""
    two = machine(1)
    gone_on = following(2, 0, ranks=(0, 2), learning=(0, 2))
    two.handle(MessageFrom(ONE, Where(job=JOB, generation=gone_on, ancestors=(FIRST.hash64(),), samples=50)), 1.0)
    returned = following(3, 0, parent=gone_on.digest())
    assert wishes(followed(two, returned, 2.0, reload=(1,))) == {"rest"}
    resting = following(4, 0, learning=(0, 2), parent=returned.digest())
    assert not wishes(followed(two, resting, 3.0))
    assert wishes(two.handle(RequestMade("learn"), 4.0)) == {"learn"}


def test_whose_learner_computes_promises_no_generation_in_which_it_rests() -> None:
    """X3: its next learner would be itself, with samples that others are dealt meanwhile. Who proposes has heard of
    before, is told how it is, and asks for no other reason again."""
    two, proposed = machine(1), following(2, 0, learning=(0, 2))
    effects = two.handle(MessageFrom(ONE, Propose(generation=proposed)), 1.0)
    assert kinds(effects) == [Wish, Refused], "in this order: the refusal is answered by another proposal"
    assert [(to, wish.kind) for to, wish in sent(effects, Wish)] == [(ONE, "learn")]
    assert [refused.number for _, refused in sent(effects, Refused)] == [2], "it is not unwilling to go on with them"
    assert phase(two) is MembershipPhase.RUNNING
    two.handle(RequestMade("rest"), 1.1)
    assert Fence in kinds(two.handle(MessageFrom(ONE, Propose(generation=proposed)), 1.1))


def test_who_has_let_a_learner_rest_that_computes_lists_it_again() -> None:
    one = machine(0)
    effects = one.handle(MessageFrom(THREE, AskIn(job=JOB, member=MEMBERS[2], linked=(ONE, TWO))), 1.0)
    proposed = sent(effects, Propose)[0][1].generation
    assert proposed.learning == (0, 1)
    one.handle(HELD, 1.0)
    one.handle(MessageFrom(THREE, Wish(job=JOB, kind="learn")), 1.1)
    refused = Refused(job=JOB, generation=proposed.hash64(), number=proposed.number, reason="its learner computes")
    effects = one.handle(MessageFrom(THREE, refused), 1.1) + one.handle(TimerDue(), 1.1 + TIMEOUTS.turn_s)
    again = sent(effects, Propose)[0][1].generation
    assert (again.ranks, again.learning) == ((0, 1, 2), (0, 1, 2))


def test_who_wishes_has_come_in_since_it_asked() -> None:
    """X3: both were told on one link, which had stalled; the ask alone would be a reason to let its learner rest."""
    two = machine(1)
    two.handle(MessageFrom(THREE, AskIn(job=JOB, member=MEMBERS[2], linked=(ONE, TWO))), 1.0)
    assert "peer2 asks in" in two.waiting()
    two.handle(MessageFrom(THREE, Wish(job=JOB, kind="learn")), 1.0)
    assert not two.waiting()
    assert not sent(two.handle(TimerDue(), 1.0 + TIMEOUTS.answer_s), Propose)
