"""How a model's values lie in the vector of a round, and how that is cut into buckets and segments (C1, WFBP).

All members compute it from the same manifest and compare digests before round 1. It depends on the model alone, never
on the number of members, so that codec state survives a change of membership.
"""

import hashlib
from dataclasses import dataclass, replace
from itertools import groupby

import msgpack

from meshwire import limits
from meshwire.codecs.spec import CodecSpec
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.schedule import Travel

VALUE_BYTES = 4  # fp32
ALIGNMENT_VALUES = 16  # 64 bytes: a cache line, and the widest vector registers
# Equal and small: what is still exchanged when the backward pass ends is then about one bucket. Larger ones would save
# nothing, for several are in flight at once. A small last one behind large ones would only wait for them.
# Beside all ways to cut there are, MG-WFBP's among them: tests/bench/results/bucket_plans.md.
BUCKET_BYTES = 1 * limits.MIB
BUCKET_VALUES_MIN = 4 * limits.KIB  # smaller buckets cost more in latency than they overlap
VECTOR_BUCKETS_MIN = 8  # a small model is cut finer than BUCKET_BYTES, or nothing would overlap
SEGMENT_VALUES_MIN = 1 * limits.KIB
# Of codecs that select: each segment sends its own largest, however small they are beside another's. From segments of
# 1 Ki the example CNN with DGC ended eleven times as far behind fp32.
SELECTED_VALUES_MIN = 16 * limits.KIB
VECTOR_SEGMENTS = 256  # enough that shards of whole segments are balanced for any number of members


@dataclass(frozen=True, slots=True)
class Shard:
    """A run of segments of a bucket."""

    first_segment: int
    segment_count: int


@dataclass(frozen=True, slots=True)
class Span:
    """Where one tensor lies in the vector, in values."""

    name: str
    tensor: int  # index into the manifest
    start: int
    count: int
    rows: int  # of the matrix that it is, its first dimension; 1 for vectors and numbers

    @property
    def columns(self) -> int:
        """All other dimensions."""
        return self.count // self.rows


