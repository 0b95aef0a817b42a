"""A projection turns the model's vector into the shorter one that a job's rounds send, and back: what all of them have
in common."""

from abc import ABC, abstractmethod
from typing import Protocol

from meshtraind.codecs.base import Values
from meshtraind.contributions.contribution import HopContribution, Retained, ZeroCopy
from meshtraind.contributions.results import RoundResults
from meshtraind.contributions.segments import Areas, RoundForm
from meshtraind.projection.expansion import Expansion, InPlace
from meshwire.messages.learner import EncoderTask, LearnerEncoder


class LearnerHelp(Protocol):
    """What a projection has its learner compute, which has torch: a sample goes there, weights come back."""

    def task(self) -> EncoderTask | None:
        """What the learner is to do next; None while it is at it, or where there is nothing to do."""

    def answered(self, body: LearnerEncoder) -> None:
        """Takes the learner's answer. One that nobody waits for was to a question of an earlier process."""

    def learner_lost(self) -> None:
        """Forgets what was asked: another process will be asked anew."""


class Projection(ABC):
    """One member's way to the shorter vector and back, in one job. What it makes of a round follows from the results of
    earlier ones alone, never from the generation: a round that runs again has it again (C1).

    Attributes:
        encoder: what the learner learns for it; None, but with LGC's autoencoder.
    """

    encoder: LearnerHelp | None = None
    reads_results = True
    """Whether later rounds are computed from the final bytes of these, which are then looked at when they come."""

    @abstractmethod
    def enter(self, place: int | None, learners: int) -> None:
        """Begins a generation, in which this member's learner is at `place`, from 0, among so many that compute; None:
        it does not."""

    @abstractmethod
    def part(self, form: RoundForm, areas: Areas, scratch: Values, number: int, weight: float) -> HopContribution:
        """What this member adds to a round, with this weight.

        Args:
            areas: where it is kept, if it is.
            scratch: for the values of one segment; shared by all rounds.
        """

    @abstractmethod
    def expansion(self, form: RoundForm, number: int, values: Values) -> Expansion:
        """What turns the results of a round back, into `values`, the result slot. Every round before it is complete."""

    @abstractmethod
    def settled(self, round_: RoundResults, *, contributed: bool) -> None:
        """Hears that a round is complete that this projects, before residuals do. Called in the order of rounds. What
        takes longer is left to `settle_one`.

        Args:
            contributed: this member is in it.
        """

    def settle_one(self) -> bool:
        """Does a little for rounds that are settled. Returns False if there was nothing to do."""
        return False

    @abstractmethod
    def forget(self, number: int) -> None:
        """Forgets a round that is needed no more, but as the source of later ones."""

    @property
    @abstractmethod
    def reaches_back(self) -> int:
        """How many rounds the bytes of a complete one are read after it."""


class AsItIs(Projection):
    """The projection of codecs without one: the model's own vector is sent.

    Args:
        staleness: the bound s; with s=0 what is added stays in the learner's slot.
    """

    reads_results = False

    def __init__(self, staleness: int) -> None:
        self._staleness = staleness

    def enter(self, place: int | None, learners: int) -> None:
        """Nothing to do: it is no other in another generation."""

    def part(self, form: RoundForm, areas: Areas, scratch: Values, number: int, weight: float) -> HopContribution:
        return Retained(form.segments, areas.take(), scratch) if self._staleness else ZeroCopy(form.segments)

    def expansion(self, form: RoundForm, number: int, values: Values) -> Expansion:
        return InPlace(form.layout.plan, values, values)

    def settled(self, round_: RoundResults, *, contributed: bool) -> None:
        """Nothing to do: nothing is made of results."""

    def forget(self, number: int) -> None:
        """Nothing to do: nothing was made of it."""

    @property
    def reaches_back(self) -> int:
        return 0
