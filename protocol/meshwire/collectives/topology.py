"""Who sends what to whom: a topology is a pure function that gives every rank its program (DESIGN section 7).

It says which transfers there are, from position to position (a scheme); what each rank does follows from that.

A rank is for a job's life, so those of a generation need not follow each other; shards go by position in the ring.
Every rank begins with its own part of every shard. What a step sends is the shard as it stands after all receipts of it
at earlier steps. A shard is a run of whole segments of one bucket.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby

from meshwire.model.plan import Shard


class Op(Enum):
    """What happens to a shard that is received."""

    REDUCE = "reduce"  # it is added to the own part
    COPY = "copy"  # it is final, replaces the own part and travels on as the same bytes
    KEEP = "keep"  # it is kept beside the own part; once all are there, they are added in the order of ranks


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank: a send, a receipt, or both at once. `op` says what the receipt does.

    Attributes:
        parts: bitmap of the ranks whose parts can be in what is received.
        after: so many steps' receipts the sender needs before it can send what is received.
    """

    send_shard: int | None
    send_to: int | None
    recv_shard: int | None
    recv_from: int | None
    op: Op
    parts: int = 0
    after: int = 0


_IDLE = Step(None, None, None, None, Op.COPY)  # one for all: where one member owns much there are thousands


@dataclass(frozen=True, slots=True)
class Route:
    """One shard's way through one rank of a topology in which sums grow from hop to hop.

    All sums that come here are added to the own part, in the order of `sums`; then the shard is finished here, or
    leaves by `onward` and comes back final.

    Attributes:
        sums: the steps at which others' sums are received.
        onward: the steps that send the sum; at most one.
        spread: the steps that send the final shard.
        finishes: this rank owns it.
    """

    sums: tuple[int, ...]
    onward: tuple[int, ...]
    spread: tuple[int, ...]
    finishes: bool


@dataclass(frozen=True, slots=True)
class Transfer:
    """One shard goes from one position to another at a step of a program that all play together."""

    step: int
    sender: int
    receiver: int
    shard: int
    op: Op


@dataclass(frozen=True)
class Program:
    """What one rank does in one exchange of one bucket.

    Attributes:
        ranks: of the generation, in ring order.
        owned: the shards whose sum this rank finishes: it divides once by the weight and encodes once (W3).
    """

    ranks: tuple[int, ...]
    rank: int
    shard_count: int
    steps: tuple[Step, ...]
    owned: frozenset[int]

    @cached_property
    def bitmap(self) -> int:
        """Of `ranks`."""
        return sum(1 << rank for rank in self.ranks)

    def finishes(self, shard: int) -> bool:
        """Whether this rank owns the shard."""
        return shard in self.owned

    @cached_property
    def routes(self) -> tuple["Route", ...]:
        """The way of each shard here, where sums are made on the way."""
        return tuple(self._route(shard) for shard in range(self.shard_count))

    def _route(self, shard: int) -> "Route":
        steps = list(enumerate(self.steps))
        sums = tuple(index for index, step in steps if step.recv_shard == shard and step.op is Op.REDUCE)
        final = next((index for index, step in steps if step.recv_shard == shard and step.op is Op.COPY), None)
        sends = [index for index, step in steps if step.send_shard == shard]
        known = (sums[-1] if sums else -1) if self.finishes(shard) else final
        before = tuple(index for index in sends if known is None or index < known)
        return Route(sums, before, tuple(index for index in sends if index not in before), self.finishes(shard))

    @cached_property
    def needs(self) -> Mapping[int, tuple[int, ...]]:
        """By step that sends: the earlier ones at which something of its shard is received that leaves with it, or
        instead of it. What is kept beside the own part is never passed on."""
        came: dict[int | None, tuple[int, ...]] = {}
        needs: dict[int, tuple[int, ...]] = {}
        for index, step in enumerate(self.steps):
            if step.send_shard is not None:
                needs[index] = came.get(step.send_shard, ())
            if step.recv_shard is not None and step.op is not Op.KEEP:
                came[step.recv_shard] = (*came.get(step.recv_shard, ()), index)
        return needs

    def sends(self) -> list[int]:
        """The shards that this rank sends, one for each send."""
        return [step.send_shard for step in self.steps if step.send_shard is not None]


