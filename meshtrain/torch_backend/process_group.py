"""The process group that torch calls: it turns torch's arguments into operations on contiguous tensors, and back.

A Python subclass of torch's ProcessGroup, which every torch from 2.6 on takes. From 2.14 on it also takes a subclass of
its Backend, behind a ProcessGroup in C++. Of what that returns C++ forwards `wait` and the future alone (2.14.1): to
`is_completed` it says no for ever, of a receive from anybody not from whom it is, and rank and size cannot change.

Which names torch reaches, and how, is documented nowhere; they are those that DDP, FSDP, DTensor, ZeRO, distributed
checkpoints and torch's own tests were seen to call.
"""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshtrain.torch_backend import collectives, profiled
from meshtrain.torch_backend.operation import Members, Operation, as_bytes
from meshtrain.torch_backend.reductions import TensorReduction
from meshtrain.torch_backend.relay import GroupError, MessageTransfer
from meshtrain.torch_backend.work import GroupWork, OperationThreads

BACKEND = "meshtrain"
Run = Callable[[Operation], None]
_ProcessGroup: Any = dist.ProcessGroup  # whose stubs are of the C++ class: with overloads that Python is not called by


class MeshProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of ranks, one on each device, over the daemons' links.

    Args:
        on_shutdown: called when the group is destroyed.
    """

    def __init__(self, members: Members, timeout: timedelta, on_shutdown: Callable[[], None]) -> None:
        super().__init__(members.rank, members.size)
        self._members = members
        self._timeout = timeout
        self._on_shutdown = on_shutdown
        self._sent: Counter[tuple[int, int]] = Counter()  # by rank and channel, which is of one world
        self._worker = self._new_worker()
        self._group_name = self._group_desc = ""

    def _new_worker(self) -> OperationThreads:
        return OperationThreads(f"meshtrain group {self._members.name}")

    # What torch asks of every group

    def rank(self) -> int:
        """One's own in this group."""
        return self._members.rank

    def size(self) -> int:
        """How many ranks."""
        return self._members.size

    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def getBackendName(self) -> str:  # noqa: N802
        """Never gloo: torch would look for gloo's own C++ object then."""
        return BACKEND

    name = getBackendName

    # torch 2.14 and later ask a group what lies behind it; here it is the group itself

    supports_coalescing = supports_splitting = supports_shrinking = supports_reconfigure = supports_window = False

    def get_backend(self, _device: Any = None) -> "MeshProcessGroup":
        """Whatever the device: of tensors that are not on the CPU its operations say so."""
        return self

    _get_backend = get_backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Kept here: torch keeps it in a C++ backend, and there is none."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """As set."""
        return self._group_name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        """As `setGroupName`."""
        self._group_desc = text

    def getGroupDesc(self) -> str:  # noqa: N802
        """As set."""
        return self._group_desc

    def shutdown(self) -> None:
        """The group is destroyed: what is pending ends by an error."""
        self._on_shutdown()
        self.end_threads()

    def end_threads(self) -> None:
        """What is put from now on fails at once."""
        self._worker.close()

    def abort(self) -> None:
        """As `shutdown`."""
        self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """For operations from now on."""
        self._timeout = timeout

    # Collectives

    def _start(self, what: str, result: Any, run: Run, options: Any = None, given: Any = None) -> GroupWork:
        """Numbers the operation, as on all ranks, and runs it behind those before it.

        Args:
            result: what its future yields.
            given: its tensors, where they are not the result.
        """
        end_mark = profiled.begin(what, _tensors(result if given is None else given))
        members = self._members
        number = next(members.numbers)
        work = GroupWork(result, what)
        asked = getattr(options, "timeout", None)
        timeout = asked if isinstance(asked, timedelta) and asked.total_seconds() > 0 else self._timeout
        timeout_s = timeout.total_seconds()

        def in_turn() -> Callable[[], None]:
            op = Operation(members, number, what, timeout_s)
            try:
                members.check()
                with torch.no_grad():
                    run(op)
            except GroupError as error:
                op.give_up()
                failed: Exception | None = dist.DistBackendError(f"{what}: {error}")
            except Exception as error:  # the script is told by its wait
                op.give_up()
                failed = error
            else:
                failed = None
            end_mark()
            return functools.partial(work.end, failed)

        self._worker.put(in_turn)
        return work

    def allreduce(self, tensors: Any, opts: Any = None) -> GroupWork:
        """All ranks get the reduction of each tensor."""
        given, reduction = _listed(tensors), _reduction(opts)

        def run(op: Operation) -> None:
            for tensor in given:
                if tensor.is_sparse:
                    _sparse_sum(op, tensor)
                    continue
                flat = _flat(tensor)
                collectives.all_reduce(op, flat, reduction)
                _write_back(tensor, flat)

        return self._start("all_reduce", given, run, opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None, **named: Any) -> GroupWork:
        """All ranks get the root's tensor."""
        given = _listed(tensors)
        root = opts if isinstance(opts, int) else named.get("root", getattr(opts, "rootRank", 0))

        def run(op: Operation) -> None:
            for tensor in given:
                flat = _flat(tensor)
                collectives.broadcast(op, flat, root)
                _write_back(tensor, flat)

        return self._start("broadcast", given, run, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> GroupWork:
        """The root gets the reduction."""
        given, reduction = _listed(tensors), _reduction(opts)
        root = getattr(opts, "rootRank", 0)

        def run(op: Operation) -> None:
            for tensor in given:
                flat = _flat(tensor) if op.rank == root else _flat(tensor).clone()
                collectives.reduce(op, flat, root, reduction)
                if op.rank == root:
                    _write_back(tensor, flat)

        return self._start("reduce", given, run, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """All ranks get all tensors."""
        given = _listed(inputs)

        def run(op: Operation) -> None:
            for tensor, places in zip(given, outputs, strict=True):
                _gather_all(op, tensor, places)

        return self._start("all_gather", outputs, run, opts, given)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """As `allgather`, of several tensors."""

        def run(op: Operation) -> None:
            for index, tensor in enumerate(inputs):
                _gather_all(op, tensor, [places[index] for places in outputs])

        return self._start("all_gather_coalesced", outputs, run, opts, inputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> GroupWork:
        """All ranks get all tensors, one behind the other."""

        def run(op: Operation) -> None:
            _gather_into(op, tensor, output)

        return self._start("all_gather_into_tensor", output, run, opts, tensor)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """As `all_gather_single`, of several tensors."""

        def run(op: Operation) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                _gather_into(op, tensor, output)

        return self._start("all_gather_into_tensor_coalesced", outputs, run, opts, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """The root gets all tensors."""
        given, root = _listed(inputs), getattr(opts, "rootRank", 0)

        def run(op: Operation) -> None:
            for index, tensor in enumerate(given):
                if op.rank != root:
                    collectives.gather(op, _flat(tensor), None, root)
                    continue
                places = [_flat(place) for place in outputs[index]]
                collectives.gather(op, _flat(tensor), places, root)
                for place, flat in zip(outputs[index], places, strict=True):
                    _write_back(place, flat)

        return self._start("gather", outputs, run, opts, given)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """Each rank gets its tensor of the root's."""
        given, root = _listed(outputs), getattr(opts, "rootRank", 0)

        def run(op: Operation) -> None:
            for index, tensor in enumerate(given):
                flat = _flat(tensor)
                parts = [_flat(part) for part in inputs[index]] if op.rank == root else None
                collectives.scatter(op, flat, parts, root)
                _write_back(tensor, flat)

        return self._start("scatter", given, run, opts, inputs if inputs else given)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """Each rank gets its part of the reduction of lists of tensors."""
        given, reduction = _listed(outputs), _reduction(opts)

        def run(op: Operation) -> None:
            for output, parts in zip(given, inputs, strict=True):
                part = collectives.reduce_scatter(op, [_flat(each).clone() for each in parts], reduction)
                _write_back(output, part)

        return self._start("reduce_scatter", given, run, opts, inputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> GroupWork:
        """Each rank gets its part of the reduction of tensors that hold all parts, one behind the other."""
        reduction = _reduction(opts)

        def run(op: Operation) -> None:
            _scatter_sum(op, output, tensor, reduction)

        return self._start("reduce_scatter_tensor", output, run, opts, tensor)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """As `reduce_scatter_single`, of several tensors."""
        reduction = _reduction(opts)

        def run(op: Operation) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                _scatter_sum(op, output, tensor, reduction)

        return self._start("reduce_scatter_tensor_coalesced", outputs, run, opts, inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """Each rank gets what each has for it."""

        def run(op: Operation) -> None:
            places = [_flat(place) for place in outputs]
            collectives.all_to_all(op, places, [_flat(tensor) for tensor in inputs])
            for place, flat in zip(outputs, places, strict=True):
                _write_back(place, flat)

        return self._start("all_to_all", outputs, run, opts, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        """As `alltoall`, of parts of one tensor along its first dimension; without sizes they are equal."""

        def run(op: Operation) -> None:
            place, given = output.contiguous(), tensor.contiguous()
            places, parts = _parts(place, output_sizes, op.size), _parts(given, input_sizes, op.size)
            collectives.all_to_all(op, places, parts)
            _write_back(output, place.reshape(-1))

        return self._start("all_to_all_single", output, run, opts, tensor)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> GroupWork:
        """Ends when all have come to it."""
        return self._start("barrier", [], collectives.barrier, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Waits for all; rank 0's error names who has not come. Raises RuntimeError."""
        limit = self._timeout if timeout is None else timeout
        members = self._members
        op = Operation(members, next(members.numbers), "monitored_barrier", limit.total_seconds())
        token, others = torch.zeros(1, dtype=torch.uint8), range(1, op.size)
        try:
            if op.rank:
                op.wait(op.send(0, token))
                op.wait(op.receive(0, torch.empty_like(token)))
                return
            missing: dict[int, GroupError] = {}
            coming = {peer: op.receive(peer, torch.empty_like(token)) for peer in others}
            for peer, transfer in coming.items():
                if not missing and op.left_s <= 0.0:
                    raise RuntimeError(
                        f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {limit.total_seconds() * 1000:.0f} ms, "
                        f"before it had heard of ranks {peer} to {op.size - 1}"
                    )
                try:
                    op.wait(transfer)
                except GroupError as error:
                    missing[peer] = error
                    if not wait_all_ranks:
                        break
            if missing:
                named = ", ".join(map(str, missing))
                who = f"Rank {named}" if len(missing) == 1 else f"Ranks {named}"
                first = next(iter(missing.values()))
                raise RuntimeError(
                    f"[Rank 0]: {who} failed to pass monitoredBarrier in {limit.total_seconds() * 1000:.0f} ms "
                    f"Original exception: {first}"
                )
            for peer in others:
                op.send(peer, token)
            op.finish()
        except GroupError as error:
            raise RuntimeError(
                f"Rank {op.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0. Please check rank 0 logs for faulty rank. Original exception: {error}"
            ) from error
        finally:
            op.give_up()

    # From one rank to another

    def send(self, tensors: Any, peer: int, tag: int = 0) -> GroupWork:
        """Sends a tensor."""
        (tensor,) = _listed(tensors)
        members = self._members
        self._check(members, f"send to rank {peer}")
        flat, channel = _flat(tensor), members.channel("tag", tag)
        rank = members.ranks[peer]
        index = self._sent[rank, channel]
        self._sent[rank, channel] += 1
        transfer = members.relay.send(rank, channel, index, as_bytes(flat), instance=members.instance)
        profiled.mark_transfer("send", tensor, transfer, self._timeout.total_seconds())
        return self._of_transfer(transfer, members, f"send to rank {peer}", [tensor], flat)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> GroupWork:
        """Receives a tensor."""
        return self._receive(tensors, peer, tag, f"recv from rank {peer}")

    def recv_anysource(self, tensors: Any, tag: int = 0) -> GroupWork:
        """Receives a tensor from whoever sends the first one."""
        return self._receive(tensors, None, tag, "recv")

    def _receive(self, tensors: Any, peer: int | None, tag: int, what: str) -> GroupWork:
        (tensor,) = _listed(tensors)
        members = self._members
        self._check(members, what)
        flat, channel = _flat(tensor), members.channel("tag", tag)
        rank = None if peer is None else members.ranks[peer]
        transfer = members.relay.receive(rank, channel, None, as_bytes(flat), instance=members.instance)
        mark = "recvAnySource" if peer is None else "recv"
        profiled.mark_transfer(mark, tensor, transfer, self._timeout.total_seconds())
        return self._of_transfer(transfer, members, what, [tensor], flat)

    def _check(self, members: Members, what: str) -> None:
        try:
            members.check()
        except GroupError as error:
            raise dist.DistBackendError(f"{what}: {error}") from error

    def _of_transfer(
        self, transfer: MessageTransfer, members: Members, what: str, tensors: list[torch.Tensor], flat: torch.Tensor
    ) -> GroupWork:
        return TransferWork(transfer, members, self._timeout.total_seconds(), tensors, flat, what)


class TransferWork(GroupWork):
    """A send or a receive, which no thread waits for but the one that wants to know."""

    def __init__(
        self,
        transfer: MessageTransfer,
        members: Members,
        timeout_s: float,
        tensors: list[torch.Tensor],
        flat: torch.Tensor,
        what: str,
    ) -> None:
        super().__init__(tensors, what)
        self._transfer = transfer
        self._members = members
        self._until_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._flat = flat

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As of `GroupWork`."""
        if not self._ended.is_set():
            limit_s = timeout.total_seconds() if timeout is not None and timeout.total_seconds() > 0 else None
            until_s = self._until_s if limit_s is None else time.monotonic() + limit_s
            try:
                self._transfer.wait(until_s, f"Timed out after {limit_s or self._timeout_s:g} s")
            except GroupError as error:
                self._members.relay.cancel(self._transfer)
                self.end(dist.DistBackendError(f"{self._what}: {error}"))
            else:
                _write_back(self._result[0], self._flat)
                assert self._transfer.rank is not None
                self.end(source=self._members.ranks.index(self._transfer.rank))
        return super().wait()

    def is_completed(self) -> bool:
        """As of `GroupWork`."""
        if self._transfer.ended:
            with contextlib.suppress(dist.DistBackendError):  # `wait` and `exception` tell of it
                self.wait()
        return self._ended.is_set()


def _listed(tensors: Any) -> list[torch.Tensor]:
    """Hooks hand over a bare tensor, torch's own functions a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _tensors(given: Any) -> list[torch.Tensor]:
    """All of them, in whatever lists."""
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for part in given for tensor in _tensors(part)]


def _reduction(options: Any) -> TensorReduction:
    if options is None:
        return TensorReduction(dist.ReduceOp.SUM)
    return TensorReduction(getattr(options, "reduceOp", options))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its values as a contiguous 1-D tensor: its own memory where that is one. Raises ValueError."""
    if tensor.device.type != "cpu":
        raise ValueError(
            f"the meshtrain backend exchanges CPU tensors, not {tensor.device}: mt.prepare trains on GPUs; with "
            "torch.distributed, leave the model on the CPU"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"the meshtrain backend exchanges dense tensors here, not {tensor.layout}: call to_dense()")
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)


def _write_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.shape))


def _gather_all(op: Operation, tensor: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    flats = [_flat(place) for place in places]
    collectives.all_gather(op, flats, _flat(tensor))
    for place, flat in zip(places, flats, strict=True):
        _write_back(place, flat)


def _gather_into(op: Operation, tensor: torch.Tensor, output: torch.Tensor) -> None:
    flat = _flat(output)
    collectives.all_gather(op, flat.chunk(op.size), _flat(tensor).clone())
    _write_back(output, flat)


def _scatter_sum(op: Operation, output: torch.Tensor, tensor: torch.Tensor, reduction: TensorReduction) -> None:
    parts = list(_flat(tensor).clone().chunk(op.size))
    _write_back(output, collectives.reduce_scatter(op, parts, reduction))


def _parts(tensor: torch.Tensor, sizes: Sequence[int], count: int) -> list[torch.Tensor]:
    """Views of it by rank, 1-D."""
    if not sizes:
        return list(tensor.reshape(-1).chunk(count)) if tensor.numel() else [tensor.reshape(-1)] * count
    return [part.reshape(-1) for part in tensor.split(list(sizes))]


def _sparse_sum(op: Operation, tensor: torch.Tensor) -> None:
    """Makes a sparse COO tensor the sum of those of all ranks, which may differ in what they hold."""
    own = tensor.coalesce()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(op.size)]
    collectives.all_gather(op, counts, torch.tensor([own._nnz()]))
    indices = [own.indices().new_empty(own.indices().shape[0] * int(count)) for count in counts]
    values = [own.values().new_empty((int(count), *own.values().shape[1:])).reshape(-1) for count in counts]
    for parts, mine in ((indices, own.indices()), (values, own.values())):
        collectives.all_to_all(op, parts, [mine.contiguous().reshape(-1)] * op.size)
    total = torch.sparse_coo_tensor(
        torch.cat([part.view(own.indices().shape[0], -1) for part in indices], dim=1),
        torch.cat([part.view(-1, *own.values().shape[1:]) for part in values]),
        tensor.shape,
    ).coalesce()
    tensor.sparse_resize_(tensor.shape, tensor.sparse_dim(), tensor.dense_dim())
    tensor.copy_(total)
