"""Every history that any daemon of the cluster has had, as one tree of chain ids, and what must be true of each."""

from collections import Counter
from dataclasses import dataclass

from meshwire.messages.generation import DealState
from meshwire.messages.learner import SampleSpace
from meshwire.rounds.chain import START, chain
from meshwire.rounds.effects import RoundComplete
from tests.sim.clusterexchange import Result


@dataclass(frozen=True, slots=True)
class Node:
    """A complete round of one history."""

    before: bytes
    generation: int
    done: RoundComplete


class Histories:
    """Fed with every completion. Raises AssertionError, naming the rule, where two daemons contradict each other."""

    def __init__(self, staleness: int, space: SampleSpace) -> None:
        self._staleness = staleness
        self._space = space
        self._nodes: dict[bytes, Node] = {}
        self._results: dict[tuple[int, int], bytes] = {}  # chain by generation and round
        self._deals: dict[tuple[bytes, int], DealState] = {}

    @property
    def count(self) -> int:
        """Rounds of all histories."""
        return len(self._nodes)

    def before(self, chain_: bytes) -> bytes:
        """The chain id of one round less."""
        return self._nodes[chain_].before

    def generation(self, chain_: bytes) -> int:
        """In which the last round of this history was completed."""
        return self._nodes[chain_].generation

    def completed(self, before: bytes, generation: int, done: RoundComplete, results: list[Result]) -> bytes:
        """A daemon has completed a round by itself. Returns its chain id."""
        own = chain(before, generation, done)
        known = self._results.setdefault((generation, done.round), own)
        assert known == own, f"G3: round {done.round} has one result in its generation"
        names = tuple((rank, bind.hyperparameters.decode()) for rank, bind in done.binds.items())
        for result in results:
            assert result.poisoned or result.names == names, f"G6, R2: the sum of round {done.round} is of its binds"
        assert done.void or not any(result.poisoned for result in results), "V1: a poisoned round is void"
        if own not in self._nodes:
            for rank, bind in done.binds.items():
                age = done.round - 1 - bind.base
                assert 0 <= age <= self._staleness, f"R0: rank {rank} has the age {age} in round {done.round}"
            self._nodes[own] = Node(before, generation, done)
        return own

    def served(self, before: bytes, chain_: bytes, done: RoundComplete) -> None:
        """A daemon has been served a round."""
        assert self._nodes[chain_].before == before, f"G4: the served round {done.round} continues the own history"
        assert self._nodes[chain_].done == done, f"G4: round {done.round} is served as it was completed"

    def dealt(self, chain_: bytes, generation: int, deal: DealState) -> None:
        """X1: the ledger is a function of the complete rounds and entered generations."""
        known = self._deals.setdefault((chain_, generation), deal)
        assert known == deal, "X1: ledgers are equal at equal rounds"

    def rounds(self, chain_: bytes) -> list[RoundComplete]:
        """All rounds of the history that ends there, the first one first."""
        rounds: list[RoundComplete] = []
        while chain_ != START:
            node = self._nodes[chain_]
            rounds.append(node.done)
            chain_ = node.before
        return rounds[::-1]

    def path(self, chain_: bytes) -> list[bytes]:
        """The chain ids of all rounds of the history that ends there, the first one first."""
        path = []
        while chain_ != START:
            path.append(chain_)
            chain_ = self.before(chain_)
        return path[::-1]

    def check(self, chain_: bytes, deal: DealState) -> int:
        """What must be true of a whole history. Returns how many epochs are over in it."""
        rounds = self.rounds(chain_)
        assert [done.round for done in rounds] == list(range(1, len(rounds) + 1)), "rounds are counted without a gap"
        names = Counter(bind.hyperparameters for done in rounds for bind in done.binds.values())
        assert max(names.values(), default=1) == 1, f"a contribution is counted once: {names.most_common(1)}"
        units: dict[int, Counter[int]] = {}
        for done in rounds:
            for bind in done.binds.values():
                for block in bind.samples:
                    units.setdefault(block.epoch, Counter()).update(range(block.first, block.end))
        still = [deal.epoch, *(block.epoch for block in deal.returned)]
        still += [block.epoch for _, batch in deal.held for block in batch]
        for epoch in range(min(still)):
            seen = units.get(epoch, Counter())
            wrong = [unit for unit in range(self._space.total) if seen[unit] != 1]
            assert not wrong, f"X1: the samples {wrong} of epoch {epoch} are not in exactly one round"
        for epoch, seen in units.items():
            assert max(seen.values()) == 1, f"X1: a sample of epoch {epoch} is in two rounds"
        return min(still)
