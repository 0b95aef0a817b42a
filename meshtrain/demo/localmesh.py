"""Several daemons on this machine, paired and linked as several laptops would be: for the demo and the tests.

They are started, paired by code through the local endpoint, and found over mDNS on the loopback interface, exactly as
on separate machines; nothing knows that they share one.

Nothing outlives the process that made them, not even if it is killed: the daemons end with their standard input, whose
other end it holds. Their folder is removed by the next one, which finds it by its lock.
"""

import contextlib
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from meshtrain.client import Client, ConnectionLost, DaemonNotRunning, RequestError
from meshtrain.machine import FolderLock, detached, is_own, loopback_interface, portable
from meshwire.message_base import Wire
from meshwire.messages.local import GetPeers, PairCode, Paired, PairHost, PairJoin, Peers, Shutdown

START_TIMEOUT_S = 20.0
PAIR_TIMEOUT_S = 30.0
LINK_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 15.0
FOLDER_PREFIX = "meshtrain-"
# In the folder, held by whoever made it and by its daemons. One that is held in another way is not found: to whoever
# does not lock as its holder does it would look free.
LOCK, TWIN_LOCK = "lock", "twin-lock"

Say = Callable[[str], None]


class LocalMeshError(Exception):
    """A daemon did not start, or the daemons did not find each other; says why."""


class LocalDaemon:
    """One `meshtraind run` on the loopback interface.

    Args:
        prefix: words in front of its command, which must replace themselves by it.
        patience_s: of `--patience`; None: as the daemon chooses.
        inherits: descriptors that it keeps open as long as it lives.
    """

    def __init__(
        self,
        name: str,
        data_dir: Path,
        prefix: Sequence[str] = (),
        patience_s: float | None = None,
        inherits: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.data_dir = data_dir
        data_dir.mkdir(mode=0o700, parents=True)
        self.log_path = data_dir / "daemon.log"
        self.client: Client | None = None
        run = [sys.executable, "-m", "meshtraind", "run", "--listen", "127.0.0.1:0"]
        run += ["--interface", loopback_interface(), "--end-with-stdin"]
        if patience_s is not None:
            run.append(f"--patience={patience_s:g}")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, *run, "--name", name, "--data-dir", str(data_dir)],
                stdin=subprocess.PIPE,  # its end is this process's
                stdout=log,
                stderr=log,
                pass_fds=inherits,
                **detached(),  # ctrl-C is for the caller, who stops its daemons itself
            )

    def wait(self) -> None:
        """Waits until it answers."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.client = Client.connect(self.data_dir)
                return
            except DaemonNotRunning:
                if self.process.poll() is not None or time.monotonic() > deadline_s:
                    raise LocalMeshError(f"the daemon {self.name} did not start:\n{self.log_tail()}") from None
                time.sleep(0.05)

    def request(self, body: Wire, timeout_s: float, name: str, on_event: Callable[[Wire], None] | None = None) -> Wire:
        """Asks this daemon."""
        assert self.client is not None
        return self.client.request(body, timeout_s=timeout_s, name=name, on_event=on_event)

    def log_tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-15:])

    def ask_to_stop(self) -> None:
        """Asks it to end, and does not wait for that."""
        if self.client is not None:
            with contextlib.suppress(RequestError, ConnectionLost, TimeoutError, OSError):
                self.client.request(Shutdown(), timeout_s=REQUEST_TIMEOUT_S, name="stop of the daemon")
            self.client.close()
            self.client = None
        else:
            self.process.terminate()

    def stop(self) -> None:
        """Ends it, and returns when it is gone."""
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


class LocalMesh:
    """As many daemons as there are names, linked to each other between entering and leaving the context.

    Args:
        names: of the devices.
        say: gets a line for each thing that happens.
        patience_s: of every daemon.

    Raises:
        LocalMeshError: on entering.
    """

    def __init__(
        self,
        names: Sequence[str],
        say: Say,
        patience_s: float | None = None,
    ) -> None:
        self.daemons: list[LocalDaemon] = []
        self._names = names
        self._say = say
        self._patience_s = patience_s
        self.folder = Path()
        self._lock: FolderLock | None = None

    def __enter__(self) -> Self:
        remove_left_behind(Path(tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        try:
            self._lock = FolderLock(self.folder / lock_name(), make=True)
            self._say(f"starting {len(self._names)} daemons, as {len(self._names)} laptops would")
            for name in self._names:
                data_dir = self.folder / name
                prefix = self.prefix(data_dir)
                self.daemons.append(
                    LocalDaemon(name, data_dir, prefix, self._patience_s, inherits=self._lock.inherited)
                )
            for daemon in self.daemons:
                daemon.wait()
            _pair_all(self.daemons, self._say)
            wait_linked(self.daemons)
            self._say("every daemon has found the others over mDNS and holds a link to each")
        except (RequestError, ConnectionLost, DaemonNotRunning, TimeoutError, OSError) as error:
            tails = self.log_tails()
            self._stop()
            raise LocalMeshError(f"{error}{tails}") from error
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop()

    def prefix(self, data_dir: Path) -> Sequence[str]:
        """`LocalDaemon`'s prefix for the daemon of a data folder: none, but in meshes that are built on this one."""
        return ()

    def log_tails(self) -> str:
        """What daemons that died have said."""
        dead = [daemon for daemon in self.daemons if daemon.process.poll() is not None]
        return "".join(f"\nthe daemon {daemon.name} has ended:\n{daemon.log_tail()}" for daemon in dead)

    def _stop(self) -> None:
        for daemon in self.daemons:
            daemon.ask_to_stop()
        for daemon in self.daemons:
            daemon.stop()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        shutil.rmtree(self.folder, ignore_errors=True)


