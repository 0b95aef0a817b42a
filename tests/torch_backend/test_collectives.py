"""Every collective against what it says, for 1 to 5 ranks, sizes on both sides of each boundary, and all dtypes."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshtrain.torch_backend import collectives
from meshtrain.torch_backend.operation import Members, Operation
from meshtrain.torch_backend.reductions import TensorReduction
from meshtrain.torch_backend.relay import GroupError, Relay
from meshwire.frames.header import GROUP_ENDS, Header, Kind
from tests.torch_backend.relays import Router, everywhere, relays
from tests.torch_backend.specs import SPEC

# Nothing, less than ranks, direct, around the ring at once, and when it is asked for.
SIZES = (0, 1, 3, 1000, 20_000, 300_001)
KINDS: Any = dist.ReduceOp.RedOpType


@pytest.fixture(scope="module", params=[1, 2, 3, 5])
def world(request: pytest.FixtureRequest) -> Iterator[list[Relay]]:
    with relays(request.param, SPEC) as (made, _):
        yield made


_numbers = iter(range(1, 10_000))


def run(world: list[Relay], on_rank: Any) -> list[Any]:
    return everywhere(world, on_rank, next(_numbers))


def values(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)
    return torch.randint(0, 100, (size,), generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_leaves_equal_bits_everywhere(world: list[Relay], size: int) -> None:
    def on(rank: int, op: Operation) -> torch.Tensor:
        tensor = values(rank, size)
        collectives.all_reduce(op, tensor, TensorReduction(KINDS.SUM))
        return tensor

    results = run(world, on)
    expected = torch.stack([values(rank, size).double() for rank in range(len(world))]).sum(0)
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("size", [5, 70_000])
@pytest.mark.parametrize(
    ("kind", "dtype", "reference"),
    [
        (KINDS.AVG, torch.float64, lambda all_: all_.mean(0)),
        (KINDS.AVG, torch.int64, lambda all_: all_.sum(0).div(len(all_), rounding_mode="trunc")),
        (KINDS.PRODUCT, torch.float64, lambda all_: all_.prod(0)),
        (KINDS.MIN, torch.int32, lambda all_: all_.min(0).values),
        (KINDS.MAX, torch.bfloat16, lambda all_: all_.max(0).values),
        (KINDS.BAND, torch.uint8, lambda all_: all_[0] if len(all_) == 1 else _fold(all_, torch.bitwise_and)),
        (KINDS.BOR, torch.int16, lambda all_: _fold(all_, torch.bitwise_or)),
        (KINDS.BXOR, torch.int64, lambda all_: _fold(all_, torch.bitwise_xor)),
    ],
)
def test_every_reduction(world: list[Relay], size: int, kind: Any, dtype: torch.dtype, reference: Any) -> None:
    def on(rank: int, op: Operation) -> torch.Tensor:
        tensor = values(rank, size, dtype)
        collectives.all_reduce(op, tensor, TensorReduction(kind))
        return tensor

    expected = reference(torch.stack([values(rank, size, dtype) for rank in range(len(world))])).to(dtype)
    for result in run(world, on):
        torch.testing.assert_close(result, expected)


def _fold(parts: torch.Tensor, combine: Any) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_from_every_root(world: list[Relay], size: int) -> None:
    for root in range(len(world)):

        def on(rank: int, op: Operation, root: int = root) -> torch.Tensor:
            tensor = values(rank, size)
            collectives.broadcast(op, tensor, root)
            return tensor

        assert all(torch.equal(result, values(root, size)) for result in run(world, on))


@pytest.mark.parametrize("size", SIZES)
def test_gathers_and_scatters(world: list[Relay], size: int) -> None:
    count = len(world)

    def all_gather(rank: int, op: Operation) -> list[torch.Tensor]:
        parts = [torch.empty(size) for _ in range(count)]
        collectives.all_gather(op, parts, values(rank, size))
        return parts

    def gather(rank: int, op: Operation) -> list[torch.Tensor]:
        parts = [torch.empty(size) for _ in range(count)]
        collectives.gather(op, values(rank, size), parts if rank == count - 1 else None, count - 1)
        return parts

    def scatter(rank: int, op: Operation) -> torch.Tensor:
        tensor = torch.empty(size)
        collectives.scatter(op, tensor, [values(each, size) for each in range(count)] if not rank else None, 0)
        return tensor

    expected = [values(rank, size) for rank in range(count)]
    for parts in (*run(world, all_gather), run(world, gather)[-1], run(world, scatter)):
        assert all(map(torch.equal, parts, expected))


@pytest.mark.parametrize("size", SIZES)
def test_reductions_to_one_and_to_parts(world: list[Relay], size: int) -> None:
    count = len(world)
    for root in range(count):

        def to_root(rank: int, op: Operation, root: int = root) -> torch.Tensor:
            tensor = values(rank, size, torch.int64)
            collectives.reduce(op, tensor, root, TensorReduction(KINDS.SUM))
            return tensor

        total = torch.stack([values(rank, size, torch.int64) for rank in range(count)]).sum(0)
        assert torch.equal(run(world, to_root)[root], total)

    def parts(rank: int, op: Operation) -> torch.Tensor:  # of different sizes
        mine = [values(10 * rank + part, size + part, torch.int64) for part in range(count)]
        return collectives.reduce_scatter(op, mine, TensorReduction(KINDS.SUM))

    for part, result in enumerate(run(world, parts)):
        given = [values(10 * rank + part, size + part, torch.int64) for rank in range(count)]
        assert torch.equal(result, torch.stack(given).sum(0))


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_of_different_sizes(world: list[Relay], size: int) -> None:
    count = len(world)

    def on(rank: int, op: Operation) -> list[torch.Tensor]:
        outputs = [torch.empty(size + peer) for peer in range(count)]
        collectives.all_to_all(op, outputs, [values(10 * rank + peer, size + rank) for peer in range(count)])
        return outputs

    for rank, outputs in enumerate(run(world, on)):
        assert all(torch.equal(output, values(10 * peer + rank, size + peer)) for peer, output in enumerate(outputs))


def test_a_barrier_holds_until_all_have_come(world: list[Relay]) -> None:
    came: list[int] = []

    def on(rank: int, op: Operation) -> int:
        came.append(rank)
        collectives.barrier(op)
        return len(came)

    assert run(world, on) == [len(world)] * len(world)


def test_several_at_once_do_not_meet(world: list[Relay]) -> None:
    """Channels differ: what is started in another order on each rank still goes where it belongs."""

    def on(rank: int, op: Operation) -> list[torch.Tensor]:
        operations = [Operation(op.members, 100_000 + k, "test", 10.0) for k in range(3)]
        tensors = [torch.full((50_000,), float(rank + k)) for k in range(3)]
        order = [0, 1, 2] if rank % 2 else [2, 1, 0]
        for k in order:
            if rank % 2:
                operations[k].send((rank - 1) % op.size, tensors[k])
            elif rank + 1 < op.size:
                operations[k].receive(rank + 1, tensors[k])
        for operation in operations:
            operation.finish()
        return tensors

    for rank, tensors in enumerate(run(world, on)):
        sender = rank % 2 == 0 and rank + 1 < len(world)
        assert [float(tensor[0]) for tensor in tensors] == [rank + k + sender for k in range(3)]


def test_sizes_that_differ_are_told_with_the_rank() -> None:
    with relays(2, SPEC) as (world, _), pytest.raises(GroupError, match=r"rank \d \(n\d\) sent \d+ bytes where \d+"):
        everywhere(world, lambda rank, op: collectives.broadcast(op, torch.zeros(10 + rank), 0))


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_who_does_not_come_is_named_at_the_deadline(size: int) -> None:
    with relays(2, SPEC) as (world, _):

        def on(rank: int, op: Operation) -> None:
            if not rank:
                collectives.all_reduce(op, torch.zeros(size), TensorReduction(KINDS.SUM))

        with pytest.raises(GroupError, match=r"Timed out after 0.5 s, waiting for rank 1 \(n1\)"):
            everywhere(world, on, timeout_s=0.5)


def lost(_world: list[Relay], router: Router) -> None:
    for rank in range(2):
        router.lose(rank, 2, "the connection broke")


def left(world: list[Relay], _router: Router) -> None:
    world[2].send(0, 5, 0, memoryview(b"x"))  # it has said something, so that the router knows its group
    world[2].close()


@pytest.mark.parametrize(
    ("goes", "text"),
    [(lost, r"rank 2 \(n2\) is gone: the connection broke"), (left, r"rank 2 \(n2\) has left the process group")],
)
def test_who_goes_ends_what_waits_for_it_and_nothing_else(goes: Any, text: str) -> None:
    with relays(3, SPEC) as (world, router):
        waiting = world[0].receive(2, 1, 0, memoryview(bytearray(10)))
        anyone = world[0].receive(None, 2, None, memoryview(bytearray(10)))
        other = world[0].receive(1, 3, 0, memoryview(bytearray(3)))
        goes(world, router)
        with pytest.raises(GroupError, match=text):
            waiting.wait(time.monotonic() + 5.0, "it")
        assert not anyone.ended
        world[1].send(0, 3, 0, memoryview(b"yes"))
        other._event.wait(5.0)
        assert bytes(other.place) == b"yes"
        later = world[0].send(2, 9, 0, memoryview(b"late"))
        assert later.error is not None
        assert "rank 2" in later.error


def test_a_window_bounds_what_is_under_way() -> None:
    """P1: without anybody who reads, a sender stops; what others send goes on."""
    with relays(2, SPEC) as (world, _):
        size = 40 * 2**20
        sending = world[0].send(1, 1, 0, memoryview(bytearray(size)))
        eager = [world[0].send(1, 2, index, memoryview(bytes(60_000))) for index in range(30)]
        assert not sending.ended, "nobody has asked for it"
        assert sum(each.ended for each in eager) == 2**20 // 60_000
        places = [world[1].receive(0, 2, index, memoryview(bytearray(60_000))) for index in range(30)]
        place = world[1].receive(0, 1, 0, memoryview(bytearray(size)))
        for each in (*places, place, *eager, sending):
            each._event.wait(10.0)
            assert each.ended
            assert each.error is None


def test_frames_of_another_instance_are_dropped() -> None:
    """Those of processes that have ended; and what comes before this one's number is known waits."""
    with relays(2, SPEC) as (world, router):
        receiving = world[1].receive(0, 1, 0, memoryview(bytearray(1)))
        world[0].instance = 6
        world[0].send(1, 1, 0, memoryview(b"a"))
        world[0].instance = 7
        world[0].send(1, 1, 0, memoryview(b"b"))
        receiving._event.wait(5.0)
        assert bytes(receiving.place) == b"b"
        assert router


