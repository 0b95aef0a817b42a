"""One measurement of a link at one of its ends: chunks go one way, then the other way, then both ways at once."""

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from meshtraind.measuring.goodput import CHUNK_BYTES_MIN, Goodput, ProbeWindow
from meshtraind.runtime.tasks import TaskSet
from meshtraind.transport.connection import Connection, RequestFailed
from meshwire import limits
from meshwire.frames.header import Header, Kind
from meshwire.messages.link import Heartbeat
from meshwire.messages.measuring import ProbeEnd, ProbeTaken

LOOK_S = 0.1  # between two looks whether a job has begun
ROUND_TRIPS = 5
ROUND_TRIPS_S = 0.15  # for all of them; one is waited for
CLOSING_S = limits.MEASURE_S_MAX  # of the last words, which come after the deadline of who has asked


class Leg(IntEnum):
    """Who sends."""

    ASKER = 1
    ASKED = 2
    BOTH = 3


class Guard(Protocol):
    """Whoever knows whether a measurement may go on."""

    def check(self) -> None:
        """Raises RequestFailed where it may not, for a job has begun."""


@dataclass(frozen=True, slots=True)
class LegFigures:
    """What the asker has found, in payload bytes a second; None: too little came to tell."""

    send_bytes_s: float | None
    receive_bytes_s: float | None
    both_send_bytes_s: float | None
    both_receive_bytes_s: float | None
    rtt_s: float
    loaded_rtt_s: float | None


class _Coming:
    """What comes of one leg.

    Attributes:
        goodput: None before the first chunk.
        told_bytes: how much the other end knows of.
    """

    def __init__(self) -> None:
        self.goodput: Goodput | None = None
        self.total_bytes = 0
        self.told_bytes = 0
        self.ended = False

    @property
    def bytes_s(self) -> float | None:
        return None if self.goodput is None else self.goodput.bytes_s


