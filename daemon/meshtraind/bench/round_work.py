"""What a round takes of a daemon's processor: two ranks in this process, over TLS on the loopback.

Each has a daemon's executor and links. What learner and rounds machine add is not in it.
"""

import asyncio
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from meshtraind.bench.peer import Peer
from meshtraind.bench.settings import BenchError
from meshtraind.machine.event_loop import loop_factory
from meshwire.codecs.registry import parse_codec

RANKS = 2
WARM_UP_ROUNDS = 1  # fills caches and memory
ROUNDS_S = 0.3  # behind it: rounds that take long are fewer
ROUNDS_MAX = 1000
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RoundWork:
    """CPU time of one rank for one round of a vector."""

    codec: str
    values: int
    processor_s: float


@dataclass(frozen=True, slots=True)
class RoundWorkReport:
    """All that was measured."""

    rounds: tuple[RoundWork, ...]

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return {"rounds": [asdict(each) for each in self.rounds]}

    def as_text(self) -> str:
        """A line for each."""
        return "\n".join(json.dumps(asdict(each)) for each in self.rounds)


def measure_rounds(
    codecs: Sequence[str], counts: Sequence[int], rounds: int, progress: Callable[[str], None]
) -> RoundWorkReport:
    """The median of so many rounds, or as many as ROUNDS_S take, of each codec with vectors of each length.

    Raises BenchError.
    """
    if not 1 <= rounds <= ROUNDS_MAX:
        raise BenchError(f"--runs {rounds}: choose 1 to {ROUNDS_MAX}")
    found = []
    for codec in codecs:
        try:
            text = str(parse_codec(codec))
        except ValueError as error:
            raise BenchError(f"--codec: {error}") from None
        for values in counts:
            progress(f"rounds of {values} values with {text}")
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                found.append(RoundWork(text, values, median(runner.run(_rounds(text, values, rounds)))))
    return RoundWorkReport(tuple(found))


async def _rounds(codec: str, values: int, rounds: int) -> list[float]:
    async with AsyncExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
        peers = []
        for rank in range(RANKS):
            folder = root / str(rank)
            folder.mkdir()
            peers.append(Peer(rank, RANKS, values, codec, None, HOST, folder))
            stack.push_async_callback(peers[-1].close)
        said = [await peer.do_listen() for peer in peers]
        for peer in peers:
            await peer.do_pin([each["certificate"] for each in said])
        first, second = peers  # the lower rank dials
        await asyncio.gather(first.do_dial({"1": (HOST, said[1]["ports"][0])}), second.do_dial({}))
        for peer in peers:
            await peer.do_allocate()
        taken_s: list[float] = []
        until_s = math.inf
        while len(taken_s) < WARM_UP_ROUNDS + rounds and time.monotonic() < until_s:
            for peer in peers:
                await peer.do_ready()
            began_s = time.process_time()
            await asyncio.gather(*(peer.do_round(0.0) for peer in peers))
            taken_s.append((time.process_time() - began_s) / RANKS)
            if len(taken_s) == WARM_UP_ROUNDS + 1:
                until_s = time.monotonic() + ROUNDS_S
        return taken_s[WARM_UP_ROUNDS:]
