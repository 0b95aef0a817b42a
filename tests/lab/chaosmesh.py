"""Real daemons on this machine whose links all pass the chaos proxy; they can be killed, frozen and started again.

Daemon i listens on 127.N.0.i. Daemon d finds daemon t at 127.N.d.t, where the proxy listens, and t sees d come from
127.N.t.d, which is where t would find d: whatever a daemon learns of where others are is a proxied address, on one port
for all. Addresses that it hears from third daemons are theirs alone; there the proxy resets who is not their dialler.
The daemons are pinned by each other beforehand, and mDNS is off.
"""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import psutil

from meshtrain.client import Client, ConnectionLost, DaemonNotRunning, RequestError
from meshtrain.demo.localmesh import LocalDaemon, LocalMeshError
from meshtraind.trust.identity import Identity, load_or_create
from meshtraind.trust.pins import Pin, PinTable
from meshwire.addresses import Address
from meshwire.message_base import Wire
from meshwire.messages.local import GetPeers, Peers
from tests.lab.chaosproxy import ChaosProxy, HostPort, ProxyThread, Route

PORT = 29_611  # below the range of outgoing connections
NETWORKS = range(64, 224)  # the N of 127.N.0.0
NAMES = ("anna", "bert", "cleo", "dora", "emil", "fred", "gina", "hugo", "ines", "jens")
LINK_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 10.0
POLL_S = 0.05
UNANSWERED = (RequestError, ConnectionLost, DaemonNotRunning, TimeoutError, OSError)


class Machine(Protocol):
    """What a daemon may have for itself of a machine: `tests.bench.soakhost`."""

    @property
    def prefix(self) -> Sequence[str]:
        """Words in front of its command, of the next start."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables beside those of this process."""

    def close(self) -> None:
        """The daemon has ended, and its data folder is needed no more."""


