"""The collectives of torch.distributed, on contiguous CPU tensors of any dtype.

Small ones are sent to everybody at once, which takes one latency; large ones go around a ring (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms", 2009), where each link carries 2 (m-1)/m of the bytes. Either way all ranks
end with the same bits: each value is summed once, in one order, and then copied.
"""

from collections.abc import Sequence

import torch

from meshtrain.torch_backend.operation import Operation
from meshtrain.torch_backend.reductions import TensorReduction
from meshtrain.torch_backend.relay import MessageTransfer

DIRECT_BYTES_MAX = 64 * 1024  # that one rank sends in all, if it sends everything to everybody
CHAIN_BYTES = 1024 * 1024  # of a broadcast along a chain, that are passed on at once

Tensors = Sequence[torch.Tensor]
Partial = tuple[int, torch.Tensor, MessageTransfer]  # which segment, where its sum so far comes, and its coming


def size_bytes(tensor: torch.Tensor) -> int:
    """How many bytes a tensor's values take."""
    return tensor.numel() * tensor.element_size()


def _direct(op: Operation, tensor: torch.Tensor) -> bool:
    return size_bytes(tensor) * (op.size - 1) <= DIRECT_BYTES_MAX


def all_reduce(op: Operation, tensor: torch.Tensor, reduction: TensorReduction) -> None:
    """Makes `tensor`, 1-D, the reduction over all ranks, in place."""
    if op.size > 1 and _direct(op, tensor):
        parts = [tensor if peer == op.rank else torch.empty_like(tensor) for peer in range(op.size)]
        all_gather(op, parts, tensor)
        _combine_in_order(tensor, parts, reduction)
    elif op.size > 1:
        segments = list(tensor.tensor_split(op.size))
        # All places first: what is large is sent when its place is there. A segment comes back complete only after it
        # was sent from here, so that the two directions share their memory.
        partial = _partial_places(op, segments)
        complete = _complete_places(op, segments)
        _reduce_around(op, segments, partial, reduction)
        _gather_around(op, segments, complete)
        op.finish()
    reduction.finish(tensor, op.size)


def _combine_in_order(tensor: torch.Tensor, parts: Tensors, reduction: TensorReduction) -> None:
    total = parts[0].clone()
    for part in parts[1:]:
        reduction.combine(total, part)
    tensor.copy_(total)


def reduce_scatter(op: Operation, parts: Tensors, reduction: TensorReduction) -> torch.Tensor:
    """This rank's part of the reduction; `parts`, one for each rank, are written over."""
    segments = list(parts)
    if op.size > 1:
        _reduce_around(op, segments, _partial_places(op, segments), reduction)
        op.finish()
    reduction.finish(segments[op.rank], op.size)
    return segments[op.rank]


def _left(op: Operation) -> int:
    return (op.rank - 1) % op.size


def _right(op: Operation) -> int:
    return (op.rank + 1) % op.size


def _partial_places(op: Operation, segments: Tensors) -> list[Partial]:
    """Where the sums of those to the left will come, in their order; the last is of this rank's own segment."""
    places = []
    for step in range(op.size - 1):
        index = (op.rank - 2 - step) % op.size
        place = torch.empty_like(segments[index])
        places.append((index, place, op.receive(_left(op), place)))
    return places


def _reduce_around(op: Operation, segments: Tensors, partial: Sequence[Partial], reduction: TensorReduction) -> None:
    op.send(_right(op), segments[(op.rank - 1) % op.size])
    for index, place, transfer in partial:
        op.wait(transfer)
        reduction.combine(segments[index], place)
        if index != op.rank:
            op.send(_right(op), segments[index])


def _complete_places(op: Operation, parts: Tensors) -> dict[int, MessageTransfer]:
    """The coming of all parts but this rank's own, by rank, in the order in which the ring brings them."""
    return {
        index: op.receive(_left(op), parts[index]) for index in ((op.rank - k) % op.size for k in range(1, op.size))
    }


def _gather_around(op: Operation, parts: Tensors, coming: dict[int, MessageTransfer]) -> None:
    """Passes on this rank's part, and then each as it comes; the last one has been everywhere."""
    for index in (op.rank, *coming)[: op.size - 1]:
        if index in coming:
            op.wait(coming[index])
        op.send(_right(op), parts[index])


