"""The learner's part in LGC: an autoencoder that is the daemon's, and learns within its time."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from meshtrain.errors import UsageError
from meshtrain.train.lgc.training import (
    EncoderTrainingError,
    decode,
    encode,
    kernels_of,
    left_out,
    principal_weights,
    train_as_asked,
    train_encoder,
)
from meshtrain.train.session import LearnerSession
from meshtraind.projection.lgc.autoencoder import Autoencoder, check_weights, starting_weights
from meshwire import limits
from meshwire.encoded_layout.lgc_autoencoder import BLOCK_VALUES, Architecture
from meshwire.messages.learner import EncoderTask
from tests.train.localdaemon import LocalDaemon

STEPS = 30

every_size = pytest.mark.parametrize("channels", [1, 3, 4, 16])


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def skewed(rows: int) -> Tensor:
    """Values of a few directions, as a linear code likes them."""
    return drawn(rows, 32, 3) @ torch.randn((3, 16), generator=torch.Generator().manual_seed(4)) + 0.1 * drawn(
        rows, 32, 16
    )


def by_steps() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is looked at: a time limit is a number of steps."""
    seconds = itertools.count()
    return lambda: float(next(seconds))


@every_size
def test_torch_computes_what_the_daemon_does(channels: int) -> None:
    """To 1e-5 of the largest value: what is learnt here is what is sent there."""
    architecture = Architecture(channels)
    weights = 0.3 * drawn(architecture.weight_count)
    values = drawn(BLOCK_VALUES)
    latents = np.empty(architecture.latent_count(BLOCK_VALUES), np.float32)
    back = np.empty(BLOCK_VALUES, np.float32)
    daemons = Autoencoder(architecture, weights.numpy())
    daemons.encode_into(values.numpy(), latents)
    daemons.decode_into(latents, back)
    kernels = kernels_of(architecture, weights)
    of_torch = encode(values.view(1, 1, -1), kernels)
    for theirs, ours in ((latents, of_torch[0].T.flatten()), (back, decode(of_torch, kernels).flatten())):
        np.testing.assert_allclose(theirs, ours.numpy(), rtol=0, atol=1e-5 * float(ours.abs().max()))


@every_size
def test_principal_directions_leave_out_what_no_linear_code_of_groups_can_keep(channels: int) -> None:
    """Eckart and Young: the squares left out are the smallest eigenvalues."""
    architecture = Architecture(channels)
    inputs = skewed(8).reshape(8, 1, -1)
    groups = inputs.reshape(-1, 16).double()
    eigenvalues = torch.linalg.eigvalsh(groups.T @ groups)
    least = float(eigenvalues[: 16 - channels].sum() / eigenvalues.sum())
    assert left_out(architecture, principal_weights(architecture, inputs), inputs) == pytest.approx(least, abs=1e-5)


def test_what_is_learnt_leaves_out_less_than_what_it_began_with_and_than_a_linear_code() -> None:
    """Values of one sign and of the other lie along different directions: no linear code of 4 latents holds all 6."""
    architecture = Architecture(4)
    strengths = drawn(64, 32, 3)
    directions = torch.randn((2, 3, 16), generator=torch.Generator().manual_seed(4))
    rows = (strengths.clamp(min=0) @ directions[0] + strengths.clamp(max=0) @ directions[1]).reshape(64, -1)
    start = torch.from_numpy(starting_weights(architecture))
    inputs = rows.unsqueeze(1)
    learnt = train_encoder(architecture, start, rows, STEPS, by_steps())
    linear = left_out(architecture, principal_weights(architecture, inputs), inputs)
    assert left_out(architecture, learnt, inputs) < 0.9 * linear < left_out(architecture, start, inputs)
    assert torch.equal(learnt, train_encoder(architecture, start, rows, STEPS, by_steps())), "the seed is fixed"


def test_without_time_it_is_at_least_the_linear_code() -> None:
    architecture = Architecture(4)
    rows = skewed(4).reshape(4, -1)
    start = torch.from_numpy(starting_weights(architecture))
    learnt = train_encoder(architecture, start, rows, time_limit_s=0.0)
    torch.testing.assert_close(learnt, principal_weights(architecture, rows.unsqueeze(1)))


def test_rows_of_any_length_are_filled_up_with_zeros() -> None:
    architecture = Architecture(1)
    rows = skewed(4).reshape(4, -1)[:, :37]
    learnt = train_encoder(architecture, torch.from_numpy(starting_weights(architecture)), rows, time_limit_s=0.0)
    assert learnt.shape == (architecture.weight_count,)


@pytest.mark.parametrize("wrong", [0.0, float("nan"), float("inf")])
def test_nothing_is_learnt_from_zeros_or_from_what_is_not_a_number(wrong: float) -> None:
    architecture = Architecture(1)
    start = torch.from_numpy(starting_weights(architecture))
    with pytest.raises(EncoderTrainingError, match="its samples are zeros, or hold what is not a number"):
        train_encoder(architecture, start, torch.full((2, 32), wrong))


def test_the_scripts_own_draws_and_modes_are_left_alone() -> None:
    """It runs inside optimizer.step(): without gradients, and in the middle of the script's random numbers."""
    architecture = Architecture(1)
    start = torch.from_numpy(starting_weights(architecture))
    before = torch.get_rng_state()
    with torch.no_grad():
        learnt = train_encoder(architecture, start, skewed(4).reshape(4, -1), 2, by_steps())
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    assert not learnt.requires_grad


def task(rows: bytes, channels: int = 4) -> EncoderTask:
    weights = starting_weights(Architecture(channels))
    return EncoderTask(number=3, channels=channels, weights=weights.tobytes(), rows=rows)


def test_a_learner_answers_with_weights_that_its_daemon_takes() -> None:
    rows = skewed(limits.ENCODER_ROW_VALUES // 32).numpy()
    answer = train_as_asked(task(rows.tobytes()))
    assert (answer.number, answer.error) == (3, None)
    check_weights(np.frombuffer(answer.weights, "<f4"), Architecture(4))


def test_a_learner_that_cannot_says_why() -> None:
    answer = train_as_asked(task(bytes(4 * limits.ENCODER_ROW_VALUES)))
    assert answer.weights == b""
    assert answer.error == "its samples are zeros, or hold what is not a number"


def test_a_learner_answers_at_its_boundary_and_goes_on() -> None:
    """And refuses to clip by a norm that latents do not tell (O4)."""
    asked = task(skewed(limits.ENCODER_ROW_VALUES // 32).numpy().tobytes())
    with LocalDaemon(1, codec="lgc:conv") as daemon:

        def script(session: LearnerSession, rank: int) -> None:
            model = torch.nn.Linear(3, 1)
            ours, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(3):
                ours(torch.ones(2, 3)).sum().backward()
                with pytest.raises(UsageError, match="with --codec lgc:conv what arrives does not tell the norm"):
                    session.clip_grad_norm_(ours.parameters(), 1.0)
                if step == 1:
                    daemon.train_encoder(rank, asked)
                optimizer.step()

        daemon.run(script)
    ((rank, answer),) = daemon.encoders
    assert (rank, answer.number, answer.error) == (0, 3, None)
