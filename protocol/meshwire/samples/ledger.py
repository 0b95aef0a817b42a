"""Which samples each member's learner may take: a function of the complete rounds and entered generations (X1 to X5).

Nobody holds the ledger: every member computes it. Units are samples, or whole batches where a script's own sampler
makes these. They are granted in *turns*: the next units, as many as one batch of each rank that is to get one, cut
among these. In lockstep, where every rank is in every round, the turns are the joint batches of one process in order.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType

from meshwire.messages.generation import DealState
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import Bind, SampleBlock
from meshwire.samples.epochs import cuts, rounds_per_epoch
from meshwire.samples.pool import Batch, SamplePool, place
from meshwire.sync_modes.batch_sizes import in_proportion, sizes_by_speed
from meshwire.sync_modes.mode import SyncSettings

NO_SPEEDS: Mapping[int, float] = MappingProxyType({})
FIRST_BATCHES = 32  # of each rank at the start, and s more: one step may accumulate so many
FIRST_BATCHES_EQUAL_MAX = 128  # where speeds do not matter, as far as the epoch has so many


def by_speed(space: SampleSpace, sync: SyncSettings) -> bool:
    """Whether batches get other sizes where measured speeds differ (X4a); a script's own ones are as it made them."""
    return sync.shares == "speed" and not space.whole_batches


def first_batches(space: SampleSpace, ranks: int, sync: SyncSettings) -> int:
    """How many batches each of so many ranks is granted at the start, when none has said yet what a step takes.

    A period takes one for each of its steps, or more (R9), and so does accumulation (O6).
    """
    rounds = space.total // (space.batch * ranks) if sync.lockstep and not by_speed(space, sync) else 0
    steps = max(sync.period, sync.accumulate)
    most = max(FIRST_BATCHES_EQUAL_MAX, steps)
    return min(max(FIRST_BATCHES, steps, rounds), most) + sync.staleness