def test_a_lost_rank_ends_what_waits_for_another_one() -> None:
    """P4: rank 0 waits for rank 1, which is there and never sends, for it waits as well. One that has left in order may
    have done its part."""
    with relays(3, SPEC) as (made, router):
        op = Operation(Members(made[0], "world", (0, 1, 2), 0, made[0].instance), 1, "test", 10.0)
        waiting = op.receive(1, torch.empty(200_000))
        why = b"its script has ended"
        ends = Header(Kind.RELAYED, len(why), job=1, round=7, step=GROUP_ENDS, contributors=1 << 2)
        router.write(0, ends.encode() + why)
        with pytest.raises(GroupError, match=r"rank 2 \(n2\) has left"):
            op.wait(op.receive(2, torch.empty(1)))
        assert not waiting.ended
    with relays(3, SPEC) as (made, router):
        op = Operation(Members(made[0], "world", (0, 1, 2), 0, made[0].instance), 1, "test", 10.0)
        waiting = op.receive(1, torch.empty(200_000))
        router.lose(0, 2, "the connection broke")
        with pytest.raises(GroupError, match=r"rank 2 \(n2\) is gone: the connection broke"):
            op.wait(waiting)
        with pytest.raises(GroupError, match=r"rank 2 \(n2\) is gone"):
            op.wait(op.send(1, torch.empty(200_000)))
        pair = Operation(Members(made[0], "pair", (0, 1), 0, made[0].instance), 1, "test", 10.0)
        assert not pair.receive(1, torch.empty(200_000)).ended, "a group without it goes on"
