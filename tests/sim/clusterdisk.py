"""The disk of one daemon, and the memory that it shares with its learner: what becomes of bases outside of processes.

A base is known by the chain id of the history whose rounds are in it, and by whose start these were applied to (G9), so
a file holds no more than that.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshtraind.runtime.threads import Check
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.checkpoint_store import Checkpoint
from meshtraind.storage.fetch import Pace
from meshtraind.transport.connection import Emit
from meshtraind.transport.messenger import Messenger
from meshtraind.transport.requests import ConnectionEnded, RequestFailed
from meshwire.checkpoints.manifest import (
    GIVEN_UP_CHARS,
    CheckpointFacts,
    CheckpointManifest,
    CheckpointName,
    UnitRecord,
)
from meshwire.jobs.checkpoint_schedule import CheckpointSchedule
from meshwire.messages.generation import SavedState
from meshwire.messages.job import BlobRef
from meshwire.rounds.chain import START
from tests.sim.clusterconnection import LinkEnd
from tests.sim.clusterexchange import Slots
from tests.sim.clustermoments import Moment

if TYPE_CHECKING:
    from tests.sim.clusterdaemon import Daemon
    from tests.sim.clusterlearner import Learner

CHAIN_BYTES = 16
ROUND_BYTES = 4
START_BYTES = 12
STORE_S = (0.02, 0.02, 1.5)  # to read and hash what a learner has written; by number


@dataclass(frozen=True, slots=True)
class State:
    """The base after a round: what it is."""

    round: int
    base: bytes
    start: bytes

    @classmethod
    def first(cls, process: str) -> "State":
        """What a process makes by its script's first lines, unlike any other's."""
        return cls(0, START, hashlib.sha256(process.encode()).digest()[:START_BYTES])

    @property
    def blob(self) -> BlobRef:
        """Its one file, as it is offered to others."""
        return BlobRef(sha256=self.base + self.round.to_bytes(ROUND_BYTES, "big") + self.start, size_bytes=1)

    @classmethod
    def of(cls, blob: BlobRef) -> "State":
        """That is in the file."""
        base, rest = blob.sha256[:CHAIN_BYTES], blob.sha256[CHAIN_BYTES:]
        return cls(int.from_bytes(rest[:ROUND_BYTES], "big"), base, rest[ROUND_BYTES:])


class Disk:
    """What lies in the folder of the job.

    Attributes:
        written: by learners or for them, by folder.
    """

    def __init__(self, daemon: "Daemon") -> None:
        self.written: dict[Path, State] = {}
        self.states = StateFolder(self, daemon)
        self.checkpoints = CheckpointFolder(self)


class StateFolder:
    """A `LentStates` of the donor that ships, and `ArrivingStates` of who joins.

    Attributes:
        lent: the files that others may fetch, by number.
    """

    folder = Path("state")

    def __init__(self, disk: Disk, daemon: "Daemon") -> None:
        self._disk = disk
        self._daemon = daemon
        self.lent: dict[int, BlobRef] = {}

    # As a donor

    async def begin(self, number: int) -> Path:
        return self.folder / f"saved-{number}"

    async def keep(self, number: int, units: Sequence[int]) -> tuple[BlobRef, ...]:
        blob = self._disk.written[self.folder / f"saved-{number}"].blob
        await asyncio.sleep(STORE_S[number % len(STORE_S)])
        self.lent[number] = blob
        return (blob,)

    async def offer(self, number: int, checkpoint: Checkpoint) -> SavedState:
        if checkpoint not in self._disk.checkpoints.there:
            raise BlobError(f"{checkpoint.folder} is gone")
        (unit,) = checkpoint.manifest.units
        self.lent[number] = unit.blob()
        return SavedState(round=checkpoint.round, chain=bytes.fromhex(checkpoint.manifest.chain), units=(unit.blob(),))

    async def discard(self, number: int) -> None:
        self._disk.written.pop(self.folder / f"saved-{number}", None)

    async def release(self, number: int) -> None:
        self.lent.pop(number, None)

    # As who joins

    async def fetch(self, units: Mapping[int, BlobRef], donor: Messenger, emit: Emit, pace: Pace) -> None:
        """J1: who loads a state finds it with its donor until the end, unless it was left out and has not heard yet."""
        daemon = self._daemon
        assert isinstance(donor, LinkEnd)
        await asyncio.sleep(daemon.world.random.choice(daemon.world.load_s))
        daemon.world.moments.come(Moment.LOADS, daemon.number)
        if donor.closing:
            raise ConnectionEnded(f"the link to {donor.name} has ended")
        (blob,) = units.values()
        giver = daemon.world.of_node(donor.link.other(daemon))
        if blob not in giver.disk.states.lent.values():
            generation = giver.generation
            together = generation is not None and daemon.member in generation.live.values()
            assert not together, f"J1: {giver.name} has given up a state that is still loaded"
            raise RequestFailed(f"{giver.name} has no such file")
        self._disk.written[self.folder] = State.of(blob)

    async def move(self, units: int, folder: Path) -> None:
        self._disk.written[folder] = self._disk.written.pop(self.folder)

    async def lay_out(self, units: Mapping[int, BlobRef]) -> None:
        (blob,) = units.values()
        self._disk.written[self.folder] = State.of(blob)


class CheckpointFolder:
    """A `CheckpointShelf` of the checkpointer that ships.

    Attributes:
        there: the newest ones.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.there: deque[Checkpoint] = deque(maxlen=CheckpointSchedule.keep)

    def clean_up(self) -> None:
        """Nothing is left: a device that is started again finds an empty disk."""

    def begin(self, number: int) -> Path:
        return self._saving(number)

    def abandon(self, number: int) -> None:
        self._disk.written.pop(self._saving(number), None)

    def finish(
        self, number: int, facts: CheckpointFacts, units: int, check: Check, *, given_up: bool = False
    ) -> Checkpoint:
        state = self._disk.written.pop(self._saving(number))
        assert (state.round, state.base.hex()) == (facts.round, facts.chain), "J1: a checkpoint is what it says"
        unit = UnitRecord(size_bytes=1, sha256=state.blob.sha256.hex())
        manifest = CheckpointManifest(**dict(facts), units=(unit,))
        name = CheckpointName(facts.round, facts.chain[:GIVEN_UP_CHARS] if given_up else "")
        made = Checkpoint(Path("checkpoints") / str(name), manifest)
        if not given_up:
            self.there.append(made)
        return made

    def _saving(self, number: int) -> Path:
        return Path("checkpoints") / f".saving-{number}"


class Kept:
    """Where a process keeps its base for the one after it: a `KeptBase` of the membership's host that ships.

    Attributes:
        state: that lies there.
        dirty: it is being changed, or whoever changed it has died over it.
    """

    def __init__(self) -> None:
        self.state: State | None = None
        self.dirty = False
        self.trusted = True

    def round(self) -> int | None:
        usable = self.state is not None and self.trusted and not self.dirty
        return self.state.round if self.state is not None and usable else None

    def clear(self) -> None:
        self.state, self.dirty, self.trusted = None, False, True


class Memory:
    """Shared by one daemon and its learner, for one history: a `LearnerMemory` and `RawSlots` of those that ship.

    Attributes:
        process: that has written its base there.
    """

    def __init__(self, staleness: int) -> None:
        self.slots = Slots(staleness)
        self.process: Learner | None = None
        self.kept = Kept()
        self._closed = False

    def raw(self, step: int) -> memoryview:
        assert not self._closed, "M2: memory that was given back is not looked into"
        return self.slots.raw(step)

    def mixed(self, slot: int) -> memoryview:
        assert not self._closed, "M2: memory that was given back is not looked into"
        return self.slots.mixed(slot)

    def close(self) -> None:
        """A process that has it may go on with it."""
        self._closed = True
