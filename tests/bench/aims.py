"""`python -m tests.bench.aims`: start, discovery and idling of real daemons on loopback, beside what is aimed at."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalDaemon, LocalMesh, LocalMeshError
from meshwire.messages.local import GetPeers, Peers
from tests.daemon import realjobs as jobs

TIMEOUT_S = 30.0
IDLE_S = 20.0
LINKS = 15
SETTLE_S = 3.0  # after its start a daemon announces itself several times

SCRIPT = """
import time
began_s = time.monotonic()
import json, torch
import meshtrain as mt
imported_s = time.monotonic()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = mt.prepare(model, optimizer)
first_step_s = time.monotonic()
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
(mt.output_dir() / "times.json").write_text(json.dumps([began_s, imported_s, first_step_s]))
mt.finish()
"""


def found_s() -> float:
    """From starting a second daemon to the first one listing it (mDNS, not paired)."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
        first = _started("anna", folder, stack)
        began_s = time.monotonic()
        _started("bert", folder, stack, wait=False)
        while True:
            reply = first.request(GetPeers(), TIMEOUT_S, "list of peers")
            assert isinstance(reply, Peers)
            if reply.peers:
                return time.monotonic() - began_s
            if time.monotonic() > began_s + TIMEOUT_S:
                raise LocalMeshError(f"the second daemon was not listed in {TIMEOUT_S:.0f} s")
            time.sleep(0.01)


def first_step_s() -> float:
    """From `meshtrain submit` to the first step of the last of two learners, less its own imports."""
    with LocalMesh(("anna", "bert"), lambda _: None) as mesh, tempfile.TemporaryDirectory() as name:
        (Path(name) / "train.py").write_text(SCRIPT)
        submit = [*_command("submit", mesh.daemons[0].data_dir), "--no-plan", "--detach", "train.py"]
        began_s = time.monotonic()
        done = subprocess.run(submit, cwd=name, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        job = done.stdout.split()[-1]
        if (summary := jobs.ended(mesh.daemons[0], job)).state != "succeeded":
            raise LocalMeshError(f"the job {summary.state}: {summary.error}")
        times = [json.loads(jobs.read(mesh.daemons[0], job, "output", rank, "times.json")) for rank in range(2)]
        return float(max(first - began_s - (imported - began) for began, imported, first in times))


def status_s() -> float:
    """Wall time of `meshtrain status`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
        daemon = _started("anna", folder, stack)
        began_s = time.monotonic()
        subprocess.run(_command("status", daemon.data_dir), capture_output=True, timeout=TIMEOUT_S, check=True)
        return time.monotonic() - began_s


def idle() -> tuple[float, float]:
    """(resident MB, percent of a core) of a daemon that nothing is asked of."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshtrain-")))
        daemon = _started("anna", folder, stack)
        time.sleep(SETTLE_S)
        before_s = _cpu_s(daemon.process.pid)
        time.sleep(IDLE_S)
        percent = (_cpu_s(daemon.process.pid) - before_s) / IDLE_S * 100
        pages = int(Path(f"/proc/{daemon.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, percent


def idle_links(links: int) -> float:
    """Percent of a core of a daemon that has so many links, and nothing to do: the mean of all that are linked."""
    names = [f"peer{number}" for number in range(1 + links)]
    with LocalMesh(names, lambda _: None) as mesh:
        pids = [daemon.process.pid for daemon in mesh.daemons]
        time.sleep(SETTLE_S)
        before_s = sum(map(_cpu_s, pids))
        time.sleep(IDLE_S)
        return (sum(map(_cpu_s, pids)) - before_s) / len(pids) / IDLE_S * 100


def _started(name: str, folder: Path, stack: ExitStack, *, wait: bool = True) -> LocalDaemon:
    daemon = LocalDaemon(name, folder / name)
    stack.callback(daemon.stop)
    stack.callback(daemon.ask_to_stop)
    if wait:
        daemon.wait()
    return daemon


def _command(verb: str, data_dir: Path) -> list[str]:
    return [str(Path(sys.executable).with_name("meshtrain")), verb, "--data-dir", str(data_dir)]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return float(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.aims", description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="how often each is measured")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    if not sys.platform.startswith("linux"):
        print("error: memory and CPU of a daemon are read from /proc, which Linux alone has", file=sys.stderr)
        return 1
    timed: tuple[tuple[str, Callable[[], float], float], ...] = (
        ("second daemon started to listed by the first, s", found_s, 2.0),
        ("submit to the first step less the script's imports, s", first_step_s, 5.0),
        ("meshtrain status, s", status_s, 0.4),
    )
    if not options.json:
        print("| what | median (range) | aim |\n|---|---|---|", flush=True)
    try:
        for what, measure, aim in timed:
            show(what, [measure() for _ in range(options.times)], aim, as_json=options.json)
        resident_mb, cpu_percent = idle()
        links_percent = idle_links(LINKS)
    except (LocalMeshError, RequestError, ConnectionLost, TimeoutError, subprocess.SubprocessError) as error:
        print(f"error: {error}{_said(error)}", file=sys.stderr)
        return 1
    show("idle daemon, MB resident", [resident_mb], 60.0, as_json=options.json)
    show("idle daemon, % of a core", [cpu_percent], 0.5, as_json=options.json)
    show(f"idle daemon with {LINKS} links, % of a core", [links_percent], 0.5, as_json=options.json)
    return 0


def show(what: str, values: list[float], aim: float, *, as_json: bool) -> None:
    """One line. Aims are reported, not judged: they depend on the machine."""
    if as_json:
        print(json.dumps({"what": what, "values": [round(value, 3) for value in values], "aim": aim}), flush=True)
        return
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    print(f"| {what} | {median(values):.2f}{spread} | {aim:g} |", flush=True)


def _said(error: Exception) -> str:
    return f"\n{error.stderr}" if isinstance(error, subprocess.CalledProcessError) else ""


if __name__ == "__main__":
    sys.exit(main())
