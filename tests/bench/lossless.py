"""`python -m tests.bench.lossless`: what the lossless stage of a link (W5) spares of real gradients, and what it costs.

Gradients of a few steps of small models pass each codec as they would on their first hop, then the stage of a link of
100 Mbit/s. Seconds are this thread's on the CPU.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from meshtrain.examples.gpt import GPT, GPTConfig
from meshtrain.examples.text import stdlib_text
from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Terms
from meshtraind.transport.compression import LinkRate, Lossless, unpack_into
from meshwire import limits

Values = NDArray[np.float32]
Loss = Callable[[], Tensor]

CODECS = ("fp32", "fp16", "int8", "int4", "qsgd", "twobit", "terngrad", "onebit", "topk:0.01", "randomk:0.01")
STEPS = 8  # until error feedback has something to give back
RUNS = 5
RATE_BYTES_PER_S = 100e6 / 8
WORDS = 30_000
COLUMNS = ("gradients of", "codec", "MB", "spared", "sender: part of a core", "receiver", "faster by")


def transformer() -> tuple[nn.Module, Loss]:
    """The demo's, on characters of real text."""
    config = GPTConfig()
    model = GPT(config)
    text = torch.tensor([ord(letter) % config.vocabulary_size for letter in stdlib_text(200_000)])

    def loss() -> Tensor:
        rows = torch.stack([text[at : at + 65] for at in torch.randint(len(text) - 65, (16,))])
        return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return model, loss


def convolutions() -> tuple[nn.Module, Loss]:
    """With ReLU, of which many are off on the noise that it is shown."""
    layers: list[nn.Module] = []
    for before, width in ((3, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1, stride=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    return model, lambda: nn.functional.cross_entropy(model(torch.randn(16, 3, 32, 32)), torch.randint(10, (16,)))


def words() -> tuple[nn.Module, Loss]:
    """An embedding of many words and as large a head: of the one few rows are used in a step, of the other all."""
    embedding, recurrent, head = nn.Embedding(WORDS, 128), nn.GRU(128, 128, batch_first=True), nn.Linear(128, WORDS)
    draw = np.random.default_rng(0)

    def loss() -> Tensor:
        rows = torch.from_numpy((draw.zipf(1.2, (8, 33)) - 1) % WORDS)
        seen, _ = recurrent(embedding(rows[:, :-1]))
        return nn.functional.cross_entropy(head(seen).flatten(0, 1), rows[:, 1:].flatten())

    return nn.ModuleList([embedding, recurrent, head]), loss


MODELS = {"the demo's GPT": transformer, "a CNN on noise": convolutions, "30,000 words": words}


def gradients(make: Callable[[], tuple[nn.Module, Loss]]) -> list[Values]:
    """Of STEPS steps, in the order in which parameters are sent."""
    torch.manual_seed(0)
    model, loss = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        parts = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append(torch.cat(parts[::-1]).numpy().copy())
        optimizer.step()
    return found


def payloads(text: str, steps: list[Values]) -> list[bytes]:
    """The frames of the last step."""
    codec = codec_named(text)
    encode = codec.encode_rest_into if codec.spec.error_feedback else codec.encode_into
    values = np.zeros_like(steps[0])
    segments: list[bytes] = []
    for number, step in enumerate(steps):
        values = values + step if codec.spec.error_feedback else step.copy()
        segments = []
        for part in _segments(values):
            area = bytearray(codec.spec.segment_bytes_max(len(part)))
            length = encode(part, memoryview(area), Terms(seed=1000 * number + len(segments)))
            segments.append(bytes(area[:length]))
    full_bytes = codec.spec.segment_bytes_max(limits.SEGMENT_VALUES_MAX)
    a_frame = max(1, (limits.CHUNK_BYTES + full_bytes // 8) // full_bytes)
    return [b"".join(segments[at : at + a_frame]) for at in range(0, len(segments), a_frame)]


def _segments(values: Values) -> Iterator[Values]:
    for start in range(0, len(values), limits.SEGMENT_VALUES_MAX):
        yield values[start : start + limits.SEGMENT_VALUES_MAX]


def passed(frames: list[bytes]) -> tuple[int, float, float]:
    """(bytes spared, seconds of the sender, seconds of the receiver), the quickest of RUNS."""
    sent_s, received_s, spared = [], [], 0
    for _ in range(RUNS):
        rate = LinkRate()
        rate.bytes_per_s = RATE_BYTES_PER_S
        stage = Lossless(rate)
        began_s = time.thread_time()
        packed = [stage.packed(frame) for frame in frames]
        sent_s.append(time.thread_time() - began_s)
        places = [memoryview(bytearray(len(frame))) for frame in frames]
        began_s = time.thread_time()
        for short, place in zip(packed, places, strict=True):
            assert short is None or unpack_into(memoryview(short), place) is None
        received_s.append(time.thread_time() - began_s)
        spared = stage.spared_bytes
    return spared, min(sent_s), min(received_s)


def main() -> int:
    """Returns the exit code."""
    argparse.ArgumentParser(prog="python -m tests.bench.lossless", description=__doc__).parse_args()
    torch.set_num_threads(1)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name, make in MODELS.items():
        steps = gradients(make)
        of = f"{name}, {len(steps[0]) / 1e6:.1f} M, {float((steps[-1] == 0).mean()):.0%} zero"
        for codec in CODECS:
            frames = payloads(codec, steps)
            whole = sum(map(len, frames))
            spared, sender_s, receiver_s = passed(frames)
            before_s, after_s = whole / RATE_BYTES_PER_S, (whole - spared) / RATE_BYTES_PER_S + sender_s + receiver_s
            figures = (f"{spared / whole:.1%}", f"{sender_s / after_s:.2%}", f"{receiver_s / after_s:.2%}")
            row = (of, codec, f"{whole / 1e6:.2f}", *figures, f"{before_s / after_s:.2f}")
            print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
