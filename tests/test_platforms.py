"""Nothing but two doors names what only POSIX systems have, and everything can be imported where they lack."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOPS = {"meshtrain": ROOT, "meshtraind": ROOT / "daemon", "meshwire": ROOT / "protocol"}

# Each has its twin inside; `daemon/meshtraind/machine/README.md` says which.
DOORS = ("daemon/meshtraind/machine/", "meshtrain/machine.py", "daemon/meshtraind/runtime/open_below.py")
# Run by no other system than theirs.
OF_ONE_SYSTEM = {"daemon/meshtraind/learner/launch.py"}  # which execs, and is left out on Windows

POSIX_MODULES = {
    *("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty", "_posixshmem"),
    "uvloop",
}
POSIX_NAMES = {
    "os": {
        *("O_CLOEXEC", "O_DSYNC", "O_NOCTTY", "O_NOFOLLOW", "O_NONBLOCK", "O_PATH", "O_SYNC", "PRIO_PROCESS"),
        *("chown", "chroot", "ctermid", "execv", "execve", "execvp", "fchdir", "fchmod", "fchown", "fork"),
        *("forkpty", "getegid", "geteuid", "getgid", "getgroups", "getpgid", "getpgrp", "getpriority"),
        *("getsid", "getuid", "kill", "killpg", "lchown", "memfd_create", "mkfifo", "mknod", "nice", "openpty"),
        *("pidfd_open", "pipe2", "posix_fadvise", "posix_fallocate", "pread", "preadv", "pwrite", "pwritev"),
        *("register_at_fork", "sched_getaffinity", "sched_setaffinity", "sched_yield", "sendfile"),
        *("set_blocking", "setgid", "setpgid", "setpriority", "setsid", "setuid", "spawnlp", "statvfs", "sync"),
        *("sysconf", "ttyname", "uname", "wait3", "wait4", "waitid"),
    },
    "signal": {
        *("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGSTOP", "SIGTSTP", "SIGUSR1", "SIGUSR2"),
        *("alarm", "pause", "pthread_kill", "setitimer", "sigwait", "siginterrupt"),
    },
    "socket": {"AF_UNIX", "SCM_RIGHTS", "send_fds", "recv_fds", "socketpair", "CMSG_LEN"},
    "mmap": {"MAP_SHARED", "MAP_ANONYMOUS", "PROT_READ", "PROT_WRITE"},
    "select": {"poll", "epoll", "kqueue"},
}
# Of any object: an event loop, a socket, a call that starts a process.
POSIX_METHODS = {
    *("add_reader", "add_writer", "add_signal_handler", "create_unix_server", "create_unix_connection", "sendmsg"),
    *("recvmsg", "madvise", "st_blocks"),
}
POSIX_ARGUMENTS = {"preexec_fn", "start_new_session", "process_group", "dir_fd"}


def posix_only(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of what a module names that only POSIX has, also below a look at `sys.platform`: its twin would
    have no one place. What is asked for by name (getattr, hasattr) has an answer where it is missing."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names if name.name in POSIX_MODULES)
            case ast.ImportFrom(module=str(module)) if module in POSIX_MODULES:
                yield node.lineno, module
            case ast.ImportFrom(module=str(module), names=names):
                only = POSIX_NAMES.get(module, set())
                yield from ((node.lineno, f"{module}.{name.name}") for name in names if name.name in only)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in POSIX_NAMES.get(module, ()):
                yield node.lineno, f"{module}.{name}"
            case ast.Attribute(attr=name) if name in POSIX_METHODS:
                yield node.lineno, name
            case ast.keyword(arg=str(name)) if name in POSIX_ARGUMENTS:
                yield node.value.lineno, f"{name}="
        yield from posix_only(node)


def test_only_the_doors_name_what_only_posix_has() -> None:
    """The next such call is made where its twin can stand beside it."""
    found = []
    for package, top in TOPS.items():
        for path in sorted((top / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(DOORS) and name not in OF_ONE_SYSTEM:
                found += [f"{name}:{line} {what}" for line, what in posix_only(ast.parse(path.read_text("utf-8")))]
    assert not found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os, fcntl", "fcntl"),
        ("def f():\n    from resource import getrusage", "resource"),
        ("from os import fork", "os.fork"),
        ("os.killpg(1, 9)", "os.killpg"),
        ("x = signal.SIGKILL", "signal.SIGKILL"),
        ("loop.add_reader(1, print)", "add_reader"),
        ("run(a, start_new_session=True)", "start_new_session="),
        ("if sys.platform == 'linux':\n    os.nice(1)", "os.nice"),
        ("getattr(os, 'O_NOFOLLOW', 0)", None),
        ("os.getpid()", None),
    ],
)
def test_what_only_posix_has_is_found(text: str, found: str | None) -> None:
    assert [what for _, what in posix_only(ast.parse(text))] == ([] if found is None else [found])


# As far as Python itself goes along: its own modules are imported before, and believe that this is Linux.
WINDOWS = """
import asyncio, ctypes, logging.handlers, multiprocessing, pkgutil, importlib, select, shutil, socket, sqlite3, ssl
import subprocess, sys, sysconfig, tempfile, threading, uuid, webbrowser, os, signal, mmap, selectors, http.server
import zipfile, tarfile
sysconfig.get_config_vars()
{before}
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
for name in {modules!r}:
    sys.modules.pop(name, None)
for module, names in {names!r}.items():
    for name in names:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
for name in ("O_DIRECTORY",):
    delattr(os, name)
sys.platform = "win32"
failed = []
for package in {packages!r}:
    top = importlib.import_module(package)
    for module in pkgutil.walk_packages(top.__path__, package + "."):
        if module.name.endswith("__main__") or ".examples." in module.name:
            continue
        try:
            importlib.import_module(module.name)
        except Exception as error:
            failed.append(f"{{module.name}}: {{type(error).__name__}}: {{error}}")
print(*failed, sep="\\n")
"""
OTHERS = "psutil zeroconf rich typer click uvicorn starlette.applications pydantic cryptography.x509 numpy platformdirs"


@pytest.mark.parametrize("packages", [("meshwire", "meshtraind"), ("meshwire", "meshtrain")], ids=" ".join)
def test_every_module_is_imported_where_posix_lacks(packages: tuple[str, ...]) -> None:
    """sys.platform says win32, fcntl and its like cannot be imported, os has no fork and no getuid: what a module
    does when it is imported needs none of them."""
    before = [f"import {name}" for name in OTHERS.split()]
    if "meshtrain" in packages:
        before += [f"import {name}" for name in ["torch", "safetensors.torch", "torch.distributed", "cloudpickle"]]
    code = WINDOWS.format(
        before="\n".join(before),
        modules=POSIX_MODULES,
        names={**POSIX_NAMES, "os": POSIX_NAMES["os"] - {"O_CLOEXEC", "register_at_fork", "set_blocking"}},
        packages=packages,
    )
    paths = [str(top) for top in TOPS.values()]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