class ChaosDaemon(LocalDaemon):
    """One `meshtraind run` that can be ended and started again with the same data folder.

    Attributes:
        process: of the newest start.
        started_s: monotonic time of it.
        frozen: stopped by SIGSTOP.
        killed: ended by `kill`.
    """

    def __init__(
        self, name: str, data_dir: Path, host: str, patience_s: float | None, machine: Machine | None = None
    ) -> None:
        self.name = name
        self.data_dir = data_dir
        self.log_path = data_dir / "daemon.log"
        self.client = None
        self.frozen = False
        self._host = host
        self._patience_s = patience_s
        self._machine = machine
        self.start()

    def start(self) -> None:
        """Starts it; `wait` returns when it answers."""
        run = [sys.executable, "-m", "meshtraind", "run", "--listen", f"{self._host}:{PORT}", "--no-mdns"]
        if self._patience_s is not None:
            run.append(f"--patience={self._patience_s:g}")
        prefix = self._machine.prefix if self._machine is not None else ()
        environment = self._machine.environment if self._machine is not None else {}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, *run, "--name", self.name, "--data-dir", str(self.data_dir)],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # ctrl-C is for the caller, who stops its daemons itself
            )
        self.started_s = time.monotonic()
        self.frozen = False
        self.killed = False

    @property
    def up(self) -> bool:
        """Running, and not frozen."""
        return not self.frozen and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL; its learners end with it. Returns when it is gone."""
        self._forget()
        self.killed = True
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP of the daemon and its learners: a laptop whose lid was closed."""
        self.frozen = True
        self.process.send_signal(signal.SIGSTOP)
        self._signal_learners(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal_learners(signal.SIGCONT)
        self.process.send_signal(signal.SIGCONT)
        self.frozen = False

    def learners(self) -> list[psutil.Process]:
        """The processes that this daemon has started."""
        try:
            return psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return []

    def kill_learner(self) -> bool:
        """SIGKILL of its learners; False when there was none."""
        return self._signal_learners(signal.SIGKILL)

    def _signal_learners(self, number: signal.Signals) -> bool:
        found = False
        for learner in self.learners():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                learner.send_signal(number)
                found = True
        return found

    def ask(self, body: Wire, name: str) -> Wire | None:
        """Its answer; None when it is not up, or does not answer as a running daemon would."""
        if not self.up:
            return None
        try:
            if self.client is None:
                self.client = Client.connect(self.data_dir)
            return self.request(body, REQUEST_TIMEOUT_S, name)
        except UNANSWERED:
            self._forget()
            return None

    def dials_from(self, client: HostPort) -> bool:
        """Whether a socket at this address is this daemon's."""
        try:
            sockets = psutil.Process(self.process.pid).net_connections("tcp4")
        except psutil.NoSuchProcess:
            return False
        return any(tuple(one.laddr) == client for one in sockets if one.laddr)

    def _forget(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None

    def ask_to_stop(self) -> None:
        """Begins its end."""
        if self.process.poll() is None:
            if self.frozen:
                self.thaw()
            self.process.terminate()
        self._forget()


class ChaosMesh:
    """As many daemons as are asked for, linked through the proxy between entering and leaving the context.

    Args:
        peers: how many, at most 10.
        seed: of the proxy.
        patience_s: of every daemon; None: as the daemon chooses.
        station_bytes_per_s: what each peer can send, and receive; None: no limit.
        keep: leave the data folders where they are.
        machine: makes the machine of the daemon with this data folder, while that is empty.

    Raises:
        LocalMeshError: on entering.
    """

    def __init__(
        self,
        peers: int,
        *,
        seed: int = 0,
        patience_s: float | None = None,
        station_bytes_per_s: float | None = None,
        keep: bool = False,
        machine: Callable[[Path], Machine] | None = None,
    ) -> None:
        self.names = NAMES[:peers]
        self.daemons: dict[str, ChaosDaemon] = {}
        self.folder = Path()
        self._seed = seed
        self._patience_s = patience_s
        self._station_bytes_per_s = station_bytes_per_s
        self._keep = keep
        self._machine = machine
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="meshtrain-chaos-"))
            if not self._keep:
                stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            network = stack.enter_context(_Network())
            routes = [
                Route(
                    dialler,
                    target,
                    listen=(network.host(d + 1, t + 1), PORT),
                    to=(network.host(0, t + 1), PORT),
                    source=network.host(t + 1, d + 1),
                )
                for (d, dialler), (t, target) in itertools.permutations(enumerate(self.names), 2)
            ]
            make = lambda: ChaosProxy(  # noqa: E731
                routes, seed=self._seed, station_bytes_per_s=self._station_bytes_per_s, admit=self._admitted
            )
            self._proxy = stack.enter_context(ProxyThread(make))
            machines = self._make_folders(stack)
            self._pin_all(routes)
            stack.callback(self._stop)
            for index, name in enumerate(self.names):
                host = network.host(0, index + 1)
                self.daemons[name] = ChaosDaemon(name, self.folder / name, host, self._patience_s, machines.get(name))
            for daemon in self.daemons.values():
                daemon.wait()
            self.wait_linked()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def proxy(self, verb: Callable[[ChaosProxy], None]) -> None:
        """Does something to the links; it has happened when this returns."""
        self._proxy.do(verb)

    def linked(self, name: str) -> set[str]:
        """The names with which a daemon holds a link; empty when it does not answer."""
        reply = self.daemons[name].ask(GetPeers(), "list of peers")
        return {peer.name for peer in reply.peers if peer.state == "linked"} if isinstance(reply, Peers) else set()

    def wait_linked(self, names: Sequence[str] | None = None) -> None:
        """Until each of these has a link to each other. Raises LocalMeshError."""
        wanted = set(self.names if names is None else names)
        deadline_s = time.monotonic() + LINK_TIMEOUT_S
        for name in sorted(wanted):
            while missing := wanted - {name} - self.linked(name):
                if time.monotonic() > deadline_s:
                    tail = self.daemons[name].log_tail()
                    raise LocalMeshError(f"{name} has no link to {', '.join(sorted(missing))}:\n{tail}")
                time.sleep(POLL_S)

    def _admitted(self, route: Route, client: HostPort) -> bool:
        daemon = self.daemons.get(route.dialler)
        return daemon is not None and daemon.dials_from(client)

    def _make_folders(self, stack: contextlib.ExitStack) -> Mapping[str, Machine]:
        """The data folders, on machines of their own where there are such. These are closed with the stack."""
        machines: dict[str, Machine] = {}
        for name in self.names:
            (self.folder / name).mkdir(mode=0o700)
            if self._machine is not None:
                machines[name] = self._machine(self.folder / name)
                stack.callback(machines[name].close)
        return machines

    def _pin_all(self, routes: Sequence[Route]) -> None:
        """Every two, as pairing does, with the proxied addresses."""
        identities: dict[str, Identity] = {}
        for name in self.names:
            identities[name] = load_or_create(self.folder / name, name)
        for name in self.names:
            with contextlib.closing(PinTable(self.folder / name / "pins.db")) as pins:
                for route in routes:
                    if route.dialler == name:
                        other = identities[route.target]
                        pin = Pin(
                            device_id=other.device_id,
                            name=other.name,
                            certificate_pem=other.certificate_pem,
                            added_at=time.time(),
                            added_by=identities[name].device_id,
                            last_addresses=(Address(host=route.listen[0], port=route.listen[1]),),
                        )
                        pins.add(pin)

    def _stop(self) -> None:
        for daemon in self.daemons.values():
            daemon.ask_to_stop()
        for daemon in self.daemons.values():
            daemon.stop()


class _Network:
    """127.N.0.0 for an N that no other mesh on this machine has."""

    def __enter__(self) -> Self:
        for offset in range(len(NETWORKS)):
            self._number = NETWORKS[(os.getpid() + offset) % len(NETWORKS)]
            try:
                self._held = socket.create_server((self.host(254, 254), PORT))
            except OSError:
                continue
            return self
        raise LocalMeshError(f"no network from 127.{NETWORKS[0]}.0.0 to 127.{NETWORKS[-1]}.0.0 is free")

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._held.close()

    def host(self, third: int, fourth: int) -> str:
        return f"127.{self._number}.{third}.{fourth}"
