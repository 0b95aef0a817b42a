"""How the rounds of one job pass from one generation into the next: fenced, brought to the cut, begun anew above it."""

from collections.abc import Mapping

from meshtraind.codecs.base import CodecError
from meshtraind.executor.executor import Executor
from meshtraind.executor.round_buffers import EncodedRound
from meshtraind.rounds.catchup import FalseRoundError
from meshtraind.rounds.effects import Performer, Stage
from meshtraind.rounds.history import RoundHistory, completion
from meshtraind.rounds.learner_turn import Turn
from meshtraind.rounds.sample_grants import Dealing
from meshtraind.transport.connection import Connection
from meshwire.messages.generation import DealState, Enter, ServedRound, Standing
from meshwire.messages.job import Generation
from meshwire.rounds.inputs import FenceRaised, GenerationEntered, RoundServed
from meshwire.rounds.machine import RoundMachine


class Crossing:
    """Of one job's rounds on this daemon.

    Args:
        links: the connection to each other member, by rank; live.
        counted, learning: number of the newest generation that the deal of samples follows, and whose learners compute
            in it.
    """

    def __init__(
        self,
        *,
        rank: int,
        links: Mapping[int, Connection],
        machine: RoundMachine,
        executor: Executor,
        turn: Turn,
        dealing: Dealing | None,
        history: RoundHistory,
        performer: Performer,
        counted: int,
        learning: tuple[int, ...],
    ) -> None:
        self._rank = rank
        self._links = links
        self._machine = machine
        self._executor = executor
        self._turn = turn
        self._dealing = dealing
        self._history = history
        self._performer = performer
        self._deal: DealState | None = None
        self._samples = 0
        self._counted, self._learning = counted, learning

    # Out of a generation

    def fence(self) -> None:
        """G2: from now on nothing of the generation is sent, completed or taken. The learner computes on."""
        self._executor.fence()
        self._performer.fence()
        self._turn.fenced(self._machine.complete)
        self._performer.handle(FenceRaised())
        self._note_cut()

    def standing(self) -> Standing:
        """G4: what is held here. In which generation, and who is linked, others know."""
        history = self._history
        return Standing(
            generation=self._performer.generation,
            number=0,
            complete=history.complete,
            chains=history.chains,
            samples=history.samples,
            linked=(),
            counted=self._counted,
            learning=self._learning,
        )

    # To the cut

    @property
    def deal(self) -> DealState | None:
        """What the ledger of samples held at the cut; None where no loader was prepared."""
        return self._deal

    @property
    def samples(self) -> int:
        """In the rounds up to the cut."""
        return self._samples

    def served_after(self, complete: int) -> tuple[ServedRound, ...]:
        """The next rounds after `complete`, for a member that lacks them. Raises KeyError when they are gone."""
        rounds = range(complete + 1, self._history.complete + 1)
        held = {round_: self._executor.encoded(round_) for round_ in rounds}
        sizes = {round_: (each.poisoned, each.size_bytes) for round_, each in held.items()}
        return self._history.served(complete, sizes)

    def encoded(self, round_: int) -> EncodedRound:
        """A complete round's bytes. Raises KeyError when they are gone."""
        return self._executor.encoded(round_)

    def place_for(self, served: ServedRound) -> memoryview:
        """Where the bytes of a round that this member lacks are to be put. Raises FalseRoundError for a wrong size."""
        try:
            return self._executor.place_for(served.round, served.size_bytes, completion(served).contributors)
        except CodecError as error:
            raise FalseRoundError(str(error)) from error

    def take_served(self, served: ServedRound) -> None:
        """A round that others hold; its bytes lie in its place, unless it is void. Raises FalseRoundError."""
        done = completion(served)
        try:
            poisoned = None if served.void else served.poisoned
            self._executor.take_served(served.round, poisoned, done.contributors, done.weight)
        except CodecError as error:
            raise FalseRoundError(str(error)) from error
        self._history.add_served(done, served.chain)
        self._performer.handle(RoundServed(done))
        self._note_cut()

    # Into the next

    def enter(self, generation: Generation, enter: Enter) -> None:
        """G6: from now on this generation's rounds are taken; those above the cut begin anew."""
        self._count(enter.counted, enter.learning)
        performer = self._performer
        performer.generation = enter.generation
        performer.stage = Stage.ENTERED
        self._executor.enter(enter.generation, generation.ranks, self._links, enter.cut, learning=generation.learning)
        computes = self._rank in generation.learning
        performer.handle(GenerationEntered(generation.ranks, enter.cut, dict(enter.complete), computes=computes))

    def resume(self, generation: Generation) -> None:
        """All have entered: what waited is sent. The deal of samples follows the generation only now, for one that some
        have not entered may be replaced, and no round is completed in it."""
        self._count(generation.number, generation.learning)
        self._executor.resume()
        self._performer.send_waiting()

    def take_in(self) -> None:
        """X3: the learner that has loaded computes from this generation on."""
        self._turn.taken_in()
        self._turn.wants_to_start(1)
        if self._dealing is not None:
            self._dealing.begin()
        self._performer.perform([])

    def _count(self, number: int, learning: tuple[int, ...]) -> None:
        """X3: each generation that goes on is followed once, in their order."""
        if number > self._counted:
            self._counted, self._learning = number, learning
            if self._dealing is not None:
                self._dealing.enter(learning)

    def _note_cut(self) -> None:
        self._deal = self._dealing.state() if self._dealing is not None else None
        self._samples = self._history.samples
