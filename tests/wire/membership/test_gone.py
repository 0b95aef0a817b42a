"""What follows where members are gone, who may have voted elsewhere before: two parts that meet, and whose vote counts
(G4, gone)."""

from meshwire.membership.effects import Effect, EnterGeneration, Fence, MembershipPhase
from meshwire.membership.inputs import LinkDown, LinkUp, MessageFrom, PeerGone, TimerDue
from meshwire.membership.machine import Membership
from meshwire.membership.proposal_checks import list_wrong
from meshwire.messages.generation import Promised, Propose, Refused, Standing, Where
from meshwire.messages.job import Generation, Member
from tests.wire.membership.test_membership import (
    HELD,
    JOB,
    MEMBERS,
    ONE,
    THREE,
    TIMEOUTS,
    enter_of,
    entered,
    following,
    kinds,
    sent,
)

RESTARTED = Member(device=ONE, incarnation=99, name="peer0")
NOW = (RESTARTED, *MEMBERS[1:])
OURS = following(3, 0, members=NOW, ranks=(0, 1), learning=(1,))  # 1 computes, and has taken 0 in again
NEWER = following(9, 2, ranks=(2,), learning=(2,))  # 2, whom 0 had taken in before it was killed


def of_ours(number: int) -> Generation:
    """The next one, of the same two."""
    update = {"number": number, "root": number, "parent": OURS.digest()}
    return Generation.load(OURS.model_copy(update=update).model_dump())


def in_ours() -> Membership:
    """Rank 1, linked to both others."""
    one = Membership(MEMBERS[1], JOB, TIMEOUTS, 0.0, generation=OURS, known=[ONE, THREE])
    for member in (RESTARTED, MEMBERS[2]):
        one.handle(LinkUp(member.device, member.incarnation), 0.0)
    return one


def proposes(one: Membership, number: int) -> list[Effect]:
    """Rank 0 does, and what 1 answers."""
    return one.handle(MessageFrom(ONE, Propose(generation=of_ours(number))), 1.0) + one.handle(HELD, 1.0)


def told(one: Membership) -> list[Effect]:
    """By 2, whose learner loads: who has a base does not leave it for that."""
    where = Where(job=JOB, generation=NEWER, ancestors=(), samples=99, based=False)
    return one.handle(MessageFrom(THREE, where), 1.0)


def roots_voted(effects: list[Effect]) -> set[int]:
    """Of the generations that its promise says to have been entered."""
    ((_, promised),) = sent(effects, Promised)
    standing: Standing = promised.standing
    return {vote.number for vote in standing.votes if vote.entered}


def test_who_was_told_of_a_newer_root_promises_nothing_older_and_says_so_with_what_it_promises() -> None:
    """So its part stays provisional: somebody of it knows that others are ahead."""
    one = in_ours()
    told(one)
    effects = proposes(one, 4)
    assert not sent(effects, Promised)
    assert [refused.number for _, refused in sent(effects, Refused)] == [NEWER.number]
    assert roots_voted(proposes(one, 10)) == {OURS.number, NEWER.number}


def test_who_is_told_of_a_newer_root_after_its_promise_says_so_with_its_next_one() -> None:
    """What it has promised it enters: the others cannot know in which order it was told."""
    one = in_ours()
    assert roots_voted(proposes(one, 4)) == {OURS.number}
    told(one)
    enter = enter_of(of_ours(4), source=1)
    assert EnterGeneration in kinds(one.handle(MessageFrom(ONE, enter), 1.1))
    one.handle(MessageFrom(ONE, entered(enter)), 1.1)
    assert one.phase is MembershipPhase.RUNNING
    assert [refused.number for _, refused in sent(proposes(one, 5), Refused)] == [NEWER.number]
    assert roots_voted(proposes(one, 10)) == {4, NEWER.number}


def test_the_word_of_those_that_are_gone_binds_nobody() -> None:
    """Nobody can go on from there."""
    one = in_ours()
    told(one)
    one.handle(LinkDown(THREE, "closed"), 1.0)
    one.handle(PeerGone(THREE, MEMBERS[2].incarnation), 1.0)
    assert roots_voted(proposes(one, 4)) == {OURS.number}


def test_who_was_gone_and_is_counted_as_another_process_is_not_gone() -> None:
    """Of three 0 goes on provisionally, for 1 is gone and 2 is silent; 1 returns, and 3 comes in. When 0 and 2 are gone
    nobody is left who was counted, and the members count: 1 as it is now, beside 3, who is silent."""
    newcomer = Member(device=f"{4:064x}", incarnation=13, name="peer3")
    returned = Member(device=MEMBERS[1].device, incarnation=99, name="peer1")
    members = (MEMBERS[0], returned, MEMBERS[2], newcomer)
    provisional = following(7, 0, members=members, ranks=(0, 1, 3), learning=(0, 1), root=1, counted=(0, 2), gone=(1,))
    one = Membership(returned, JOB, TIMEOUTS, 0.0, generation=provisional, known=[ONE, THREE, newcomer.device])
    for member in (MEMBERS[0], newcomer):
        one.handle(LinkUp(member.device, member.incarnation), 0.0)
        one.handle(LinkDown(member.device, "silent"), 1.0)
    one.handle(PeerGone(ONE, MEMBERS[0].incarnation), 1.0)
    one.handle(PeerGone(THREE, MEMBERS[2].incarnation), 1.0)
    (fence,) = [effect for effect in one.handle(TimerDue(), 2.0) if isinstance(effect, Fence)]
    assert (fence.generation.provisional, fence.generation.ranks) == (True, (1,))
    assert (fence.generation.counted, fence.generation.gone) == ((1, 3), (0,))
    assert list_wrong(fence.generation) is None, "whoever hears of it takes it for a breach of the protocol"
