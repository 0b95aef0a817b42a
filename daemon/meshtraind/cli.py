"""`meshtraind run`: the daemon in the foreground, for a service manager, a terminal, or `meshtrain up`.

`meshtraind replay` looks at what one did.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from meshtraind.app import App, Config, StartError
from meshtraind.runtime.free_memory import keep_one_arena
from meshtraind.runtime.log_file import open_log
from meshtraind.runtime.log_limit import LimitedHandler
from meshtraind.runtime.tasks import TaskSet
from meshwire import limits
from meshwire.addresses import DEFAULT_PORT
from meshwire.memory_layout.shared_slots import DATA_DIR_VARIABLE
from meshwire.messages.local import IntroductionPolicy

EXIT_FAILED = 1
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
        "  meshtraind run --listen 127.0.0.1:0 --interface lo --data-dir /tmp/a",
    )
    run.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=f"0.0.0.0:{DEFAULT_PORT}",
        help="where peers connect (default %(default)s; port 0 takes any free one)",
    )
    run.add_argument("--interface", metavar="IF", action="append", default=[], help="announce here only; repeatable")
    run.add_argument("--peer", metavar="HOST[:PORT]", action="append", default=[], help="dial this too; repeatable")
    run.add_argument("--no-mdns", action="store_true", help="neither announce nor look for devices on the network")
    run.add_argument(
        "--patience",
        metavar="SECONDS",
        type=float,
        default=limits.PATIENCE_S,
        help="how long a peer may be silent before jobs go on without it; every other timeout follows from it "
        f"({limits.PATIENCE_S_MIN:g} to {limits.PATIENCE_S_MAX:g}, default %(default)g)",
    )
    run.add_argument(
        "--introductions",
        choices=[policy.value for policy in IntroductionPolicy],
        help="devices that a paired one introduces: take them, ask first, or never; kept until it is given again "
        "(default: accept)",
    )
    run.add_argument("--name", help="how this device is called (default: the host name)")
    run.add_argument("--data-dir", metavar="DIR", type=Path, help=f"keys, jobs, logs (or {DATA_DIR_VARIABLE})")
    run.add_argument(
        "--end-with-stdin",
        action="store_true",
        help="end when standard input, a pipe, does: for programs that start daemons of their own",
    )
    run.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    run.add_argument(
        "--log-file",
        metavar="FILE",
        type=Path,
        help=f"log here and not to stderr; at {limits.LOG_FILE_BYTES_MAX // limits.MIB} MiB it becomes FILE.1",
    )
    _add_replay(commands)
    options = parser.parse_args(arguments)
    if options.command == "replay":
        from meshtraind.replay.command import replay

        return replay(options.trace, as_json=options.json, out=sys.stdout, errors=sys.stderr)
    keep_one_arena()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # M3; numpy, imported with the first job, reads it
    try:
        handler = open_log(options.log_file, options.log_level)
    except OSError as error:
        parser.error(f"--log-file {options.log_file}: it cannot be written: {error.strerror or error}")
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
        )
    except ValueError as error:
        parser.error(str(error))
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run(config, handler, end_with_stdin=options.end_with_stdin))
    except StartError as error:
        print(f"meshtraind: error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
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
        loop.add_reader(sys.stdin.fileno(), _read_stdin, loop, app)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, app.request_stop)
    tasks = TaskSet("log")
    tasks.spawn(handler.keep_telling(), "tell what was left out")
    try:
        await app.run()
    finally:
        await tasks.close()


def _read_stdin(loop: asyncio.AbstractEventLoop, app: App) -> None:
    """Whoever holds the other end says nothing; when it is gone, the pipe ends."""
    if not os.read(sys.stdin.fileno(), limits.KIB):
        loop.remove_reader(sys.stdin.fileno())
        log.info("standard input has ended")
        app.request_stop()


def default_data_dir() -> Path:
    """DATA: of the environment, else where the system keeps a user's data."""
    named = os.environ.get(DATA_DIR_VARIABLE)
    if named:
        return Path(named)
    from platformdirs import user_data_path

    return user_data_path("meshtrain")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it exists, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
