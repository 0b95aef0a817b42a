"""Live daemons that are attacked: three laptops and an attacker's machine, what attacks cost them, and what may cost.

With root each of the four is a network namespace on one switch, and this process is on the attacker's. Without, the
daemons listen on loopback, and what needs a network of its own is left out.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from meshtrain.client import Client, ConnectionLost, DaemonNotRunning, RequestError
from meshtrain.demo.localmesh import LocalDaemon, LocalMeshError
from meshtraind.trust.identity import Identity, load_or_create
from meshtraind.trust.pins import Pin, PinTable
from meshwire import limits
from meshwire.addresses import DEFAULT_PORT, Address
from meshwire.jobs.files import human_bytes
from meshwire.messages.job import Found, JobSummary
from meshwire.messages.local import GetJobs, GetPeers, GetStatus, IntroductionPolicy, Peers, Shutdown, Status
from tests.bench.liar import Liar, LiarLink, Serve
from tests.bench.soakwatch import use_of
from tests.daemon import realjobs as jobs
from tests.lab.lab import Lab

NAMES = ("anna", "bert", "cleo")
ATTACKER = len(NAMES)  # its station
LIARS = ("mallory", "moriarty", "morgana")  # one for each daemon
RATE_MBIT = 300.0  # a good home WiFi: floods come as fast as such a network brings them
COMMAND_TIMEOUT_S = 60.0
LINK_TIMEOUT_S = 30.0
END_TIMEOUT_S = 15.0
POLL_S = 0.25
SHOWN_CHARS = 200
UNANSWERED = (RequestError, ConnectionLost, DaemonNotRunning, TimeoutError, OSError)
TRACEBACK = b"Traceback (most recent call last)"
ERROR = b" ERROR "  # what others say is no error of the daemon's


@dataclass(frozen=True)
class Bounds:
    """What an attack may cost each daemon.

    Attributes:
        status_s: the longest wait for `meshtrain status`: a person takes more for a hang.
        memory_bytes: growth that is left afterwards: what allocators and caches keep of a busy minute.
        peak_bytes: growth meanwhile: a link's queues (LINK_BACKLOG_BYTES_MAX) on several links, with Python's share.
        descriptors, threads: growth that is left when handshakes have timed out. Threads are those of asyncio's pool,
            which keeps what it has once started.
        disk_bytes: growth that is left: job folders, history and blobs of what was refused.
        log_bytes: written in all, and
        log_bytes_per_s: for each second: 1 KiB a second is 86 MB a day, of which rotation keeps the newest.
        rounds_gap_s: the longest time without a round of the two others' job: twice the patience after which a link
            counts as lost.
    """

    status_s: float = 2.0
    memory_bytes: int = 64 * limits.MIB
    peak_bytes: int = 192 * limits.MIB
    descriptors: int = 8
    threads: int = min(32, (os.cpu_count() or 1) + 4) + 2
    disk_bytes: int = 16 * limits.MIB
    log_bytes: int = 32 * limits.KIB
    log_bytes_per_s: int = 1 * limits.KIB
    rounds_gap_s: float = 2 * limits.PATIENCE_S


class NotHeldError(Exception):
    """An attack had success; says how."""


class LeftOutError(Exception):
    """An attack could not be tried here; says why."""


class Victim(LocalDaemon):
    """A daemon as `meshtrain up` starts it.

    Args:
        prefix: words in front of the command: a namespace.
        options: of `meshtrain up`.

    Attributes:
        pid: of the daemon.
        steady: it runs, and is not being restarted.
        address: where its peers reach it.
    """

    def __init__(self, name: str, data_dir: Path, prefix: Sequence[str], options: Sequence[str]) -> None:
        self.name = name
        self.data_dir = data_dir
        self.log_path = data_dir / "daemon.log"
        self.client: Client | None = None
        self.pid = 0
        self.steady = False
        self.address = Address(host="127.0.0.1", port=DEFAULT_PORT)
        self._prefix = prefix
        self._options = options

    def start(self, host: str, environment: dict[str, str]) -> None:
        """Raises LocalMeshError."""
        command = [sys.executable, "-m", "meshtrain.cli", "up", "--name", self.name, "--data-dir", str(self.data_dir)]
        done = subprocess.run(
            [*self._prefix, *command, *self._options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise LocalMeshError(f"{self.name} did not start: {done.stdout}{done.stderr}")
        self.client = Client.connect(self.data_dir)
        status = self.status()
        self.pid = status.pid
        self.address = Address(host=host, port=int(status.listen.rpartition(":")[2]))
        self.steady = True

    @property
    def up(self) -> bool:
        """Whether its process runs."""
        return psutil.pid_exists(self.pid) and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE

    def status(self) -> Status:
        """Raises what a request raises."""
        reply = self.request(GetStatus(), jobs.TIMEOUT_S, "status")
        assert isinstance(reply, Status)
        return reply

    def peers(self) -> Peers:
        """As `meshtrain peers`."""
        reply = self.request(GetPeers(), jobs.TIMEOUT_S, "peers")
        assert isinstance(reply, Peers)
        return reply

    def linked(self) -> set[str]:
        """Names of the devices that it has a link to."""
        return {peer.name for peer in self.peers().peers if peer.state == "linked"}

    def learners(self) -> list[psutil.Process]:
        """The processes that it has started."""
        return psutil.Process(self.pid).children()

    def stop(self) -> None:
        """Returns when it is gone."""
        self.steady = False
        if self.client is not None:
            with contextlib.suppress(*UNANSWERED):
                self.client.request(Shutdown(), timeout_s=END_TIMEOUT_S, name="stop of the daemon")
            self.client.close()
            self.client = None
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while self.pid and self.up:
            if time.monotonic() > deadline_s:
                psutil.Process(self.pid).kill()
            time.sleep(POLL_S)


class Log:
    """What a daemon writes into its log, read as it grows and across rotation."""

    def __init__(self, path: Path) -> None:
        self.written_bytes = 0
        self.tracebacks = 0
        self.error = ""  # the last line of the first traceback
        self.errors = 0  # lines of level ERROR,
        self.first_error = ""
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._inode = path.stat().st_ino if path.exists() else 0
        self._rest = b""
        self._in_traceback = False

    def read(self) -> None:
        """Looks at what has come."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:  # rotated
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        self.written_bytes += len(data)
        whole, _, self._rest = (self._rest + data).rpartition(b"\n")
        for line in whole.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        if TRACEBACK in line:
            self.tracebacks += 1
            self._in_traceback = True
        elif self._in_traceback and line and not line.startswith((b" ", b"\t")):
            self._in_traceback = False
            self.error = self.error or line.decode(errors="replace")[:SHOWN_CHARS]
        if ERROR in line:
            self.errors += 1
            self.first_error = self.first_error or line.partition(ERROR)[2].decode(errors="replace")[:SHOWN_CHARS]


