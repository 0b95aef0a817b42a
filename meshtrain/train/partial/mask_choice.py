"""Chooses weights by their magnitude, so that all peers that hold the same values choose the same weights.

Floating point numbers without their sign are in the same order as the integers with the same bits. Magnitudes are
compared as these integers: an order without exceptions, also for NaN, in which nothing is rounded. Of two equal
magnitudes the first counts as larger. Places are indices into a tensor's values in row-major order, rising.
"""

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def largest(values: Tensor, count: int) -> Tensor:
    """The places of the `count` values of the largest magnitudes, on the CPU."""
    return _largest(_magnitudes(values), count)


def moved(places: Tensor, weights: Tensor, mean: Tensor, count: int) -> Tensor:
    """The places that are kept after a change, by RigL's drop and grow: the `count` kept weights of the smallest
    magnitude leave, and as many come in where the mean is largest outside of what stays. A weight that has just left
    can be among these: then it has stayed.

    Args:
        places: that are kept, at least `count`.
        weights: of the base that the mean was made on.
        mean: of all values of the tensor.
        count: how many are exchanged, at most.

    Returns:
        As many places, on the CPU.
    """
    places = places.cpu()
    stays = places[_largest(_magnitudes(weights)[places], len(places) - count)]
    is_free = torch.ones(weights.numel(), dtype=torch.bool)
    is_free[stays] = False
    free = is_free.nonzero().view(-1)
    grown = free[_largest(_magnitudes(mean)[free], count)]
    return torch.cat([stays, grown]).sort().values


def only(values: Tensor, places: Tensor) -> Tensor:
    """A tensor of this shape that has the values at these places, and zeros elsewhere."""
    return spread(packed(values, places), places, values.shape)


def packed(values: Tensor, places: Tensor) -> Tensor:
    """The values at these places, one after the other."""
    return values.reshape(-1).index_select(0, places)


def spread(values: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """A tensor of this shape with these values at these places, and zeros elsewhere."""
    return values.new_zeros(shape.numel()).index_copy_(0, places, values).view(shape)


def _magnitudes(values: Tensor) -> Tensor:
    flat = values.detach().cpu().flatten()
    return flat.abs().view(_INTEGERS[flat.element_size()])


def _largest(keys: Tensor, count: int) -> Tensor:
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    least = keys.kthvalue(len(keys) - count + 1).values
    chosen = keys > least
    ties = (keys == least).nonzero().view(-1)
    chosen[ties[: count - int(chosen.count_nonzero())]] = True
    return chosen.nonzero().view(-1)
