"""`up`, `down` and `dashboard`: the daemon of this device as a background process, and its page."""

import os
import subprocess
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from meshtrain.cli.commands.mesh import ID_CHARS, INTRODUCTIONS
from meshtrain.cli.ui.connection import connected
from meshtrain.cli.ui.errors import CliError, reported
from meshtrain.cli.ui.options import DataDir, Json
from meshtrain.cli.ui.terminal import plain, print_json, say
from meshtrain.client import ask
from meshtrain.datadir import data_folder
from meshtrain.errors import ConnectionLost, DaemonNotRunning, OtherVersion
from meshtrain.following.shown_text import human_seconds, printable_lines
from meshtrain.machine import FolderLock, detached
from meshwire import limits
from meshwire.messages.envelope import Done
from meshwire.messages.local import (
    DashboardOpened,
    GetStatus,
    IntroductionPolicy,
    OpenDashboard,
    SetIntroductions,
    Shutdown,
    Status,
)
from meshwire.text import printable

UP_TIMEOUT_S = 30.0  # a cold start reads some hundred files; a laptop that has just woken takes its time
DOWN_TIMEOUT_S = 30.0  # learners get their grace, then are killed
POLL_S = 0.05
LOCK = Path("run", "lock")  # below the data folder: held by the daemon, whose process it names
LOG_NAME = "daemon.log"
LOG_TAIL_BYTES = 4 * limits.KIB
LOG_TAIL_LINES = 15
NO_TORCH = (
    "warning: there is no torch here, so no job runs on this device: pip install '.[torch]', and meshtrain down, up; "
    "or let it be a hub, which sums for the others and keeps their state: meshtrain down, meshtrain up --hub"
)


