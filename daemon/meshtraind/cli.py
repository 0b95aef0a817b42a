"""`meshtraind run`: the daemon in the foreground, for a service manager, a terminal, or `meshtrain up`.

`meshtraind install` makes it a service of the system, and `meshtraind replay` looks at what one did.
"""

import argparse
import asyncio
import logging
import os
import sys
from functools import partial
from pathlib import Path

from meshtraind.app import App, Config, StartError
from meshtraind.machine.event_loop import loop_factory, on_end_of_stdin, on_stop_signals
from meshtraind.runtime.free_memory import keep_one_arena
from meshtraind.runtime.log_file import open_log
from meshtraind.runtime.log_limit import LimitedHandler
from meshtraind.runtime.tasks import TaskSet
from meshwire import limits
from meshwire.addresses import DEFAULT_PORT
from meshwire.memory_layout.shared_slots import DATA_DIR_VARIABLE
from meshwire.messages.local import IntroductionPolicy

EXIT_FAILED = 1
LISTEN = f"0.0.0.0:{DEFAULT_PORT}"
LOG_LEVEL = "info"
DASHBOARD = "0"
log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Parses the command line and runs the daemon until it is told to stop. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="meshtraind",
        description="The meshtrain daemon. A device that is paired with this one may run code here as your user.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run in the foreground until SIGTERM or ctrl-C",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  meshtraind run\n"
        "  meshtraind run --peer 192.168.1.20 --name attic\n"
        "  meshtraind run --hub --name nas\n"
        "  meshtraind run --listen 127.0.0.1:0 --interface lo --data-dir /tmp/a",
    )
    _add_daemon_options(run)
    run.add_argument(
        "--end-with-stdin",
        action="store_true",
        help="end when standard input, a pipe, does: for programs that start daemons of their own",
    )
    run.add_argument(
        "--log-file",
        metavar="FILE",
        type=Path,
        help=f"log here and not to stderr; at {limits.LOG_FILE_BYTES_MAX // limits.MIB} MiB it becomes FILE.1",
    )
    _add_service(commands)
    _add_replay(commands)
    options = parser.parse_args(arguments)
    if options.command == "replay":
        from meshtraind.replay.command import replay

        return replay(options.trace, as_json=options.json, out=sys.stdout, errors=sys.stderr)
    try:
        home = Path.home()
    except RuntimeError:
        parser.error("this user has no home folder: set HOME to one that is there")
    if options.command == "uninstall":
        return _uninstall(options.data_dir or default_data_dir(), home)
    try:
        config = Config.from_options(
            listen=options.listen,
            interfaces=options.interface,
            peers=options.peer,
            mdns=not options.no_mdns,
            name=options.name,
            data_dir=options.data_dir or default_data_dir(),
            patience_s=options.patience,
            introductions=options.introductions,
            dashboard=options.dashboard,
            hub=options.hub,
        )
    except ValueError as error:
        parser.error(str(error))
    if options.command == "install":
        return _install(_daemon_arguments(options, config.data_dir), config.data_dir, home, options.only_print)
    keep_one_arena()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # M3; numpy, imported with the first job, reads it
    try:
        handler = open_log(options.log_file, options.log_level)
    except OSError as error:
        parser.error(f"--log-file {options.log_file}: it cannot be written: {error.strerror or error}")
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run(config, handler, end_with_stdin=options.end_with_stdin))
    except StartError as error:
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    """Says why, and returns the exit code."""
    print(f"meshtraind: error: {error}", file=sys.stderr)  # noqa: T201
    return EXIT_FAILED


def _add_daemon_options(command: argparse.ArgumentParser) -> None:
    """What a daemon is told at its start, be it now or by a service."""
    command.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=LISTEN,
        help="where peers connect (default %(default)s; port 0 takes any free one)",
    )
    command.add_argument(
        "--interface", metavar="IF", action="append", default=[], help="announce here only; repeatable"
    )
    command.add_argument("--peer", metavar="HOST[:PORT]", action="append", default=[], help="dial this too; repeatable")
    command.add_argument("--no-mdns", action="store_true", help="neither announce nor look for devices on the network")
    command.add_argument(
        "--patience",
        metavar="SECONDS",
        type=float,
        default=limits.PATIENCE_S,
        help="how long a peer may be silent before jobs go on without it; every other timeout follows from it "
        f"({limits.PATIENCE_S_MIN:g} to {limits.PATIENCE_S_MAX:g}, default %(default)g)",
    )
    command.add_argument(
        "--introductions",
        choices=[policy.value for policy in IntroductionPolicy],
        help="devices that a paired one introduces: take them, ask first, or never; kept until it is given again "
        "(default: accept)",
    )
    command.add_argument(
        "--dashboard",
        metavar="PORT",
        default=DASHBOARD,
        help="where `meshtrain dashboard` finds its page, on this machine alone (default %(default)s: any free port; "
        "off: it is not served)",
    )
    command.add_argument(
        "--hub",
        action="store_true",
        help="train nothing here, and need no torch: sum what the laptops send, and keep the jobs' state; for a NAS or "
        "a small computer on a cable",
    )
    command.add_argument(
        "--name", help="how this device is called, kept until you say otherwise (at first: the host name)"
    )
    command.add_argument("--data-dir", metavar="DIR", type=Path, help=f"keys, jobs, logs (or {DATA_DIR_VARIABLE})")
    command.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default=LOG_LEVEL)


