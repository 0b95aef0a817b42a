"""Times the daemons' collective and gloo's in turn, in one run, both from a common start.

A round's time runs from an instant that all ranks wait for on the system's one monotonic clock to the end of the last
rank. Both sides pay alike for ranks that wake up late; without the common start only gloo would.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from meshtraind.bench.report import Memory, Report, Series
from meshtraind.bench.settings import ROUND_TIMEOUT_S, WARM_UP_ROUNDS, BenchError, Settings, Station
from meshtraind.bench.worker import Worker, ask_all

# A daemon has it for itself (M3). With a thread for each core the ranks' BLAS threads spin against each other, and a
# round takes two to four times as long.
AS_A_DAEMON = {"OPENBLAS_NUM_THREADS": "1"}
START_DELAY_S = 0.05  # for the commands to reach all ranks before the common start


async def compare(settings: Settings, stations: Sequence[Station]) -> Report:
    """Runs both sides, one rank of each per station. Raises BenchError, also when a result is wrong."""
    with tempfile.TemporaryDirectory(prefix="meshtrain-bench-") as folder:
        ours = _peers(settings, stations, Path(folder))
        theirs = _gloo_workers(settings, stations, Path(folder))
        try:
            for worker in (*ours, *theirs):
                await worker.start()
            await _connect_peers(settings, ours, stations)
            await ask_all(theirs, do="connect")
            await _warm_up(ours, theirs)
            return await _measure(settings, ours, theirs)
        finally:
            await asyncio.gather(*(worker.stop() for worker in (*ours, *theirs)))


def _peers(settings: Settings, stations: Sequence[Station], folder: Path) -> list[Worker]:
    workers = []
    for rank, station in enumerate(stations):
        argv = [*station.prefix, sys.executable, "-m", "meshtraind.bench.peer", "--rank", str(rank)]
        argv += ["--members", str(settings.peers), "--values", str(settings.values), "--codec", settings.codec]
        argv += ["--host", station.host]
        if settings.topology is not None:
            argv += ["--topology", settings.topology]
        if settings.tls:
            argv += ["--folder", str(folder / f"rank{rank}")]
        workers.append(Worker(f"meshtrain rank {rank}", argv, AS_A_DAEMON))
    return workers


def _gloo_workers(settings: Settings, stations: Sequence[Station], folder: Path) -> list[Worker]:
    # By its name alone: the daemon's package neither imports the training package nor torch.
    module = "meshtrain.train.glooworker"
    workers = []
    for rank, station in enumerate(stations):
        argv = [*station.prefix, sys.executable, "-m", module, "--rank", str(rank), "--members", str(settings.peers)]
        argv += ["--values", str(settings.values), "--host", station.host, "--store", str(folder / "gloo-store")]
        argv += ["--timeout-s", str(ROUND_TIMEOUT_S)]
        workers.append(Worker(f"gloo rank {rank}", argv))
    return workers


async def _connect_peers(settings: Settings, workers: Sequence[Worker], stations: Sequence[Station]) -> None:
    listening = await ask_all(workers, do="listen")
    if settings.tls:
        await ask_all(workers, do="pin", certificates=[answer["certificate"] for answer in listening])
    for rank, worker in enumerate(workers):
        addresses = {
            other: (stations[other].host, answer["ports"][str(rank)])
            for other, answer in enumerate(listening)
            if str(rank) in answer["ports"]
        }
        worker.tell(do="dial", addresses=addresses)
    for worker in workers:
        await worker.answer(ROUND_TIMEOUT_S, "dial")
    await ask_all(workers, do="allocate")


async def _round(workers: Sequence[Worker]) -> tuple[float, float]:
    """Has all ranks of one side play a round. Returns what it took: (seconds to the end of the last rank, CPU seconds
    of all)."""
    await ask_all(workers, ROUND_TIMEOUT_S, do="ready")
    start_s = time.monotonic() + START_DELAY_S
    answers = await ask_all(workers, ROUND_TIMEOUT_S, do="round", start_s=start_s)
    usages = await ask_all(workers, do="usage")
    return max(answer["end_s"] for answer in answers) - start_s, sum(usage["cpu_s"] for usage in usages)


async def _warm_up(ours: Sequence[Worker], theirs: Sequence[Worker]) -> None:
    """Checks both sides' results, and touches all memory."""
    for _ in range(WARM_UP_ROUNDS):
        for workers in (ours, theirs):
            await _round(workers)
            checks = await ask_all(workers, do="check")
            for worker, check in zip(workers, checks, strict=True):
                if check["wrong"] is not None:
                    raise BenchError(f"{worker.name} has a wrong result: {check['wrong']}")
            if len({check["digest"] for check in checks}) != 1:
                raise BenchError(f"{workers[0].name} and others hold results that are not bit-equal")


async def _measure(settings: Settings, ours: Sequence[Worker], theirs: Sequence[Worker]) -> Report:
    our_rounds, their_rounds = [], []
    for _ in range(settings.rounds):
        our_rounds.append(await _round(ours))
        their_rounds.append(await _round(theirs))
    used = await ask_all(ours, do="memory")
    return Report(
        settings,
        Series(*zip(*our_rounds, strict=True)),
        Series(*zip(*their_rounds, strict=True)),
        max((Memory(**parts) for parts in used), key=lambda parts: parts.peak - parts.before),
    )
