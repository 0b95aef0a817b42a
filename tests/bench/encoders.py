"""`python -m tests.bench.encoders`: how much of real gradients' chosen values each encoder of LGC leaves out.

Two members of one process train with shared places, as `lgc` does before latents: in each block some values are chosen
by one member for both, in falling order. Encoders learn from a hundred rounds and are measured on the next fifty: what
of the mean of both members' values is not decoded from the mean of their latents.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from platformdirs import user_cache_path
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from meshtrain.examples.cnn import CNN
from meshtrain.examples.digits import read_digits
from meshtrain.examples.gpt import GPT, GPTConfig
from meshtrain.examples.text import stdlib_text
from meshtrain.train.lgc.training import train_encoder
from meshtraind.codecs import codec_named
from meshtraind.projection.lgc.autoencoder import Autoencoder, starting_weights
from meshwire import limits
from meshwire.encoded_layout.lgc import block_values
from meshwire.encoded_layout.lgc_autoencoder import GROUP_VALUES, Architecture

Values = NDArray[np.float32]
Places = NDArray[np.int64]
Code = Callable[[Values], Values]  # (members, blocks, chosen) to what all decode of the mean

MEMBERS = 2
DENSE_ROUNDS = 50
LEARNT_ROUNDS = 100
MEASURED_ROUNDS = 50
REFRESH = 8  # rounds in which places of all blocks are chosen anew, of an eighth in each
ROW_BLOCKS = 32
SAMPLE_ROWS = 128  # what a learner is given at a time: a quarter of a megabyte
TRAININGS = 4
COLUMNS = ("values", "chosen in a block", "latents", "autoencoder", "PCA", "fewer values", "all, in 4 bits")


@dataclass(frozen=True)
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]


@dataclass(frozen=True)
class Sent:
    """What the members send in a round.

    Attributes:
        values: (members, blocks, chosen), in falling order as they were when they were chosen.
        ranks: (blocks, chosen), how many of the block's magnitudes were larger then.
    """

    values: Values
    ranks: Places


def transformer() -> Training:
    """The demo's, on characters of real text."""
    config = GPTConfig()
    model = GPT(config)
    text = torch.tensor([ord(letter) % config.vocabulary_size for letter in stdlib_text(200_000)])

    def loss() -> Tensor:
        rows = torch.stack([text[at : at + 65] for at in torch.randint(len(text) - 65, (12,))])
        return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return Training(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss)


def digits() -> Training:
    """The example CNN on handwritten digits."""
    pixels, labels = read_digits(user_cache_path("meshtrain") / "digits")
    images, wanted = torch.from_numpy(pixels).float().div_(255).unsqueeze(1), torch.from_numpy(labels).long()
    model = CNN()

    def loss() -> Tensor:
        chosen = torch.randint(len(images), (32,))
        return cross_entropy(model(images[chosen]), wanted[chosen])

    return Training(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), loss)


MODELS = {"the demo's GPT": transformer, "the CNN on digits": digits}


