"""Checkpoints while a job trains: when this device's learner is to write one, and what it takes to go on from there."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from meshtraind.rounds.history import Entry
from meshtraind.runtime.tasks import TaskSet
from meshtraind.runtime.threads import Check, in_thread
from meshtraind.storage.checkpoint_store import Checkpoint, CheckpointError
from meshtraind.storage.job_record import Job
from meshtraind.transport.requests import RequestFailed
from meshwire.checkpoints.manifest import CheckpointFacts, GenerationRecord
from meshwire.jobs.checkpoint_schedule import CheckpointTurn, schedule_of
from meshwire.jobs.files import human_bytes
from meshwire.messages.generation import Model
from meshwire.messages.job import Generation
from meshwire.messages.learner import LearnerSaved
from meshwire.messages.link import Software

if TYPE_CHECKING:
    from meshtraind.rounds.driver import Rounds

log = logging.getLogger(__name__)

ROUNDS_AHEAD = 8  # a learner that is asked so early has not passed the round when it hears of it
COMMITTED_POLL_S = 0.05
END_TIMEOUT_S = 15.0  # a person waits, and may have wanted the end because a learner hangs


class CheckpointShelf(Protocol):
    """Where the checkpoints of one job lie. All of it blocks. `CheckpointStore` is one."""

    def clean_up(self) -> None:
        """Deletes what a daemon that was killed has left. Raises CheckpointError."""

    def begin(self, number: int) -> Path:
        """A new folder, in which a learner writes one. Raises CheckpointError."""

    def abandon(self, number: int) -> None:
        """It is not written to its end. Raises CheckpointError."""

    def finish(
        self, number: int, facts: CheckpointFacts, units: int, check: Check, *, given_up: bool = False
    ) -> Checkpoint:
        """Makes what was written a checkpoint; the oldest is deleted. Raises CheckpointError."""


class StateSource(Protocol):
    """Whoever can be asked for the base of a round that is still to come: this device's learner (`StateRequests`), or,
    for a hub, that of another member (`HubStates`)."""

    @property
    def each_slot(self) -> bool:
        """Whether it saves in every slot of the schedule, and not in its turn alone."""

    async def save(self, after_round: int, folder: Path, timeout_s: float | None = None) -> LearnerSaved:
        """After which round the state is that `folder` gets: `after_round`, or a later one. Raises RequestFailed."""

    async def bring(self, chain: bytes, folder: Path) -> None:
        """Puts it there, if it does not lie there yet, and checks that it is of the history with this chain hash.

        Raises:
            RequestFailed: it is not, or cannot be had.
        """


@dataclass(frozen=True)
class Written:
    """What a learner has written of a history that is given up; it is needed no more."""

    store: CheckpointShelf
    number: int
    facts: CheckpointFacts
    units: int

    async def finish(self) -> Checkpoint:
        """Makes it a checkpoint. Raises CheckpointError."""
        return await in_thread(
            lambda check: self.store.finish(self.number, self.facts, self.units, check, given_up=True)
        )


class Checkpointer:
    """Writes the checkpoints of one job on this device: decides when, asks the learner, and keeps the newest ones.

    A learner saves at the first boundary after the round that it was asked for. What the ledger and the chain were is
    kept of every round since, until it has said which one it was.

    Args:
        model: the job's, once there are rounds.

    Attributes:
        newest: the last one that a learner here has written in the history of now.
    """

    def __init__(
        self,
        job: Job,
        store: CheckpointShelf,
        software: Software,
        saving: StateSource,
        tasks: TaskSet,
        model: Callable[[], Model],
    ) -> None:
        self._job = job
        self._store = store
        self._software = software
        self._saving = saving
        self._tasks = tasks
        self._model = model
        self._schedule = schedule_of(job.spec.checkpoint_every)
        self._turn: CheckpointTurn | None = None
        self._number = 0
        self._after: int | None = None  # the round that the learner was asked for
        self._task: asyncio.Task[None] | None = None  # that writes, or wrote, the newest one
        self._passed: dict[int, tuple[Entry, Generation]] = {}  # the rounds since, until the state's one is known
        self._noting = False
        self.newest: Checkpoint | None = None

    def round_complete(self, rounds: "Rounds", round_: int) -> None:
        """The next round is complete."""
        generation = self._job.generation
        if self._schedule is None or generation is None:
            return
        every_rounds = self._schedule.every_rounds
        ahead = 0 if every_rounds is None else min(ROUNDS_AHEAD, every_rounds)
        age_s = time.time() - self._job.spec.created_at_s
        if self._turn is None:
            before = self._schedule.slot(round_ - 1 + ahead, age_s)
            self._turn = CheckpointTurn(self._schedule, self._job.rank, before, always=self._saving.each_slot)
        due = self._turn.due(round_ + ahead, age_s, generation.learning)
        if due and self._after is None and not rounds.finished:
            self._begin(rounds, round_ + ahead)
        if self._noting and self._after is not None and round_ >= self._after:
            self._passed[round_] = rounds.entry(), generation

    async def before_the_end(self, rounds: "Rounds") -> None:
        """The job is about to be ended by a person: what has been learned since the last checkpoint is saved, if this
        device's learner reaches a boundary soon. The job goes on meanwhile, here and elsewhere."""
        generation = self._job.generation
        if self._schedule is None or generation is None or rounds.finished:
            return
        round_ = rounds.complete
        if self._after is None and round_ and (self.newest is None or self.newest.round < round_):
            self._begin(rounds, round_)
            self._passed[round_] = rounds.entry(), generation
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=END_TIMEOUT_S)

    async def write_given_up(self, rounds: "Rounds") -> Written:
        """The history that these rounds are of is not kept, and no round is completed in it any more: the learner
        writes its base. A checkpoint that is being written would wait for ever until its round is sure to be kept (G5).

        Raises:
            RequestFailed: the learner is lost, reaches no boundary in END_TIMEOUT_S, or cannot write.
            CheckpointError: the disk refuses.
        """
        generation = self._job.generation
        if self._schedule is None or generation is None:
            raise RequestFailed("the job was submitted with --checkpoint-every off")
        if rounds.finished:
            raise RequestFailed("its learner has ended")
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        self._after = None  # also of one that was cancelled before its first step
        self._passed.clear()
        entry = rounds.entry()
        store, number = self._store, await self._numbered()
        folder = await in_thread(lambda _: store.begin(number))
        try:
            saved = await self._saving.save(entry.complete, folder, END_TIMEOUT_S)
            if saved.round != entry.complete:
                raise RequestFailed(f"its learner has written the base after round {saved.round}")
            return Written(store, number, self._facts(rounds, entry, generation), saved.units)
        except BaseException:
            await in_thread(lambda _: store.abandon(number))
            raise

    async def _numbered(self) -> int:
        """Under which number the next one is written."""
        if not self._number:
            await in_thread(lambda _: self._store.clean_up())
        self._number += 1
        return self._number

    def _begin(self, rounds: "Rounds", after_round: int) -> None:
        self._after = after_round
        self._noting = True
        self._task = self._tasks.spawn(self._save(rounds, after_round), f"checkpoint after round {after_round}")

    def forget(self, above: int = -1) -> None:
        """The history is not kept, or only as far as the round `above`."""
        if self.newest is not None and self.newest.round > above:
            self.newest = None

    async def _save(self, rounds: "Rounds", after_round: int) -> None:
        job = self._job.spec.job
        try:
            made = await self._write(await self._numbered(), rounds, after_round)
            if not rounds.closed:
                self.newest = made
        except (CheckpointError, RequestFailed) as error:  # training goes on without this one
            if not rounds.finished:  # its script has ended meanwhile: there will be no such round
                log.warning("job %s: no checkpoint after round %d: %s", job, after_round, error)
        else:
            log.info("job %s: checkpoint after round %d, %s", job, made.round, human_bytes(made.manifest.size_bytes))
        finally:
            self._after = None
            self._passed.clear()

    async def _write(self, number: int, rounds: "Rounds", after_round: int) -> Checkpoint:
        store = self._store
        folder = await in_thread(lambda _: store.begin(number))
        try:
            saved = await self._saving.save(after_round, folder)
            await self._until_committed(rounds, saved.round)
            entry, generation = self._passed[saved.round]
            self._noting = False
            self._passed.clear()
            facts = self._facts(rounds, entry, generation)
            await self._saving.bring(entry.chain, folder)
        except BaseException:
            await in_thread(lambda _: store.abandon(number))
            raise
        return await in_thread(lambda check: store.finish(number, facts, saved.units, check))

    async def _until_committed(self, rounds: "Rounds", round_: int) -> None:
        """G5: a history is named once it is sure to be kept. Raises RequestFailed when it was not."""
        while rounds.committed < round_:
            if rounds.closed:
                raise RequestFailed("the round was not kept")
            await asyncio.sleep(COMMITTED_POLL_S)

    def _facts(self, rounds: "Rounds", entry: Entry, generation: Generation) -> CheckpointFacts:
        spec, model = self._job.spec, self._model()
        return CheckpointFacts(
            job=spec.job,
            spec=spec.pack().hex(),
            round=entry.complete,
            generation=GenerationRecord.of(generation),
            chain=entry.chain.hex(),
            model=model.manifest.state_digest().hex(),
            plan=model.plan.hex(),
            samples=entry.samples,
            space=rounds.sample_space,
            deal=entry.deal,
            created_at_s=time.time(),
            software=self._software,
            changes=entry.changes,
        )
