"""What each case measures: a call is one repeat of it, with processes of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
from platformdirs import user_cache_path

from meshtrain.examples.digits import FILE_NAME, fetch_digits
from meshtraind.bench.allreduce import compare
from meshtraind.bench.report import Report
from meshtraind.bench.settings import Settings, loopback
from tests.bench import aims, allreduce_lab
from tests.bench.goals.sides import Side, Work, in_turn, place
from tests.bench.journal import Figures
from tests.lab.lab import lab_unavailable

T = TypeVar("T")
RATE_MBIT = 100.0
HOOK_RANK = 4
# Both kinds of PowerSGD let two steps travel whole: the fewest that torch's hook takes.
WAYS = ("powersgd:4,warmup=2", "topk", "dgc:0.01,ramp=0", "int8@local:8")
PERIOD = 8  # steps of a turn, so that one of a period holds a round
AGAIN = "loss hook, another first basis"
WARM_UP = 3  # steps, of which two travel whole


def learner(model: str, members: int, codec: str, steps: int, turns: int) -> Figures:
    """A job on loopback beside plain torch, or beside DDP over gloo with fp32."""
    work = Work(model, members)
    with place(members) as here, ExitStack() as stack:
        beside = stack.enter_context(here.torch(work))
        daemons = stack.enter_context(here.daemons(members))
        job = stack.enter_context(here.job(daemons, work, codec))
        return _compared(*in_turn((beside, job), steps, turns))


def _compared(beside: list[dict[str, Any]], job: list[dict[str, Any]]) -> Figures:
    pairs = list(zip(beside, job, strict=True))
    return {
        "speed": [one["s"] / other["s"] for one, other in pairs],
        "cpu": [other["cpu_s"] / one["cpu_s"] for one, other in pairs],
        "learner_cpu": [other["own_cpu_s"] / one["own_cpu_s"] for one, other in pairs],
        "beside_ms": [1000 * one["s"] for one in beside],
        "job_ms": [1000 * one["s"] for one in job],
    }


def profiled(model: str, members: int, codec: str, steps: int) -> Iterator[tuple[str, str]]:
    """(side, where the time of its rank 0 goes, by function), of some steps behind a turn that is not looked at."""
    work = Work(model, members)
    with place(members) as here, ExitStack() as stack:
        beside = stack.enter_context(here.torch(work))
        daemons = stack.enter_context(here.daemons(members))
        for side in (beside, stack.enter_context(here.job(daemons, work, codec))):
            side.turn(steps)
            yield side.name, side.turn(steps, profile=True)["profile"]


def all_reduce(peers: int, mb: int, tls: bool, rounds: int) -> Figures:
    """The daemons' all-reduce on loopback beside gloo's."""
    settings = Settings(peers, mb, rounds=rounds, tls=tls)
    return _reduced(asyncio.run(compare(settings, loopback(peers))))


def all_reduce_lossy(peers: int, mb: int, percent: float, rounds: int) -> Figures:
    """The same in the lab, where so many of the frames are lost and gloo's connections have cubic, as most systems'."""
    network = allreduce_lab.Network(RATE_MBIT, loss_percent=percent, congestion="cubic")
    return _reduced(allreduce_lab.measure(Settings(peers, mb, rounds=rounds), network))


def cubic_unavailable() -> str | None:
    """Why stations may not have cubic, and what to do; None: they may."""
    if (reason := lab_unavailable()) is not None:
        return reason
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().strip()
    if "cubic" in allowed.split():
        return None
    return f"the stations may not choose cubic: sysctl -w net.ipv4.tcp_allowed_congestion_control='{allowed} cubic'"


def _reduced(report: Report) -> Figures:
    settings, ours, theirs = report.settings, report.meshtrain, report.gloo
    return {
        "speed": list(report.ratio.rounds),
        "cpu": [one / other for one, other in zip(ours.cpu_s, theirs.cpu_s, strict=True)],
        "job_cpu_s_per_gb": [ours.cpu_s_per_gb(settings)],
        "beside_cpu_s_per_gb": [theirs.cpu_s_per_gb(settings)],
        "beside_ms": [1000 * seconds for seconds in theirs.seconds],
        "job_ms": [1000 * seconds for seconds in ours.seconds],
    }


@contextmanager
def beside_the_hook(
    model: str, members: int, rate_mbit: float | None, seed: int, *, again: bool = False
) -> Iterator[tuple[Side, list[Side]]]:
    """DDP with PowerSGD's hook, and a job for each of `WAYS` on the same daemons; all train on the same samples.
    `again`: before these the hook once more, from another first basis."""
    data = digits_folder() if model == "digits" else None
    work = Work(model, members, seed, data)
    with place(members, rate_mbit) as here, ExitStack() as stack:
        hook = stack.enter_context(here.torch(work, HOOK_RANK))
        others = [stack.enter_context(here.torch(work, HOOK_RANK, basis=1))] if again else []
        daemons = stack.enter_context(here.daemons(members))
        yield hook, [*others, *(stack.enter_context(here.job(daemons, work, way)) for way in WAYS)]


def side_warm_up(side: Side) -> int:
    """Steps of its first turn, which is not counted."""
    return PERIOD if "@" in side.name else WARM_UP


def limited(model: str, members: int, turns: int) -> Figures:
    """Time of a step at RATE_MBIT a station. `alone_ms`: of DDP without any exchange, all ranks computing at once."""
    with beside_the_hook(model, members, RATE_MBIT, 0) as (hook, ways):
        took, *others = in_turn((hook, *ways), PERIOD, turns, [side_warm_up(side) for side in (hook, *ways)])
        alone_s = hook.turn(PERIOD, alone=True)["s"]
    found = {"hook_ms": [1000 * one["s"] for one in took], "alone_ms": [1000 * alone_s]}
    for way, own in zip(WAYS, others, strict=True):
        found[f"speed {way}"] = [one["s"] / other["s"] for one, other in zip(took, own, strict=True)]
        found[f"cpu {way}"] = [other["cpu_s"] / one["cpu_s"] for one, other in zip(took, own, strict=True)]
        found[f"ms {way}"] = [1000 * one["s"] for one in own]
    return found


def loss(model: str, members: int, turns: int, seed: int) -> Figures:
    """Held-out loss after as many samples, on loopback: it does not depend on the network, nor on other work. Of the
    hook once more, from another first basis: so far apart are two that compute the same."""
    with beside_the_hook(model, members, None, seed, again=True) as (hook, others):
        in_turn((hook, *others), PERIOD, turns - 1)
        beside = hook.held_out_loss()
        again, *ways = others
        found = {"hook": [beside], "steps": [float(turns * PERIOD)], AGAIN: [again.held_out_loss() / beside]}
        for way, side in zip(WAYS, ways, strict=True):
            found[f"nats {way}"] = [own := side.held_out_loss()]
            found[f"loss {way}"] = [own / beside]
    return found


def digits_folder() -> str:
    """Where the digits lie; fetched once. Raises DigitsError."""
    folder = user_cache_path("meshtrain") / "digits"
    if not (folder / FILE_NAME).exists():
        fetch_digits(folder)
    return str(folder)


def memory(members: int, steps: int) -> Figures:
    """The most that daemon, learner and their shared memory hold at once, beside the most of a rank of DDP: rank 0's,
    with a model of 190 MiB, while steps are taken."""
    work = Work("wide", members)
    with place(members) as here, ExitStack() as stack:
        beside = stack.enter_context(here.torch(work))
        theirs = max(_while(beside, steps, lambda: sum(_resident(beside.learners[0]))))
        daemons = stack.enter_context(here.daemons(members))
        job = stack.enter_context(here.job(daemons, work, "fp32"))

        def parts() -> tuple[float, float, float]:
            (daemon, shared), (own, seen) = _resident(job.daemons[0]), _resident(job.learners[0])
            return daemon, own, shared + seen

        daemon, own, shared = max(_while(job, steps, parts), key=sum)
    return {
        "ratio": [(daemon + own + shared) / theirs],
        "daemon_mib": [daemon],
        "learner_mib": [own],
        "shared_mib": [shared],
        "ddp_mib": [theirs],
    }


def _while(side: Side, steps: int, sample: Callable[[], T]) -> Sequence[T]:
    """Samples of a turn that follows another one, every few milliseconds."""
    side.turn(steps)
    ended, samples = threading.Event(), [sample()]

    def watch() -> None:
        while not ended.wait(0.01):
            samples.append(sample())

    watcher = threading.Thread(target=watch, name="memory of a turn")
    watcher.start()
    try:
        side.turn(steps)
    finally:
        ended.set()
        watcher.join()
    return samples


def _resident(process: psutil.Process) -> tuple[float, float]:
    """MiB of a process: its own pages and those of files; and its part of the memory that it shares with others."""
    folder = Path(f"/proc/{process.pid}")
    text = (folder / "status").read_text() + (folder / "smaps_rollup").read_text().partition("\n")[2]
    fields = (line.split() for line in text.splitlines())
    kib = {words[0]: int(words[1]) for words in fields if words[-1] == "kB"}
    return (kib["RssAnon:"] + kib["RssFile:"]) / 1024, kib["Pss_Shmem:"] / 1024


def idle() -> Figures:
    """A daemon that nothing is asked of."""
    resident_mb, percent = aims.idle()
    return {"mb": [resident_mb], "percent": [percent]}


def idle_links() -> Figures:
    """What a daemon that is linked with fifteen others takes of a core while no job runs."""
    return {"percent": [aims.idle_links(aims.LINKS)]}
