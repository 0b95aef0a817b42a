"""Groups that go on with the ranks that are left: who is in, what ends, and what a loss does (P8)."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshtrain.torch_backend.operation import Members, Operation
from meshtrain.torch_backend.process_group import MeshProcessGroup
from meshtrain.torch_backend.reconfigurable import ReconfigurableGroup
from meshtrain.torch_backend.relay import GroupError, Relay
from tests.torch_backend.relays import Router, relays
from tests.torch_backend.specs import SPEC

SIZE = 3
TIMEOUT = timedelta(seconds=5)


class Owner:
    """What a process has of its groups."""

    def __init__(self, relay: Relay) -> None:
        self.close = relay.close
        self.told: list[tuple[int, ...]] = []

    def members_changed(self, ranks: tuple[int, ...]) -> None:
        self.told.append(ranks)


class Ranks:
    """A group on every rank, in one process."""

    def __init__(self, made: list[Any], router: Router) -> None:
        self.relays, self.router = made, router
        self.owners = [Owner(relay) for relay in made]
        self.groups = [
            ReconfigurableGroup(
                relay,
                SimpleNamespace(group_id="0", group_rank=rank, group_size=SIZE, timeout=TIMEOUT),
                self.owners[rank],
            )
            for rank, relay in enumerate(made)
        ]

    def handles(self, *ranks: int) -> list[str]:
        return [self.groups[rank].get_reconfigure_handle() for rank in ranks]

    def begin(self, uuid: int, *ranks: int, timeout: timedelta | None = None) -> None:
        """These make a world, each in the order in which it is named."""
        options = options_of(uuid, self.handles(*ranks), timeout)
        works = [self.groups[rank].reconfigure(options) for rank in ranks]
        for work in works:
            work.wait()

    def sums(self, *ranks: int, size: int = 4) -> list[float]:
        """What each has, of tensors of its rank in the group and one."""
        tensors = [torch.full((size,), self.groups[rank].rank() + 1.0) for rank in ranks]
        works = [self.groups[rank].allreduce([each]) for rank, each in zip(ranks, tensors, strict=True)]
        for work in works:
            work.wait()
        assert all(each.eq(each[0]).all() for each in tensors)
        return [each[0].item() for each in tensors]


def options_of(uuid: int, handles: Any, timeout: timedelta | None = None) -> Any:
    return SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={})


@pytest.fixture
def world() -> Iterator[Ranks]:
    with relays(SIZE, SPEC, None) as (made, router):
        ranks = Ranks(made, router)
        yield ranks
        for group in ranks.groups:
            group.shutdown()


def test_there_are_no_members_before_the_first(world: Ranks) -> None:
    group = world.groups[1]
    assert (group.rank(), group.size(), group.supports_reconfigure) == (1, SIZE, True)
    with pytest.raises(dist.DistBackendError, match=r"no members yet: call torch\.distributed's _reconfigure"):
        group.allreduce([torch.ones(1)]).wait()


@pytest.mark.parametrize("size", [4, 300_000])
def test_worlds_follow_each_other(world: Ranks, size: int) -> None:
    """In any order, smaller and larger; ranks are as listed, and rank and size are those of now."""
    for uuid, ranks in enumerate(((0, 1, 2), (0, 1), (2, 0), (1,), (2, 1, 0), (2, 1, 0))):
        world.begin(uuid, *ranks)
        assert [world.groups[rank].rank() for rank in ranks] == list(range(len(ranks)))
        assert [world.groups[rank].getSize() for rank in ranks] == [len(ranks)] * len(ranks)
        assert world.owners[ranks[0]].told[-1] == ranks
        assert world.sums(*ranks, size=size) == [sum(range(1, len(ranks) + 1))] * len(ranks)


def test_worlds_apart_join(world: Ranks) -> None:
    """Who begins the larger one first is waited for by nobody, and waits for all: what it has sent is kept."""
    world.begin(1, 0)
    work = world.groups[0].reconfigure(options_of(3, world.handles(0, 1, 2)))
    world.begin(2, 1, 2)
    assert world.sums(1, 2) == [3.0, 3.0]
    others = [world.groups[rank].reconfigure(options_of(3, world.handles(0, 1, 2))) for rank in (1, 2)]
    for each in (work, *others):
        each.wait()
    assert world.sums(0, 1, 2) == [6.0] * 3


def test_a_set_of_handles_is_in_the_job_order(world: Ranks) -> None:
    options = options_of(1, set(world.handles(0, 1, 2)))
    works = [group.reconfigure(options) for group in world.groups]
    for work in works:
        work.wait()
    assert [group.rank() for group in world.groups] == [0, 1, 2]


def test_what_was_begun_before_ends_and_reaches_nobody(world: Ranks) -> None:
    """Ranks have come differently far when they begin anew: in collectives, sends, and messages that nobody took."""
    world.begin(1, 0, 1, 2)
    waiting = [world.groups[0].allreduce([torch.ones(size)]) for size in (1, 300_000, 1)]
    world.groups[1].send([torch.ones(3)], 0, 5)
    receiving = world.groups[1].recv([torch.ones(3)], 2, 5)
    world.begin(2, 0, 1)
    for work in (*waiting, receiving):
        with pytest.raises(dist.DistBackendError, match="the process group was reconfigured"):
            work.wait()
    place = torch.zeros(3)
    taken = world.groups[0].recv([place], 1, 5)
    world.groups[1].send([torch.full((3,), 2.0)], 0, 5)
    taken.wait()
    assert place.tolist() == [2.0] * 3, "of this world"
    assert world.sums(0, 1) == [3.0, 3.0]


def test_a_lost_member_ends_what_all_wait_for(world: Ranks) -> None:
    """Also between two that are left: one of them may have begun anew already. And whoever is left goes on."""
    world.begin(1, 0, 1, 2)
    work = world.groups[0].recv([torch.ones(1)], 1)
    for rank in (0, 1):
        world.router.lose(rank, 2, "the connection broke")
    with pytest.raises(dist.DistBackendError, match=r"rank 2 \(n2\) is gone: the connection broke"):
        work.wait()
    with pytest.raises(dist.DistBackendError, match="rank 2"):
        world.groups[0].allreduce([torch.ones(1)]).wait()
    world.begin(2, 0, 1)
    assert world.sums(0, 1) == [3.0, 3.0]
    with pytest.raises(dist.DistBackendError, match=r"reconfigure: rank 2 \(n2\) is gone"):
        world.groups[0].reconfigure(options_of(3, world.handles(0, 1, 2))).wait()


def test_a_member_that_ends_ends_what_all_wait_for(world: Ranks) -> None:
    world.begin(1, 0, 1, 2)
    work = world.groups[0].recv([torch.ones(1)], 1)
    world.relays[2].close()
    with pytest.raises(dist.DistBackendError, match=r"rank 2 \(n2\) has left the process group"):
        work.wait()
    world.begin(2, 0, 1)
    assert world.sums(0, 1) == [3.0, 3.0]


def test_what_was_dropped_takes_no_window(world: Ranks) -> None:
    """P1: bytes that reach nobody, for the other end has begun anew, are not counted in the next world."""
    world.begin(1, 0, 1)
    world.groups[1].recv([torch.ones(2_000_000)], 0)
    until_s = time.monotonic() + 5.0
    while not world.relays[0]._asked_for:
        assert time.monotonic() < until_s, "it was asked for"
    options = options_of(2, world.handles(0, 1))
    first = world.groups[1].reconfigure(options)
    world.groups[0].send([torch.ones(2_000_000)], 1)
    for work in (first, world.groups[0].reconfigure(options)):
        work.wait()
    assert world.sums(0, 1, size=300_000) == [3.0, 3.0]


def test_a_process_that_has_ended_is_not_waited_for(world: Ranks) -> None:
    """In whichever world it was, also where it was in none."""
    world.begin(1, 0, 1)
    world.relays[2].close()
    world.relays[1].close()
    with pytest.raises(dist.DistBackendError, match=r"rank 1 \(n1\) has left the process group"):
        world.groups[0].allreduce([torch.ones(1)]).wait()
    began_s = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=r"rank 2 \(n2\) has left the process group"):
        world.groups[0].reconfigure(options_of(2, world.handles(0, 2))).wait()
    assert time.monotonic() - began_s < TIMEOUT.total_seconds() / 2


def test_who_does_not_come_is_named(world: Ranks) -> None:
    with pytest.raises(dist.DistBackendError, match=r"Timed out after 0.2 s, waiting for rank 1 \(n1\)"):
        world.groups[0].reconfigure(options_of(1, world.handles(0, 1), timedelta(seconds=0.2))).wait()
    with pytest.raises(dist.DistBackendError, match="reconfigure has failed"):
        world.groups[0].allreduce([torch.ones(1)]).wait()
    world.begin(2, 0, 1)
    assert world.sums(0, 1) == [3.0, 3.0]


def test_an_aborted_group_begins_anew(world: Ranks) -> None:
    world.begin(1, 0, 1, 2)
    work = world.groups[0].allreduce([torch.ones(1)])
    from_anybody = world.groups[0].recv_anysource([torch.ones(1)])
    world.groups[0].abort()
    for each in (work, from_anybody, world.groups[0].recv_anysource([torch.ones(1)])):
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            each.wait()
    world.begin(2, 0, 1, 2)
    assert world.sums(0, 1, 2) == [6.0] * 3


def test_subgroups_are_of_one_world(world: Ranks) -> None:
    world.begin(1, 0, 1, 2)
    relay = world.relays[0]
    group = MeshProcessGroup(Members(relay, "sub", (0, 1), 0, relay.instance), TIMEOUT, relay.close)
    world.begin(2, 0, 1)
    for call in (lambda: group.allreduce([torch.ones(1)]).wait(), lambda: group.send([torch.ones(1)], 1)):
        with pytest.raises(dist.DistBackendError, match="before the last _reconfigure: make the group again"):
            call()
    group.end_threads()


def test_an_operation_that_begins_when_its_world_is_over_is_of_none(
    world: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited behind others for longer than `reconfigure` waits for them."""
    monkeypatch.setattr("meshtrain.torch_backend.work.JOIN_TIMEOUT_S", 0.05)
    world.begin(1, 0, 1, 2)
    gate = threading.Event()

    def held() -> Callable[[], None]:
        assert gate.wait(TIMEOUT.total_seconds())
        return lambda: None

    for _ in range(2):
        world.groups[0]._worker.put(held)
    late = world.groups[0].allreduce([torch.ones(1)])
    world.begin(2, 0, 1)
    gate.set()
    with pytest.raises(dist.DistBackendError, match="before the last _reconfigure"):
        late.wait()
    assert world.sums(0, 1) == [3.0, 3.0]


