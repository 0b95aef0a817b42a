"""A budget of bytes, shared out among the segments of a vector: `--codec topk:0.01,budget=2MB`.

It bounds every encoded vector of every round: the sum of all segments of one member's own part, float buffers
included, and the sum of all segments of the round's mean. So in the sharded exchange a member sends at most
2 (m-1)/m times the budget in a round, besides the headers of frames, and each link of it 2/m; in a gather m-1 times the
budget, and each link all of it.

A share follows from the segment alone, never from what is in it: so any set of segments keeps within the sum of their
shares, in whatever order and on however many owners they are encoded. What one leaves of its share is the next one's.
"""

from dataclasses import dataclass

from meshwire.codecs.schedules import size_text
from meshwire.codecs.sparsifiers import chosen_bytes_max
from meshwire.codecs.spec import CodecSpec
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.model.plan import Plan


@dataclass(frozen=True)
class Budget:
    """How much a segment may take.

    Attributes:
        codec: of the segments that share it.
        rest_bytes: what is left when each segment has as much as a single value needs.
        values: that share it; the first ones of the vector.
    """

    codec: CodecSpec
    rest_bytes: int
    values: int

    def share_bytes(self, start: int, count: int) -> int:
        """Of the segment of values [start, start + count): enough for one value, and of the rest its part."""
        end = start + count
        part = self.rest_bytes * end // self.values - self.rest_bytes * start // self.values
        return _least_bytes(self.codec, count) + part


def budget_of(plan: Plan, layout: EncodedLayout) -> Budget | None:
    """None if the codec has none. Raises ValueError for one too small for the model, which names the least."""
    spec = layout.codecs[0]
    if not spec.budget_bytes:
        return None
    gradients, buffers = plan.buckets[: plan.coded_buckets], plan.buckets[plan.coded_buckets :]
    buffer_bytes = sum(layout.span(bucket.index, 0, bucket.segment_count)[1] for bucket in buffers)
    counts = [bucket.segment_bounds(segment)[1] for bucket in gradients for segment in range(bucket.segment_count)]
    least_bytes = buffer_bytes + sum(_least_bytes(spec, count) for count in counts)
    if spec.budget_bytes < least_bytes:
        raise ValueError(
            f"codec {spec}: a budget of {size_text(spec.budget_bytes)} is too small for this model: one value of each "
            f"of its {len(counts)} segments, and its float buffers, take {least_bytes} bytes. Choose budget="
            f"{size_text(least_bytes)} or more"
        )
    return Budget(spec, spec.budget_bytes - least_bytes, sum(bucket.count for bucket in gradients))


def _least_bytes(spec: CodecSpec, count: int) -> int:
    return chosen_bytes_max(spec, 1, count)