@dataclass(frozen=True, slots=True)
class Bucket:
    """A contiguous run of the vector that is sent together: values [start, start + count), cut into segments."""

    index: int
    start: int
    count: int
    spans: range  # indices into the plan's spans
    segment_values: int
    home: int  # index among the buckets of a round in which all values travel

    @property
    def segment_count(self) -> int:
        """At least 1."""
        return -(-self.count // self.segment_values)

    def segment_bounds(self, segment: int) -> tuple[int, int]:
        """(start, count) of a segment in values of the vector; the last one may be short."""
        if not 0 <= segment < self.segment_count:
            raise IndexError(f"segment {segment} of {self.segment_count} in bucket {self.index}")
        first = segment * self.segment_values
        return self.start + first, min(self.segment_values, self.count - first)


@dataclass(frozen=True, slots=True)
class Plan:
    """The vector of a round. Buckets tile it where all values travel; values between two spans of a bucket are padding,
    zero in every contribution.

    Attributes:
        coded_buckets: how many hold parameters that the job's codec is for: the first ones.
        parameter_buckets: how many hold parameters: all but the one of float buffers, which is the last.
        travel: of the job whose rounds these are: what of this vector travels in which of them; None: all in all.
    """

    segment_values: int
    total_values: int
    spans: tuple[Span, ...]
    buckets: tuple[Bucket, ...]
    coded_buckets: int
    parameter_buckets: int
    travel: Travel | None = None

    def borders(self, bucket: int, segment: int) -> tuple[int, ...]:
        """Where in a segment other tensors begin than its first one, in values of the segment, ascending. They are
        multiples of ALIGNMENT_VALUES; padding belongs to the tensor before it."""
        start, count = self.buckets[bucket].segment_bounds(segment)
        begin = (self.spans[index].start for index in self.buckets[bucket].spans if self.spans[index].count)
        return tuple(at - start for at in begin if start < at < start + count)

    def digest(self) -> bytes:
        """SHA-256 over all positions."""
        spans = [(span.name, span.tensor, span.start, span.count) for span in self.spans]
        buckets = [(bucket.start, bucket.count, bucket.spans.start, bucket.spans.stop) for bucket in self.buckets]
        packed: bytes = msgpack.packb((self.segment_values, self.total_values, spans, buckets))
        return hashlib.sha256(packed).digest()


def plan_buckets(manifest: ModelManifest, bucket_bytes: int = BUCKET_BYTES, codec: CodecSpec | None = None) -> Plan:
    """Lays out trainable parameters in reverse definition order, as a backward pass produces them, then float buffers.
    Those that the codec is not for come behind the others: they are small, and need buckets of their own.

    A bucket is a run of whole tensors of at most `bucket_bytes` of fp32, or one larger tensor; of its parameters a
    round has all, or none (T1). Raises ValueError when that makes more buckets than the wire can number.
    """
    tensors = tuple(enumerate(manifest.tensors))
    parameters = [(index, spec) for index, spec in reversed(tensors) if spec.kind == "parameter" and spec.in_vector]
    coded = [(index, spec) for index, spec in parameters if codec is None or codec.takes(spec.shape)]
    whole = [(index, spec) for index, spec in parameters if codec is not None and not codec.takes(spec.shape)]
    buffers = [(index, spec) for index, spec in tensors if spec.kind == "buffer" and spec.in_vector]
    groups = _grouped(coded, manifest.travel, bucket_bytes // VALUE_BYTES)
    coded_buckets = len(groups)
    groups += _grouped(whole, manifest.travel, bucket_bytes // VALUE_BYTES)
    parameter_buckets = len(groups)
    if buffers:
        groups.append(len(buffers))
    buckets_max = limits.BUCKETS_MAX // (2 if codec is not None and codec.two_phases else 1)  # a precursor for each
    if len(groups) > buckets_max:
        raise ValueError(
            f"buckets of {bucket_bytes} bytes cut this model into {len(groups)}; at most {buckets_max} are "
            "possible: make them larger"
        )
    spans, total_values = _placed(coded + whole + buffers)
    segment_values = values_per_segment(total_values, _least_segment(codec))
    buckets: list[Bucket] = []
    first = 0
    for index, tensor_count in enumerate(groups):
        start, last = spans[first].start, spans[first + tensor_count - 1]
        end = last.start + aligned(last.count)
        buckets.append(Bucket(index, start, end - start, range(first, first + tensor_count), segment_values, index))
        first += tensor_count
    return Plan(segment_values, total_values, spans, tuple(buckets), coded_buckets, parameter_buckets, manifest.travel)


def plan_for(plan: Plan, codec: CodecSpec) -> Plan:
    """The same values in the same buckets, cut into segments as another codec wants them (C3)."""
    segment_values = values_per_segment(plan.total_values, _least_segment(codec))
    if segment_values == plan.segment_values:
        return plan
    buckets = tuple(replace(bucket, segment_values=segment_values) for bucket in plan.buckets)
    return replace(plan, segment_values=segment_values, buckets=buckets)


def _least_segment(codec: CodecSpec | None) -> int:
    return SELECTED_VALUES_MIN if codec is not None and codec.family.selects else SEGMENT_VALUES_MIN


def _placed(tensors: list[tuple[int, TensorSpec]]) -> tuple[tuple[Span, ...], int]:
    """The spans, and the end of the last one, all aligned."""
    spans: list[Span] = []
    start = 0
    for index, spec in tensors:
        rows = spec.shape[0] if len(spec.shape) > 1 and spec.count else 1
        spans.append(Span(spec.name, index, start, spec.count, rows))
        start += aligned(spec.count)
    return tuple(spans), start


def _grouped(tensors: list[tuple[int, TensorSpec]], travel: Travel | None, bucket_values: int) -> list[int]:
    """How many consecutive tensors go into each bucket."""
    sizes = [aligned(spec.count) for _, spec in tensors]
    most = min(bucket_values, max(sum(sizes) // VECTOR_BUCKETS_MIN, BUCKET_VALUES_MIN))
    groups: list[int] = []
    first = 0
    for _, together in groupby(tensors, lambda tensor: _rounds_of(tensor[0], travel)):
        end = first + sum(1 for _ in together)
        while first < end:
            groups.append(_fitting(sizes, first, end, most))
            first += groups[-1]
    return groups


def _rounds_of(tensor: int, travel: Travel | None) -> tuple[bool, ...]:
    """By stretch, whether anything of a tensor travels."""
    return tuple(stretch.counts[tensor] > 0 for stretch in travel.stretches) if travel is not None else ()


def _fitting(sizes: list[int], first: int, until: int, most: int) -> int:
    """How many tensors from `first` on, and before `until`, fit into `most` values; at least one."""
    end, total = first + 1, sizes[first]
    while end < until and total + sizes[end] <= most:
        total += sizes[end]
        end += 1
    return end - first


def values_per_segment(total_values: int, least: int = SEGMENT_VALUES_MIN) -> int:
    """C1: 64 Ki values, or the power of two that still cuts a small vector into VECTOR_SEGMENTS, but not less than
    `least`."""
    wanted = max(total_values // VECTOR_SEGMENTS, least)
    return min(1 << (wanted.bit_length() - 1), limits.SEGMENT_VALUES_MAX)


def aligned(values: int) -> int:
    """What so many values take in a vector."""
    return -(-values // ALIGNMENT_VALUES) * ALIGNMENT_VALUES
