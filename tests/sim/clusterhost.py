"""What a daemon of the cluster does where its membership decides: rounds are made, dropped and begun anew.

The counterpart of `meshtraind.session.membership_host`.
"""

import asyncio
from typing import TYPE_CHECKING

from meshtraind.recovery.checkpointer import END_TIMEOUT_S
from meshtraind.rounds.catchup import Beginning
from meshtraind.rounds.driver import Rounds
from meshtraind.rounds.generation_change import GenerationChange
from meshtraind.session.history_source import HistorySource
from meshtraind.session.membership_driver import MembershipDriver
from meshtraind.transport.requests import RequestFailed
from meshwire.checkpoints.manifest import CheckpointName
from meshwire.messages.generation import Enter, Holding
from meshwire.messages.job import Generation
from meshwire.messages.startup import Model
from tests.sim.clusterconnection import LinkEnd
from tests.sim.clusterrounds import MANIFEST
from tests.sim.clusterwitness import Left

if TYPE_CHECKING:
    from tests.sim.clusterdaemon import Daemon


class SavedBase:
    """A base that is given up, as `Parting` has it written, and the checkpoint that it becomes."""

    def __init__(self, round_: int, base: bytes) -> None:
        self.name = CheckpointName(round_, base.hex()[:8])

    async def finish(self) -> "SavedBase":
        return self


class Host:
    """Of one daemon: a `Host` of `meshtraind.session.membership_driver`, a `HistoryOwner` of `history_source`."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._world = daemon.world
        self.source = HistorySource(daemon.name, daemon.world.spec.job, self)

    @property
    def generations(self) -> MembershipDriver[LinkEnd]:
        return self._daemon.driver

    @property
    def barrier_passed(self) -> int:
        return 0

    @property
    def rounds(self) -> Rounds | None:
        return None if self._daemon.rounds is None else self._daemon.rounds.shipped

    @property
    def crossing(self) -> GenerationChange | None:
        return None if self.rounds is None else self.rounds.crossing

    @property
    def founding(self) -> bool:
        return False

    def holding(self) -> Holding:
        return self._daemon.life.holding()

    def saved_beginning(self, enter: Enter) -> Beginning:
        saved = self._daemon.life.saved
        assert saved is not None
        assert (saved.complete, saved.chain) == (enter.cut, enter.chain)
        return Beginning(self.model(), self._world.space, saved, 0)

    def model(self) -> Model:
        """The same for all."""
        return Model(job=self._world.spec.job, rank=0, manifest=MANIFEST, plan=bytes(32))

    def begin_loading(self, generation: Generation, beginning: Beginning) -> None:
        daemon, entry = self._daemon, beginning.entry
        if entry.anew:
            if daemon.rounds is not None:
                history = daemon.rounds.history
                left = Left(history.chain, history.complete, entry.complete, 0, apart=False)
                daemon.losses.leave(left)
            daemon.without_learner = True
            daemon.life.end()
            self._world.went_back(daemon, entry)
        daemon.life.forget(above=entry.complete if entry.anew else -1)
        daemon.drop_rounds()
        assert daemon.job is not None
        daemon.job.take(generation)
        daemon.rounds = daemon.make_rounds(generation, entry, loading=True)
        daemon.life.load_next()

    def samples_at_beginning(self, enter: Enter) -> int | None:
        """Learners here prepare nothing: a checkpoint is all that they go back to."""
        return None

    def begin_anew(self, generation: Generation) -> None:
        raise AssertionError("nobody goes back to the beginning")

    def entered(self, generation: Generation) -> None:
        daemon = self._daemon
        daemon.life.loans.entered(generation)
        if daemon.without_learner and daemon.rank not in generation.learning:
            daemon.without_learner = False
            daemon.life.run()

    def resumed(self) -> None:
        self._daemon.report()

    async def write_given_up(self) -> SavedBase:
        """The learner comes to a boundary, and what is complete is in its base."""
        rounds, learner = self._daemon.rounds, self._daemon.learner
        if rounds is None or learner is None or learner.rounds is not rounds:
            raise RequestFailed("its learner holds no state now")
        rounds.shipped.learner.part("its history is not kept")
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                return SavedBase(*await learner.saved(rounds.history.complete))
        except TimeoutError:
            raise RequestFailed("its learner has not reached a boundary") from None

    def left_out(self, reason: str) -> None:
        daemon = self._daemon
        self._world.tell(daemon.name, f"is left out: {reason}")
        daemon.left_out += 1
        daemon.without_learner = True
        assert daemon.job is not None
        daemon.job.drop_out()
        daemon.drop_rounds()
        daemon.life.end()
        daemon.was_left_out()

    def turned_away(self, reason: str) -> None:
        self._daemon.turned_away(reason)

    def nobody_learns(self) -> None:
        self._world.fail("no peer can run the script any more")