def rounds_of(training: Training, ratio: float) -> Iterator[Sent]:
    """After the dense rounds: matrices by shared indices with error feedback, all other tensors as they are."""
    parameters = list(training.model.parameters())
    coded = [parameter for parameter in reversed(parameters) if parameter.dim() > 1]
    size = block_values(ratio)
    blocks = -(-sum(parameter.numel() for parameter in coded) // size)
    residuals = np.zeros((MEMBERS, blocks, size), np.float32)
    each = math.ceil(ratio * size)
    places, ranks = _largest(residuals[0], each)
    for number in range(-DENSE_ROUNDS, LEARNT_ROUNDS + MEASURED_ROUNDS):
        gradients = [_gradients(training, parameters) for _ in range(MEMBERS)]
        for parameter, *parts in zip(parameters, *gradients, strict=True):
            parameter.grad = torch.stack(parts).mean(0)
        if number >= 0:
            for residual, parts in zip(residuals, gradients, strict=True):
                of = {id(parameter): part for parameter, part in zip(parameters, parts, strict=True)}
                flat = torch.cat([of[id(parameter)].flatten() for parameter in coded]).numpy()
                residual.reshape(-1)[: len(flat)] += flat
            newer = _largest(residuals[number % MEMBERS], each)
            if not number:
                places, ranks = newer
            values = np.take_along_axis(residuals, places[None], axis=2)
            yield Sent(values, ranks.copy())
            np.put_along_axis(residuals, np.broadcast_to(places, values.shape), 0.0, axis=2)
            means = np.zeros_like(residuals[0])
            np.put_along_axis(means, places, values.mean(0), axis=1)
            _give(coded, torch.from_numpy(means.reshape(-1)))
            renewed = np.arange(blocks) % REFRESH == number % REFRESH
            places[renewed], ranks[renewed] = newer[0][renewed], newer[1][renewed]
        training.optimizer.step()


def _gradients(training: Training, parameters: list[nn.Parameter]) -> list[Tensor]:
    return list(torch.autograd.grad(training.loss(), parameters))


def _give(parameters: list[nn.Parameter], means: Tensor) -> None:
    for parameter in parameters:
        parameter.grad = means[: parameter.numel()].view(parameter.shape).clone()
        means = means[parameter.numel() :]


def _largest(blocks: Values, each: int) -> tuple[Places, Places]:
    """Places of the largest magnitudes of each block, in falling order of values, and their ranks."""
    largest = np.argsort(-np.abs(blocks), axis=1, kind="stable")[:, :each]
    falling = np.argsort(-np.take_along_axis(blocks, largest, axis=1), axis=1, kind="stable")
    return np.take_along_axis(largest, falling, axis=1), falling


def autoencoder(learnt: list[Sent], latents: int) -> Code:
    """Trained as a learner does, on a sample at a time. Zeros fill each block up to a group of 16."""
    architecture = Architecture(latents)
    weights = torch.from_numpy(starting_weights(architecture))
    vectors = [_groups(vector).reshape(-1) for vector in _vectors(learnt)]
    length = ROW_BLOCKS * GROUP_VALUES
    rows = np.concatenate([vector[: len(vector) // length * length].reshape(-1, length) for vector in vectors])
    draw = np.random.default_rng(0)
    for _ in range(TRAININGS):
        sample = rows[draw.choice(len(rows), min(SAMPLE_ROWS, len(rows)), replace=False)]
        weights = train_encoder(architecture, weights, torch.from_numpy(sample), time_limit_s=60.0)
    trained = Autoencoder(architecture, weights.numpy())

    def code(values: Values) -> Values:
        sent = np.empty((len(values), values.shape[1] * latents), np.float32)
        for own, out in zip(values, sent, strict=True):
            trained.encode_into(_groups(own).reshape(-1), out)
        back = np.empty(values.shape[1] * GROUP_VALUES, np.float32)
        trained.decode_into(sent.mean(0), back)
        return back.reshape(-1, GROUP_VALUES)[:, : values.shape[2]]

    return code


def _groups(blocks: Values) -> Values:
    return np.pad(blocks, ((0, 0), (0, GROUP_VALUES - blocks.shape[1])))


def principal(learnt: list[Sent], latents: int) -> Code:
    """A linear code: of each block, its parts along the principal directions of all blocks."""
    rows = np.concatenate(_vectors(learnt)).astype(np.float64)
    _, directions = np.linalg.eigh(rows.T @ rows)
    kept = directions[:, -latents:].astype(np.float32)

    def code(values: Values) -> Values:
        mean: Values = values.mean(0) @ kept @ kept.T
        return mean

    return code


def in_four_bits(values: Values) -> Values:
    """All values, without latents, in a quarter of fp16's bytes."""
    codec = codec_named("int4")
    total = np.zeros(values[0].size, np.float32)
    for own in values.reshape(len(values), -1):
        for start in range(0, len(own), limits.SEGMENT_VALUES_MAX):
            part = own[start : start + limits.SEGMENT_VALUES_MAX]
            area = memoryview(bytearray(codec.spec.segment_bytes_max(len(part))))
            length = codec.encode_into(part, area)
            out = total[start : start + len(part)]
            codec.sum_into(area[:length], out, out)
    return (total / len(values)).reshape(values[0].shape)


def _vectors(learnt: list[Sent]) -> list[Values]:
    """Values of each member and their mean, so that rounds count alike."""
    return [vector / np.linalg.norm(vector) for sent in learnt for vector in (*sent.values, sent.values.mean(0))]


def left_out(code: Code, measured: list[Sent]) -> float:
    """The part of the squares of means that is not decoded."""
    wrong = [np.square(code(sent.values) - sent.values.mean(0)).sum() for sent in measured]
    return float(np.sum(wrong) / np.sum([np.square(sent.values.mean(0)).sum() for sent in measured]))


def left_out_of_fewer(measured: list[Sent], kept: int) -> float:
    """The same where so many values of each block are sent as they are, those that were largest when chosen."""
    wrong = [np.square(sent.values.mean(0)[sent.ranks >= kept]).sum() for sent in measured]
    return float(np.sum(wrong) / np.sum([np.square(sent.values.mean(0)).sum() for sent in measured]))


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.encoders", description=__doc__)
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.01, 0.1], help="the part of values that is chosen")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name, make in MODELS.items():
        for ratio in options.ratio:
            torch.manual_seed(0)
            every = list(rounds_of(make(), ratio))
            learnt, measured = every[:LEARNT_ROUNDS], every[LEARNT_ROUNDS:]
            chosen = measured[0].values.shape[2]
            exact = left_out(in_four_bits, measured)
            for latents in sorted({-(-chosen // 2), -(-chosen // 4), 1}, reverse=True):
                figures = (
                    left_out(autoencoder(learnt, latents), measured),
                    left_out(principal(learnt, latents), measured),
                    left_out_of_fewer(measured, latents),
                    exact,
                )
                row = (f"{name}, {ratio:.0%}", str(chosen), str(latents), *(f"{figure:.1%}" for figure in figures))
                print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
