"""Times every codec there is in one thread, segment by segment as a job does (those of whole tensors: `transforms.py`).

Time is that of this thread on the CPU, so that whatever else the machine does takes least part in it.
"""

import math
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from meshtraind.bench.codec_report import CodecFigures, CodecReport
from meshtraind.bench.job_round import meet_whole, round_cost
from meshtraind.bench.settings import BenchError
from meshtraind.bench.transforms import transform_figures
from meshtraind.codecs import codec_named
from meshtraind.codecs.base import Codec, Terms
from meshwire.codecs.registry import FAMILIES, FP32, parse_codec
from meshwire.limits import SEGMENT_VALUES_MAX

Values = NDArray[np.float32]

VALUES_MAX = 10**9
LAYER_VALUES = (1_728, 64, 36_864, 147_456, 512, 589_824, 2_359_296, 1_000)  # over and over, as in a ResNet
DEGREES = 3  # of freedom: tails as heavy as those of gradients
SCALE_SPREAD = 1.5  # of the layers' scales, in powers of e


def all_codecs() -> list[str]:
    """Every family with its defaults, and as its example has it."""
    texts = [text for family in FAMILIES.values() for text in (family.name, family.example) if text]
    return list(dict.fromkeys(str(parse_codec(text)) for text in texts))


def measure(
    codecs: Sequence[str],
    counts: Sequence[int],
    runs: int,
    progress: Callable[[str], None],
    *,
    whole_rounds: bool = True,
) -> CodecReport:
    """Figures of all `codecs` for vectors of `counts` values. Raises BenchError for what cannot be measured.

    Args:
        whole_rounds: also what a member of a job computes for a round, which takes three times as long as all else.
    """
    if not 1 <= runs <= 1000:
        raise BenchError(f"--runs {runs}: choose 1 to 1000")
    for count in counts:
        if not 1 <= count <= VALUES_MAX:
            raise BenchError(f"--values {count}: choose 1 to {VALUES_MAX}")
    try:
        specs = [parse_codec(text) for text in codecs]
    except ValueError as error:
        raise BenchError(f"--codec: {error}") from None
    fp32, figures = {}, []
    for count in counts:
        progress(f"making {count} values")
        values = gradient(count)
        progress("fp32, to compare with")
        fp32[count] = _figures("fp32", values, runs, whole_rounds)
        for number, spec in enumerate(specs, 1):
            progress(f"{spec} ({number} of {len(specs)}), {count} values")
            if spec.family.transforms:
                figures.append(transform_figures(spec, values, runs))
            else:
                figures.append(fp32[count] if spec == FP32 else _figures(str(spec), values, runs, whole_rounds))
    return CodecReport(runs, fp32, figures)


def gradient(count: int) -> Values:
    """Values with heavy tails, in layers of very different scales; always the same."""
    rng = np.random.default_rng(5)
    values = np.empty(count, np.float32)
    start = layer = 0
    while start < count:
        length = LAYER_VALUES[layer % len(LAYER_VALUES)]
        scale = 1e-3 * math.exp(SCALE_SPREAD * rng.standard_normal())
        for at in range(start, min(start + length, count), SEGMENT_VALUES_MAX):
            piece = values[at : min(at + SEGMENT_VALUES_MAX, start + length)]
            piece[:] = scale * rng.standard_t(DEGREES, len(piece))
        start += length
        layer += 1
    return values


def _figures(text: str, values: Values, runs: int, whole_rounds: bool) -> CodecFigures:
    memory_bytes = _memory_bytes(text, values)
    codec = codec_named(text)
    area = memoryview(bytearray(sum(codec.spec.segment_bytes_max(len(part)) for part in _segments(values))))
    rest, total = np.empty_like(values), np.zeros_like(values)
    encode_s, add_s = [], []
    for _ in range(runs):
        np.copyto(rest, values)  # error feedback leaves its rest there
        started_s = time.thread_time()
        lengths = _encode(codec, rest, area)
        encoded_s = time.thread_time()
        _add(codec, area, lengths, total)
        encode_s.append(encoded_s - started_s)
        add_s.append(time.thread_time() - encoded_s)
    round_s = None
    if whole_rounds and meet_whole(codec.spec):
        cost = round_cost(codec.spec, values)
        round_s = cost.contribution_s + cost.sums_s
    return CodecFigures(
        codec=text,
        values=len(values),
        encoded_bytes=sum(lengths),
        encode_s=min(encode_s),
        add_s=min(add_s),
        error=_error(codec, area, lengths, values),
        memory_bytes=memory_bytes,
        round_s=round_s,
    )


def _encode(codec: Codec, values: Values, area: memoryview) -> list[int]:
    """Lengths of the segments, which lie back to back."""
    encode = codec.encode_rest_into if codec.spec.error_feedback else codec.encode_into
    lengths, at = [], 0
    for seed, part in enumerate(_segments(values)):
        lengths.append(encode(part, area[at:], Terms(seed=seed)))
        at += lengths[-1]
    return lengths


def _add(codec: Codec, area: memoryview, lengths: Sequence[int], total: Values) -> None:
    at = 0
    for length, part in zip(lengths, _segments(total), strict=True):
        codec.sum_into(area[at : at + length], part, part)
        at += length


def _error(codec: Codec, area: memoryview, lengths: Sequence[int], values: Values) -> float:
    lost = norm = 0.0
    at = 0
    for length, part in zip(lengths, _segments(values), strict=True):
        decoded = np.empty_like(part)
        codec.decode_into(area[at : at + length], decoded)
        at += length
        lost += float(np.square(part - decoded, dtype=np.float64).sum())
        norm += float(np.square(part, dtype=np.float64).sum())
    return math.sqrt(lost / norm)


def _memory_bytes(text: str, values: Values) -> int:
    """How much memory a codec takes with its first segments: scratch that stays, and what is allocated on the way."""
    few = values[: 2 * SEGMENT_VALUES_MAX].copy()
    spec = parse_codec(text)
    area = memoryview(bytearray(sum(spec.segment_bytes_max(len(part)) for part in _segments(few))))
    total = np.zeros_like(few)
    codec_named(text)  # the import is no memory of its own
    tracemalloc.start()
    try:
        codec = codec_named(text)
        _add(codec, area, _encode(codec, few, area), total)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _segments(values: Values) -> Iterator[Values]:
    for start in range(0, len(values), SEGMENT_VALUES_MAX):
        yield values[start : start + SEGMENT_VALUES_MAX]