def _daemon_arguments(options: argparse.Namespace, data_dir: Path) -> list[str]:
    """The same options again, for a process without this one's environment and folder."""
    words = ["--data-dir", str(data_dir)]
    for flag, value, default in (
        ("--listen", options.listen, LISTEN),
        ("--patience", options.patience, limits.PATIENCE_S),
        ("--log-level", options.log_level, LOG_LEVEL),
        ("--introductions", options.introductions, None),
        ("--dashboard", options.dashboard, DASHBOARD),
        ("--name", options.name, None),
    ):
        words += [flag, str(value)] if value != default else []
    words += [word for one in options.interface for word in ("--interface", one)]
    words += [word for one in options.peer for word in ("--peer", one)]
    words += ["--hub"] if options.hub else []
    return [*words, "--no-mdns"] if options.no_mdns else words


def _add_service(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    install = commands.add_parser(
        "install",
        help="have the system start the daemon whenever you are logged in",
        description="Makes the daemon a service of yours: a systemd user unit, a launchd agent, a task of Windows. It "
        "starts now, and from then on by itself, with these options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  meshtraind install\n  meshtraind install --name attic\n"
        "  meshtraind install --hub --name nas\n  meshtraind install --print",
    )
    _add_daemon_options(install)
    install.add_argument("--print", action="store_true", dest="only_print", help="show the definition, change nothing")
    uninstall = commands.add_parser(
        "uninstall",
        help="take that back; keys, pairings and jobs stay",
        description="Stops the daemon that `meshtraind install` has set up, and has the system forget it. Keys, "
        "pairings and jobs stay in the data folder.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  meshtraind uninstall",
    )
    uninstall.add_argument("--data-dir", metavar="DIR", type=Path, help="the same as at `install`")


def _install(arguments: list[str], data_dir: Path, home: Path, only_print: bool) -> int:
    from meshtraind.api.rundir import RunDir, RunDirError
    from meshtraind.service.manager import ServiceError, service_for

    try:
        service = service_for(sys.platform, arguments, data_dir, home)
        if only_print:
            print(service.definition, end="")  # noqa: T201
            return 0
        with RunDir(data_dir):  # who runs there already would be in the service's way
            pass
        service.install()
    except (ServiceError, RunDirError, OSError) as error:
        return _failed(error)
    print("\n".join((f"meshtraind is a service now: {service.path}", *service.next_steps)))  # noqa: T201
    return 0


def _uninstall(data_dir: Path, home: Path) -> int:
    from meshtraind.service.manager import ServiceError, service_for

    try:
        service_for(sys.platform, (), data_dir.expanduser().absolute(), home).uninstall()
    except (ServiceError, OSError) as error:
        return _failed(error)
    print(f"meshtraind is no service any more; keys, pairings and jobs stay in {data_dir}")  # noqa: T201
    return 0


def _add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    data = default_data_dir()
    replay = commands.add_parser(
        "replay",
        help="a job's trace: the same decisions again, and a summary of its rounds or of who took part",
        description="Feeds every input in a job's trace to a new round machine or membership machine and compares "
        "each of its decisions with the recorded one. Needs no daemon.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="`meshtrain submit --trace` makes each member of the job write a trace in its own data folder:\n"
        "  DATA/jobs/ID/trace.jsonl       its rounds\n"
        "  DATA/jobs/ID/membership.jsonl  who was lost, who proposed what and why, what was entered\n"
        f"DATA is {data}, or what was given as --data-dir or {DATA_DIR_VARIABLE}.\n\n"
        "example:\n"
        f"  meshtraind replay {data}/jobs/3f9c2a1b04de/trace.jsonl\n\n"
        "exit code: 0 all the same; 1 a decision differs, its line is shown; 2 the trace cannot be read to its end",
    )
    replay.add_argument("trace", metavar="TRACE", type=Path)
    replay.add_argument("--json", action="store_true", help="one JSON object instead of text")


async def _run(config: Config, handler: LimitedHandler, *, end_with_stdin: bool) -> None:
    app = App(config)
    loop = asyncio.get_running_loop()
    if end_with_stdin:
        on_end_of_stdin(loop, partial(_stdin_ended, app))
    on_stop_signals(loop, app.request_stop)
    tasks = TaskSet("log")
    tasks.spawn(handler.keep_telling(), "tell what was left out")
    try:
        await app.run()
    finally:
        await tasks.close()


def _stdin_ended(app: App) -> None:
    """Whoever holds the other end says nothing; when it is gone, the pipe ends."""
    log.info("standard input has ended")
    app.request_stop()


def default_data_dir() -> Path:
    """DATA: of the environment, else where the system keeps a user's data."""
    named = os.environ.get(DATA_DIR_VARIABLE)
    if named:
        return Path(named)
    from platformdirs import user_data_path

    return user_data_path("meshtrain")