@dataclass(frozen=True)
class Scheme:
    """A topology for some members, by their positions in ring order.

    Attributes:
        transfers: in the order of steps. At each a member sends at most one shard, and receives at most one.
        owners: by shard, the positions of those that finish it: one, or where parts are kept (`Op.KEEP`) all.
    """

    transfers: Iterable[Transfer]
    owners: Sequence[Collection[int]]


def ring_scheme(members: int) -> Scheme:
    """Ring all-reduce (Patarasuk and Yuan 2009): m - 1 reduce steps, then m - 1 copy steps.

    At step t position p sends shard (p - t) mod m to its successor.
    """
    transfers = (
        Transfer(
            step,
            position,
            (position + 1) % members,
            (position - step) % members,
            Op.REDUCE if step < members - 1 else Op.COPY,
        )
        for step in range(2 * (members - 1))
        for position in range(members)
    )
    return Scheme(transfers, [{(shard - 1) % members} for shard in range(members)])


def gather_scheme(members: int) -> Scheme:
    """Gather, or all-to-all: everybody sends everybody its own part, and adds all of them in the order of ranks.

    There is one shard, the whole bucket, and everybody finishes it. At step j position p sends its part to position
    p + 1 + j and receives that of p - 1 - j (all mod m): so at each step every member sends once and receives once, and
    no link is used twice. A value is encoded once on its way; a member sends m - 1 parts, which is m/2 times what a
    ring does.
    """
    transfers = (
        Transfer(turn - 1, position, (position + turn) % members, 0, Op.KEEP)
        for turn in range(1, members)
        for position in range(members)
    )
    return Scheme(transfers, [range(members)])


def programs_from(scheme: Scheme, ranks: tuple[int, ...]) -> tuple[Program, ...]:
    """What each of these ranks does, in ring order. A world of one has no steps and owns everything. Raises ValueError
    when `ranks` are not sorted."""
    if list(ranks) != sorted(set(ranks)):
        raise ValueError(f"ranks {ranks} are not in order")
    members = range(len(ranks))
    sent: list[dict[int, Transfer]] = [{} for _ in members]  # by step
    received: list[dict[int, tuple[Transfer, int, int]]] = [{} for _ in members]  # with `parts` and `after`
    holds: dict[tuple[int, int], tuple[int, int]] = {}  # by position and shard: whose parts, and since which step
    last = -1
    for last, at_once in groupby(scheme.transfers, key=lambda each: each.step):
        moves = [(each, *holds.get((each.sender, each.shard), (1 << ranks[each.sender], 0))) for each in at_once]
        for each, parts, after in moves:
            assert last not in sent[each.sender], f"step {last}: position {each.sender} sends twice"
            assert last not in received[each.receiver], f"step {last}: position {each.receiver} receives twice"
            sent[each.sender][last] = each
            received[each.receiver][last] = each, parts, after
            if each.op is not Op.KEEP:  # what is kept beside the own part is never passed on
                at = each.receiver, each.shard
                holds[at] = holds.get(at, (1 << ranks[each.receiver], 0))[0] | parts, last + 1

    def step_of(position: int, index: int) -> Step:
        send, receipt = sent[position].get(index), received[position].get(index)
        if send is None and receipt is None:
            return _IDLE
        shard, to = (None, None) if send is None else (send.shard, ranks[send.receiver])
        if receipt is None:
            return Step(shard, to, None, None, Op.COPY)
        each, parts, after = receipt
        return Step(shard, to, each.shard, ranks[each.sender], each.op, parts, after)

    return tuple(
        Program(
            ranks,
            ranks[position],
            len(scheme.owners),
            tuple(step_of(position, index) for index in range(last + 1)),
            frozenset(shard for shard, owners in enumerate(scheme.owners) if position in owners),
        )
        for position in members
    )


def owner_of(ranks: tuple[int, ...], shard: int) -> int:
    """The rank that finishes `shard` in a ring: the last one that its sum reaches."""
    return ranks[shard - 1]


