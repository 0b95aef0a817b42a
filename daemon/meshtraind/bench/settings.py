"""What is measured, and on which machines."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import collective_for
from meshwire.limits import MIB
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import VALUE_BYTES, Plan, plan_buckets

PEERS_MAX = 16  # each is two processes, one of them with torch
MB_MAX = 1000
ROUNDS_MAX = 1000
TENSOR_VALUES = 4 * MIB // VALUE_BYTES
WARM_UP_ROUNDS = 3  # the first is checked; each further one touches memory that the first did not
WORKER_TIMEOUT_S = 120.0  # start of a process, and every small answer
ROUND_TIMEOUT_S = 600.0


class BenchError(Exception):
    """The benchmark cannot be run, or a result is wrong; the text is for a person."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a person has asked `bench allreduce` to compare. Raises BenchError when that is no comparison.

    Attributes:
        peers: m.
        mb: size N of the vector of fp32 values, in 10^6 bytes.
        rounds: timed rounds of each side.
        tls: False only here; a daemon's links always have it.
        topology: as typed; None: the codec's usual one.
    """

    peers: int
    mb: int
    codec: str = "fp32"
    rounds: int = 10
    tls: bool = True
    topology: str | None = None

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("--peers", self.peers, 2, PEERS_MAX),
            ("--mb", self.mb, 1, MB_MAX),
            ("--rounds", self.rounds, 1, ROUNDS_MAX),
        ):
            if not least <= value <= most:
                raise BenchError(f"{name} {value}: choose {least} to {most}")
        try:
            codec = parse_codec(self.codec)
        except ValueError as error:
            raise BenchError(f"--codec: {error}") from None
        try:
            collective_for(codec, self.topology)
        except ValueError as error:
            raise BenchError(str(error)) from None

    @property
    def values(self) -> int:
        """How many fp32 values the vector has that each rank brings."""
        return self.mb * 1_000_000 // VALUE_BYTES

    @property
    def bus_bytes(self) -> float:
        """What a ring moves per rank and round, in fp32: 2(m-1)/m * N."""
        return 2 * (self.peers - 1) / self.peers * self.values * VALUE_BYTES


@dataclass(frozen=True, slots=True)
class Station:
    """Where one rank of both sides runs.

    Attributes:
        host: the IPv4 address that it listens on.
        prefix: what goes in front of a command to run it there.
    """

    host: str
    prefix: Sequence[str] = ()


def loopback(peers: int) -> list[Station]:
    """The stations where all ranks run on this machine."""
    return [Station("127.0.0.1")] * peers


def manifest_of(values: int) -> ModelManifest:
    """A model of `values` parameters in tensors of 4 MiB, which make its ordinary buckets."""
    sizes = [TENSOR_VALUES] * (values // TENSOR_VALUES)
    if values % TENSOR_VALUES:
        sizes.append(values % TENSOR_VALUES)
    tensors = tuple(
        TensorSpec(name=f"tensor{index}", shape=(size,), dtype="float32", kind="parameter")
        for index, size in enumerate(sizes)
    )
    return ModelManifest(tensors=tensors, optimizer="none")


def plan_of(values: int) -> Plan:
    """The plan of such a model."""
    return plan_buckets(manifest_of(values))
