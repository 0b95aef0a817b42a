"""Which samples stand behind the next contribution of this learner: its weight, its blocks, and the claim with them."""

from collections.abc import Sequence
from typing import NamedTuple

from meshtrain.train.data.deal import Deal
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import SampleBlock


class BoundSamples(NamedTuple):
    """What the bind of one step says of its samples: R2 (bind), X1 (blocks), X2 (claim)."""

    weight: float  # in samples
    alone: float  # samples of as many batches where one learner trains by itself
    blocks: tuple[SampleBlock, ...]
    claim: int  # in batches


class Portion(NamedTuple):
    """What stands behind one of several backward passes of a step, in samples.

    Attributes:
        alone: of as many batches where one learner trains by itself.
    """

    weight: float
    alone: float


class StepSamples:
    """Counts what the prepared loader hands to the script, until the next step takes it as its own.

    Args:
        deal: what the loader reads from. None: no loader was prepared, or one that cannot be dealt; then nothing is
            counted, every step weighs 1, and claims nothing.
    """

    def __init__(self, deal: Deal | None) -> None:
        self._deal = deal
        self._blocks: list[SampleBlock] = []
        self._samples = self._batches = 0
        self._last_weight = self._last_alone = 1.0
        self._portioned = 0, 0  # samples and batches of them that a pass has
        self._last_portion = Portion(1.0, 1.0)

    @property
    def space(self) -> SampleSpace | None:
        """What is dealt in each epoch; None without a deal."""
        return self._deal.space() if self._deal is not None else None

    @property
    def behind(self) -> bool:
        """Whether epochs are over that the script has still to run through (X4)."""
        return self._deal is not None and self._deal.behind

    def add(self, blocks: Sequence[SampleBlock], samples: int) -> None:
        """The loader hands a batch of so many samples to the script."""
        self._blocks.extend(blocks)
        self._samples += samples
        self._batches += 1

    def step_lost(self, step: int, *, retry: bool) -> None:
        """Hears that this step is in no round. `retry`: it was in no bind either, so its samples are handed out again,
        by R5 (absent)."""
        if self._deal is not None:
            self._deal.step_lost(step, retry)

    def portion(self) -> Portion:
        """That of one of several backward passes that a step has (O6): what was handed out since the pass before, or as
        much as that pass had."""
        samples, batches = self._samples - self._portioned[0], self._batches - self._portioned[1]
        self._portioned = self._samples, self._batches
        if samples:
            self._last_portion = Portion(float(samples), self._alone(samples, batches))
        return self._last_portion

    def take(self, step: int) -> BoundSamples:
        """The samples of the step that binds now: all that was handed out since the step before.

        A further step on the same batch weighs as much as the one before, and covers no new samples.
        """
        blocks, samples, batches = tuple(self._blocks), self._samples, self._batches
        self._blocks, self._samples, self._batches, self._portioned = [], 0, 0, (0, 0)
        if samples:
            self._last_weight, self._last_alone = float(samples), self._alone(samples, batches)
        claim = self._deal.bind(step) if self._deal is not None else 0
        return BoundSamples(self._last_weight, self._last_alone, blocks, claim)

    def _alone(self, samples: int, batches: int) -> float:
        """Of how many samples these batches are without other learners, whose shares may differ (X4a) and whose last
        batches are short. A sampler of batches says no size: there it is what they hold."""
        space = self.space
        return float(samples if space is None or space.whole_batches else batches * space.batch)