def bucket_shards(segment_count: int, members: int, bucket_index: int) -> tuple[Shard, ...]:
    """Cuts a bucket into one shard per member, as equal as whole segments allow.

    The segments left over go to other members in every bucket, each bucket going on where an equal one before it
    stopped, so that over a whole plan all send the same.
    """
    size, left_over = divmod(segment_count, members)
    turn = bucket_index * left_over
    shards: list[Shard] = []
    first = 0
    for shard in range(members):
        count = size + ((shard - turn) % members < left_over)
        shards.append(Shard(first, count))
        first += count
    return tuple(shards)


def simulate(
    programs: Sequence[Program],
    shards: Sequence[Shard],
    parts: Sequence[Sequence[float] | None],
    weights: Sequence[float],
) -> list[list[float]]:
    """Runs the programs in lockstep and returns every rank's result, by position, one value standing for a segment.

    Args:
        programs: of all ranks, in ring order.
        shards: of this bucket.
        parts: by position, w*g, one value per segment; None for a rank that only forwards (R4).
        weights: by position; 0 where the part is None.

    A bucket without any contribution stays zero. Raises ValueError when a rank waits for something that is not sent.
    """
    segment_count = sum(shard.segment_count for shard in shards)
    areas = [list(part) if part is not None else [0.0] * segment_count for part in parts]
    sums = [[weight] * len(shards) for weight in weights]  # the weight that each rank's state of a shard holds
    lacking = [[step.recv_shard for step in program.steps if step.op is not Op.COPY] for program in programs]
    kept: dict[tuple[int, int], dict[int, tuple[list[float], float]]] = {}  # by position and shard: parts by rank
    for position, program in enumerate(programs):
        for shard in program.owned:
            if shard not in lacking[position]:
                _finish(areas[position], shards[shard], sums[position][shard])
    for index in range(max((len(program.steps) for program in programs), default=0)):
        steps = [program.steps[index] if index < len(program.steps) else None for program in programs]
        sent: dict[tuple[int | None, int | None, int | None], tuple[list[float], float]] = {
            (program.rank, step.send_to, step.send_shard): (
                _cut(areas[position], shards[step.send_shard]),
                sums[position][step.send_shard],
            )
            for position, (program, step) in enumerate(zip(programs, steps, strict=True))
            if step is not None and step.send_shard is not None
        }
        for position, (program, step) in enumerate(zip(programs, steps, strict=True)):
            if step is None or step.recv_shard is None:
                continue
            if (step.recv_from, program.rank, step.recv_shard) not in sent:
                raise ValueError(
                    f"step {index}: rank {program.rank} waits for shard {step.recv_shard} of rank {step.recv_from} "
                    "in vain"
                )
            values, weight = sent[step.recv_from, program.rank, step.recv_shard]
            run, area, weight_here = shards[step.recv_shard], areas[position], sums[position][step.recv_shard]
            if step.op is not Op.COPY:
                lacking[position].remove(step.recv_shard)
            complete = step.recv_shard not in lacking[position]
            if step.op is Op.REDUCE:
                values = [own + other for own, other in zip(_cut(area, run), values, strict=True)]
                sums[position][step.recv_shard] = weight_here + weight
            elif step.op is Op.KEEP:
                parts_here = kept.setdefault(
                    (position, step.recv_shard), {program.rank: (_cut(area, run), weight_here)}
                )
                assert step.recv_from is not None
                parts_here[step.recv_from] = values, weight
                if not complete:
                    continue
                in_order = [parts_here[rank] for rank in program.ranks]
                values = [sum(column) for column in zip(*(part for part, _ in in_order), strict=True)]
                sums[position][step.recv_shard] = sum(each for _, each in in_order)
            area[run.first_segment : run.first_segment + run.segment_count] = values
            if program.finishes(step.recv_shard) and complete:
                _finish(area, run, sums[position][step.recv_shard])
    return areas


def _cut(area: list[float], run: Shard) -> list[float]:
    return area[run.first_segment : run.first_segment + run.segment_count]


def _finish(area: list[float], run: Shard, weight: float) -> None:
    if weight:
        for segment in range(run.first_segment, run.first_segment + run.segment_count):
            area[segment] /= weight
