"""What systems do differently: POSIX's way and its twin, side by side, keep the same promises."""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from meshtrain import machine as commands
from meshtrain.train.model.kept_state import _File
from meshtraind.learner.process import LearnerProcess
from meshtraind.learner.shared_memory import SharedMemory, SharedMemoryError
from meshtraind.machine.control_pipe import ASK_TO_END, CONTROL_VARIABLE, ENDED_CODE, ORPHANED_CODE
from meshtraind.machine.event_loop import accepted, serve_locally
from meshtraind.machine.file_lock import FileLock, LockHeldError
from meshtraind.machine.memory_file import MemoryFile
from meshtraind.machine.process_tree import ProcessTree
from meshtraind.runtime.open_below import folder_below, open_below
from meshwire.memory_layout.shared_slots import FILE_PREFIX, PORTABLE_VARIABLE, MemoryLayout
from tests.daemon.waiting import until

DEADLINE_S = 20.0
LAYOUT = MemoryLayout.for_bound(values=1024, staleness=0)


@pytest.fixture(params=["0", "1"], ids=["posix", "twin"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    """Whether the twins are used; what they put into files lies in the test's folder."""
    monkeypatch.setenv(PORTABLE_VARIABLE, request.param)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return bool(int(request.param))


def python(code: str, **more: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **more)


@pytest.mark.usefixtures("twin")
def test_a_lock_has_one_holder_who_is_named_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys; from pathlib import Path; from meshtraind.machine.file_lock import FileLock\n"
        "lock = FileLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LockHeldError, match=str(holder.pid)):
            FileLock(path)
        with pytest.raises(BlockingIOError):
            commands.FolderLock(path, shared=True)  # as `meshtrain down` asks
        holder.kill()
    again = FileLock(path)
    assert path.read_text() == f"{os.getpid()}\n"
    again.release()
    commands.FolderLock(path, shared=True).release()
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("twin")
def test_a_lock_whose_holder_cannot_be_written_is_nobodys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            FileLock(tmp_path / "lock")
    FileLock(tmp_path / "lock").release()


@pytest.mark.usefixtures("twin")
def test_a_folders_lock_appears_when_it_is_held(tmp_path: Path) -> None:
    """What can be had is nobody's: else the folder of a demo that begins could be removed as one that was killed."""
    lock = commands.FolderLock(tmp_path / "lock", make=True)
    assert (tmp_path / "lock").exists()
    with pytest.raises(BlockingIOError):
        commands.FolderLock(tmp_path / "lock")
    lock.release()
    commands.FolderLock(tmp_path / "lock").release()


def test_a_child_maps_the_memory_that_it_is_told_of(twin: bool) -> None:
    """M2: the learner sizes it, both see the same bytes, and when it is closed nothing is left."""
    memory = SharedMemory()
    try:
        told = memory.file.told
        assert told.startswith(FILE_PREFIX) == twin
        code = (
            "import mmap, os, sys; from meshtrain.machine import memory_descriptor\n"
            f"descriptor = memory_descriptor({told!r})\n"
            f"os.ftruncate(descriptor, {LAYOUT.total_bytes})\n"
            f"mmap.mmap(descriptor, {LAYOUT.total_bytes})[:4] = b'seen'"
        )
        subprocess.run([sys.executable, "-c", code], pass_fds=memory.file.inherited, check=True)
        memory.map(LAYOUT)
        assert bytes(memory.raw(0)[:4]) == b"seen"
        path = Path(told.removeprefix(FILE_PREFIX))
        assert not twin or path.stat().st_mode & 0o077 == 0
    finally:
        memory.close()
    assert not twin or not list(path.parent.iterdir())


def test_what_a_killed_daemon_leaves_goes_when_the_next_one_shares_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """M2: the twin's file has a name, which a killed process cannot take back; those in use stay."""
    monkeypatch.setenv(PORTABLE_VARIABLE, "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    code = (
        "import sys; from meshtraind.machine.memory_file import MemoryFile\n"
        "memory = MemoryFile('x'); print(memory.told, flush=True); sys.stdin.read()"
    )
    with python(code) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().decode().strip().removeprefix(FILE_PREFIX))
        first = MemoryFile("y")
        assert left.exists(), "its owner runs"
        owner.kill()
    second = MemoryFile("y")
    assert not left.exists()
    first.close()
    second.close()


def test_memory_that_cannot_be_had_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PORTABLE_VARIABLE, "1")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(SharedMemoryError, match="no memory can be shared with a learner"):
        SharedMemory()