@dataclass
class Cost:
    """Of one daemon, during one attack."""

    pid: int
    log: Log
    resident_bytes: int
    descriptors: int
    threads: int
    disk_bytes: int
    peak_bytes: int = 0
    status_s: float = 0.0
    unanswered: str = ""


@dataclass
class Watch:
    """Looks at the daemons while an attack goes on, from a thread of its own."""

    victims: Sequence[Victim]
    job: str | None = None  # of bert and cleo
    _costs: dict[str, Cost] = field(default_factory=dict)
    _clients: dict[str, tuple[int, Client]] = field(default_factory=dict)  # with the process id of who is asked
    _rounds: int = 0
    _round_s: float = 0.0
    _gap_s: float = 0.0
    _began_s: float = 0.0

    def begin(self) -> None:
        """Before an attack."""
        self._began_s = self._round_s = time.monotonic()
        self._gap_s = 0.0
        self._rounds = 0
        for victim in self.victims:
            use = use_of(victim.pid)
            if use is None:
                raise LocalMeshError(f"{victim.name} has ended")
            disk_bytes = disk_bytes_of(victim.data_dir)
            self._costs[victim.name] = Cost(
                victim.pid, Log(victim.log_path), use.resident_bytes, use.descriptors, use.threads, disk_bytes
            )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)
        self._thread.start()

    def _look_on(self) -> None:
        while not self._stop.wait(POLL_S):
            for victim in self.victims:
                self._look(victim)
            if self.job is not None:
                self._look_at_rounds()

    def _look(self, victim: Victim) -> None:
        cost = self._costs[victim.name]
        cost.log.read()
        if not victim.steady:
            return
        cost.pid = victim.pid  # it may have been restarted
        use = use_of(cost.pid)
        if use is None:
            if victim.steady:
                cost.unanswered = cost.unanswered or "it has ended"
            return
        cost.peak_bytes = max(cost.peak_bytes, use.resident_bytes)
        asked_s = time.monotonic()
        try:
            self._client(victim).request(GetStatus(), timeout_s=jobs.TIMEOUT_S, name="status")
        except UNANSWERED as error:
            self._forget(victim)
            if victim.pid == cost.pid and victim.steady:
                cost.unanswered = cost.unanswered or str(error)
            return
        cost.status_s = max(cost.status_s, time.monotonic() - asked_s)

    def _client(self, victim: Victim) -> Client:
        """A connection to the daemon that runs now."""
        pid, client = self._clients.get(victim.name, (0, None))
        if client is None or pid != victim.pid:
            self._forget(victim)
            client = Client.connect(victim.data_dir)
            self._clients[victim.name] = victim.pid, client
        return client

    def _forget(self, victim: Victim) -> None:
        _, client = self._clients.pop(victim.name, (0, None))
        if client is not None:
            client.close()

    def _look_at_rounds(self) -> None:
        bert = self.victims[1]
        with contextlib.suppress(*UNANSWERED):
            found = self._client(bert).request(GetJobs(prefix=self.job or ""), timeout_s=jobs.TIMEOUT_S, name="jobs")
            rounds = found.jobs[0].rounds if isinstance(found, Found) and found.jobs else 0
            if rounds > self._rounds:
                self._rounds, self._round_s = rounds, time.monotonic()
        self._gap_s = max(self._gap_s, time.monotonic() - self._round_s)

    def end(self, bounds: Bounds) -> list[str]:
        """After it. Waits until what has an end has ended; returns what exceeds the bounds."""
        duration_s = time.monotonic() - self._began_s
        deadline_s = time.monotonic() + limits.HANDSHAKE_TIMEOUT_S + 2.0
        while time.monotonic() < deadline_s and any(self._left(victim, bounds) for victim in self.victims):
            time.sleep(POLL_S)
        self._stop.set()
        self._thread.join()
        wrong = [text for victim in self.victims for text in self._exceeded(victim, bounds, duration_s)]
        if self.job is not None and self._gap_s > bounds.rounds_gap_s:
            wrong.append(f"the job of bert and cleo had no round for {self._gap_s:.1f} s")
        return wrong

    def peak_bytes(self, victim: Victim) -> int:
        """What this attack has made a daemon take of memory so far, at most."""
        cost = self._costs[victim.name]
        return max(0, cost.peak_bytes - cost.resident_bytes)

    def close(self) -> None:
        """Ends its connections."""
        for victim in self.victims:
            self._forget(victim)

    def _left(self, victim: Victim, bounds: Bounds) -> list[str]:
        """What is still held, though it should have been given back."""
        cost, use = self._costs[victim.name], use_of(victim.pid)
        if use is None or victim.pid != cost.pid:
            return []
        learners = 1 + len(victim.learners())
        grown = (
            ("descriptors", use.descriptors - cost.descriptors, bounds.descriptors * learners),
            ("threads", use.threads - cost.threads, bounds.threads),
        )
        return [f"{victim.name} keeps {more} more {what}" for what, more, most in grown if more > most]

    def _exceeded(self, victim: Victim, bounds: Bounds, duration_s: float) -> list[str]:
        cost = self._costs[victim.name]
        cost.log.read()
        name, wrong = victim.name, self._left(victim, bounds)
        if cost.unanswered:
            wrong.append(f"{name} did not answer `status`: {cost.unanswered}")
        if cost.status_s > bounds.status_s:
            wrong.append(f"`status` of {name} took {cost.status_s:.1f} s")
        if cost.log.tracebacks:
            wrong.append(f"{cost.log.tracebacks} tracebacks in the log of {name}, the first: {cost.log.error}")
        if cost.log.errors:
            wrong.append(f"{cost.log.errors} errors in the log of {name}, the first: {cost.log.first_error}")
        log_bytes = bounds.log_bytes + bounds.log_bytes_per_s * duration_s
        use = use_of(victim.pid)
        now_bytes = use.resident_bytes if use is not None and victim.pid == cost.pid else 0
        for what, grown, most in (
            ("wrote to its log", cost.log.written_bytes, log_bytes),
            ("took more memory, at the peak:", cost.peak_bytes - cost.resident_bytes, bounds.peak_bytes),
            ("keeps more memory:", now_bytes - cost.resident_bytes, bounds.memory_bytes),
            ("keeps more of the disk:", disk_bytes_of(victim.data_dir) - cost.disk_bytes, bounds.disk_bytes),
        ):
            if grown > most:
                wrong.append(f"{name} {what} {human_bytes(int(grown))}, at most {human_bytes(int(most))}")
        return wrong


