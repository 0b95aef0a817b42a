"""How many samples stand behind the next contribution: its weight, its blocks, and the claim that goes with it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwire.messages.rounds import SampleBlock

OnBind = Callable[[int], int]  # step -> batches to be held after its round


class BoundSamples(NamedTuple):
    """What one step's bind says of its samples (R2, X1, X2)."""

    weight: float  # in samples
    blocks: tuple[SampleBlock, ...]
    claim: int  # in batches


class StepSamples:
    """Samples that the prepared loader has given to the script since the last bind."""

    def __init__(self) -> None:
        self._on_bind: OnBind | None = None
        self._blocks: list[SampleBlock] = []
        self._samples = 0
        self._last_weight = 1.0

    def start_counting(self, on_bind: OnBind) -> None:
        """A loader is prepared. Without one every step weighs the same (W3).

        Args:
            on_bind: says what is claimed with a step.
        """
        self._on_bind = on_bind

    def add(self, blocks: Sequence[SampleBlock], samples: int) -> None:
        """A batch of so many samples was handed to the script."""
        self._blocks.extend(blocks)
        self._samples += samples

    def take(self, step: int) -> BoundSamples:
        """What is said of the step that binds now.

        A further step on the batch in hand weighs as much as the one before, and covers no new samples.
        """
        blocks, samples = tuple(self._blocks), self._samples
        self._blocks, self._samples = [], 0
        if samples:
            self._last_weight = float(samples)
        return BoundSamples(self._last_weight, blocks, self._on_bind(step) if self._on_bind is not None else 0)
