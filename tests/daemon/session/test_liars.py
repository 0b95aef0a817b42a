"""G10: one of four lies. The others name it, go on without it, and end as if it had been killed at that round."""

import asyncio
import logging
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from meshtraind.codecs import codec_named
from meshtraind.contributions.received import BrokenPartError
from meshtraind.contributions.segments import Segment
from meshtraind.executor.gather import GatherArithmetic
from meshtraind.session.membership_driver import MembershipDriver
from meshtraind.session.membership_host import MembershipHost
from meshtraind.session.session import JobSession
from meshwire.collectives.exchange import Work
from meshwire.frames.header import Header
from meshwire.jobs.lifecycle import job_number
from meshwire.message_base import Wire
from meshwire.messages.generation import Promised
from meshwire.messages.job import End
from meshwire.messages.rounds import Seal
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.settings_changes import SettingsWish
from tests.daemon.executorring import PLAN, Ring, offers
from tests.daemon.liarmesh import JOB, Frame, LiarMesh, at_round
from tests.daemon.lies import LIAR, LIES, RING
from tests.sim.clusterrounds import job_spec
from tests.wire.membership.test_proposing import standing

ROUND, STEPS = 3, 5
HONEST = (0, 2, 3)


@cache
def killed(codec: str, before: int) -> tuple[dict[int, bytes], dict[int, int]]:
    """The means of the same job, in which the liar is killed before this step."""
    mesh = LiarMesh(4, codec, STEPS, dies={LIAR: before})
    asyncio.run(mesh.run(HONEST))
    return mesh.peers[0].means, mesh.peers[0].contributors


@pytest.mark.parametrize("name", LIES)
def test_the_others_go_on_as_if_the_liar_had_been_killed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    codec, lie, named = LIES[name]
    mesh = LiarMesh(4, codec, STEPS)
    mesh.peers[LIAR].lie = at_round(ROUND, lie)
    with caplog.at_level(logging.WARNING):
        asyncio.run(mesh.run(HONEST))
    honest = [mesh.peers[rank] for rank in HONEST]
    assert not any(peer.failed for peer in honest), "the job goes on"
    for peer in honest:
        assert peer.means == honest[0].means, "bit-equal"
        assert LIAR not in (peer.job.generation or mesh.generation).ranks
        (refused,) = peer.job.summary().refused
        assert (refused.rank, refused.violations) == (LIAR, 1)
        assert named in refused.reason
    assert f"rank {LIAR} (n{LIAR}) was refused by rank" in caplog.text
    without = next(number for number, who in sorted(honest[0].contributors.items()) if not who >> LIAR & 1)
    means, contributors = killed(codec, without)
    assert honest[0].contributors == contributors
    assert honest[0].means == means


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_one_false_end_ends_nothing_for_the_others(outcome: Any) -> None:
    """Who says so speaks for itself."""
    mesh = LiarMesh(3, RING, STEPS)
    end = End(job=JOB, outcome=outcome, reason="I say so", now=True)

    def told(header: Header, content: bytes | Wire | None) -> list[Frame]:
        also = [(Header(header.kind, 1, job=job_number(JOB)), end)] if isinstance(content, Seal) else []
        return [(header, content), *also]

    mesh.peers[LIAR].lie = told
    asyncio.run(mesh.run((0, 2)))
    assert mesh.peers[0].ends
    assert mesh.peers[0].means == mesh.peers[2].means


