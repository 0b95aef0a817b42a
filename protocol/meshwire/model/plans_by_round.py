"""Where the values lie that travel in each round, if these are not all of them (T1).

Each bucket keeps its place in the vector; what travels of it lies packed at the place's beginning, and a bucket of
which nothing travels is not there at all. So parameters that travel whole lie where they always do, and what a codec
has left out of them stays where it is while others come and go.
"""

from dataclasses import replace

from meshwire.model.plan import Bucket, Plan, Span, aligned
from meshwire.model.schedule import Counts


class RoundPlans:
    """Those of one job.

    Args:
        plan: of a round in which all values travel.

    Attributes:
        whole: that.
        all: each that some round has, once. All have the same spans at the same indices; of those that do not travel
            the count is 0.
    """

    def __init__(self, plan: Plan) -> None:
        self.whole = plan
        travel = plan.travel
        lengths: list[Counts | None] = [None]
        if travel is not None:
            found = dict.fromkeys((None, *(stretch.counts for stretch in travel.stretches)))
            lengths = [counts for counts in found if travel.last(counts) != 0]
        self._index = {counts: index for index, counts in enumerate(lengths)}
        self.all: tuple[Plan, ...] = tuple(plan if counts is None else _shorter(plan, counts) for counts in lengths)

    def index(self, number: int) -> int:
        """In `all`, of a round's."""
        travel = self.whole.travel
        return self._index[travel.of(number) if travel is not None else None]

    def of(self, number: int) -> Plan:
        """That of a round, numbered from 1."""
        return self.all[self.index(number)]

    def ends_with(self, number: int) -> bool:
        """No later round has the plan of this one."""
        travel = self.whole.travel
        return travel is not None and travel.last(travel.of(number)) == number

    def bucket_counts(self) -> tuple[tuple[int, int, int], ...]:
        """(first round, in whose multiples all travel or 0, how many travel else) of each stretch of rounds.

        A stretch may have no other rounds than such multiples: then its last number counts for nothing. They come again
        as `Travel.every` says.
        """
        stretches = self.whole.travel.stretches if self.whole.travel is not None else ()
        return tuple(
            (each.first, each.whole_every, len(self.all[self._index.get(each.counts, 0)].buckets)) for each in stretches
        )


def _shorter(plan: Plan, counts: Counts) -> Plan:
    spans = list(plan.spans)
    buckets: list[Bucket] = []
    coded_buckets = parameter_buckets = 0
    for bucket in plan.buckets:
        end = bucket.start
        for index in bucket.spans:
            spans[index] = _cut(plan.spans[index], end, counts[plan.spans[index].tensor])
            end += aligned(spans[index].count)
        if end == bucket.start:
            continue
        buckets.append(replace(bucket, index=len(buckets), count=end - bucket.start))
        coded_buckets += bucket.index < plan.coded_buckets
        parameter_buckets += bucket.index < plan.parameter_buckets
    return Plan(
        plan.segment_values,
        plan.total_values,
        tuple(spans),
        tuple(buckets),
        coded_buckets,
        parameter_buckets,
        plan.travel,
    )


def _cut(span: Span, start: int, count: int) -> Span:
    """A tensor of which a part travels is no matrix."""
    return replace(span, start=start, count=count, rows=span.rows if count == span.count else 1)
