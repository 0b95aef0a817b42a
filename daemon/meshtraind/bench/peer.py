"""One rank of meshtrain's side: a process with the daemon's connections, TLS, executor and shared memory.

It is a daemon without what surrounds the collective: discovery, jobs, the round machine. Neighbours on the ring have
one connection per pair; the lower rank dials, to a port that is open for it alone.
"""

import argparse
import asyncio
import json
import os
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from meshtraind.bench import memory, vectors
from meshtraind.bench.settings import ROUND_TIMEOUT_S, WORKER_TIMEOUT_S, BenchError, plan_of
from meshtraind.executor.executor import Executor
from meshtraind.executor.host import ExchangeMembers, ExchangeMemory, ExchangeSettings
from meshtraind.learner.shared_memory import SharedMemory
from meshtraind.machine.event_loop import loop_factory
from meshtraind.machine.facts import peak_bytes
from meshtraind.transport.connection import Connection
from meshtraind.trust.identity import Identity, device_id_of, load_or_create
from meshtraind.trust.pins import Pin, PinTable
from meshtraind.trust.tls import NotPinnedError, Trust
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.exchange import Part
from meshwire.collectives.strategy import collective_for
from meshwire.encoded_layout.encoded import EncodedLayout
from meshwire.frames.header import Header
from meshwire.memory_layout.shared_slots import MemoryLayout
from meshwire.message_base import Wire

ROUNDS_KEPT = 2  # as in a daemon: a round is committed, and its bytes are freed, while the next one is exchanged
JOB = GENERATION = 1


class Neighbour:
    """The connection to another rank: takes its chunks, and fails the benchmark when it ends."""

    def __init__(self, peer: "Peer", rank: int) -> None:
        self._peer = peer
        self.rank = rank
        self.connection = Connection(self, name=f"rank {rank}")

    def chunk_announced(self, _conn: Connection, header: Header) -> memoryview | str | None:
        return self._peer.executor.chunk_announced(self.rank, header)

    def chunk_received(self, _conn: Connection, header: Header) -> None:
        self._peer.executor.chunk_received(header)

    def notice(self, _conn: Connection, _header: Header, body: Wire) -> None:
        self._peer.fail(f"rank {self.rank} sent an unexpected {type(body).__name__}")

    async def request(self, _conn: Connection, _header: Header, body: Wire, _emit: Callable[[Wire], None]) -> Wire:
        raise BenchError(f"rank {self.rank} asked for an unexpected {type(body).__name__}")

    def lost(self, _conn: Connection, reason: str) -> None:
        self._peer.fail(f"lost rank {self.rank}: {reason}")