def lock_name() -> str:
    """How a mesh's lock is called, as this process locks."""
    return TWIN_LOCK if portable() else LOCK


def remove_left_behind(parent: Path) -> None:
    """Removes the folders of meshes whose process was killed, and of whose daemons none runs any more."""
    for lock in parent.glob(f"{FOLDER_PREFIX}*/{lock_name()}"):
        with contextlib.suppress(OSError):  # in use, or removed meanwhile
            if not is_own(lock.parent):
                continue
            FolderLock(lock).release()  # nobody takes it again
            shutil.rmtree(lock.parent, ignore_errors=True)


def _pair_all(daemons: list[LocalDaemon], say: Say) -> None:
    """Each with the one before it, by a code, through the same requests that `meshtrain pair` makes; the others are
    introduced to each other."""
    for host, guest in itertools.pairwise(daemons):
        code = _pair(host, guest)
        say(f"paired {guest.name} with {host.name} by the code {code}")


def _pair(host: LocalDaemon, guest: LocalDaemon) -> str:
    codes: list[str] = []

    def on_code(event: Wire) -> None:
        if isinstance(event, PairCode):
            codes.append(event.code)
            guest.request(PairJoin(code=event.code, at=f"127.0.0.1:{event.port}"), PAIR_TIMEOUT_S, "pairing")

    reply = host.request(PairHost(), PAIR_TIMEOUT_S, "pairing", on_code)
    if not isinstance(reply, Paired):
        raise LocalMeshError(f"{host.name} answered pairing with {type(reply).__name__}")
    return codes[0]


def wait_linked(daemons: Sequence[LocalDaemon]) -> None:
    """Returns when each holds a link to each. Raises LocalMeshError."""
    deadline_s = time.monotonic() + LINK_TIMEOUT_S
    for daemon in daemons:
        while True:
            reply = daemon.request(GetPeers(), REQUEST_TIMEOUT_S, "list of peers")
            assert isinstance(reply, Peers)
            if sum(peer.state == "linked" for peer in reply.peers) == len(daemons) - 1:
                break
            if time.monotonic() > deadline_s:
                states = ", ".join(f"{peer.name} is {peer.state}" for peer in reply.peers)
                raise LocalMeshError(f"{daemon.name} has not found the others in {LINK_TIMEOUT_S:.0f} s: {states}")
            time.sleep(0.05)