class Ledger:
    """Which blocks are granted to whom, and in no round yet.

    Every unit of an epoch is in the binds of exactly one complete round, except for those that `drop_last` leaves out:
    less than a joint batch at an epoch's end. Memory: the blocks that are granted and not covered.

    Args:
        space: what the members' loaders read.
        learning: ranks whose learners compute; none, where all are to begin anew before round 1 (G9).
        sync: in lockstep all ranks of a round are kept at one number of batches, the largest that one of them claims:
            what they hold ahead must not let one end an epoch before the others. Else each has what it claims.
        speeds: in samples/s, by rank, as they were measured before the job; where batches follow speed, its first ones
            do by these, if they are known of all. Later ones never do: who comes in later does not know them all (X1).

    Raises:
        ValueError: when there is not one round in which every member gets a sample.
    """

    def __init__(
        self, space: SampleSpace, learning: Iterable[int], sync: SyncSettings, speeds: Mapping[int, float] = NO_SPEEDS
    ) -> None:
        ranks = sorted(learning)
        if ranks:
            rounds_per_epoch(space.total, [space.batch] * len(ranks), drop_last=space.drop_last)
        self._space = space
        self._sync = sync
        self._pool = SamplePool(space.total)
        self._held: dict[int, list[Batch]] = {rank: [] for rank in ranks}
        self._speeds = speeds if by_speed(space, sync) else NO_SPEEDS
        self._sizes: dict[int, int] = {}
        self._sizes = self._sizes_of(ranks)
        self._claim = 0  # the largest of the newest round with any
        if ranks:
            self._speeds = NO_SPEEDS
            self._grant(dict.fromkeys(ranks, first_batches(space, len(ranks), sync)))

    @classmethod
    def restored(
        cls, space: SampleSpace, sync: SyncSettings, state: DealState, speeds: Mapping[int, float] = NO_SPEEDS
    ) -> "Ledger":
        """The ledger that `state` was read from, with the ranks that were learning then; `speeds` count where nothing
        was granted yet. Raises ValueError."""
        ledger = cls.__new__(cls)
        ledger._space, ledger._sync = space, sync
        begins = not state.sizes and (state.epoch, state.position) == (0, 0)
        ledger._speeds = speeds if begins and by_speed(space, sync) else NO_SPEEDS
        ledger._pool = SamplePool(space.total, state.epoch, state.position, state.returned)
        ledger._sizes, ledger._claim = dict(state.sizes), state.claim
        ledger._held = {rank: [] for rank in ledger._sizes}
        for rank, batch in state.held:
            if rank not in ledger._held:
                raise ValueError(f"rank {rank} holds samples in a deal that lists the ranks {sorted(ledger._held)}")
            ledger._held[rank].append(batch)
        return ledger

    def state(self) -> DealState:
        """Between two rounds. `held` has an entry for each batch, `sizes` for each learning rank."""
        epoch, position = self._pool.pointer
        return DealState(
            epoch=epoch,
            position=position,
            returned=self._pool.returned,
            held=tuple((rank, batch) for rank, batches in self._held.items() for batch in batches),
            sizes=tuple(self._sizes.items()),
            claim=self._claim,
        )

    @property
    def epochs_used(self) -> float:
        """How many epochs' units nobody holds or is still to be granted: they are in complete rounds, or left out."""
        epoch, position = self._pool.pointer
        held = (block for batches in self._held.values() for batch in batches for block in batch)
        open_units = sum(block.end - block.first for block in (*self._pool.returned, *held))
        return epoch + (position - open_units) / self._space.total

    @property
    def sizes(self) -> Mapping[int, int]:
        """Units a batch, by learning rank, of what is granted from now on (X4a)."""
        return self._sizes

    def batches(self, rank: int) -> tuple[Batch, ...]:
        """What a rank holds, in the order in which it was granted; nothing if its learner does not compute."""
        return tuple(self._held.get(rank, ()))

    def enter(self, learning: Iterable[int]) -> dict[int, tuple[Batch, ...]]:
        """X3: a generation is entered in which these ranks' learners compute; to be called at its cut.

        What the others held comes back and is granted again at once, so that nobody waits for it at an epoch's end. A
        newcomer is granted as many batches as were claimed last, so that what is held does not grow with each return.
        Those that stay keep the proportions of their sizes, and a newcomer begins with the size of equal shares.

        Returns:
            The granted batches by rank.
        """
        ranks = sorted(learning)
        if ranks == list(self._held):
            return {}
        gone = [batches for rank, batches in self._held.items() if rank not in ranks]
        self._pool.put_back(block for batches in gone for batch in batches for block in batch)
        newcomers = [rank for rank in ranks if rank not in self._held]
        self._held = {rank: self._held.get(rank, []) for rank in ranks}
        self._sizes = self._sizes_of(ranks)
        if not ranks:
            return {}
        self._speeds = NO_SPEEDS
        self._leave_out()
        granted = self._grant(
            dict.fromkeys(newcomers, self._claim or first_batches(self._space, len(ranks), self._sync))
        )
        while self._pool.returned:
            for rank, batch in self._turn(ranks).items():
                granted[rank] = (*granted.get(rank, ()), batch)
        return granted

    def complete(self, binds: Mapping[int, Bind], least: int = 0) -> dict[int, tuple[Batch, ...]] | str:
        """Takes the next complete round, void or not (X5): what its binds cover, and what is granted for their claims.

        Args:
            binds: its contributions by rank.
            least: as many batches count as claimed by whoever claims any (C3, a longer period).

        Returns:
            The granted batches by contributor; or what is wrong with a bind, and then nothing has changed.
        """
        for rank in sorted(binds):
            if wrong := self._wrong_with(rank, binds[rank]):
                return f"rank {rank} {wrong}"
        for rank in sorted(binds):
            self._cover(rank, binds[rank].samples)
            if len(binds[rank].sizes) == len(self._sizes):  # else they are of an earlier generation
                self._sizes = dict(zip(self._sizes, binds[rank].sizes, strict=True))
        claims = {rank: bind.claim and max(bind.claim, least) for rank, bind in sorted(binds.items())}
        most = max(claims.values(), default=0)
        self._claim = most or self._claim
        levels = dict.fromkeys(claims, most) if self._sync.lockstep else claims
        wanted = {rank: level - len(self._held[rank]) for rank, level in levels.items() if rank in self._held}
        return dict.fromkeys(sorted(binds), ()) | self._grant(wanted)

    def wrong(self, binds: Mapping[int, Bind]) -> dict[int, str]:
        """By rank what `complete` would not take of these."""
        found = {rank: self._wrong_with(rank, bind) for rank, bind in sorted(binds.items())}
        return {rank: text for rank, text in found.items() if text is not None}

    def over(self, epoch: int, finished: Set[int]) -> int | None:
        """X4: None while units of the epoch are still to be granted, or held by a rank that is not `finished`.

        Else the epoch is over, and this is how many units the finished ranks leave unused.
        """
        held = self._units_held(epoch)
        if epoch >= self._pool.epoch or not held.keys() <= finished:
            return None
        return sum(held.values())

    def _units_held(self, epoch: int) -> dict[int, int]:
        units = {
            rank: sum(block.end - block.first for batch in batches for block in batch if block.epoch == epoch)
            for rank, batches in self._held.items()
        }
        return {rank: count for rank, count in units.items() if count}

    # Binds

    def _wrong_with(self, rank: int, bind: Bind) -> str | None:
        covered = set(bind.samples)
        if len(covered) < len(bind.samples):
            return "covers a block of samples twice (X1)"
        batches = self._held.get(rank, ())
        if foreign := sorted(covered.difference(*batches), key=place)[:1]:
            return f"covers {_text(foreign[0])}, which it does not hold (X1)"
        if any(not covered.isdisjoint(batch) and not covered.issuperset(batch) for batch in batches):
            return "covers a part of a batch (X1)"
        return self._wrong_sizes(bind.sizes)

    def _wrong_sizes(self, sizes: Sequence[int]) -> str | None:
        joint = self._space.batch * len(self._sizes)
        if sizes and self._space.whole_batches:
            return "sets batch sizes, and whole batches have none (X4a)"
        if len(sizes) == len(self._sizes) and sum(sizes) != joint:
            return f"sets {len(sizes)} batch sizes of {sum(sizes)} in sum, not of {joint} (X4a)"
        return None

    def _cover(self, rank: int, blocks: Sequence[SampleBlock]) -> None:
        if covered := set(blocks):
            self._held[rank] = [batch for batch in self._held[rank] if batch[0] not in covered]

    # Grants

    def _sizes_of(self, ranks: Sequence[int]) -> dict[int, int]:
        """X4a: of these ranks, from now on, with the joint batch that equal shares have."""
        batch = self._space.batch
        if any(rank in self._sizes for rank in ranks):
            sizes: Sequence[int] = in_proportion([self._sizes.get(rank, batch) for rank in ranks], batch * len(ranks))
        else:
            equal = (batch,) * len(ranks)
            speeds = [self._speeds.get(rank, 0.0) for rank in ranks]
            sizes = (sizes_by_speed(speeds, batch, equal) if ranks else None) or equal
        return dict(zip(ranks, sizes, strict=True))

    def _grant(self, wanted: Mapping[int, int]) -> dict[int, tuple[Batch, ...]]:
        """So many batches for each rank, in turns."""
        granted: dict[int, list[Batch]] = {rank: [] for rank, count in wanted.items() if count > 0}
        while ranks := [rank for rank in granted if len(granted[rank]) < wanted[rank]]:
            for rank, batch in self._turn(ranks).items():
                granted[rank].append(batch)
        return {rank: tuple(batches) for rank, batches in granted.items()}

    def _turn(self, ranks: Sequence[int]) -> dict[int, Batch]:
        """X4: one batch for each of these, of one epoch. Fewer get one if that has not a unit for each.

        A remainder with which the next turn of all ranks could not give everybody a unit joins this turn.
        """
        left = self._pool.left()
        if self._space.drop_last:
            shares = self._whole(ranks, left)
        else:
            taking = ranks[:left]
            sizes = [self._sizes[rank] for rank in taking]
            count = min(sum(sizes), left)
            count = left if left - count < len(self._held) else count
            bounds = cuts(count, sizes)
            shares = {rank: end - first for rank, first, end in zip(taking, bounds, bounds[1:], strict=False)}
        turn = {rank: self._pool.take(share) for rank, share in shares.items()}
        for rank, batch in turn.items():
            self._held[rank].append(batch)
        self._leave_out()
        return turn

    def _whole(self, ranks: Sequence[int], left: int) -> dict[int, int]:
        """Whole batches only, for as many as there are."""
        shares = {}
        for rank in ranks:
            size = min(self._sizes[rank], self._space.total)
            if size <= left:
                shares[rank] = size
                left -= size
        return shares

    def _leave_out(self) -> None:
        """With `drop_last`, an epoch's rest: less than a joint batch, or than a batch if no epoch has a joint one."""
        if self._space.drop_last and self._held:
            joint = sum(self._sizes.values())
            least = joint if joint <= self._space.total else min(max(self._sizes.values()), self._space.total)
            while self._pool.left() < least:
                self._pool.skip()


def _text(block: SampleBlock) -> str:
    return f"samples {block.first} to {block.end} of epoch {block.epoch}"