def test_what_is_kept_begins_where_windows_can_map_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """J3: each region is mapped by itself, which Windows does at multiples of 64 KiB only."""
    monkeypatch.setenv(PORTABLE_VARIABLE, "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    memory = MemoryFile("kept")
    file = _File(memory.descriptor)
    file.empty()
    assert [file.take(5000)[0] % 65536 for _ in range(3)] == [0, 0, 0]
    assert memory.grows
    memory.close()


def lives(process: psutil.Process) -> bool:
    """Whether it has not ended; nobody may have asked for the exit code of one that has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # in between
        return False


@pytest.mark.usefixtures("twin")
@pytest.mark.asyncio
async def test_all_that_a_child_starts_ends_with_it() -> None:
    """Also what has lost its parent: it is found by its session, or by what it has inherited."""
    tree = ProcessTree()
    code = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)"
    )
    with python(code, env={**os.environ, **tree.environment}, **tree.options) as child:
        assert child.stdout is not None
        orphan = psutil.Process(int(child.stdout.readline()))
        child.wait()
    assert lives(orphan)
    tree.yield_more(child.pid, 3)
    assert orphan.nice() == min(19, psutil.Process().nice() + 3)
    await ProcessTree().end(2**22 - 1)  # of another child: nobody is hit
    assert lives(orphan)
    await tree.end(child.pid)
    await until(lambda: not lives(orphan), "its end", DEADLINE_S)


@pytest.mark.usefixtures("twin")
def test_a_command_ends_what_it_has_started() -> None:
    tree = commands.OwnedTree()
    code = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True); time.sleep(60)"
    )
    with python(code, env={**os.environ, **tree.environment}, **commands.detached()) as child:
        assert child.stdout is not None
        grandchild = psutil.Process(int(child.stdout.readline()))
        tree.end(child)
    deadline_s = time.monotonic() + DEADLINE_S
    while lives(grandchild):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class Newborn:
    """A process in the moment in which the kernel replaces it: whose it is shows only at the second look."""

    def __init__(self) -> None:
        self.mark: dict[str, str] = {}
        self.looks = 0
        self.killed = False

    def environ(self) -> dict[str, str]:
        self.looks += 1
        return self.mark if self.looks > 1 else {}

    def create_time(self) -> float:
        return time.time()

    def ppid(self) -> int:
        return os.getpid()

    def status(self) -> str:
        return psutil.STATUS_ZOMBIE if self.killed else psutil.STATUS_RUNNING

    def kill(self) -> None:
        self.killed = True


@pytest.mark.asyncio
async def test_what_is_just_being_started_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORTABLE_VARIABLE, "1")
    for tree in (ProcessTree(), commands.OwnedTree()):
        newborn = Newborn()
        newborn.mark = tree.environment
        with monkeypatch.context() as patch:
            patch.setattr(psutil, "process_iter", [newborn].copy)
            if isinstance(tree, ProcessTree):
                await tree.end(os.getpid())
            else:
                tree.end(cast(Any, SimpleNamespace(kill=int, wait=int)))
        assert newborn.killed


SCRIPT = """
import pathlib, signal, sys, time
print('stdin', repr(sys.stdin.read()), flush=True)
if sys.argv[1] == 'saves':
    def stopped(number, frame):
        raise SystemExit(7)
    signal.signal(signal.SIGTERM, stopped)
try:
    print('ready', flush=True)
    while True:
        time.sleep(0.01)
finally:
    print('saved', flush=True)
"""


@pytest.mark.parametrize("way", ["saves", "plain"])
@pytest.mark.asyncio
async def test_a_learner_that_is_asked_to_end_may_save(twin: bool, tmp_path: Path, way: str) -> None:
    """Its standard input is empty, whatever it is used for, and it is in no environment that its children inherit."""
    process, memory, log = learner(tmp_path, SCRIPT, way)
    try:
        await process.start({"PATH": os.environ["PATH"]}, 3)
        await until(lambda: "ready" in log.read_text(), "the script", DEADLINE_S)
        await process.stop(now=False)
        code = await process.wait()
    finally:
        await process.stop(now=True)
        memory.close()
    text = log.read_text()
    assert "stdin ''" in text
    assert ("saved" in text) == (way == "saves")
    assert code == (7 if way == "saves" else ENDED_CODE if twin else -signal.SIGTERM)


@pytest.mark.usefixtures("twin")
@pytest.mark.asyncio
async def test_a_learner_yields_to_its_daemon(tmp_path: Path) -> None:
    """M3 (CPU): from the start, and more when its owner says so."""
    process, memory, _ = learner(tmp_path, "import time\ntime.sleep(60)", "")
    own = os.nice(0)
    try:
        await process.start({"PATH": os.environ["PATH"]}, 3)
        assert process._process is not None
        script = psutil.Process(process._process.pid)
        await until(lambda: script.nice() == own + 3, "its first niceness", DEADLINE_S)
        process.yield_more(5)
        assert script.nice() == own + 5
    finally:
        await process.stop(now=True)
        await process.wait()
        memory.close()


def learner(folder: Path, code: str, argument: str) -> tuple[LearnerProcess, SharedMemory, Path]:
    job = folder / "jobs" / "one"
    (job / "logs").mkdir(parents=True)
    (job / "train.py").write_text(code)
    fields = {"script": "train.py", "args": (argument,), "independent": True, "engine": "mesh", "as_module": False}
    spec = cast(Any, SimpleNamespace(**fields, learners=1))
    memory, log = SharedMemory(), job / "logs" / "0.log"
    log.touch()
    return LearnerProcess(job, spec, log, memory, Path(sys.executable)), memory, log


CHILD = """
import os, signal, sys, time
from meshtraind.machine.control_pipe import hear_daemon
if sys.argv[1:] == ['saves']:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
hear_daemon()
print(repr(sys.stdin.read()), 'MESHTRAIN_CONTROL' in os.environ, flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("said", "way", "code"),
    [(ASK_TO_END, "saves", 7), (ASK_TO_END, "", ENDED_CODE), (None, "saves", ORPHANED_CODE), (None, "", ORPHANED_CODE)],
)
def test_the_pipe_says_end_and_that_the_daemon_is_gone(said: bytes | None, way: str, code: int) -> None:
    command = [sys.executable, "-c", CHILD, *way.split()]
    environment = {**os.environ, CONTROL_VARIABLE: "stdin"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"'' False\n"
        try:
            if said is None:
                child.stdin.close()
            else:
                child.stdin.write(said)
                child.stdin.flush()
            assert child.wait(DEADLINE_S) == code
        finally:
            child.kill()


LOOP = """
import asyncio, sys
from meshtraind.machine.event_loop import loop_factory, on_end_of_stdin, on_stop_signals
async def main():
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    on_stop_signals(loop, done.set)
    on_end_of_stdin(loop, done.set)
    print(type(loop).__module__.split('.')[0], flush=True)
    await done.wait()
    print('in order', flush=True)
with asyncio.Runner(loop_factory=loop_factory()) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("way", ["SIGTERM", "SIGINT", "stdin"])
def test_a_daemon_is_stopped_in_order(twin: bool, way: str) -> None:
    with python(LOOP) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert (child.stdout.readline() == b"uvloop\n") == (not twin)
        if way == "stdin":
            child.stdin.write(b"nobody reads this")
            child.stdin.close()
        else:
            child.send_signal(getattr(signal, way))
        assert child.stdout.readline() == b"in order\n"
        assert child.wait(DEADLINE_S) == 0


@pytest.mark.usefixtures("twin")
@pytest.mark.asyncio
async def test_every_caller_is_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        waiting = asyncio.gather(accepted(listener))
        await asyncio.sleep(0)
        waiting.cancel()  # nobody is lost who calls from now on
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for _ in range(3):
            with socket.create_connection(listener.getsockname()[:2]) as caller:
                heard, host = await asyncio.wait_for(accepted(listener), DEADLINE_S)
                assert (heard.getpeername(), host) == (caller.getsockname(), "127.0.0.1")
                assert not heard.getblocking()
                heard.close()


class Closing(asyncio.Protocol):
    """Sends everybody away."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


@pytest.mark.asyncio
async def test_programs_of_this_machine_are_served_at_the_address_that_is_told(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    for path in (tmp_path / "socket", None):
        server, address = await serve_locally(loop, Closing, path)
        if path is not None:
            assert (address, path.stat().st_mode & 0o777) == (f"unix:{path}", 0o600)
            with await asyncio.to_thread(commands.connect_unix, str(path), DEADLINE_S) as stream:
                assert await asyncio.to_thread(stream.recv, 1) == b""
        else:
            assert address.startswith("tcp:127.0.0.1:")
        server.close()
        await server.wait_closed()


def test_frames_arrive_whole_however_they_are_sent(twin: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = commands.send_some(ours, [memoryview(b"head"), memoryview(b"data")])
        assert sent == (4 if twin else 8)
        assert theirs.recv(16) == b"headdata"[:sent]


@pytest.mark.usefixtures("twin")
def test_no_link_is_followed_below_a_scripts_folder(tmp_path: Path) -> None:
    """Neither at the end of a path nor in its middle, and nobody waits for a pipe."""
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a" / "file").write_text("own")
    (tmp_path / "secret").write_text("secret")
    (root / "a" / "link").symlink_to(tmp_path / "secret")
    (root / "way").symlink_to(root / "a")
    os.mkfifo(root / "a" / "pipe")
    with os.fdopen(open_below(root, ("a", "file"))) as file:
        assert file.read() == "own"
    with folder_below(root, ("a",)) as folder:
        assert sorted(os.listdir(folder)) == ["file", "link", "pipe"]
    for parts, why in (
        (("a", "link"), "'link' is no file but a link"),
        (("way", "file"), "'way' is no folder but a link"),
        (("a", "pipe"), "'pipe' is no file but a pipe"),
        (("a",), "'a' is no file but a folder"),
        (("a", "file", "x"), "'file' is no folder but a file"),
        (("a", ".."), "not the name of one file"),
    ):
        with pytest.raises(OSError, match=why):
            open_below(root, parts)
    os.close(open_below(root, ("a", "new"), os.O_WRONLY | os.O_CREAT))
    assert (root / "a" / "new").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_exchanged_while_it_is_opened_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where no system call refuses links the file is looked at again once it is open."""
    monkeypatch.setenv(PORTABLE_VARIABLE, "1")
    (tmp_path / "file").write_text("own")
    (tmp_path / "secret").write_text("secret")
    opened = os.open

    def swap(path: str, *more: Any, **keywords: Any) -> int:
        if path.endswith("file"):
            os.unlink(path)
            os.symlink(tmp_path / "secret", path)
        return opened(path, *more, **keywords)

    def swap_and_back(path: str, *more: Any, **keywords: Any) -> int:
        handle = swap(path, *more, **keywords)
        os.unlink(path)
        Path(path).write_text("own again")
        return handle

    for swapping in (swap, swap_and_back):
        (tmp_path / "file").unlink()
        (tmp_path / "file").write_text("own")
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", swapping)
            with pytest.raises(OSError, match="'file' is no file but"):
                open_below(tmp_path, ("file",))


def test_the_interface_to_oneself_is_found_by_its_address() -> None:
    assert commands.loopback_interface() == "lo"