def disk_bytes_of(folder: Path) -> int:
    """What lies in a data folder, the daemon's own log and jobs' logs excepted."""
    total_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if not name.startswith("daemon.log") and not parent.endswith("/logs"):
                with contextlib.suppress(FileNotFoundError):
                    total_bytes += os.lstat(Path(parent) / name).st_size
    return total_bytes


class Scene:
    """A context manager: the daemons run inside it, and nothing of them afterwards.

    Args:
        lab: a network of namespaces, whose last station is the attacker's; None: loopback.
        minutes: of the whole run; attacks take their share of it.
        seed: of everything that is drawn.

    Attributes:
        folder: of this run: the daemons' data folders, the attacker's files, and a folder for temporary files into
            which every user may write.
        job: that bert and cleo train, once it has begun.
    """

    def __init__(self, lab: Lab | None, minutes: float, seed: int) -> None:
        self.lab = lab
        self.seed = seed
        self.share = minutes / 15.0
        self.job: str | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="meshtrain-attack-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.folder.chmod(0o755)  # another user is not to be kept away by what this command has made
            self.temporary = self.folder / "tmp"
            self.temporary.mkdir()
            self.temporary.chmod(0o1777)
            self.attacker = self.folder / "attacker"
            self.attacker.mkdir()
            self.victims = [self._victim(index, name) for index, name in enumerate(NAMES)]
            stack.callback(self._stop)
            self._liars = [self._liar(identity) for identity in self._pin_all()]
            for liar in self._liars:
                stack.callback(liar.close)
            for victim in self.victims:
                self.start(victim)
            self.watch = Watch(self.victims)
            stack.callback(self.watch.close)
            self.wait_linked()
            if self.lab is not None:
                stack.enter_context(self.lab.inside(ATTACKER))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def anna(self) -> Victim:
        """Takes no part in the job."""
        return self.victims[0]

    @property
    def bert(self) -> Victim:
        """The job's first member."""
        return self.victims[1]

    @property
    def cleo(self) -> Victim:
        """The job's other member."""
        return self.victims[2]

    @property
    def host(self) -> str:
        """The attacker's address."""
        return self.lab.host(ATTACKER) if self.lab is not None else "127.0.0.1"

    @property
    def environment(self) -> dict[str, str]:
        """Of daemons: sockets and temporary files lie in this run's folder."""
        kept = {name: value for name, value in os.environ.items() if name not in ("XDG_RUNTIME_DIR", "JOURNAL_STREAM")}
        return kept | {"TMPDIR": str(self.temporary)}

    def liar(self, victim: Victim) -> Liar:
        """The paired device of this daemon that keeps to no rule."""
        return self._liars[self.victims.index(victim)]

    def seconds(self, whole_s: float) -> float:
        """How long something goes on that takes `whole_s` in a run of 15 minutes."""
        return max(1.0, whole_s * self.share)

    def start(self, victim: Victim) -> None:
        """Raises LocalMeshError."""
        host = self.lab.host(self.victims.index(victim)) if self.lab is not None else "127.0.0.1"
        victim.start(host, self.environment)

    def restart(self, victim: Victim) -> None:
        """As `meshtrain down` and `meshtrain up`."""
        victim.stop()
        self.start(victim)

    def wait_linked(self, timeout_s: float = LINK_TIMEOUT_S) -> float:
        """Until each daemon has a link to each other; returns how long it took. Raises TimeoutError."""
        began_s = time.monotonic()
        for victim in self.victims:
            while missing := set(NAMES) - {victim.name} - victim.linked():
                if time.monotonic() - began_s > timeout_s:
                    names = ", ".join(sorted(missing))
                    raise TimeoutError(f"{victim.name} has no link to {names} after {timeout_s:.0f} s")
                time.sleep(0.05)
        return time.monotonic() - began_s

    def begin_job(self) -> None:
        """Bert and cleo train a small model until they are told to stop."""
        self._work = self.folder / "job"
        self._work.mkdir()
        text = jobs.UNTIL_STOPPED.replace("optimizer.step()", "optimizer.step()\n        time.sleep(0.05)")
        options = {"args": (str(self._work / "stop"),), "on": ("bert", "cleo"), "hash_every": 10}
        self.job = jobs.submit(self.bert, self._work, text, **options).job
        jobs.wait_for(self.bert, self.job, lambda seen: seen.rounds > 3, "the first rounds")
        self.watch.job = self.job

    def end_job(self) -> JobSummary:
        """How it ends when its script may."""
        assert self.job is not None
        self.watch.job = None
        (self._work / "stop").touch()
        return jobs.ended(self.bert, self.job)

    def _victim(self, index: int, name: str) -> Victim:
        data_dir = self.folder / name
        data_dir.mkdir()
        data_dir.chmod(0o755)  # as a person made it, or an older version
        if self.lab is None:
            return Victim(name, data_dir, (), ("--listen", "127.0.0.1:0", "--interface", "lo"))
        return Victim(name, data_dir, self.lab.command(index, []), ("--interface", "eth0"))

    def _liar(self, identity: Identity) -> Liar:
        return Liar(identity, PinTable(self.attacker / identity.name / "pins.db"))

    def _pin_all(self) -> list[Identity]:
        """As pairing does; each daemon has one liar among its peers, too. Returns the liars."""
        identities: dict[str, Identity] = {}
        for name in (*NAMES, *LIARS):
            folder = self.folder / name if name in NAMES else self.attacker / name
            folder.mkdir(exist_ok=True)
            identities[name] = load_or_create(folder, name)
        groups = [set(NAMES), *({name, liar} for name, liar in zip(NAMES, LIARS, strict=True))]
        for group in groups:
            for name in group:
                folder = self.folder / name if name in NAMES else self.attacker / name
                with contextlib.closing(PinTable(folder / "pins.db")) as pins:
                    for other in group - {name}:
                        known = identities[other]
                        added_by = identities[name].device_id
                        pins.add(Pin(known.device_id, other, known.certificate_pem, time.time(), added_by))
                    if name != NAMES[0]:  # each liar stays one daemon's, and the first one is there to be introduced to
                        pins.introductions = IntroductionPolicy.NEVER
        return [identities[name] for name in LIARS]

    def _stop(self) -> None:
        for victim in self.victims:
            victim.stop()


