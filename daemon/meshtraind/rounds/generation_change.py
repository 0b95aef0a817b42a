"""How the rounds of one job pass from one generation into the next: fenced, brought to the cut, begun anew above it."""

from meshtraind.codecs.base import CodecError
from meshtraind.contributions.results import EncodedRound
from meshtraind.rounds.catchup import FalseRoundError
from meshtraind.rounds.data_plane import DataPlane
from meshtraind.rounds.effects import EffectPerformer, RoundParts, Stage
from meshtraind.rounds.history import completion
from meshwire.memory_layout.footprint import unapplied_max
from meshwire.messages.generation import DealState, Enter, ServedRound, Standing
from meshwire.messages.job import Generation, JobSpec
from meshwire.rounds.inputs import (
    FenceRaised,
    GenerationEntered,
    LearnerTakenIn,
    LearningChanged,
    RoundServed,
    SettingsChanged,
)
from meshwire.sync_modes.settings_changes import SettingsChanges


def rounds_kept(plane: DataPlane, spec: JobSpec, generation: Generation) -> int:
    """How many rounds are kept for a learner that does not apply them (`RoundSettings.unapplied_max`)."""
    round_bytes = plane.round_bytes(spec.peers_max or len(generation.members))
    return unapplied_max(round_bytes, spec.sync.staleness)


class GenerationChange:
    """What membership asks of the rounds of one job, in the order of a change: out of a generation, to the cut, into
    the next.

    Args:
        counted, learning: number of the newest generation that the deal of samples follows, and whose learners compute
            in it.
    """

    def __init__(self, parts: RoundParts, performer: EffectPerformer, counted: int, learning: tuple[int, ...]) -> None:
        self._parts = parts
        self._performer = performer
        self._deal: DealState | None = None
        self._samples = 0
        self._counted, self._learning = counted, learning

    # Out of a generation

    def fence(self) -> None:
        """G2: from now on nothing of the generation is sent, completed or taken. The learner computes on."""
        self._parts.plane.fence()
        if self._parts.gossip is not None:
            self._parts.gossip.fence()
        self._performer.fence()
        self._performer.handle(FenceRaised())
        self._note_cut()

    def standing(self) -> Standing:
        """G4: what is held here. In which generation, and who is linked, others know."""
        history = self._parts.history
        return Standing(
            generation=self._performer.generation,
            number=0,
            complete=history.complete,
            chains=history.chains,
            samples=history.samples,
            linked=(),
            counted=self._counted,
            learning=self._learning,
            changes=history.changes,
            ahead=self._parts.spec.sync.staleness + 1,
        )

    # To the cut

    def take_changes(self, changes: SettingsChanges) -> None:
        """C3: which rounds of the history that is kept go by which settings."""
        self._parts.history.changes = changes
        self._parts.plane.take_changes(changes)
        self._performer.handle(SettingsChanged(changes))

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
        rounds = range(complete + 1, self._parts.history.complete + 1)
        held = {round_: self._parts.plane.encoded(round_) for round_ in rounds}
        sizes = {round_: (each.poisoned, each.size_bytes) for round_, each in held.items()}
        return self._parts.history.served(complete, sizes)

    def encoded(self, round_: int) -> EncodedRound:
        """A complete round's bytes. Raises KeyError when they are gone."""
        return self._parts.plane.encoded(round_)

    def place_for(self, served: ServedRound) -> memoryview:
        """Where the bytes of a round that this member lacks are to be put. Raises FalseRoundError for a wrong size."""
        try:
            return self._parts.plane.place_for(served.round, served.size_bytes, completion(served).contributors)
        except CodecError as error:
            raise FalseRoundError(str(error)) from error

    def take_served(self, served: ServedRound) -> None:
        """A round that others hold; its bytes lie in its place, unless it is void. Raises FalseRoundError."""
        done = completion(served)
        try:
            poisoned = None if served.void else served.poisoned
            weights = [bind.weight for _, bind in sorted(done.binds.items())]
            self._parts.plane.take_served(served.round, poisoned, done.contributors, weights)
        except CodecError as error:
            raise FalseRoundError(str(error)) from error
        self._parts.history.add_served(done, served.chain)
        self._performer.handle(RoundServed(done))
        self._note_cut()

    # Into the next

    def enter(self, generation: Generation, enter: Enter) -> None:
        """G6: from now on this generation's rounds are taken; those above the cut begin anew."""
        self._count(enter.counted, enter.learning)
        parts, performer = self._parts, self._performer
        self.take_changes(enter.changes)
        performer.generation = enter.generation
        performer.stage = Stage.ENTERED
        parts.plane.enter(enter.generation, generation.ranks, parts.links, enter.cut, learning=generation.learning)
        computes = parts.rank in generation.learning
        kept = rounds_kept(parts.plane, parts.spec, generation)
        completes = dict(enter.complete)
        performer.handle(
            GenerationEntered(generation.ranks, enter.cut, completes, computes=computes, unapplied_max=kept)
        )

    def resume(self, generation: Generation) -> None:
        """All have entered: what waited is sent. The deal of samples follows the generation only now, for one that some
        have not entered may be replaced, and no round is completed in it."""
        self._count(generation.number, generation.learning)
        self._parts.plane.resume()
        self._performer.send_waiting()
        if self._parts.gossip is not None:
            self._parts.gossip.resume(self._performer.generation, generation.learning)

    def take_in(self) -> None:
        """X3 (what others held is dealt again): the learner that has loaded computes from this generation on."""
        self._performer.handle(LearnerTakenIn())

    def _count(self, number: int, learning: tuple[int, ...]) -> None:
        """X3: the deal of samples follows each generation that goes on, once and in their order."""
        if number > self._counted:
            self._counted, self._learning = number, learning
            self._performer.handle(LearningChanged(learning))

    def _note_cut(self) -> None:
        self._deal = self._performer.deal
        self._samples = self._parts.history.samples