class Peer:
    """What the coordinator commands, one method each; `serve` calls them by name."""

    def __init__(
        self,
        rank: int,
        members: int,
        values: int,
        codec: str,
        topology: str | None,
        host: str,
        folder: Path | None,
    ) -> None:
        self._rank = rank
        self._members = members
        self._plan = plan_of(values)
        self._codec = codec
        self._topology = topology
        self._layout = EncodedLayout(self._plan, parse_codec(codec))
        self._host = host
        self._folder = folder
        self.complete = 0
        self._round_done = asyncio.Event()
        self._end_s = 0.0
        self._cpu_at_start_s = 0.0
        self._failure: str | None = None
        self._neighbours: dict[int, Neighbour] = {}
        self._servers: list[asyncio.Server] = []
        self._stack = ExitStack()
        self._identity: Identity | None = None
        self._pins: PinTable | None = None
        self._trust: Trust | None = None
        self._before_bytes = 0
        self.executor: Executor

    def fail(self, text: str) -> None:
        """Ends the round that runs, with an error."""
        self._failure = self._failure or text
        self._round_done.set()

    async def do_listen(self) -> dict[str, Any]:
        """Opens a port for each neighbour that will dial; tells the ports and this device's certificate."""
        if self._folder is not None:
            self._identity = load_or_create(self._folder, f"rank {self._rank}")
            self._pins = PinTable(self._folder / "pins.db")
            self._stack.callback(self._pins.close)
            self._trust = Trust(self._identity, self._pins)
        topology = collective_for(parse_codec(self._codec), self._topology).topology
        strategy = topology.strategy(self._layout, tuple(range(self._members)), self._rank)
        steps = strategy.program.steps
        for rank in ({step.send_to for step in steps} | {step.recv_from for step in steps}) - {None}:
            assert rank is not None
            self._neighbours[rank] = Neighbour(self, rank)
        context = self._trust.server_context if self._trust is not None else None
        ports = {}
        for rank, neighbour in self._neighbours.items():
            if rank < self._rank:
                loop = asyncio.get_running_loop()
                made = neighbour.connection
                server = await loop.create_server(lambda made=made: made, self._host, 0, ssl=context)
                self._servers.append(server)
                ports[rank] = server.sockets[0].getsockname()[1]
        return {"ports": ports, "certificate": self._identity.certificate_pem if self._identity is not None else None}

    async def do_pin(self, certificates: list[str]) -> dict[str, Any]:
        """Pins the keys of the other ranks, so that links to them can be made."""
        if self._pins is not None and self._identity is not None:
            for rank, pem in enumerate(certificates):
                if rank in self._neighbours:
                    device = device_id_of(ssl.PEM_cert_to_DER_cert(pem))
                    self._pins.add(Pin(device, f"rank {rank}", pem, time.time(), self._identity.device_id))
        return {}

    async def do_dial(self, addresses: dict[str, tuple[str, int]]) -> dict[str, Any]:
        """Connects to the neighbours of higher rank, and waits for those of lower rank."""
        loop = asyncio.get_running_loop()
        context = self._trust.client_context if self._trust is not None else None
        name = "meshtrain" if context is not None else None
        async with asyncio.timeout(WORKER_TIMEOUT_S):
            for rank, neighbour in self._neighbours.items():
                if rank > self._rank:
                    host, port = addresses[str(rank)]
                    made = neighbour.connection
                    await loop.create_connection(lambda made=made: made, host, port, ssl=context, server_hostname=name)
            while not all(neighbour.connection.writable for neighbour in self._neighbours.values()):
                if self._failure is not None:
                    raise BenchError(self._failure)
                await asyncio.sleep(0.01)
        for server in self._servers:
            server.close()
        return {}

    async def do_allocate(self) -> dict[str, Any]:
        """Makes the slots and the executor, and fills this rank's vector."""
        self._before_bytes = memory.resident_bytes()
        layout = MemoryLayout.for_bound(self._plan.total_values, 0)
        slots = SharedMemory()
        self._stack.callback(slots.close)
        os.ftruncate(slots.descriptor, layout.total_bytes)
        slots.map(layout)
        self._raw = np.frombuffer(slots.raw(0), np.float32)
        self._result = np.frombuffer(slots.result(), np.float32)
        self._slots_bytes = layout.total_bytes
        vectors.fill(self._raw, self._rank)
        ranks = tuple(range(self._members))
        self.executor = Executor(
            ExchangeSettings(plan=self._plan, codec=self._codec, topology=self._topology, job=JOB, seed=0, staleness=0),
            self._rank,
            ExchangeMembers(
                generation=GENERATION,
                ranks=ranks,
                links={rank: neighbour.connection for rank, neighbour in self._neighbours.items()},
                learning=ranks,
            ),
            first=1,
            memory=ExchangeMemory(self._result),
            host=self,
        )
        return {}

    async def do_ready(self) -> dict[str, Any]:
        """Gets ready, before every round."""
        if self.complete >= ROUNDS_KEPT:
            self.executor.forget(self.complete + 1 - ROUNDS_KEPT)
        self.executor.open_result(self.complete + 1)
        self._round_done.clear()
        if self._failure is not None:
            raise BenchError(self._failure)
        return {}

    async def do_round(self, start_s: float) -> dict[str, Any]:
        """One all-reduce from the common start; all buckets at once, as after a backward pass without overlap."""
        time.sleep(max(0.0, start_s - time.monotonic()))  # the loop's timers are too coarse; nothing else is due
        self._cpu_at_start_s = time.process_time()
        number = self.complete + 1
        for bucket in self._plan.buckets:
            self.executor.contribute(number, bucket.index, Part.DATA, 1.0, self._raw)
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            await self._round_done.wait()
        if self._failure is not None:
            raise BenchError(self._failure)
        return {"end_s": self._end_s}

    async def do_usage(self) -> dict[str, Any]:
        """CPU seconds of this process since the round's start."""
        return {"cpu_s": time.process_time() - self._cpu_at_start_s}

    async def do_check(self) -> dict[str, Any]:
        """Whether the result is the mean, and its digest."""
        wrong = vectors.wrong_value(self._result, self._members, self._codec)
        digest = vectors.digest(self._result)
        self._result[:] = np.nan  # so that the next round has to write everything anew
        return {"wrong": wrong, "digest": digest}

    async def do_memory(self) -> dict[str, Any]:
        """The parts of `meshtraind.bench.report.Memory`."""
        return {
            "before": self._before_bytes,
            "slots": self._slots_bytes,
            "encoded_round": self._layout.total_bytes,
            "encoded_rounds": ROUNDS_KEPT,
            "peak": peak_bytes(),
        }

    async def close(self) -> None:
        """Closes the links to all other ranks, when nothing is to be measured any more."""
        for neighbour in self._neighbours.values():
            neighbour.connection.close("the benchmark has ended")
        self._stack.close()

    def bucket_complete(
        self, round_: int, bucket: int, poisoned: bool, contributors: int, weight: float, squared_norm: float
    ) -> None:
        """Checks that everybody's part is in a bucket: the figures are of whole rounds."""
        if poisoned or contributors != (1 << self._members) - 1 or weight != self._members:
            self.fail(f"round {round_}, bucket {bucket}: contributors {contributors:#x}, weight {weight}")

    def chunk_broken(self, rank: int | None, text: str) -> None:
        """Fails the round that runs: a peer has sent what it should not."""
        self.fail(f"rank {rank}: {text}")

    def result_decoded(self, round_: int) -> None:
        """Notes when a round was over, and wakes who waits for it."""
        self._end_s = time.monotonic()
        self.complete = round_
        self._round_done.set()


async def serve(peer: Peer) -> None:
    """Does what standard input says until it ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := await reader.readline():
            command = json.loads(line)
            try:
                answer = await getattr(peer, f"do_{command.pop('do')}")(**command)
            except (BenchError, NotPinnedError, OSError, TimeoutError) as error:
                answer = {"error": str(error) or type(error).__name__}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        await peer.close()


def main() -> None:
    """The process's arguments come from the coordinator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--values", type=int, required=True)
    parser.add_argument("--codec", required=True)
    parser.add_argument("--topology")
    parser.add_argument("--host", required=True)
    parser.add_argument("--folder", type=Path, help="for the identity; without it there is no TLS")
    options = parser.parse_args()

    async def run() -> None:
        await serve(Peer(**vars(options)))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


if __name__ == "__main__":
    main()