def reduce(op: Operation, tensor: torch.Tensor, root: int, reduction: TensorReduction) -> None:
    """Makes `tensor`, 1-D, the reduction over all ranks on `root`; on others it holds something on the way to it."""
    if op.size == 1:
        reduction.finish(tensor, 1)
        return
    if _direct(op, tensor):
        if op.rank == root:
            parts = [tensor if peer == root else torch.empty_like(tensor) for peer in range(op.size)]
            gather(op, tensor, parts, root)
            _combine_in_order(tensor, parts, reduction)
            reduction.finish(tensor, op.size)
        else:
            gather(op, tensor, None, root)
        return
    segments = list(tensor.tensor_split(op.size))
    _reduce_around(op, segments, _partial_places(op, segments), reduction)
    gather(op, segments[op.rank], segments if op.rank == root else None, root)
    if op.rank == root:
        reduction.finish(tensor, op.size)


def broadcast(op: Operation, tensor: torch.Tensor, root: int) -> None:
    """Makes `tensor`, 1-D, that of `root`."""
    position = (op.rank - root) % op.size

    def peer(at: int) -> int:
        return (at + root) % op.size

    if _direct(op, tensor):  # a binomial tree
        bit = 1
        while bit < op.size:
            if position < bit and position + bit < op.size:
                op.send(peer(position + bit), tensor)
            elif bit <= position < 2 * bit:
                op.wait(op.receive(peer(position - bit), tensor))
            bit *= 2
    else:
        blocks = tensor.split(max(1, CHAIN_BYTES // tensor.element_size()))
        coming = [op.receive(peer(position - 1), block) if position else None for block in blocks]
        for block, transfer in zip(blocks, coming, strict=True):
            if transfer is not None:
                op.wait(transfer)
            if position + 1 < op.size:
                op.send(peer(position + 1), block)
    op.finish()


def all_gather(op: Operation, parts: Tensors, tensor: torch.Tensor) -> None:
    """Fills `parts`, by rank, with the tensors of all; its own may be `tensor` itself."""
    if parts[op.rank] is not tensor:
        parts[op.rank].copy_(tensor)
    if _direct(op, tensor):
        others = [peer for peer in range(op.size) if peer != op.rank]
        for peer in others:
            op.receive(peer, parts[peer])
        for peer in others:
            op.send(peer, tensor)
    elif op.size > 1:
        _gather_around(op, parts, _complete_places(op, parts))
    op.finish()


def gather(op: Operation, tensor: torch.Tensor, parts: Tensors | None, root: int) -> None:
    """Fills `parts` on `root`, by rank, with the tensors of all."""
    if op.rank != root:
        op.send(root, tensor)
    else:
        assert parts is not None
        if parts[root] is not tensor:
            parts[root].copy_(tensor)
        for peer in range(op.size):
            if peer != root:
                op.receive(peer, parts[peer])
    op.finish()


def scatter(op: Operation, tensor: torch.Tensor, parts: Tensors | None, root: int) -> None:
    """Makes `tensor` the part that `root` has for this rank."""
    if op.rank == root:
        assert parts is not None
        tensor.copy_(parts[root])
        for peer in range(op.size):
            if peer != root:
                op.send(peer, parts[peer])
    else:
        op.receive(root, tensor)
    op.finish()


def all_to_all(op: Operation, outputs: Tensors, inputs: Tensors) -> None:
    """Sends each rank its input; fills `outputs`, by rank, with what they have for this one."""
    outputs[op.rank].copy_(inputs[op.rank])
    others = [(op.rank + step) % op.size for step in range(1, op.size)]
    for peer in others:
        op.receive(peer, outputs[peer])
    for peer in others:
        op.send(peer, inputs[peer])
    op.finish()


def barrier(op: Operation) -> None:
    """Ends when all ranks have begun it."""
    token = torch.zeros(1, dtype=torch.uint8)
    all_gather(op, [torch.empty_like(token) for _ in range(op.size)], token)
