"""`python -m tests.bench.journey fp32 bsp`: one bucket on its way through the real rounds of rank 0 of 2.

What is counted is what a reader has to follow: calls into the project's own functions, the files they stand in, and how
often the way returns to a file that it had left. The links are lists, the learner is this script.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np

from meshtraind.executor.factory import ExecutorFactory
from meshtraind.executor.host import ExchangeSettings
from meshtraind.learner.shared_memory import SharedMemory
from meshtraind.rounds.driver import JobModel, Rounds, RoundsPorts, RoundsStart
from meshtraind.rounds.history import Entry
from meshtraind.transport.round_link import RoundLink
from meshwire.codecs.registry import parse_codec
from meshwire.frames.header import Header
from meshwire.jobs.lifecycle import job_number
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.message_base import Wire
from meshwire.messages.job import BlobRef, JobSpec, Member
from meshwire.messages.learner import LearnerBucket, LearnerSealed
from meshwire.messages.rounds import Bind, Call, Null, Seal
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.plan import Plan, plan_buckets
from meshwire.sync_modes.mode import sync_settings
from tests.computing import begin, computing
from tests.unpacedlink import UnpacedLink

PACKAGES = ("/meshtraind/", "/meshwire/", "/meshtrain/")
JOB = "1kx3m9q2v7bd"
BUCKET_BYTES = 262_144
EXCHANGES_MAX = 20  # until the round is complete on both sides
DECODING_S = 0.005  # what is decoded in slices gets the loop for so long


@dataclass
class Journey:
    """The calls of one stretch, in their order."""

    name: str
    calls: list[tuple[str, str]] = field(default_factory=list)  # file, function

    @property
    def stays(self) -> list[str]:
        """The files in the order of the way, each as often as it was entered from another one."""
        files = [file for file, _ in self.calls]
        return [file for at, file in enumerate(files) if at == 0 or files[at - 1] != file]

    def __str__(self) -> str:
        stays = self.stays
        files = list(dict.fromkeys(stays))
        counts = f"{len(self.calls)} calls, {len(files)} files, {len(stays) - len(files)} returns"
        return f"{self.name}: {counts}\n    {' '.join(file.removesuffix('.py') for file in files)}"


@contextmanager
def followed(name: str) -> Iterator[Journey]:
    """What is called within."""
    journey = Journey(name)

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = next((code.co_filename.rpartition(each)[2] for each in PACKAGES if each in code.co_filename), None)
        if event == "call" and path is not None and not code.co_name.startswith("<"):
            journey.calls.append((path, code.co_qualname))

    sys.setprofile(profile)
    try:
        yield journey
    finally:
        sys.setprofile(None)


class Link(UnpacedLink):
    """A connection that keeps what it is given."""

    writable = True
    chunk_bytes_received = 0

    def __init__(self) -> None:
        self.chunks: list[tuple[Header, Any]] = []
        self.messages: list[Wire] = []

    def on_writable(self, _: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def send_chunk(self, header: Header, payload: Any) -> None:
        self.chunks.append((header, payload))

    def notify(self, body: Wire, **_: object) -> None:
        self.messages.append(body)


class Peer:
    """One of the two members between which the bucket travels."""

    def __init__(self, rank: int, spec: JobSpec, members: tuple[Member, ...], manifest: ModelManifest, plan: Plan):
        self.memory = SharedMemory()
        self.memory.make(MemoryLayout.for_bound(plan.total_values, spec.sync.staleness))
        self.link = Link()
        self.told: list[Wire] = []
        self.buckets = len(plan.buckets)
        generation = computing(JOB, members[0].device, members)
        links: Mapping[int, RoundLink] = {1 - rank: self.link}
        settings = ExchangeSettings(
            plan=plan, codec=spec.codec, job=job_number(spec.job), seed=spec.seed, staleness=spec.sync.staleness
        )
        planes = ExecutorFactory(settings, links, self.memory.result(), None)
        self.rounds = Rounds(
            JobModel(spec, manifest, plan, samples=None),
            RoundsStart(rank, generation, Entry(anew=True)),
            RoundsPorts(links, self.memory, planes),
            self,
            None,
            rtt_s=0.001,
            stall_s=60.0,
        )
        begin(self.rounds, generation)
        np.frombuffer(self.memory.raw(1), np.float32)[:] = 1.0 + rank

    def notify(self, body: Wire, /) -> None:
        """The learner is told something."""
        self.told.append(body)

    def fail(self, reason: str, /) -> None:
        """The job would end."""
        raise RuntimeError(reason)

    def refuse(self, rank: int, text: str, /) -> None:
        """A member would be left out."""
        raise RuntimeError(f"rank {rank}: {text}")

    def round_complete(self, rounds: Rounds, round_: int, /) -> None:
        """Nobody waits for it here."""

    def bucket(self, bucket: int) -> None:
        self.rounds.learner.bucket(LearnerBucket(step=1, bucket=bucket, weight=8.0, hyperparameters=b"", poison=None))

    def seal(self) -> None:
        self.rounds.learner.sealed(LearnerSealed(step=1, used=b"\x80", integers=()))

    def tell(self, other: "Peer", rank: int) -> list[tuple[Header, Any]]:
        """Gives `other` the messages; returns the chunks."""
        messages, self.link.messages = self.link.messages, []
        for message in messages:
            assert isinstance(message, Bind | Seal | Null | Call)
            other.rounds.message(rank, message)
        chunks, self.link.chunks = self.link.chunks, []
        return chunks


def land(peer: Peer, sender: int, header: Header, payload: Any, name: str | None = None) -> None:
    """A chunk arrives, counted if it has a name."""
    bytes_ = b"" if payload is None else bytes(payload)
    with followed(name or "") as journey:
        place = peer.rounds.chunk_announced(sender, header)
    if isinstance(place, str):
        raise RuntimeError(place)
    if place is not None:
        if bytes_:
            place[:] = bytes_
        with followed("") as taken:
            peer.rounds.chunk_received(sender, header)
        journey.calls += taken.calls
    if name is not None:
        print(journey)


async def travel(codec: str, sync: str) -> None:
    """Prints the stretches of the way."""
    members = tuple(Member(device=f"{rank:064x}", incarnation=1, name=name) for rank, name in enumerate("ab"))
    spec = JobSpec(
        job=JOB,
        name="journey",
        submitter=members[0].device,
        created_at_s=0.0,
        script="train.py",
        args=(),
        env=(),
        files=BlobRef(sha256=bytes(32), size_bytes=0),
        data=None,
        sync=sync_settings(sync),
        codec=codec,
        on_nan="stop",
        seed=7,
        bucket_bytes=BUCKET_BYTES,
        hash_every=1,
        trace=False,
    )
    tensor = TensorSpec(name="w", shape=(512, 256), dtype="float32", kind="parameter")
    manifest = ModelManifest(tensors=(tensor,), optimizer="SGD")
    plan = plan_buckets(manifest, BUCKET_BYTES, parse_codec(codec))
    peers = [Peer(rank, spec, members, manifest, plan) for rank in range(2)]
    one, other = peers
    with followed("bucket ready -> chunks on the link") as journey:
        one.bucket(0)
    print(journey)
    for peer in peers:
        for bucket in range(1 if peer is one else 0, peer.buckets):
            peer.bucket(bucket)
        peer.seal()
    first, *rest = other.tell(one, 1)
    land(one, 1, *first, name="chunk received -> summed and sent on")
    for header, payload in rest:
        land(one, 1, header, payload)
    for _ in range(EXCHANGES_MAX):
        for header, payload in one.tell(other, 0):
            land(other, 0, header, payload)
        for header, payload in other.tell(one, 1):
            land(one, 1, header, payload)
        await asyncio.sleep(DECODING_S)
    assert one.rounds.complete == other.rounds.complete == 1, "the round is not complete"
    with followed("a member is lost: fence and standing") as journey:
        one.rounds.crossing.fence()
        one.rounds.crossing.standing()
    print(journey)
    for peer in peers:
        peer.rounds.close()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.journey", description=__doc__)
    parser.add_argument("codec", help="as in `meshtrain submit --codec`, for example fp32 or topk")
    parser.add_argument("sync", help="as in `meshtrain submit --sync`, for example bsp or ssp:2")
    options = parser.parse_args()
    asyncio.run(travel(options.codec, options.sync))


if __name__ == "__main__":
    main()
