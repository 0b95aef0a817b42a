"""The shell of the rounds through a change of generation: real machine, executor and turn, nothing in their places.

`tests/sim` runs the same shell in clusters, with an exchange of names in the place of the executor's bytes; here they
are bytes.
"""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.session.member_handler import MemberHandler
from meshtraind.session.session import JobSession
from meshwire.frames.header import Header, Kind
from meshwire.message_base import Wire
from meshwire.messages.generation import Enter
from meshwire.messages.job import Generation, RankReport
from meshwire.messages.learner import LearnerBucket, LearnerSealed, RoundDone
from meshwire.messages.rounds import Bind, Call, Null, Seal
from tests.daemon.roundhost import executor_of
from tests.daemon.session.test_learner_notices import JOB, PLAN, Desk, kinds, stepped

SEALED = LearnerSealed(step=1, used=b"\x01", integers=())


def enter(desk: Desk, number: int = 2, learning: tuple[int, ...] = (0, 1)) -> Generation:
    """All members have promised the next generation, in which nobody is lost, and this one enters it."""
    crossing = desk.rounds.crossing
    generation = desk.generation.model_copy(update={"number": number, "learning": learning})
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


def told_by_rank_1(desk: Desk, contributors: int = 0b11) -> None:
    """All that it has to say of round 1, with the results of the exchange."""
    desk.rounds.message(1, Bind(round=1, step=1, base=0, weight=1.0))
    desk.rounds.message(1, Seal(round=1, used=b"\x01", integers=()))
    for bucket in PLAN.buckets:
        desk.rounds.bucket_complete(1, bucket.index, False, contributors, float(contributors.bit_count()), 0.0)


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


@pytest.mark.parametrize("ready", [1, len(PLAN.buckets)])
@pytest.mark.asyncio
async def test_a_learner_that_dies_in_a_round_costs_the_others_none(ready: int) -> None:
    """V2, G6: neither poison nor a seal; where its rank rests the round runs again, and counts."""
    async with Desk(2, "ssp:2", rtt_s=10.0) as desk:  # nobody is late, however slow this machine
        desk.say(*(LearnerBucket(step=1, bucket=bucket, weight=1.0) for bucket in range(ready)))
        told_by_rank_1(desk)
        desk.rounds.learner.dead("its process has ended")
        assert kinds(desk.links[1].sent) == [Bind]
        assert desk.rounds.complete == 0
        desk.rounds.crossing.fence()
        generation = enter(desk, learning=(1,))
        desk.rounds.crossing.resume(generation)
        assert desk.links[1].sent[1:] == [Null(round=1)]
        told_by_rank_1(desk, contributors=0b10)
        assert desk.rounds.complete == 1
        assert desk.rounds.history_samples == 1
        assert not desk.failed


def member_side(desk: Desk) -> MemberHandler:
    """What members say, on its way to the rounds."""
    job = SimpleNamespace(ended=False, ending=False, report=lambda _report: None)
    agreement = SimpleNamespace(wake=lambda: None, in_barrier=lambda _rank: False)
    membership = SimpleNamespace(hears=lambda _rank: True)
    owner = SimpleNamespace(rounds=desk.rounds, member_reported=lambda: None)
    return MemberHandler(cast(Any, job), cast(Any, agreement), cast(Any, membership), cast(Any, owner))


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
            return desk.rounds._machine._table._decided[1]

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
async def test_a_report_moves_the_commit_where_no_frames_do() -> None:
    """G5: the others' learners rest, and their last frames were of before they held the round. Not one of another
    generation, where the same number may be another round's."""
    async with Desk(2, "ssp:2") as desk:
        side = member_side(desk)
        desk.compute(1)
        told_by_rank_1(desk)
        assert (desk.rounds.complete, desk.rounds.committed) == (1, 0)
        of_now, report = desk.generation.hash64(), RankReport(job=JOB, rank=1, state="running")
        for generation, committed in ((of_now ^ 1, 0), (of_now, 1)):
            complete = Header(kind=Kind.CONTROL, payload_bytes=0, generation=generation, complete=1)
            assert side.notice(1, complete, report) is None
            assert desk.rounds.committed == committed


def test_every_report_says_how_many_rounds_are_complete() -> None:
    """G5: the other side of it."""
    told: list[tuple[object, int]] = []
    session = SimpleNamespace(
        _metrics=SimpleNamespace(report=lambda *_of: "report"),
        _learners=SimpleNamespace(starts=1),
        _tell_all=lambda body, complete: told.append((body, complete)),
        job=SimpleNamespace(report=lambda _report: None, ended=False),
        rounds=SimpleNamespace(complete=7, peer_measured=lambda _report: None),
    )
    JobSession.tell_report(cast(Any, session))
    assert told == [("report", 7)]


@pytest.mark.asyncio
async def test_what_a_round_left_out_is_kept_until_it_is_complete() -> None:
    """V1, C1: as long as it may be void, or run again. It is not committed: the other has announced nothing (G5)."""
    async with Desk(2, "ssp:2", codec="int8") as desk:
        desk.compute(1)
        worker = executor_of(desk.rounds)._feedback.worker  # type: ignore[union-attr]
        assert list(worker._before) == [1]
        told_by_rank_1(desk)
        assert (desk.rounds.complete, desk.rounds.committed) == (1, 0)
        assert not worker._before
        assert 1 in executor_of(desk.rounds)._memory.own, "G5: its own part is freed when all hold the round"


@pytest.mark.asyncio
async def test_what_lay_decoded_before_a_change_is_not_given_after_it() -> None:
    """G6: the round runs again, perhaps without a member whose part is in those means: a base of its own, unseen."""
    async with Desk(2, "ssp:2") as desk:
        desk.compute(1)
        for bucket in PLAN.buckets:
            desk.rounds.bucket_complete(1, bucket.index, False, 3, 2.0, 0.0)
        desk.rounds.result_decoded(1)
        desk.rounds.crossing.fence()
        generation = enter(desk)
        desk.rounds.crossing.resume(generation)
        desk.told.clear()
        told_by_rank_1(desk)
        assert desk.rounds.complete == 1
        assert RoundDone not in kinds(desk.told)
        desk.rounds.result_decoded(1)
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
