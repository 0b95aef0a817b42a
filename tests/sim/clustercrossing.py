"""The rounds of a daemon of the cluster as its membership knows them: led into the next generation, and served.

A round that is served has bytes, fetched piece by piece like those of a model's: they tell what was summed.
"""

import pickle
from dataclasses import dataclass

from meshwire.messages.generation import DealState, Enter, ServedRound, Standing
from meshwire.messages.job import Generation
from meshwire.messages.learner import SampleSpace
from meshwire.rounds.inputs import RoundTripMeasured
from tests.sim.clusterexchange import Result
from tests.sim.clusterrounds import Rounds


@dataclass(frozen=True)
class ServedBytes:
    """A `meshtraind.rounds.catchup.RoundBytes`."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read(self, offset_bytes: int, max_bytes: int) -> bytes:
        return self.data[offset_bytes : offset_bytes + max_bytes]


class HeldRounds:
    """A `meshtraind.session.membership_driver.MemberRounds`, with its `CrossingRounds`."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._places: dict[int, bytearray] = {}  # of rounds that are being fetched

    @property
    def complete(self) -> int:
        return self._rounds.machine.complete

    @property
    def history_samples(self) -> int:
        return self._rounds.history.samples

    @property
    def sample_space(self) -> SampleSpace | None:
        return self._rounds.world.space

    @property
    def crossing(self) -> "HeldRounds":
        return self

    def note_round_trip(self, rtt_s: float) -> None:
        known_s = self._rounds.machine.settings.rtt_s
        if not 0.8 * known_s <= rtt_s <= 1.25 * known_s:
            self._rounds.handle(RoundTripMeasured(rtt_s))

    @property
    def deal(self) -> DealState | None:
        return self._rounds.deal

    @property
    def samples(self) -> int:
        return self._rounds.samples

    def fence(self) -> None:
        self._rounds.fence()

    def standing(self) -> Standing:
        return self._rounds.standing()

    def enter(self, generation: Generation, enter: Enter) -> None:
        self._rounds.enter(generation, enter)

    def resume(self, generation: Generation) -> None:
        self._rounds.resume(generation)

    def take_in(self) -> None:
        self._rounds.take_in()

    def served_after(self, complete: int) -> tuple[ServedRound, ...]:
        rounds = self._rounds
        numbers = range(complete + 1, rounds.history.complete + 1)
        sizes = {number: (b"", self.encoded(number).size_bytes) for number in numbers}
        return rounds.history.served(complete, sizes)[:4]  # as a message holds but some

    def encoded(self, round_: int) -> ServedBytes:
        return ServedBytes(pickle.dumps(self._rounds.exchange.encoded(round_)))

    def place_for(self, served: ServedRound) -> memoryview:
        place = self._places[served.round] = bytearray(served.size_bytes)
        return memoryview(place)

    def take_served(self, served: ServedRound) -> None:
        data = self._places.pop(served.round, None)
        results: list[Result] = [] if data is None else pickle.loads(data)
        self._rounds.take_served(served, results)