@reported
def up(
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="How other devices see this one, kept until you say otherwise; at first its host name.",
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Where peers connect to; port 0: any free one.")
    ] = None,
    interface: Annotated[
        list[str] | None, typer.Option("--interface", metavar="IF", help="Only this network interface; repeatable.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="HOST[:PORT]", help="Where a paired device is, if mDNS is blocked; repeatable."),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            "--patience",
            metavar="SECONDS",
            min=limits.PATIENCE_S_MIN,
            max=limits.PATIENCE_S_MAX,
            help=f"How long a peer may be silent before jobs go on without it; else {limits.PATIENCE_S:g}.",
        ),
    ] = None,
    introductions: Annotated[
        IntroductionPolicy | None,
        typer.Option(
            "--introductions",
            help="Devices that a paired one introduces: take them (as at first), ask first, or never. Kept until it is "
            "given again; a daemon that is up follows at once.",
        ),
    ] = None,
    dashboard_port: Annotated[
        str | None,
        typer.Option(
            "--dashboard",
            metavar="PORT",
            help="Where `meshtrain dashboard` finds its page, on this machine alone; else any free port. off: nowhere.",
        ),
    ] = None,
    hub: Annotated[
        bool,
        typer.Option(
            "--hub",
            help="Train nothing here, and need no torch: sum what the laptops send, keep the jobs' state. For a NAS or "
            "a small computer on a cable.",
        ),
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Start the daemon in the background. It finds paired devices, and runs jobs that they submit."""
    folder = data_folder(data_dir)
    options = _options(name, listen, interface or (), peer or (), patience)
    options += [f"--dashboard={dashboard_port}"] if dashboard_port is not None else []
    options += ["--hub"] if hub else []
    running = _status(folder)
    if running is not None:
        print(f"{printable(running.name)} ({running.device[:ID_CHARS]}) is already up, on {printable(running.listen)}")
        if introductions is not None:
            with connected(folder) as client:
                ask(client, SetIntroductions(policy=introductions), Done, name="introductions")
            print(f"From now on it {INTRODUCTIONS[introductions]}.")
        if options:
            say("Its other options are those of its start. To change them: meshtrain down, then up again.")
        return
    options += [f"--introductions={introductions.value}"] if introductions is not None else []
    status = _start(folder, options)
    role = ", a hub" if status.hub else ""
    print(
        f"{printable(status.name)} ({status.device[:ID_CHARS]}) is up{role}, on {printable(status.listen)}", flush=True
    )
    for warning in status.warnings:
        say(f"warning: {printable_lines(warning)}", style="yellow")
    if status.software.torch is None and not status.hub:
        say(NO_TORCH, style="yellow")
    if status.peers_paired:
        say("Next: meshtrain peers")
    else:
        say("Next: meshtrain pair    (then type the code on the other device)")


def _options(
    name: str | None, listen: str | None, interfaces: Sequence[str], peers: Sequence[str], patience_s: float | None
) -> list[str]:
    made = [f"--name={name}"] if name is not None else []
    made += [f"--listen={listen}"] if listen is not None else []
    made += [f"--interface={interface}" for interface in interfaces]
    made += [f"--peer={peer}" for peer in peers]
    return made + ([f"--patience={patience_s:g}"] if patience_s is not None else [])


def _status(folder: Path) -> Status | None:
    """The status of the running daemon, or None when none answers. Raises OtherVersion."""
    try:
        with connected(folder) as client:
            return ask(client, GetStatus(), Status, name="status")
    except OtherVersion:
        raise
    except (DaemonNotRunning, ConnectionLost):
        return None


def _start(folder: Path, options: Sequence[str]) -> Status:
    log = folder / LOG_NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_offset = log.stat().st_size if log.exists() else 0
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise CliError(
            f"the data folder {folder} cannot be written: {error.strerror or error}",
            "another one with --data-dir or MESHTRAIN_DATA_DIR",
        ) from error
    try:
        # The daemon owns the file and begins a new one when it is full. What it says before it can do so, or in a
        # crash, lands there too.
        process = subprocess.Popen(
            [sys.executable, "-m", "meshtraind", "run", f"--data-dir={folder}", f"--log-file={log}", *options],
            cwd=folder,  # `-m` would import a user's files from the current folder before installed packages
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            **detached(),
        )
    finally:
        os.close(descriptor)
    return _wait_until_up(process, folder, log, log_offset)


def _wait_until_up(process: "subprocess.Popen[bytes]", folder: Path, log: Path, log_offset: int) -> Status:
    """Raises CliError with the end of the daemon's log; nothing is left running then."""
    deadline_s = time.monotonic() + UP_TIMEOUT_S
    try:
        while True:
            ended = process.poll() is not None
            status = _status(folder)  # asked after: another `up` may have won, and ours has ended for it
            if status is not None:
                return status
            if ended:
                raise CliError(f"meshtraind ended with exit code {process.returncode}{_tail(log, log_offset)}")
            if time.monotonic() > deadline_s:
                raise CliError(f"meshtraind did not answer within {UP_TIMEOUT_S:.0f} s{_tail(log, log_offset)}")
            time.sleep(POLL_S)
    except BaseException:
        process.terminate()
        try:
            process.wait(timeout=DOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _tail(log: Path, offset_bytes: int) -> str:
    """What the daemon wrote since its start, its last lines, for an error message."""
    with log.open("rb") as file:
        end_bytes = file.seek(0, os.SEEK_END)
        if end_bytes < offset_bytes:
            offset_bytes = 0  # the daemon has begun a new file since
        file.seek(max(offset_bytes, end_bytes - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").rstrip().splitlines()[-LOG_TAIL_LINES:]
    shown = "".join(f"\n  {line}" for line in lines) or "\n  (nothing)"
    return f". The end of {log}:{shown}"


@reported
def down(data_dir: DataDir = None) -> None:
    """Stop the daemon. The other devices go on with its jobs; `meshtrain up` lets it return to them.

    A job that no other laptop trains is saved, here and on its hub, and goes on when this one, or another laptop of a
    hub's job, is up again; where it cannot be saved, it ends. Paired devices stay paired.
    """
    folder = data_folder(data_dir)
    try:
        status = _status(folder)
    except OtherVersion:
        say("This daemon was started from another version of meshtrain. Its jobs go on elsewhere.")
        _wait_until_down(_terminate(folder), folder)
        print("meshtraind is down")
        return
    if status is None:
        print("meshtraind is not running")
        return
    if status.jobs_running:
        say(f"{status.jobs_running} running here: other devices go on, and this one returns with `meshtrain up`")
        say("A job that no other laptop trains is saved first, and goes on from there.")
    with connected(folder) as client:
        ask(client, Shutdown(), Done, name="shutdown", timeout_s=DOWN_TIMEOUT_S)
    _wait_until_down(status.pid, folder)
    print(f"{printable(status.name)} is down")


def _terminate(folder: Path) -> int:
    """Stops a daemon that does not understand what this version asks: it ends by SIGTERM as it does when asked; on
    Windows at once.

    Returns its process. Raises CliError, OSError.
    """
    import psutil

    try:
        FolderLock(folder / LOCK, shared=True).release()
    except BlockingIOError:
        holder = (folder / LOCK).read_text().strip()
    else:
        raise CliError(f"no daemon holds {folder / LOCK}, and something answers in its place", "meshtrain status")
    if not holder.isdigit():
        raise CliError(f"{folder / LOCK} does not name the daemon's process", "end meshtraind by hand")
    psutil.Process(int(holder)).terminate()
    return int(holder)


def _wait_until_down(pid: int, folder: Path) -> None:
    import psutil

    deadline_s = time.monotonic() + DOWN_TIMEOUT_S
    try:
        process = psutil.Process(pid)
        # A zombie has ended; whoever started it has not asked yet.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline_s:
                raise CliError(
                    f"meshtraind (pid {pid}) was told to stop and still runs after {DOWN_TIMEOUT_S:.0f} s",
                    f"the end of {folder / LOG_NAME}",
                )
            time.sleep(POLL_S)
    except psutil.NoSuchProcess:
        return


@reported
def dashboard(
    data_dir: DataDir = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, and start no browser.")] = False,
    json: Json = False,
) -> None:
    """Open the dashboard. This device's links, devices and jobs, live, in the browser of this machine.

    The daemon serves it from now on until it ends, to this machine alone. The address that is printed lets one browser
    in, once, within a minute; type the command again for another one, or when the page says that its session is over.
    With --json nothing is opened either.
    """
    with connected(data_dir) as client:
        reply = ask(client, OpenDashboard(), DashboardOpened, name="dashboard")
    if json:
        print_json(plain(reply))
        return
    print(reply.url)
    if no_open or not webbrowser.open(reply.url):
        say(f"Open this address in a browser on this machine. It lets one in, within {human_seconds(reply.expires_s)}.")