class Hearer:
    """A member of four that hears of ends: what `JobSession` looks at, and what it did."""

    def __init__(self, *, learning: tuple[int, ...], computes: bool = False, out: bool = False) -> None:
        self.linked = {f"{rank + 1:064x}" for rank in (1, 2, 3)}
        self.did: list[str] = []
        self._over: set[int] = set()
        self._failed_elsewhere: dict[int, str] = {}
        self._lying: set[int] = set()
        self._looking = False
        members = tuple(SimpleNamespace(device=f"{rank + 1:064x}", hub=False) for rank in range(4))
        self.job = SimpleNamespace(
            ending=False,
            rank=0,
            reports={},
            members=members,
            rank_of=lambda device: [member.device for member in members].index(device),
            spec=SimpleNamespace(job=JOB, restarts_max=None, engine="mesh"),
            generation=SimpleNamespace(learning=learning) if learning else None,
            counted=learning,
        )
        member = SimpleNamespace(hub=False)
        self._node = SimpleNamespace(links=dict.fromkeys(self.linked), patience_s=5.0, member=member)
        self.passage = SimpleNamespace(
            founding=False,
            computes_now=computes,
            is_out=out,
            generations=SimpleNamespace(elsewhere=frozenset()),
            goes=lambda rank: self.did.append(f"without {rank}"),
        )
        self._tasks = SimpleNamespace(spawn=lambda later, _name: later.close())

    def end(self, outcome: str, _reason: str, *, now: bool, tell: bool) -> None:
        self.did.append(outcome)

    def lie_down(self) -> None:
        self.did.append("lies down")

    def _succeed(self) -> None:
        self.did.append("succeeded")

    def _check_over(self, *, waited: bool = False) -> None:
        JobSession._check_over(cast(Any, self), waited=waited)

    def _check_abandoned(self) -> None:
        JobSession._check_abandoned(cast(Any, self))

    async def _check_over_later(self) -> None:
        pass

    async def _look_for_others(self) -> None:
        pass

    def hears_of_no_base(self, rank: int) -> None:
        JobSession.member_lies_down(cast(Any, self), rank)

    def hears(self, rank: int, outcome: Any) -> list[str]:
        JobSession.member_ended(cast(Any, self), rank, End(job=JOB, outcome=outcome, reason="so", now=False))
        return self.did


def test_a_person_ends_a_job_from_anywhere_and_a_failure_is_its_members_own() -> None:
    assert Hearer(learning=(0, 1, 2, 3), computes=True).hears(1, "cancelled") == ["cancelled"]
    assert Hearer(learning=(0, 1, 2, 3), computes=True).hears(1, "failed") == ["without 1"]
    founding = Hearer(learning=(0, 1, 2, 3))
    founding.passage.founding = True
    assert founding.hears(1, "failed") == ["failed"], "it begins with all, or not at all"


def test_who_asks_in_ends_where_nobody_is_left_that_could_take_it_in() -> None:
    """G10: all others are here, and have given the job up, or ask in themselves."""
    asks = Hearer(learning=(), out=True)
    asks.passage.generations.elsewhere = frozenset({f"{3:064x}"})
    assert asks.hears(1, "failed") == ["without 1"]
    asks._check_abandoned()
    assert asks.did == ["without 1"], "rank 2 goes on"
    asks.passage.generations.elsewhere = frozenset()
    gone = f"{4:064x}"
    asks.linked.discard(gone)
    del asks._node.links[gone]
    asks._check_abandoned()
    assert asks.did == ["without 1"], "rank 3 may go on where it cannot be heard"
    asks._node.links[gone] = None
    asks._check_abandoned()
    assert asks.did == ["without 1", "failed"]


def test_who_asks_in_lies_down_with_those_that_have_no_base_any_more() -> None:
    """J3, J5: it has nothing, and may have a checkpoint on its disk; unless one says in time that it goes on. A member
    goes on without who has lain down."""
    asks = Hearer(learning=(), out=True)
    asks.hears_of_no_base(1)
    assert asks.did == ["without 1"], "rank 2 was asked just now, and its answer is on its way"
    asks.passage.generations.elsewhere = frozenset({f"{2:064x}", f"{3:064x}"})
    asks._check_abandoned()
    assert asks.did == ["without 1"], "rank 2 goes on"
    del asks._node.links[f"{4:064x}"]  # whoever goes on elsewhere will say so when there is a link
    asks.hears_of_no_base(2)
    JobSession.member_goes_on(cast(Any, asks), f"{2:064x}")
    asks._check_abandoned()
    assert asks.did == ["without 1", "without 2"], "rank 1 has the job again"
    asks.hears_of_no_base(1)
    asks._check_abandoned()
    assert asks.did == ["without 1", "without 2", "without 1", "lies down"]
    member = Hearer(learning=(0, 1))
    member.hears_of_no_base(1)
    member.hears_of_no_base(1)
    assert member.did == ["without 1"]


def test_success_is_what_all_that_count_say_of_themselves() -> None:
    """G10: who computes with them hears it from nobody, for it knows better; who asks in, from all that are linked."""
    computes = Hearer(learning=(0, 1, 2), computes=True)
    assert not computes.hears(1, "succeeded")
    assert not computes.hears(2, "succeeded")
    loads = Hearer(learning=(1, 2))
    assert not loads.hears(1, "succeeded")
    assert loads.hears(2, "succeeded") == ["succeeded"]
    asks = Hearer(learning=(), out=True)
    assert not asks.hears(1, "succeeded")
    assert not asks.hears(2, "succeeded")
    assert asks.hears(3, "succeeded") == ["succeeded"]


