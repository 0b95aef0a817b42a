"""Attacks of another user of the same machine, and of a script that uses its learner's token for more than a learner's
part. The first needs root, from which a process becomes `nobody`."""

import asyncio
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from meshtrain.client import Client, ConnectionLost, RequestError
from meshwire.memory_layout.shared_slots import ENDPOINT_VARIABLE, JOB_VARIABLE, TOKEN_VARIABLE
from meshwire.message_base import Wire
from meshwire.messages.job import Fetch
from meshwire.messages.local import (
    Attach,
    Cancel,
    GetJobs,
    GetPeers,
    GetStatus,
    PairJoin,
    Resubmit,
    ResumeFrom,
    Shutdown,
    Unpair,
)
from tests.bench.attackscene import LeftOutError, NotHeldError, Scene, attack
from tests.bench.soakwatch import SHARED_MEMORY

NOBODY = 65534
TIMEOUT_S = 10.0


def as_nobody(work: Callable[[], list[str]]) -> list[str]:
    """What `work` returns, in a process of another user without any group."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise LeftOutError("becoming another user takes root")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        found = ["the process of the other user broke"]
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            found = work()
        except BaseException:
            found = [traceback.format_exc()]
        finally:
            os.write(writing, json.dumps(found)[:60_000].encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    found = json.loads(said)
    assert isinstance(found, list)
    return found


def files_below(folder: Path) -> list[Path]:
    """Everything that root sees there."""
    return [folder, *folder.rglob("*")]


@attack("local")
async def reading_the_data_folder(scene: Scene) -> str:
    """opening every file and listing every folder of the data folders, which others could enter before the first start:
    key, token, pins, history, job folders, logs, blobs"""
    paths = [path for victim in scene.victims for path in files_below(victim.data_dir)]
    own = [path for path in paths if not path.is_symlink()]

    def work() -> list[str]:
        opened = []
        for path in own:
            try:
                if path.is_dir():
                    os.listdir(path)
                else:
                    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            except OSError:
                continue
            opened.append(str(path.relative_to(scene.folder)))
        return opened

    if opened := as_nobody(work):
        raise NotHeldError(f"{len(opened)} of {len(own)} can be read by others: {', '.join(opened[:6])}")
    return f"{len(own)} files and folders, none can be read"


@attack("local")
async def writing_into_the_data_folder(scene: Scene) -> str:
    """making, replacing and removing files in the data folders, and changing those that are there"""
    folders = [path for victim in scene.victims for path in files_below(victim.data_dir)]

    def work() -> list[str]:
        changed = []
        for path in folders:
            try:
                if path.is_dir():
                    planted = path / "planted"
                    planted.touch()
                    planted.unlink()
                else:
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                continue
            changed.append(str(path.relative_to(scene.folder)))
        return changed

    if changed := as_nobody(work):
        raise NotHeldError(f"others can change {', '.join(changed[:6])}")
    return f"{len(folders)} files and folders, none can be changed"


@attack("local")
async def connecting_to_the_endpoint(scene: Scene) -> str:
    """connecting to every local socket of the daemons, with and without a token that was read elsewhere"""
    described = [json.loads((victim.data_dir / "run/daemon.json").read_text()) for victim in scene.victims]
    sockets = [one["endpoint"].removeprefix("unix:") for one in described]

    def work() -> list[str]:
        reached = []
        for path in sockets:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
                try:
                    stream.connect(path)
                except OSError:
                    continue
                reached.append(path)
        return reached

    if reached := as_nobody(work):
        raise NotHeldError(f"others can connect to {reached}")
    return f"{len(sockets)} sockets, none can be reached"


@attack("local")
async def memory_and_processes(scene: Scene) -> str:
    """the shared memory of learners (/dev/shm, /proc/PID/fd), environments and memory of daemons and learners, and what
    a command line tells: tokens are wanted"""
    tokens = {(victim.data_dir / "run/token").read_text().strip() for victim in scene.victims}
    pids = [victim.pid for victim in scene.victims]
    learners = [learner.pid for victim in scene.victims for learner in victim.learners()]
    for learner in learners:
        tokens |= {value for name, value in psutil.Process(learner).environ().items() if name == TOKEN_VARIABLE}
    shared = [path for path in SHARED_MEMORY.iterdir() if "mesh" in path.name or path.name.startswith("mt-")]

    def work() -> list[str]:
        found = []
        for path in shared:
            try:
                os.close(os.open(path, os.O_RDONLY))
            except OSError:
                continue
            found.append(str(path))
        for pid in [*pids, *learners]:
            for what in ("environ", "mem", "maps", "fd"):
                try:
                    name = f"/proc/{pid}/{what}"
                    found.append(name if (os.listdir(name) if what == "fd" else Path(name).read_bytes()[:1]) else "")
                except OSError:
                    continue
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            found += [f"a token in the command line of {pid}" for token in tokens if token in words]
        return [text for text in found if text]

    if found := as_nobody(work):
        raise NotHeldError(f"others can read {', '.join(found[:6])}")
    return f"{len(pids)} daemons, {len(learners)} learners, {len(shared)} files in {SHARED_MEMORY}: nothing"


@attack("local")
async def planted_runtime_folder(scene: Scene) -> str:
    """the folder of sockets in the temporary folder is made by another user first, as a folder and as a link to one of
    this user; then a daemon starts"""
    name = f"meshtrain-{os.getuid()}"
    for how in ("a folder", "a link"):
        temporary = scene.folder / f"tmp-{how.rpartition(' ')[2]}"
        temporary.mkdir()
        temporary.chmod(0o1777)
        trap = scene.folder / f"trap-{temporary.name}"
        trap.mkdir()
        os.chown(trap, NOBODY, NOBODY)
        where, kind, target = temporary / name, how, trap

        def work() -> list[str]:
            if kind == "a link":  # noqa: B023
                where.symlink_to(target)  # noqa: B023
            else:
                where.mkdir(mode=0o777)  # noqa: B023
            return []

        as_nobody(work)
        data_dir = scene.folder / f"trapped-{temporary.name}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "meshtraind", "run", "--listen", "127.0.0.1:0", "--no-mdns"),
            *("--data-dir", str(data_dir)),
            env=scene.environment | {"TMPDIR": str(temporary)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                said, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.communicate()
            inside = [str(path) for path in (*where.glob("*"), *trap.glob("*"))]
            raise NotHeldError(f"with {how} of another user in its place a daemon starts, and uses {inside}") from None
        if b"does not belong to your user" not in said:
            raise NotHeldError(f"with {how} in its place a daemon says: {said.decode(errors='replace')[-200:]}")
    return "each time the daemon does not start, and says which folder is wrong"


@attack("local")
async def a_learners_token(scene: Scene) -> str:
    """the token in a learner's environment used to ask what only a person may: as a client, and as the learner"""
    assert scene.job is not None
    learners = scene.bert.learners()
    if not learners:
        raise LeftOutError("bert has no learner")
    environment = learners[0].environ()
    endpoint, token = environment[ENDPOINT_VARIABLE], environment[TOKEN_VARIABLE]
    wanted: list[Wire] = [
        GetStatus(),
        GetPeers(),
        GetJobs(),
        PairJoin(code="000-000", at="127.0.0.1:9"),
        Unpair(peer="nobody at all"),
        Resubmit(resume=ResumeFrom(job="0" * 12)),
        Cancel(job="0" * 12, now=True),
        Fetch(job=scene.job, what="log", offset_bytes=0, max_bytes=100),
        Shutdown(),
    ]
    allowed = []
    for role in ("client", "learner"):
        for body in wanted:
            if verdict := await asyncio.to_thread(asked_with, endpoint, token, role, environment[JOB_VARIABLE], body):
                allowed.append(f"{type(body).__name__} as a {role} ({verdict})")
    if not scene.bert.up:
        raise NotHeldError("the daemon has ended by it")
    if allowed:
        raise NotHeldError(f"allowed: {'; '.join(allowed)}")
    return f"{len(wanted)} requests in two roles, all refused"


NOT_ALLOWED = ("may not", "learner", "token")  # words of a refusal for who asks, and not for what


def asked_with(endpoint: str, token: str, role: str, job: str, body: Wire) -> str:
    """How a daemon obeyed; empty when it refused for who asks."""
    if isinstance(body, Shutdown) and role == "client":
        body = Unpair(peer="x" * 60)  # what it would obey is asked without ending the daemon
    attach = Attach(token=token, role="client") if role == "client" else Attach(token=token, role="learner", job=job)
    try:
        client, _ = Client.attach(endpoint, attach)
    except (RequestError, ConnectionLost, OSError):
        return ""
    try:
        reply = client.request(body, timeout_s=TIMEOUT_S, name="what a person may ask")
    except (RequestError, ConnectionLost) as error:
        text = str(error)
        return "" if any(word in text for word in NOT_ALLOWED) else text[:60]
    except TimeoutError:
        return "no answer"
    finally:
        client.close()
    return type(reply).__name__
