"""What is compared: the learners of a job, beside plain torch or ranks of DDP over gloo.

All processes of a comparison live at once, with one thread each, and take their steps in turn (A B A B); while one side
steps the others wait in a read. So a ratio pairs two turns of one round, and both paid for whatever else the
machine does.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

from meshtrain.demo.localmesh import LocalDaemon, LocalMesh
from tests.bench.goals import learnerturns
from tests.bench.overlap_lab import linked_stations
from tests.daemon import realjobs as jobs
from tests.lab.lab import Cell, Lab

NAMES = ("anna", "bert", "cleo", "dora", "emil", "fine", "gero", "hans")
CONNECT_TIMEOUT_S = 60.0
TURN_TIMEOUT_S = 240.0


class SidesError(Exception):
    """The measurement could not be made; says why."""


@dataclass(frozen=True)
class Work:
    """What both sides train.

    Attributes:
        model: a name that `learnerturns.made` knows.
        data: the folder with the digits, for the model that reads them.
    """

    model: str
    members: int
    seed: int = 0
    data: str | None = None


class Side:
    """The processes of one side, connected.

    Args:
        streams: to and from each learner or rank.
        pids: of these.
        daemons: whose CPU time and memory is this side's too.
    """

    def __init__(self, name: str, streams: list[TextIO], pids: list[int], daemons: list[psutil.Process]) -> None:
        self.name = name
        self._streams = streams
        self.learners = [psutil.Process(pid) for pid in pids]
        self.daemons = daemons

    def turn(self, steps: int, *, profile: bool = False, alone: bool = False) -> dict[str, Any]:
        """So many steps of every rank: seconds a step of the slowest, CPU seconds a step of all processes and of the
        learners alone."""
        before_s = self._daemon_cpu_s()
        told = self._ask({"steps": steps, "profile": profile, "alone": alone, "held_out": False})
        own_s = sum(one["cpu_s"] for one in told)
        return {
            "s": max(one["s"] for one in told) / steps,
            "cpu_s": (own_s + self._daemon_cpu_s() - before_s) / steps,
            "own_cpu_s": own_s / steps,
            "profile": told[0].get("profile", ""),
        }

    def held_out_loss(self) -> float:
        """The loss of the model as it is now, on samples that it was not trained on, in nats."""
        return float(self._ask({"held_out": True})[0]["loss"])

    def _ask(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        for stream in self._streams:
            stream.write(json.dumps(what) + "\n")
            stream.flush()
        lines = [stream.readline() for stream in self._streams]
        if not all(lines):
            raise SidesError(f"a process of the side {self.name} has ended")
        return [json.loads(line) for line in lines]

    def _daemon_cpu_s(self) -> float:
        times = [daemon.cpu_times() for daemon in self.daemons]
        return sum(one.user + one.system for one in times)


class Place:
    """Where the sides run: this machine's loopback, or the stations of a lab.

    Args:
        folder: for what both sides need; it must exist, and its path be short enough for a socket.
        lab: None: loopback.
    """

    def __init__(self, folder: Path, listener: socket.socket, lab: Lab | None) -> None:
        self._folder = folder
        self._listener = listener
        self._lab = lab
        self._sides = 0

    @contextmanager
    def daemons(self, members: int) -> Iterator[Sequence[LocalDaemon]]:
        """As many as that, linked to each other. Raises LocalMeshError, OverlapError."""
        if self._lab is not None:
            yield linked_stations(self._lab, NAMES[:members], self._folder)
            return
        with LocalMesh(NAMES[:members], lambda _text: None) as mesh:
            yield mesh.daemons

    @contextmanager
    def job(self, daemons: Sequence[LocalDaemon], work: Work, way: str, topology: str | None = None) -> Iterator[Side]:
        """The learners of a job on all these daemons.

        Args:
            way: CODEC[@SYNC] as typed; bsp without a SYNC.

        Raises:
            SidesError: it does not start, or does not succeed in the end.
        """
        codec, _, sync = way.partition("@")
        options = {"args": (self._told("job", work),), "codec": codec, "sync": sync or "bsp", "hash_every": 100}
        options |= {"topology": topology}
        with ExitStack() as stack:
            submitted = jobs.submit(daemons[0], self._own_folder(), Path(learnerturns.__file__).read_text(), **options)
            try:
                streams, pids = self._connected(work.members, stack)
            except TimeoutError:
                seen = jobs.summary(daemons[0], submitted.job)
                raise SidesError(f"{way}: the job is {seen.state}: {seen.error}") from None
            yield Side(way, streams, pids, [psutil.Process(one) for one in map(_pid, daemons)])
            stack.close()
            ended = jobs.ended(daemons[0], submitted.job)
            if ended.state != "succeeded" or ended.replicas_equal is False:
                raise SidesError(f"{way}: the job {ended.state}: {ended.error}, replicas equal: {ended.replicas_equal}")

    @contextmanager
    def torch(self, work: Work, hook: int | str | None = None, basis: int = 0) -> Iterator[Side]:
        """Plain torch for one member, else DDP; `hook`: with PowerSGD of this rank, from a first basis with this seed,
        or "fp16". Raises SidesError."""
        name = "plain" if work.members == 1 else "ddp" if hook is None else f"ddp, hook {hook}"
        store = str(self._own_folder() / "store")
        with ExitStack() as stack:
            children = []
            for rank in range(work.members):
                side = "plain" if work.members == 1 else "ddp"
                ddp = {"rank": rank, "members": work.members, "store": store, "hook": hook, "basis": basis}
                children.append(self._start(rank, [learnerturns.__file__, self._told(side, work, ddp)]))
            try:
                streams, pids = self._connected(work.members, stack)
                yield Side(name, streams, pids, [])
                stack.close()
                for child in children:
                    child.wait(CONNECT_TIMEOUT_S)
            except TimeoutError:
                raise SidesError(f"{name}: not all ranks came in {CONNECT_TIMEOUT_S:.0f} s") from None
            finally:
                for child in children:
                    child.kill()
                    child.wait()

    def _start(self, rank: int, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        interface = "lo" if self._lab is None else "eth0"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
        command = [sys.executable, *arguments]
        if self._lab is not None:
            return self._lab.run(rank, command, stdout=subprocess.DEVNULL, env=env)
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, start_new_session=True)

    def _told(self, side: str, work: Work, more: Mapping[str, Any] | None = None) -> str:
        at = self._listener.getsockname()
        return json.dumps({"side": side, "at": at, **asdict(work), **(more or {})})

    def _own_folder(self) -> Path:
        self._sides += 1
        folder = self._folder / f"side{self._sides}"
        folder.mkdir()
        return folder

    def _connected(self, members: int, stack: ExitStack) -> tuple[list[TextIO], list[int]]:
        """The lines to and from each process of a side, by rank, and who they are."""
        found: dict[int, tuple[TextIO, int]] = {}
        for _ in range(members):
            stream, _ = self._listener.accept()
            stream.settimeout(TURN_TIMEOUT_S)
            stack.enter_context(stream)
            lines = stack.enter_context(stream.makefile("rw"))
            hello = json.loads(lines.readline())
            found[hello["rank"]] = lines, hello["pid"]
        ordered = [found[rank] for rank in sorted(found)]
        return [lines for lines, _ in ordered], [pid for _, pid in ordered]


def _pid(daemon: LocalDaemon) -> int:
    return daemon.process.pid


@contextmanager
def place(members: int, rate_mbit: float | None = None, *, shared: bool = False) -> Iterator[Place]:
    """Loopback, or a lab in which every station can send and receive so much; `shared`: in which so much crosses the
    air of the one cell that all are in. Raises LabError."""
    with ExitStack() as stack:
        lab = None
        if rate_mbit is not None:
            made = Lab(members, cell=Cell(rate_mbit)) if shared else Lab(members, rate_mbit)
            lab = stack.enter_context(made)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "turns"))
        listener.listen()
        listener.settimeout(CONNECT_TIMEOUT_S)
        yield Place(folder, listener, lab)


def in_turn(
    sides: Sequence[Side], steps: int, turns: int, warm_up: Sequence[int] | None = None
) -> list[list[dict[str, Any]]]:
    """What the turns of each side took, after one that is not counted, of other lengths where these are given."""
    for side, first in zip(sides, warm_up or [steps] * len(sides), strict=True):
        side.turn(first)
    rounds = [[side.turn(steps) for side in sides] for _ in range(turns)]
    return [[took[at] for took in rounds] for at in range(len(sides))]
