"""The shell of the rounds through a change of generation: real machine, executor and turn, nothing in their places.

That the machines decide rightly is proved in virtual time, with other shells; here that they are asked and obeyed.
"""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.memberside import MemberSide
from meshwire.header import Header, Kind
from meshwire.messages.generation import Enter
from meshwire.messages.job import Generation, RankReport
from meshwire.messages.learner import LearnerBucket, LearnerSealed, RoundDone
from meshwire.messages.rounds import Bind, Call, Seal
from meshwire.wiretypes import Wire
from tests.daemon.test_learner_notices import JOB, PLAN, Desk, kinds, stepped

SEALED = LearnerSealed(step=1, used=b"\x01", integers=())


def enter(desk: Desk, number: int = 2) -> Generation:
    """All members have promised the next generation, in which nobody is lost, and this one enters it."""
    crossing = desk.rounds.crossing
    generation = desk.generation.model_copy(update={"number": number})
    standing = crossing.standing()
    cut, chain = standing.complete, standing.chains[-1]
    crossing.enter(
        generation,
        Enter(
            job=JOB, generation=generation.hash64(), cut=cut, chain=chain, source=0, complete=((0, cut), (1, cut)),
            reload=(), counted=number, learning=generation.learning,
        ),
    )  # fmt: skip
    return generation


def told_by_rank_1(desk: Desk) -> None:
    """All that it has to say of round 1, with the results of the exchange."""
    desk.rounds.message(1, Bind(round=1, step=1, base=0, weight=1.0))
    desk.rounds.message(1, Seal(round=1, used=b"\x01", integers=()))
    for bucket in PLAN.buckets:
        desk.rounds._bucket_complete(1, bucket.index, False, 3, 2.0, 0.0)


@pytest.mark.asyncio
async def test_a_member_completes_nothing_after_its_promise() -> None:
    """G2: the own seal is all that the round lacks. Completed here it would count on this member alone."""
    async with Desk(2, "ssp:2") as desk:
        desk.say(*(LearnerBucket(step=1, bucket=bucket.index, weight=1.0) for bucket in PLAN.buckets))
        told_by_rank_1(desk)
        desk.rounds.crossing.fence()
        desk.links[1].sent.clear()
        desk.say(SEALED)
        assert desk.rounds.complete == 0
        assert not desk.links[1].sent, "nor says it anything"
        header = Header(kind=Kind.CHUNK, payload_bytes=4, generation=desk.generation.hash64(), round=1)
        assert desk.rounds.chunk_announced(1, header) is None, "nor takes anything"
        enter(desk)
        assert desk.rounds.complete == 0, "what others have said is forgotten (G6)"
        told_by_rank_1(desk)
        assert desk.rounds.complete == 1
        assert not desk.failed


@pytest.mark.asyncio
async def test_all_that_waited_until_everybody_had_entered_is_sent_in_order() -> None:
    """G2: nobody sends before; a member of whose messages one is missing would hold the round up for ever."""
    async with Desk(2, "ssp:2") as desk:
        desk.rounds.crossing.fence()
        generation = enter(desk)
        desk.compute(1)
        desk.say(stepped(1))
        desk.compute(2)
        assert not desk.links[1].sent
        desk.rounds.crossing.resume(generation)
        sent = [body for body in desk.links[1].sent if not isinstance(body, Call)]  # of which time decides
        assert kinds(sent) == [Bind, Seal, Bind, Seal]
        assert [body.round for body in sent] == [1, 1, 2, 2]
        assert not desk.failed


def member_side(desk: Desk) -> MemberSide:
    """What members say, on its way to the rounds."""
    job = SimpleNamespace(ended=False, ending=False, report=lambda _report: None)
    agreement = SimpleNamespace(wake=lambda: None, in_barrier=lambda _rank: False)
    membership = SimpleNamespace(hears=lambda _rank: True)
    return MemberSide(
        cast(Any, job), cast(Any, agreement), lambda: desk.rounds, cast(Any, membership), lambda: None, cast(Any, None)
    )


@pytest.mark.asyncio
async def test_what_is_said_in_another_generation_is_not_heard() -> None:
    """G2, G6: a link delivers what was queued before its sender promised. Taken for a part of now, it would be another
    history's, and what its sender says again would break the rules."""
    async with Desk(2, "ssp:2") as desk:
        side = member_side(desk)
        bind: Wire = Bind(round=1, step=1, base=0, weight=1.0)

        def says(body: Wire, generation: Generation, complete: int = 0) -> int:
            header = Header(kind=Kind.CONTROL, payload_bytes=0, generation=generation.hash64(), complete=complete)
            assert side.notice(1, header, body) is None
            assert not desk.failed
            return desk.rounds._machine._table.decided(1)

        first = desk.generation
        assert says(bind, first) == 1
        desk.rounds.crossing.fence()
        assert not desk.rounds.takes(first.hash64()), "it has promised another one"
        second = enter(desk)
        assert says(bind, first) == 0
        assert says(Seal(round=1, used=b"\x01", integers=()), first) == 0
        says(RankReport(job=JOB, rank=1, state="running"), first, complete=7)
        assert says(bind, second) == 1
        desk.rounds.crossing.fence()
        third = enter(desk, 3)
        assert says(bind, second) == 0
        assert says(bind, third) == 1


@pytest.mark.asyncio
async def test_what_lay_decoded_before_a_change_is_not_given_after_it() -> None:
    """G6: the round runs again, perhaps without a member whose part is in those means: a base of its own, unseen."""
    async with Desk(2, "ssp:2") as desk:
        desk.compute(1)
        for bucket in PLAN.buckets:
            desk.rounds._bucket_complete(1, bucket.index, False, 3, 2.0, 0.0)
        desk.rounds._result_decoded(1)
        desk.rounds.crossing.fence()
        generation = enter(desk)
        desk.rounds.crossing.resume(generation)
        desk.told.clear()
        told_by_rank_1(desk)
        assert desk.rounds.complete == 1
        assert RoundDone not in kinds(desk.told)
        desk.rounds._result_decoded(1)
        assert RoundDone in kinds(desk.told)


@pytest.mark.asyncio
async def test_the_timer_is_set_for_each_round_anew() -> None:
    """R3: whoever is late is called, in every round, though nothing else happens here meanwhile."""
    async with Desk(2, "ssp:2") as desk:
        for step in (1, 2, 3):
            desk.compute(step)
            async with asyncio.timeout(10):
                while Call(round=step) not in desk.links[1].sent:
                    await asyncio.sleep(0.001)
            desk.say(stepped(step))
        assert not desk.failed
