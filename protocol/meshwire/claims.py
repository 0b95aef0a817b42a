"""Which samples each member may take, claimed as the learners go: a function of the complete rounds (X1, X2, X5).

Units are samples, or whole batches where a script's own sampler makes these. The epochs lie one after the other without
end, and a pointer hands them out as blocks of one batch each. Nobody holds the ledger: every member computes it.
"""

from collections.abc import Mapping, Sequence, Set

from meshwire import limits
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import Bind, SampleBlock

FIRST_BATCHES = 32  # of each member before round 1, and s more
PREFETCH_MAX = FIRST_BATCHES - 4  # of a loader: it and s+3 more, which a learner wants to hold, fit into those
HELD_BATCHES_MAX = 2 * limits.CLAIM_BATCHES_MAX  # of one member: ahead of its learner, and in its rounds in flight


def first_batches(staleness: int) -> int:
    """How many batches each member is granted before round 1."""
    return FIRST_BATCHES + staleness


class Ledger:
    """Which blocks were granted to whom, and which of them rounds have covered.

    Every unit of an epoch is granted once, and covered once at most, except for those that `drop_last` leaves out.
    Memory: the blocks that are granted and not covered.

    Args:
        space: what the members' loaders read.
        first_batches: granted to each member before round 1, in turns by rank.

    Raises:
        ValueError: when `drop_last` leaves nothing, an epoch being shorter than one batch of each member.

    Attributes:
        sizes: units a batch, by rank, of what is granted from now on (X4a).
    """

    def __init__(self, space: SampleSpace, members: int, first_batches: int) -> None:
        if space.drop_last and space.total < space.batch * members:
            raise ValueError(f"drop_last leaves nothing of {space.total} samples for {members} times {space.batch}")
        self._space = space
        self._members = members
        self._epoch = 0  # the pointer
        self._position = 0
        self._held: list[set[SampleBlock]] = [set() for _ in range(members)]
        self._units_held: dict[int, list[int]] = {}  # epoch -> by rank
        self.sizes: tuple[int, ...] = (space.batch,) * members
        turns = [[self._grant(rank) for rank in range(members)] for _ in range(first_batches)]
        self._first = tuple(zip(*turns, strict=True)) if turns else ((),) * members

    def initial(self, rank: int) -> tuple[SampleBlock, ...]:
        """What `rank` holds before round 1, one batch each."""
        return self._first[rank]

    def complete(self, binds: Mapping[int, Bind]) -> dict[int, tuple[SampleBlock, ...]] | str:
        """Takes the next complete round, void or not: what its binds cover, and what is granted for their claims.

        Args:
            binds: its contributions by rank.

        Returns:
            The granted blocks by rank, one batch each; or what is wrong with a bind, and then nothing has changed.
        """
        for rank in sorted(binds):
            if wrong := self._wrong_with(rank, binds[rank]):
                return f"rank {rank} {wrong}"
        for rank in sorted(binds):
            self._cover(rank, binds[rank].samples)
            self.sizes = binds[rank].sizes or self.sizes
        return {rank: tuple(self._grant(rank) for _ in range(binds[rank].claim)) for rank in sorted(binds)}

    def held(self, epoch: int) -> Mapping[int, int]:
        """Units of an epoch that are granted and not covered, by rank; only ranks that hold any."""
        return {rank: units for rank, units in enumerate(self._units_held.get(epoch, ())) if units}

    def over(self, epoch: int, finished: Set[int]) -> int | None:
        """X4: None while units of the epoch are still to be granted, or held by a rank that is not `finished`.

        Else the epoch is over, and this is how many units the finished ranks leave unused.
        """
        held = self.held(epoch)
        if epoch >= self._epoch or not held.keys() <= finished:
            return None
        return sum(held.values())

    def _wrong_with(self, rank: int, bind: Bind) -> str | None:
        blocks = set(bind.samples)
        if len(blocks) < len(bind.samples):
            return "covers a block of samples twice (X1)"
        if foreign := sorted(blocks - self._held[rank], key=_place)[:1]:
            return f"covers {_text(foreign[0])}, which it does not hold (X1)"
        if len(self._held[rank]) - len(blocks) + bind.claim > HELD_BATCHES_MAX:
            return f"claims {bind.claim} batches, and would hold more than {HELD_BATCHES_MAX} (X2)"
        return self._wrong_sizes(bind.sizes)

    def _wrong_sizes(self, sizes: Sequence[int]) -> str | None:
        if not sizes:
            return None
        joint = self._space.batch * self._members
        if self._space.whole_batches:
            return "sets batch sizes, and whole batches have none (X4a)"
        if len(sizes) != self._members or sum(sizes) != joint:
            return f"sets {len(sizes)} batch sizes of {sum(sizes)} in sum, not {self._members} of {joint} (X4a)"
        return None

    def _cover(self, rank: int, blocks: Sequence[SampleBlock]) -> None:
        for block in blocks:
            self._held[rank].remove(block)
            by_rank = self._units_held[block.epoch]
            by_rank[rank] -= block.end - block.first
            if not any(by_rank) and block.epoch < self._epoch:
                del self._units_held[block.epoch]

    def _grant(self, rank: int) -> SampleBlock:
        size, total = self.sizes[rank], self._space.total
        if self._space.drop_last and total - self._position < size:
            self._next_epoch()
        block = SampleBlock(epoch=self._epoch, first=self._position, end=min(self._position + size, total))
        self._held[rank].add(block)
        self._units_held.setdefault(block.epoch, [0] * self._members)[rank] += block.end - block.first
        self._position = block.end
        left = total - self._position
        if left == 0 or (self._space.drop_last and left < min(self.sizes)):
            self._next_epoch()
        return block

    def _next_epoch(self) -> None:
        if not any(self._units_held.get(self._epoch, ())):
            self._units_held.pop(self._epoch, None)
        self._epoch += 1
        self._position = 0


def _place(block: SampleBlock) -> tuple[int, int, int]:
    return block.epoch, block.first, block.end


def _text(block: SampleBlock) -> str:
    return f"samples {block.first} to {block.end} of epoch {block.epoch}"
