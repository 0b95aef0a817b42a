"""How many samples stand behind the next contribution: its weight (R2, W3, X1)."""

from collections.abc import Sequence

from meshwire.messages.rounds import SampleBlock


class DrawnSamples:
    """Samples that the prepared loader has given to the script since the last bind."""

    def __init__(self) -> None:
        self._counted = False
        self._blocks: list[SampleBlock] = []
        self._last_weight = 1.0

    def start_counting(self) -> None:
        """A loader is prepared. Without one every step weighs the same (W3)."""
        self._counted = True

    def add(self, blocks: Sequence[SampleBlock]) -> None:
        """A batch was handed to the script."""
        self._blocks.extend(blocks)

    def take(self) -> tuple[float, tuple[SampleBlock, ...]]:
        """Weight and blocks of the step that binds now.

        A further step on the batch in hand weighs as much as the one before, and covers no new samples.
        """
        blocks, self._blocks = tuple(self._blocks), []
        count = sum(block.end - block.first for block in blocks)
        if self._counted and count:
            self._last_weight = float(count)
        return self._last_weight, blocks