@dataclass(frozen=True)
class Attack:
    """One thing that is tried.

    Attributes:
        tried: in words.
        run: returns what was seen; raises NotHeldError or LeftOutError.
        needs_lab: it takes a network of its own.
    """

    group: str
    name: str
    tried: str
    run: Callable[[Scene], Awaitable[str]]
    bounds: Bounds
    needs_lab: bool


ATTACKS: list[Attack] = []


def attack(
    group: str, *, bounds: Bounds | None = None, needs_lab: bool = False
) -> Callable[[Callable[[Scene], Awaitable[str]]], Callable[[Scene], Awaitable[str]]]:
    """Function decorator: its name is the attack's, its docstring what is tried."""

    def register(run: Callable[[Scene], Awaitable[str]]) -> Callable[[Scene], Awaitable[str]]:
        name = run.__name__.replace("_", " ")
        tried = " ".join((run.__doc__ or "").split())
        ATTACKS.append(Attack(group, name, tried, run, bounds or Bounds(), needs_lab))
        return run

    return register


async def in_thread(work: Callable[[], object]) -> object:
    """For requests to daemons, which block."""
    return await asyncio.to_thread(work)


async def linked(liar: Liar, victim: Victim, serve: Serve = lambda _wanted: None) -> LiarLink:
    """A link, tried again where the last one is still being closed. Raises NotHeldError."""
    for attempt in range(5):
        try:
            return await liar.connect(victim.address, serve)
        except (OSError, TimeoutError):
            await asyncio.sleep(0.1 * 2**attempt)
    raise NotHeldError(f"{victim.name} lets its paired device in no more")
