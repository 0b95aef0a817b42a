"""`python -m tests.bench.learner_path`: what a job costs its learners, beside plain torch and beside DDP over gloo.

One model at a time, one thread a process, everything on this machine and on loopback. A job of one member stands
beside plain torch, a job of several beside DDP with as many ranks. All processes of a case live at once and take their
steps in turn (A B A B); while one side steps the other waits in a read. So a ratio pairs two turns that follow each
other, and both paid for whatever else the machine does.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import psutil

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMesh, LocalMeshError
from tests.bench import learnerturns
from tests.daemon import realjobs as jobs

NAMES = ("anna", "bert", "cleo", "dora", "emil", "fine", "gero", "hans")
CONNECT_TIMEOUT_S = 60.0
TURN_TIMEOUT_S = 120.0
WARM_UP_TURNS = 1


class BenchError(Exception):
    """The measurement could not be made; says why."""


@dataclass(frozen=True)
class Case:
    """Which model, in a job of how many members, and how much of it is a turn."""

    model: str
    members: int
    codec: str
    steps: int  # of a turn

    @property
    def name(self) -> str:
        """As it is chosen and printed."""
        return f"{self.model}/{self.members}/{self.codec}"


CASES = (
    Case("resnet", 1, "fp16", 4),
    Case("gpt", 1, "fp16", 4),
    Case("resnet", 2, "fp16", 4),
    Case("gpt", 2, "fp16", 4),
    Case("tiny", 2, "fp16", 300),
    Case("tiny", 4, "fp16", 150),
    Case("tiny", 8, "fp16", 60),
)


class Side:
    """The processes of one side, connected.

    Args:
        daemons: whose CPU time is this side's too.
    """

    def __init__(self, name: str, streams: list[TextIO], daemons: list[psutil.Process]) -> None:
        self.name = name
        self._streams = streams
        self._daemons = daemons

    def turn(self, steps: int, *, profile: bool = False) -> dict[str, Any]:
        """So many steps of every rank: seconds a step of the slowest, CPU seconds a step of all processes and of the
        learners alone."""
        before_s = self._daemon_cpu_s()
        for stream in self._streams:
            stream.write(json.dumps({"steps": steps, "profile": profile}) + "\n")
            stream.flush()
        lines = [stream.readline() for stream in self._streams]
        if not all(lines):
            raise BenchError(f"a process of the side {self.name} has ended")
        told = [json.loads(line) for line in lines]
        own_s = sum(one["cpu_s"] for one in told)
        return {
            "s": max(one["s"] for one in told) / steps,
            "cpu_s": (own_s + self._daemon_cpu_s() - before_s) / steps,
            "own_cpu_s": own_s / steps,
            "profile": told[0].get("profile", ""),
        }

    def _daemon_cpu_s(self) -> float:
        times = [daemon.cpu_times() for daemon in self._daemons]
        return sum(one.user + one.system for one in times)


@contextmanager
def job_side(case: Case, folder: Path, listener: socket.socket) -> Iterator[Side]:
    """A job on as many daemons as it has members."""
    with LocalMesh(NAMES[: case.members], lambda _text: None) as mesh, ExitStack() as stack:
        text = Path(learnerturns.__file__).read_text()
        port = str(listener.getsockname()[1])
        options = {"args": ("job", case.model, port), "codec": case.codec, "hash_every": 100}
        submitted = jobs.submit(mesh.daemons[0], folder, text, **options)
        try:
            streams = connected(listener, case.members, stack)
        except TimeoutError:
            seen = jobs.summary(mesh.daemons[0], submitted.job)
            raise BenchError(f"{case.name}: the job is {seen.state}: {seen.error}") from None
        yield Side("job", streams, [psutil.Process(daemon.process.pid) for daemon in mesh.daemons])
        stack.close()
        ended = jobs.ended(mesh.daemons[0], submitted.job)
        if ended.state != "succeeded":
            raise BenchError(f"{case.name}: the job {ended.state}: {ended.error}")


@contextmanager
def torch_side(case: Case, folder: Path, listener: socket.socket) -> Iterator[Side]:
    """Plain torch, or DDP over gloo."""
    port = str(listener.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    store = folder / "store"
    with ExitStack() as stack:
        children = []
        for rank in range(case.members):
            side = ["ddp", case.model, port, str(rank), str(case.members), str(store)]
            arguments = ["plain", case.model, port] if case.members == 1 else side
            command = [sys.executable, learnerturns.__file__, *arguments]
            children.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
        try:
            yield Side("plain" if case.members == 1 else "ddp", connected(listener, case.members, stack), [])
            stack.close()
        finally:
            for child in children:
                try:
                    child.wait(CONNECT_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()


def connected(listener: socket.socket, members: int, stack: ExitStack) -> list[TextIO]:
    """The lines to and from each process of a side, by rank."""
    streams: dict[int, TextIO] = {}
    for _ in range(members):
        stream, _ = listener.accept()
        stream.settimeout(TURN_TIMEOUT_S)
        stack.enter_context(stream)
        lines = stack.enter_context(stream.makefile("rw"))
        streams[json.loads(lines.readline())["rank"]] = lines
    return [streams[rank] for rank in sorted(streams)]


def measure(case: Case, turns: int, *, profile: bool) -> dict[str, Any]:
    """Both sides of a case. Raises BenchError and what the mesh raises."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-bench-")))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(CONNECT_TIMEOUT_S)
        torch_only = stack.enter_context(torch_side(case, folder, listener))
        job = stack.enter_context(job_side(case, folder, listener))
        taken: dict[str, list[dict[str, Any]]] = {"torch": [], "job": []}
        load_before = os.getloadavg()[0]
        for turn in range(WARM_UP_TURNS + turns):
            for name, side in (("torch", torch_only), ("job", job)):
                told = side.turn(case.steps)
                if turn >= WARM_UP_TURNS:
                    taken[name].append(told)
        pairs = list(zip(taken["torch"], taken["job"], strict=True))
        found = {
            "case": case.name,
            "beside": torch_only.name,
            "speed": _spread([one["s"] / other["s"] for one, other in pairs]),
            "cpu": _spread([other["cpu_s"] / one["cpu_s"] for one, other in pairs]),
            "learner_cpu": _spread([other["own_cpu_s"] / one["own_cpu_s"] for one, other in pairs]),
            "torch_ms": round(1000 * median(one["s"] for one in taken["torch"]), 3),
            "job_ms": round(1000 * median(one["s"] for one in taken["job"]), 3),
            "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        }
        if profile:
            for name, side in (("torch", torch_only), ("job", job)):
                print(f"-- {case.name}, {name}, rank 0, {case.steps} steps")
                print(re.sub(r"(?m)^\s*$\n", "", side.turn(case.steps, profile=True)["profile"]))
    return found


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"median": round(median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3)}


