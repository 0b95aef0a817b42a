"""The exchange of one daemon in virtual time: a bucket's result is there when the parts of all members are.

The data plane of the rounds that ship, in the place of the executor: what a fence stops, what is kept over it, where
results are decoded, when memory is free. What a part holds is the name of its contribution.
"""

import asyncio
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshtraind.contributions.results import EncodedRound
from meshtraind.executor.host import BindsOfRounds, RoundHost
from meshtraind.transport.round_link import RoundLink
from meshwire.collectives.exchange import Part
from meshwire.frames.header import Flags, Header, Kind
from meshwire.memory_layout.footprint import ROUND_OBJECTS_BYTES, UNAPPLIED_BYTES_MAX
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.messages.job import Generation
from meshwire.rounds.effects import Message
from meshwire.sync_modes.neighbours import NEIGHBOURS_MAX
from meshwire.sync_modes.settings_changes import SettingsChange, SettingsChanges, codecs_by_round

SLOT_BYTES = 64
MIXED_BYTES = 250  # that a learner shows its neighbours
DECODE_S = 0.003  # of a round that was whole before the result slot was opened for it


@dataclass(frozen=True, slots=True)
class News:
    """A round message of a member, what it says before round 1, or its report: each says how far its sender is."""

    generation: int
    complete: int
    message: Message | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A member's part of one bucket on its way. Its header's step says whose it is."""

    header: Header
    payload: bytes

    @property
    def generation(self) -> int:
        return self.header.generation


@dataclass(frozen=True, slots=True)
class Result:
    """All parts of one bucket together."""

    names: tuple[tuple[int, str], ...]  # by rank, of those that are no poison
    contributors: int
    weight: float
    poisoned: bool


class Slots:
    """The memory in which a learner leaves what its steps have computed, as many slots as a real one has."""

    def __init__(self, staleness: int) -> None:
        self._slots = [bytearray(SLOT_BYTES) for _ in range(MemoryLayout.for_bound(1, staleness).raw_slots)]

        self._mixed = [bytearray(MIXED_BYTES) for _ in range(1 + 2 * max(NEIGHBOURS_MAX.values()))]

    def raw(self, step: int) -> memoryview:
        return memoryview(self._slots[step % len(self._slots)])

    def mixed(self, slot: int) -> memoryview:
        return memoryview(self._mixed[slot])

    def put(self, step: int, name: str) -> None:
        self.raw(step)[:] = name.encode().ljust(SLOT_BYTES, b"\0")


def written(raw: memoryview) -> str:
    """The name in a slot."""
    return bytes(raw).rstrip(b"\0").decode()


def round_bytes(unapplied_max: int) -> int:
    """How large a round is of which a daemon keeps so many for a learner that does not apply them (M1)."""
    return UNAPPLIED_BYTES_MAX // unapplied_max - ROUND_OBJECTS_BYTES


@dataclass(frozen=True, slots=True)
class Own:
    """What this member adds to a bucket.

    Attributes:
        name: of the contribution; empty for poison, and where it only forwards.
        codec: it travels in.
    """

    part: Part
    weight: float
    name: str
    codec: str

    def packed(self) -> bytes:
        """As it travels."""
        return f"{self.name}\0{self.codec}".encode() if self.name else b""


class Exchange:
    """Of one daemon: a `meshtraind.rounds.data_plane.DataPlane`.

    Args:
        staleness, round_bytes: of the job.
        buckets: how many a round has.
        links: the way to each other member, by rank; live.
        on_resume: called when all members have entered, before anything is sent.

    Attributes:
        in_slot: the round whose means lie in the result slot, all of them; 0: none's.
    """

    encoder = None

    def __init__(
        self,
        generation: Generation,
        rank: int,
        staleness: int,
        buckets: Callable[[int], int],
        round_bytes: int,
        links: Mapping[int, RoundLink],
        host: RoundHost,
        binds: BindsOfRounds,
        on_resume: Callable[[], None],
    ) -> None:
        self.generation = generation.hash64()
        self._ranks = generation.ranks
        self._rank = rank
        self._staleness = staleness
        self._buckets = buckets
        self._round_bytes = round_bytes
        self._links = links
        self._host = host
        self._binds = binds
        self._on_resume = on_resume
        self.changes: SettingsChanges = ()
        self._own: dict[tuple[int, int], Own] = {}
        self._raw: dict[int, tuple[str, memoryview]] = {}  # by round, with s=0: what is to lie in the learner's slot
        self._places: dict[tuple[int, int, int], bytearray] = {}  # by round, bucket and sender
        self._waiting: list[Header] = []  # of whose sender it is not known that it has bound the round
        self._arrived: dict[tuple[int, int], dict[int, Own]] = {}
        self._results: dict[int, dict[int, Result]] = {}
        self._whole: set[int] = set()
        self._outbox: list[tuple[int, int]] | None = None
        self._fenced = False
        self._slot = 0
        self._decoding: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.in_slot = 0

    @property
    def rounds_kept(self) -> int:
        """In memory."""
        return len({round_ for round_, _ in self._own} | {round_ for round_, _ in self._arrived} | self._whole)

    def round_bytes(self, members: int) -> int:
        return self._round_bytes

    # What this member adds

    def contribute(self, number: int, bucket: int, part: Part, weight: float, raw: memoryview | None) -> None:
        """G6: a part that is given again is the same, or is taken back."""
        known = self._own.get((number, bucket))
        name = ""
        if part is Part.DATA:
            assert raw is not None
            name = known.name if known is not None else written(raw)
            if self._staleness == 0:
                self._raw.setdefault(number, (name, raw))
        own = Own(part, weight, name, self.codec_of(number))
        assert known in (None, own) or part is Part.NOTHING, "G6: rounds keep their bytes"
        self._own[number, bucket] = own
        if self._fenced:
            return
        if self._outbox is not None:
            self._outbox.append((number, bucket))
        else:
            self._give(number, bucket)

    def contribute_nothing(self, number: int) -> None:
        for bucket in range(self._buckets(number)):
            self.contribute(number, bucket, Part.NOTHING, 0.0, None)

    def _give(self, number: int, bucket: int) -> None:
        own = self._own[number, bucket]
        _, raw = self._raw.get(number, ("", None))
        assert raw is None or own.part is not Part.DATA or written(raw) == own.name, (
            "M1: with s=0 a part is sent from the learner's slot, where it lies as it was when it was bound"
        )
        payload = own.packed()
        header = Header(
            kind=Kind.CHUNK,
            payload_bytes=len(payload),
            flags=Flags.POISON if own.part is Part.POISON else Flags.NONE,
            generation=self.generation,
            round=number,
            step=self._rank,
            bucket=bucket,
            contributors=0 if own.part is Part.NOTHING else 1 << self._rank,
            weight=own.weight,
            complete=self._host.complete,
        )
        for link in self._links.values():
            if link.writable:
                link.send_chunk(header, payload)
        self._arrive(self._rank, number, bucket, own)

    # What arrives

    def chunk_announced(self, sender: int, header: Header) -> memoryview | str | None:
        if self._fenced or header.generation != self.generation:
            return None
        complete = self._host.complete
        if not complete < header.round <= complete + 2 * (self._staleness + 1):
            return f"chunk of round {header.round} while {complete} are complete"
        if header.step != sender or header.bucket >= self._buckets(header.round):
            return f"chunk of bucket {header.bucket} of rank {header.step} from rank {sender}"
        place = bytearray(header.payload_bytes)
        if self._places.setdefault((header.round, header.bucket, sender), place) is not place:
            return f"round {header.round}: a second part of rank {sender} in bucket {header.bucket}"
        return memoryview(place)

    def chunk_received(self, header: Header) -> None:
        if not self._fenced and header.generation == self.generation and not self._take(header):
            self._waiting.append(header)

    def decided(self) -> None:
        if self._waiting and not self._fenced:
            self._waiting = [header for header in self._waiting if not self._take(header)]

    def _take(self, header: Header) -> bool:
        """R2: returns False if it has to wait until its sender has bound the round, or nulled it."""
        bound = self._binds.bound(header.round, 1 << header.step)
        if bound is None:
            return False
        if (header.contributors, header.weight) != bound:
            said = f"{header.contributors:b} with {header.weight}, bound are {bound[0]:b} with {bound[1]}"
            self._host.chunk_broken(header.step, f"round {header.round}, bucket {header.bucket}: of {said}")
            return True
        name, _, codec = bytes(self._places[header.round, header.bucket, header.step]).decode().partition("\0")
        assert not name or codec == self.codec_of(header.round), "C3: a round travels in one codec"
        poison = Part.POISON if header.flags is Flags.POISON else Part.NOTHING
        part = Part.DATA if name else poison
        self._arrive(header.step, header.round, header.bucket, Own(part, header.weight, name, codec))
        return True

    def lacks(self, number: int) -> Iterator[tuple[int, int, int]]:
        for bucket in range(self._buckets(number)):
            if number not in self._whole:
                there = self._arrived.get((number, bucket), {})
                yield from ((rank, bucket, 0) for rank in self._ranks if rank not in there)

    def receipts(self, number: int) -> int:
        return 0 if any(True for _ in self.lacks(number)) else 1

    def _arrive(self, rank: int, number: int, bucket: int, own: Own) -> None:
        arrived = self._arrived.setdefault((number, bucket), {})
        assert rank not in arrived, "one part for each member and bucket"
        arrived[rank] = own
        if len(arrived) == len(self._ranks):
            assert set(arrived) == set(self._ranks), "G3: of the members of this generation"
            self._result(number, bucket, arrived)

    def _result(self, number: int, bucket: int, parts: dict[int, Own]) -> None:
        del self._arrived[number, bucket]
        given = {rank: own for rank, own in sorted(parts.items()) if own.part is not Part.NOTHING}
        poisoned = any(own.part is Part.POISON for own in given.values())
        result = Result(
            names=tuple((rank, own.name) for rank, own in given.items()),
            contributors=sum(1 << rank for rank in given),
            weight=sum(own.weight for own in given.values()),
            poisoned=poisoned,
        )
        results = self._results.setdefault(number, {})
        results[bucket] = result
        if len(results) == self._buckets(number):
            self._whole.add(number)
        squared_norm = 0.0 if poisoned else float(number * 100 + bucket)
        self._host.bucket_complete(number, bucket, poisoned, result.contributors, result.weight, squared_norm)
        if number == self._slot and number in self._whole and self._decoding is None:
            self._decoded()

    # What becomes of rounds

    def _decode(self) -> None:
        """What is there of the slot's round goes there by and by; nothing that lies there is of use meanwhile."""
        self._stop_decoding()
        if self._slot in self._whole:
            self._decoding = self._loop.call_later(DECODE_S, self._decoded)

    def _decoded(self) -> None:
        self._decoding = None
        self.in_slot = self._slot
        self._host.result_decoded(self._slot)

    def _stop_decoding(self) -> None:
        self.in_slot = 0
        if self._decoding is not None:
            self._decoding.cancel()
            self._decoding = None

    def settle(self, number: int, *, void: bool, contributed: bool) -> None:
        name, raw = self._raw.pop(number, ("", None))
        if raw is not None and contributed and not void:
            assert written(raw) == name, "M1: with s=0 the learner's slot stays until the round is complete"

    def open_result(self, number: int) -> None:
        self._slot = number
        if self._fenced and number > self._host.complete:
            self._stop_decoding()  # it runs again
        else:
            self._decode()

    def forget(self, number: int) -> None:
        self._whole.discard(number)
        self._results.pop(number, None)
        for bucket in range(self._buckets(number)):
            self._own.pop((number, bucket), None)
            for rank in self._ranks:
                self._places.pop((number, bucket, rank), None)

    def close(self) -> None:
        self._fenced = True
        self._outbox = None
        self._stop_decoding()

    def names(self, number: int) -> list[Result]:
        """What was summed, by bucket. Raises KeyError when it is gone."""
        return [result for _, result in sorted(self._results[number].items())]

    # From one generation to the next

    def fence(self) -> None:
        self._fenced = True
        self._outbox = None
        self._waiting.clear()
        if self._slot > self._host.complete:
            self._stop_decoding()

    def encoded(self, number: int) -> EncodedRound:
        if number > self._host.complete or number not in self._whole:
            raise KeyError(number)
        results = self.names(number)
        return EncodedRound((memoryview(pickle.dumps((self.codec_of(number), results))),), poisoned_bitmap(results))

    def place_for(self, number: int, size_bytes: int, contributors: int) -> memoryview:
        assert self._fenced, "G4: rounds are served to who has promised"
        assert number > self._host.complete, "G4: to who lacks them"
        place = self._places[number, 0, self._rank] = bytearray(size_bytes)
        return memoryview(place)

    def take_served(self, number: int, poisoned: bytes | None, contributors: int, weights: Sequence[float]) -> None:
        place = self._places.pop((number, 0, self._rank), None)
        results: list[Result] = []
        if poisoned is not None:
            assert place is not None, "the bytes of a served round are in their place"
            codec, results = pickle.loads(place)
            assert codec == self.codec_of(number), "C3: a round is read as it was encoded"
            assert poisoned_bitmap(results) == poisoned, "what is served is what was held"
            for result in results:
                assert result.poisoned or (result.contributors, result.weight) == (contributors, sum(weights)), (
                    "of its binds"
                )
        self._results[number] = dict(enumerate(results))
        self._whole.add(number)
        for bucket in range(self._buckets(number)):
            self._arrived.pop((number, bucket), None)
        if number == self._slot:
            self._decode()

    def enter(
        self,
        generation: int,
        ranks: tuple[int, ...],
        links: Mapping[int, RoundLink],
        cut: int,
        *,
        learning: tuple[int, ...],
    ) -> None:
        """What is above the cut begins anew, but for the own parts."""
        assert self._fenced, "G2: a generation is left before the next one is entered"
        assert self._host.complete == cut, "G4: all hold the rounds up to the cut"
        self.generation, self._ranks, self._links = generation, ranks, links
        self._fenced, self._outbox = False, []
        self._arrived.clear()
        self._places.clear()
        self._whole = {number for number in self._whole if number <= cut}
        self._results = {number: results for number, results in self._results.items() if number <= cut}

    def codec_of(self, number: int) -> str:
        """In which a round travels."""
        return codecs_by_round("fp32", [change for change in self.changes if change.first <= number])[-1][1]

    def take_changes(self, changes: Sequence[SettingsChange]) -> None:
        assert self._fenced, "C3: settings change between generations"
        self.changes = tuple(changes)

    def resume(self) -> None:
        self._on_resume()
        outbox, self._outbox = self._outbox or [], None
        for number, bucket in outbox:
            self._give(number, bucket)


def poisoned_bitmap(results: list[Result]) -> bytes:
    """The buckets without a result, as in `EncodedRound`."""
    bits = sum(1 << bucket for bucket, result in enumerate(results) if result.poisoned or not result.contributors)
    return bits.to_bytes(1, "little")
