"""Trains the autoencoder of LGC, when the daemon asks for it: the daemon has the values to learn from, and no torch.

Learned Gradient Compression (Abrahamyan et al. 2021, arXiv 2103.08870) sends the values that all members have chosen as
the latents of a small convolutional autoencoder, whose shape `meshwire.encoded_layout.lgc_autoencoder` has. Which
weights it has follows from values that were sent lately. One member's learner trains it, at a boundary between two
steps, and all are told the weights that it has found: so nothing here need be bit-equal to anything.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshwire import limits
from meshwire.encoded_layout.lgc_autoencoder import GROUP_VALUES, HIDDEN, SLOPE, STRIDE, WEIGHT_MAX, Architecture
from meshwire.messages.learner import EncoderTask, LearnerEncoder

TIME_LIMIT_S = 1.0  # every member waits for the one whose learner trains
STEPS_MAX = 200
BATCH_VALUES = 16 * 1024  # of one step
LEARNING_RATE = 3e-3  # of Adam
FRESH_SCALE = 0.1  # of channels that pass nothing on at first
SEED = 0
MARGIN = STRIDE // 2
LITTLE = np.dtype("<f4")  # as weights and values travel


class EncoderTrainingError(Exception):
    """The values cannot be learnt from; says why."""


def train_as_asked(task: EncoderTask) -> LearnerEncoder:
    """Weights, or why there are none: training of the model goes on without, and the daemon says so in its log."""
    weights = torch.from_numpy(np.frombuffer(task.weights, LITTLE).astype(np.float32))
    rows = torch.from_numpy(np.frombuffer(task.rows, LITTLE).astype(np.float32))
    try:
        learnt = train_encoder(Architecture(task.channels), weights, rows.view(-1, limits.ENCODER_ROW_VALUES))
    except (EncoderTrainingError, RuntimeError) as error:  # torch's are RuntimeErrors: no memory, no eigenvectors
        return LearnerEncoder(number=task.number, error=str(error)[: limits.ERROR_CHARS_MAX])
    return LearnerEncoder(number=task.number, weights=learnt.numpy().astype(LITTLE).tobytes())


def train_encoder(
    architecture: Architecture,
    weights: Tensor,
    rows: Tensor,
    time_limit_s: float = TIME_LIMIT_S,
    now_s: Callable[[], float] = time.monotonic,
) -> Tensor:
    """Weights that leave out less of such values than those given do, or these if none were found.

    Begins with the better of `weights` and the principal directions of groups of 16 values, which a linear code cannot
    improve on; then Adam, on the part of the squares that is left out.

    Args:
        weights: `weight_count` of them.
        rows: (rows, values of each), fp32, of which each counts as its squares do; a row is at most BLOCK_VALUES long.
        time_limit_s: no step begins later.

    Raises EncoderTrainingError when there is nothing but zeros, or a value is not a number.
    """
    padding = -rows.shape[1] % GROUP_VALUES
    inputs = F.pad(rows, (0, padding)).unsqueeze(1)
    energy = float(inputs.double().square().sum())
    if not 0 < energy < float("inf"):
        raise EncoderTrainingError("its samples are zeros, or hold what is not a number")
    inputs = inputs / (energy / inputs.numel()) ** 0.5  # so that Adam's rate suits them
    end_s = now_s() + time_limit_s
    with _one_thread(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        candidates = [weights, principal_weights(architecture, inputs)]
        errors = [left_out(architecture, candidate, inputs) for candidate in candidates]
        best = min(range(2), key=errors.__getitem__)
        learnt = _descend(architecture, candidates[best], inputs, end_s, now_s)
        return learnt if left_out(architecture, learnt, inputs) < errors[best] else candidates[best]


@torch.no_grad()
def left_out(architecture: Architecture, weights: Tensor, inputs: Tensor) -> float:
    """The part of the squares of inputs (rows, 1, values) that is not decoded."""
    return float(_error(kernels_of(architecture, weights), inputs))


def decode(latents: Tensor, kernels: list[Tensor]) -> Tensor:
    """(rows, channels, groups) to (rows, 1, values)."""
    hidden = F.leaky_relu(F.conv_transpose1d(latents, kernels[2], stride=STRIDE, padding=MARGIN), SLOPE)
    return F.conv_transpose1d(hidden, kernels[3], stride=STRIDE, padding=MARGIN)


def encode(inputs: Tensor, kernels: list[Tensor]) -> Tensor:
    """(rows, 1, values) to (rows, channels, groups)."""
    hidden = F.leaky_relu(F.conv1d(inputs, kernels[0], stride=STRIDE, padding=MARGIN), SLOPE)
    return F.conv1d(hidden, kernels[1], stride=STRIDE, padding=MARGIN)


@torch.no_grad()
def principal_weights(architecture: Architecture, inputs: Tensor) -> Tensor:
    """Weights with which the autoencoder is principal component analysis of groups of 16 values, to begin with.

    A group is STRIDE x STRIDE values: the outer layers take STRIDE values each, the inner ones STRIDE of their outputs.
    The LeakyReLU between them is made linear by passing each value on twice, once with each sign: of x and -x it makes
    x and -slope x, whose difference is (1 + slope) x. So first and fourth layer copy values in and out; the second
    projects a group onto the largest eigenvectors of the groups' second moments, and the third, transposed, back.
    """
    groups = inputs.reshape(-1, GROUP_VALUES).double()
    directions = torch.linalg.eigh(groups.T @ groups).eigenvectors.flip(1)[:, : architecture.channels].float()
    weights = torch.zeros(architecture.weight_count)
    first, second, third, fourth = kernels_of(architecture, weights)
    passing = torch.eye(STRIDE).repeat_interleave(2, dim=0) * torch.tensor([1.0, -1.0]).repeat(STRIDE)[:, None]
    within = slice(MARGIN, MARGIN + STRIDE)
    first[: 2 * STRIDE, 0, within] = fourth[: 2 * STRIDE, 0, within] = passing
    # directions: (quarter, place) x latent
    parts = directions.T.reshape(architecture.channels, STRIDE, STRIDE) / (1 + SLOPE)
    second[:, : 2 * STRIDE, within] = third[:, : 2 * STRIDE, within] = (parts @ passing.T).transpose(1, 2)
    draw = torch.Generator().manual_seed(SEED)
    fresh = (HIDDEN - 2 * STRIDE, 2 * STRIDE)
    first[2 * STRIDE :, 0] = torch.randn(fresh, generator=draw) * FRESH_SCALE
    third[:, 2 * STRIDE :] = torch.randn((architecture.channels, *fresh), generator=draw) * FRESH_SCALE
    return weights


@contextmanager
def _one_thread() -> Iterator[None]:
    """The kernels are so small that threads would wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _descend(
    architecture: Architecture, start: Tensor, inputs: Tensor, end_s: float, now_s: Callable[[], float]
) -> Tensor:
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS_MAX)
    batch = max(1, BATCH_VALUES // inputs.shape[2])
    draw = torch.Generator().manual_seed(SEED)
    for _ in range(STEPS_MAX):
        if now_s() >= end_s:
            break
        chosen = torch.randint(len(inputs), (batch,), generator=draw)
        (gradient,) = torch.autograd.grad(_error(kernels_of(architecture, weights), inputs[chosen]), weights)
        weights.grad = gradient
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            weights.clamp_(-WEIGHT_MAX, WEIGHT_MAX)
    return weights.detach()


def _error(kernels: list[Tensor], inputs: Tensor) -> Tensor:
    return (decode(encode(inputs, kernels), kernels) - inputs).square().sum() / inputs.square().sum()


def kernels_of(architecture: Architecture, weights: Tensor) -> list[Tensor]:
    """Views of the four, as `Architecture.layers`."""
    shapes = architecture.layers
    parts = weights.split([a * b * c for a, b, c in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