def test_an_operation_that_runs_on_when_its_world_is_over_sends_and_takes_nothing(world: Ranks) -> None:
    """It may compute for longer than `reconfigure` waits for it. What it sent then would reach ranks that never ask for
    it, and take of what they may be sent unasked."""
    world.begin(1, 0, 1, 2)
    group = world.groups[0]
    members = group._members
    op = Operation(members, next(members.numbers), "all_reduce", 5.0)
    world.begin(2, 0, 1)
    eager = world.relays[0]._eager[1]
    for transfer in (op.send(1, torch.ones(2)), op.receive(1, torch.ones(2))):
        with pytest.raises(GroupError, match="before the last _reconfigure"):
            op.wait(transfer)
    assert world.relays[0]._eager[1] == eager
    assert not world.relays[1]._early
    assert next(group._members.numbers) == next(world.groups[1]._members.numbers), "operations are counted by world"
    assert world.sums(0, 1) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda handles: handles[1:], "is not among those given"),
        (lambda handles: [*handles, handles[1]], "two handles of one rank"),
        (lambda handles: [*handles, "gloo:1"], "'gloo:1' is no handle of a process of job"),
        (lambda handles: [*handles, handles[0].replace("/0/", "/9/")], "no handle of a process of job"),
    ],
)
def test_other_handles_are_refused(world: Ranks, change: Any, text: str) -> None:
    with pytest.raises(dist.DistBackendError, match=text):
        world.groups[0].reconfigure(options_of(1, change(world.handles(0, 1))))
    world.begin(1, 0, 1)
    with pytest.raises(dist.DistBackendError, match="already used"):
        world.groups[0].reconfigure(options_of(1, world.handles(0, 1)))


def test_no_thread_is_left(world: Ranks) -> None:
    world.begin(1, 0, 1, 2)
    before = threading.active_count()
    for uuid in range(2, 6):
        world.begin(uuid, 0, 1, 2)
    assert threading.active_count() <= before