class Legs:
    """The legs of one measurement. Whoever runs them gives them a deadline.

    Args:
        number: that the measurement has on the wire.
        comes: the legs in which the other end sends; chunks of others are dropped.
        name: of the other end, in errors.

    Attributes:
        doing: what is waited for, in words.
    """

    def __init__(
        self, connection: Connection, number: int, comes: Collection[Leg], guard: Guard, name: str, tasks: TaskSet
    ) -> None:
        self.doing = "the first answer"
        self._connection = connection
        self._number = number
        self._guard = guard
        self._name = name
        self._tasks = tasks
        self._payload = memoryview(os.urandom(limits.CHUNK_BYTES))  # nothing packs it
        self._place = memoryview(bytearray(limits.CHUNK_BYTES))
        self._windows: dict[int, ProbeWindow] = {}
        self._coming: dict[int, _Coming] = {leg: _Coming() for leg in comes}
        self._changed = asyncio.Event()
        self._wrong: str | None = None

    # What arrives

    def chunk_announced(self, header: Header) -> memoryview | None:
        """Where a chunk goes; None where it is of no use, or more than a leg has."""
        coming = self._coming.get(header.round)
        size = header.payload_bytes
        if coming is None or coming.ended or not 0 < size <= limits.CHUNK_BYTES:
            return None
        if coming.total_bytes + size > limits.MEASURE_LEG_BYTES_MAX:
            return None
        if coming.goodput is None:
            coming.goodput = Goodput(time.monotonic())
            self._changed.set()
        return self._place[:size]

    def chunk_received(self, header: Header) -> None:
        """Counts a chunk, as it travelled, and tells the other end; of tiny ones not of each."""
        coming = self._coming[header.round]
        coming.total_bytes += header.carried_bytes
        if coming.total_bytes - coming.told_bytes >= CHUNK_BYTES_MIN:
            self._tell_taken(header.round, coming)

    def heard(self, body: ProbeTaken | ProbeEnd) -> None:
        """Takes the other end's word on a leg."""
        if isinstance(body, ProbeTaken):
            window = self._windows.get(body.leg)
            if window is None:
                self._wrong = f"it has taken {body.taken_bytes} bytes of a measurement, of none that were sent"
            else:
                self._wrong = self._wrong or window.taken(body.taken_bytes, time.monotonic())
        elif (coming := self._coming.get(body.leg)) is not None and not coming.ended:
            if coming.total_bytes > coming.told_bytes:
                self._tell_taken(body.leg, coming)
            coming.ended = True
        self._changed.set()

    def _tell_taken(self, leg: int, coming: _Coming) -> None:
        assert coming.goodput is not None
        coming.told_bytes = coming.total_bytes
        coming.goodput.came(coming.total_bytes, time.monotonic())
        self._connection.notify(ProbeTaken(number=self._number, leg=leg, taken_bytes=coming.total_bytes))

    # The asker's part, and the other's

    async def ask(self) -> LegFigures:
        """All legs, of the end that has asked. Raises RequestFailed."""
        self.doing = "round trips"
        rtt_s = await self._rtt_s()
        loaded: list[float] = []
        probing = self._tasks.spawn(self._round_trips(loaded), "round trips under load")
        try:
            sent = await self._send(Leg.ASKER, rtt_s)
            await self._taken(sent)
        finally:
            probing.cancel()
        self.doing = f"what {self._name} sends"
        down = self._coming[Leg.ASKED]
        await self._until(lambda: down.ended)
        both = self._coming[Leg.BOTH]
        both_sent = await self._send(Leg.BOTH, rtt_s)
        # As long as both sent: what comes later had the link to itself.
        both_rates = both_sent.goodput.bytes_s, both.bytes_s
        await self._taken(both_sent)
        self.doing = f"the end of what {self._name} sends"
        await self._until(lambda: both.ended)
        return LegFigures(
            sent.goodput.bytes_s,
            down.bytes_s,
            both_rates[0] or both_sent.goodput.bytes_s,
            both_rates[1] or both.bytes_s,
            rtt_s,
            statistics.median(loaded) if loaded else None,
        )

    async def answer(self, rtt_s: float) -> None:
        """All legs, of the end that was asked and has said that it is ready. Raises RequestFailed."""
        self.doing = f"what {self._name} sends"
        await self._until(lambda: self._coming[Leg.ASKER].ended)
        await self._taken(await self._send(Leg.ASKED, rtt_s))
        both = self._coming[Leg.BOTH]
        self.doing = f"what {self._name} sends"
        await self._until(lambda: both.goodput is not None)
        await self._taken(await self._send(Leg.BOTH, rtt_s))
        await self._until(lambda: both.ended)

    async def _send(self, leg: Leg, rtt_s: float) -> ProbeWindow:
        """Sends chunks for as long as a leg lasts, but no more than has been taken and a window."""
        self.doing = f"{self._name} to take what is sent"
        connection = self._connection
        before = next(iter(self._windows.values()), None)
        window = self._windows[leg] = ProbeWindow(time.monotonic(), rtt_s, before)
        until_s = time.monotonic() + limits.MEASURE_LEG_S
        unsubscribe = connection.on_writable(self._changed.set)
        try:
            while (left_s := until_s - time.monotonic()) > 0 and window.sent_bytes < limits.MEASURE_LEG_BYTES_MAX:
                self._check()
                size = window.next_bytes() if connection.writable else 0
                if size:
                    header = Header(Kind.CHUNK, size, generation=self._number, round=leg)
                    connection.send_chunk(header, self._payload[:size])
                    window.sent(size, time.monotonic())
                    await asyncio.sleep(0)
                else:
                    await self._change(min(left_s, LOOK_S))
        finally:
            unsubscribe()
        connection.notify(ProbeEnd(number=self._number, leg=leg))
        return window

    async def _taken(self, window: ProbeWindow) -> None:
        await self._until(lambda: window.all_taken)

    async def _until(self, fulfilled: Callable[[], bool]) -> None:
        while not fulfilled():
            self._check()
            await self._change(LOOK_S)

    async def _change(self, wait_s: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):  # nothing came: whoever waits looks again
            async with asyncio.timeout(wait_s):
                await self._changed.wait()

    def _check(self) -> None:
        self._guard.check()
        if self._wrong is not None:
            raise RequestFailed(f"{self._name} says that {self._wrong}")

    async def _rtt_s(self) -> float:
        """The median of some round trips, or the first one alone on a slow link."""
        found: list[float] = []
        until_s = time.monotonic() + ROUND_TRIPS_S
        while not found or (len(found) < ROUND_TRIPS and time.monotonic() < until_s):
            self._check()
            await self._round_trip(found)
        return statistics.median(found)

    async def _round_trips(self, found: list[float]) -> None:
        while True:
            await self._round_trip(found)

    async def _round_trip(self, found: list[float]) -> None:
        began_s = time.monotonic()
        await self._connection.request(Heartbeat(), timeout_s=CLOSING_S, name=f"round trip to {self._name}")
        found.append(time.monotonic() - began_s)
