"""A checkpoint: the state of a replica after one round as files, and a manifest of what it takes to go on from there.

The manifest is JSON, for people to read, in exactly one spelling: a hash covers every byte of it. File names are never
taken from it, they follow from the numbers of the units.
"""

import hashlib
import re
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, StringConstraints, model_validator

from meshwire import limits
from meshwire.jobs.lifecycle import JobId
from meshwire.message_base import DeviceId, Wire
from meshwire.messages.generation import DealState, RoundCount
from meshwire.messages.job import BlobRef, Generation, Member, Rank
from meshwire.messages.learner import SampleSpace
from meshwire.messages.link import Software
from meshwire.sync_modes.settings_changes import SettingsChangesKept

FORMAT: Literal[1] = 1
MANIFEST_FILE = "manifest.json"

Packed = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})+$", max_length=2 * limits.JOB_FILE_BYTES_MAX)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ChainHex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
UnixTime = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def unit_file(unit: int) -> str:
    """The name of a unit's file."""
    return f"{unit}.safetensors"


GIVEN_UP_CHARS = 8  # of the chain hash, in the name of a checkpoint whose history was given up
_NAME = re.compile(r"(0|[1-9][0-9]{0,9})(?:-([0-9a-f]{8}))?")


class CheckpointName(NamedTuple):
    """What a checkpoint of a job is called: its round; of a history that was given up, the begin of its chain hash too.

    So a history that is kept and one that is not have different names for one round, and members that gave up the same
    have the same.
    """

    round: int
    given_up: str = ""

    def __str__(self) -> str:
        """As it is typed, and as its folder is called."""
        return f"{self.round}-{self.given_up}" if self.given_up else str(self.round)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for what is no name."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no name of a checkpoint: 500, or 500-1f2e3d4c of one that was given up")
        return cls(int(match[1]), match[2] or "")


class GenerationRecord(Wire):
    """A generation as JSON: who was in the job, and under which ranks the rest of the manifest names them."""

    number: Annotated[int, Field(ge=1, lt=2**32)]
    hash: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    proposer: DeviceId
    parent: Sha256 | None
    members: Annotated[tuple[Member, ...], Field(min_length=1, max_length=limits.MEMBERS_MAX)]
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=limits.MEMBERS_MAX)]
    learning: Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)]
    root: Annotated[int, Field(ge=1, lt=2**32)] | None = None  # None: written before generations named their root
    counted: Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)] = ()
    gone: Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)] = ()

    @classmethod
    def of(cls, generation: Generation) -> Self:
        """As it is written."""
        return cls(
            number=generation.number,
            hash=f"{generation.hash64():016x}",
            proposer=generation.proposer,
            parent=None if generation.parent is None else generation.parent.hex(),
            members=generation.members,
            ranks=generation.ranks,
            learning=generation.learning,
            root=generation.root,
            counted=generation.counted,
            gone=generation.gone,
        )

    def generation(self, job: str) -> Generation:
        """As it was."""
        return Generation(
            job=job,
            number=self.number,
            proposer=self.proposer,
            parent=None if self.parent is None else bytes.fromhex(self.parent),
            members=self.members,
            ranks=self.ranks,
            learning=self.learning,
            root=self.number if self.root is None else self.root,
            counted=self.counted if self.root is not None else self.learning or self.ranks,
            gone=self.gone,
        )


class UnitRecord(Wire):
    """The file of one unit (J1)."""

    size_bytes: Annotated[int, Field(ge=1, le=limits.DATA_BYTES_MAX)]
    sha256: Sha256

    def blob(self) -> BlobRef:
        """As it is offered to other daemons."""
        return BlobRef(sha256=bytes.fromhex(self.sha256), size_bytes=self.size_bytes)


class CheckpointFacts(Wire):
    """What a daemon knows of the state that its learner has written; bytes are in hexadecimal.

    Attributes:
        spec: the job's specification, packed.
        round: the newest one in the base.
        generation: which that round belongs to.
        chain: h of that round (G4).
        model, plan: of the model's manifest (`state_digest`) and the bucket plan.
        samples: in the rounds so far.
        space, deal: what the prepared loaders read, and the ledger after that round (X1); None: there are none.
        created_at_s: Unix time.
        changes: of settings that the history had gone through, or was about to (C3).
    """

    job: JobId
    spec: Packed
    round: RoundCount
    generation: GenerationRecord
    chain: ChainHex
    model: Sha256
    plan: Sha256
    samples: Annotated[int, Field(ge=0, lt=2**63)]
    space: SampleSpace | None
    deal: DealState | None
    created_at_s: UnixTime
    software: Software
    changes: SettingsChangesKept = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        has_root = self.generation.root is not None  # without one the hash cannot be computed any more
        if has_root and f"{self.generation.generation(self.job).hash64():016x}" != self.generation.hash:
            raise ValueError("the generation's hash is not that of its members")
        if (self.space is None) != (self.deal is None):
            raise ValueError("a deal of samples goes with what is dealt")
        return self


class CheckpointManifest(CheckpointFacts):
    """All of a checkpoint but its files."""

    format: Literal[1] = FORMAT
    units: Annotated[tuple[UnitRecord, ...], Field(min_length=1, max_length=limits.TENSORS_MAX + 2)]

    @property
    def size_bytes(self) -> int:
        """Of all units."""
        return sum(unit.size_bytes for unit in self.units)

    def encode(self) -> bytes:
        """The manifest's file."""
        body = self.model_dump_json().encode()
        return _HEAD % hashlib.sha256(body).hexdigest().encode() + body + _TAIL

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Reads `encode()`'s bytes. Raises ValueError (pydantic's errors are such) for everything else."""
        if len(data) > limits.CHECKPOINT_MANIFEST_BYTES_MAX:
            raise ValueError(f"{len(data)} bytes, at most {limits.CHECKPOINT_MANIFEST_BYTES_MAX} are read")
        head = _HEAD_PATTERN.match(data)
        if head is None or not data.endswith(_TAIL):
            raise ValueError("it is no manifest of a checkpoint, or was cut off")
        body = data[head.end() : -len(_TAIL)]
        if hashlib.sha256(body).hexdigest().encode() != head[1]:
            raise ValueError("its bytes are not those that were written")
        return cls.model_validate_json(body, strict=True)


_HEAD, _TAIL = b'{"sha256": "%s", "checkpoint": ', b"}\n"
_HEAD_PATTERN = re.compile(rb'\{"sha256": "([0-9a-f]{64})", "checkpoint": ')
