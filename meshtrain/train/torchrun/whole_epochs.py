"""The samples of one rank where all ranks stay in step: whole epochs at a time, in the turns in which a job deals them.

In a job the daemons grant a learner what it claims with each round. Here nobody is ever late, left out or back again,
so each rank knows beforehand what a ledger would grant it (X1, X4).
"""

from collections.abc import Callable

from meshtrain.errors import MeshtrainError
from meshtrain.train.data.deal import Deal
from meshwire.messages.rounds import SampleBlock
from meshwire.samples.epochs import part_of_epoch


class WholeEpochs:
    """Fills a deal with this rank's batches before the loader asks for them: the prepared loader never waits.

    Args:
        deal: of this rank's loader.
    """

    def __init__(self, deal: Deal, rank: int, world_size: int) -> None:
        space = deal.space()
        self._part = part_of_epoch(space.total, space.batch, world_size, rank, drop_last=space.drop_last)
        self._deal = deal
        self._granted = 0  # epochs

    def wait_samples(self, until: Callable[[], bool]) -> None:
        """All batches of this epoch are there from its beginning: a queue without any of it means its end."""
        while self._granted <= self._deal.epoch:
            epoch = self._granted
            self._deal.grant([(SampleBlock(epoch=epoch, first=first, end=end),) for first, end in self._part], 0)
            self._deal.epoch_over(epoch)
            self._granted += 1
        assert until()

    def wait_idle(self, reason: str, until: Callable[[], bool], what: str) -> None:
        """No rank waits for samples that others hold."""
        assert until()

    def end_period(self) -> bool:
        """Each step is one of all ranks: there is never one under way."""
        return False

    def begin_rehearsal(self) -> None:
        """Raises MeshtrainError: every rank has a part of every turn, so no epoch is without one."""
        raise MeshtrainError(f"epoch {self._deal.epoch + 1} has no batch for this rank")

    def leave_rehearsal(self) -> None:
        """None is rehearsed."""

    def end_rehearsal(self) -> None:
        """None is rehearsed."""