def row(found: dict[str, Any]) -> str:
    """A case as a line of the table: medians, with the least and the most."""
    speed, cpu, own = (
        "{median:.2f} ({min:.2f} to {max:.2f})".format(**found[name]) for name in ("speed", "cpu", "learner_cpu")
    )
    load = " to ".join(f"{one:g}" for one in found["load"])
    times = f"{found['torch_ms']:g} | {found['job_ms']:g}"
    return f"| {found['case']} | {found['beside']} | {times} | {speed} | {cpu} | {own} | {load} |"


COLUMNS = (
    "| model/members/codec | beside | its step, ms | the job's | speed: job / beside | CPU: job / beside "
    "| CPU without daemons | load |"
)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.learner_path", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="only the cases whose name begins so, as resnet/1")
    parser.add_argument("--turns", type=int, default=6, help="of each side")
    parser.add_argument("--profile", action="store_true", help="also where a learner's time goes, by function")
    parser.add_argument("--json", action="store_true", help="one JSON object a line for every case")
    options = parser.parse_args()
    try:
        if not options.json:
            print(f"{COLUMNS}\n|{'---|' * (COLUMNS.count('|') - 1)}", flush=True)
        for case in CASES:
            if case.name.startswith(options.only):
                found = measure(case, options.turns, profile=options.profile)
                print(json.dumps(found) if options.json else row(found), flush=True)
    except (BenchError, LocalMeshError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