def test_who_asks_in_believes_those_that_nobody_contradicts_in_time() -> None:
    """A member that was restarted knows of no end, and of no job."""
    asks = Hearer(learning=(), out=True)
    asks.hears(1, "succeeded")
    asks.passage.generations.elsewhere = frozenset({f"{3:064x}"})
    asks._check_over(waited=True)
    assert not asks.did, "rank 2 says that it goes on"
    asks.passage.generations.elsewhere = frozenset()
    asks._check_over(waited=True)
    assert asks.did == ["succeeded"]


@pytest.mark.asyncio
async def test_what_nobody_has_bound_yet_is_not_passed_on_before_it_is() -> None:
    """R2, G10: whoever passes a sum on answers for who is in it. What cannot be compared yet waits."""
    ring = Ring(3)
    known: dict[int, tuple[int, float]] = {}
    victim = ring.members[1].executor
    victim._binds = SimpleNamespace(bound=lambda _round, bitmap: known.get(bitmap))
    ring.rounds = {1: offers(3, seed=1)}
    for rank in (0, 1):
        for _ in PLAN.buckets:
            ring.contribute(rank, ring.rounds[1][rank])
    sent = len(ring.members[1].link.queue)
    ring.deliver(0)
    assert len(ring.members[1].link.queue) == sent, "it waits"
    known[0b001] = (0b001, 99.0)
    victim.decided()
    assert [text.partition(":")[0] for text in ring.broken] == ["0"]
    assert "shows the weight 1.0, the binds add up to 99.0" in ring.broken[0]
    ring.close()


def test_a_sum_that_is_not_finite_names_the_part_that_was_not() -> None:
    """V1, G10: a void round would end the job by `--on-nan stop`, and name nobody."""
    codec, count = codec_named("fp32"), 8
    segment = Segment(codec, 0, 4 * count, 0, count, measured=True)
    good, bad = np.ones(count, "<f4").tobytes(), np.full(count, np.nan, "<f4").tobytes()
    arithmetic = GatherArithmetic([[segment]], count)
    area = memoryview(bytearray(good + bad))
    work = Work(
        first_segment=0, segment_count=1, incoming=True, add_own=False, finish=True, deliver=True, at_once=True,
        send_steps=(), contributors=0b101, weight=2.0, poison=False, length_bytes=0,
        parts=((0, 4 * count), (4 * count, 4 * count)),
    )  # fmt: skip
    with pytest.raises(BrokenPartError) as broken:
        arithmetic.compute(1, 0, work, area, None, None)
    assert broken.value.rank == 2
    huge = np.full(count, 3e38, "<f4").tobytes()
    area[:] = huge + huge
    assert arithmetic.compute(1, 0, work, area, None, None).poison, "finite parts can have a sum that is not"


def test_who_was_refused_is_heard_no_more_in_that_generation() -> None:
    """G10: at once, though the change of generation comes a turn of the loop later."""
    passage = MembershipHost.__new__(MembershipHost)
    refused: list[str] = []
    members = (SimpleNamespace(device="a"), SimpleNamespace(device="b"))
    passage._job = cast(Any, SimpleNamespace(members=members, rank=0, ending=False))
    passage._refusing = {}
    passage.generations = cast(
        Any, SimpleNamespace(refuses=refused.__contains__, refuse=lambda device, _why: refused.append(device))
    )

    async def check() -> None:
        assert passage.hears(1)
        passage.refuse(1, "NaN")
        assert not passage.hears(1)
        await asyncio.sleep(0)
        assert refused == ["b"]
        assert not passage.hears(1)

    asyncio.run(check())


@pytest.mark.parametrize("asked", ["none", "powersgd", "int8"])
def test_who_asks_for_no_codec_is_refused_and_not_its_proposer(asked: str) -> None:
    """G10: the shell looks at each promise before the machine makes a commit of it."""
    driver = MembershipDriver.__new__(MembershipDriver)
    held = standing(1, 12, linked=(0, 1)).model_copy(update={"asks": SettingsWish(codec=asked)})
    refused: list[str] = []
    taken: list[object] = []
    driver._job = cast(Any, SimpleNamespace(spec=job_spec(JOB, "a" * 64, sync_settings("bsp"))))
    driver.refuse = lambda device, _why: refused.append(device)  # type: ignore[method-assign, assignment]
    driver._take = taken.append  # type: ignore[method-assign, assignment]
    driver.notice("b" * 64, Promised(job=JOB, generation=1, standing=held))
    assert (len(refused), len(taken)) == ((0, 1) if asked == "int8" else (1, 0))
