"""Where the time goes: of a learner by function, and of a process of the all-reduce by samples of its stack."""

import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import psutil

from tests.bench.goals import measures
from tests.bench.goals.sides import SidesError

WORKS = {"learner": (("resnet", 1, 4), ("gpt", 1, 4), ("resnet", 2, 4), ("gpt", 2, 4)), "tiny": (("tiny", 4, 150),)}
RATE_HZ = 500
SAMPLED_S = 8
ROUNDS = 120  # which take longer than the samples
WARM_S = 4.0
LINES = 30
START_TIMEOUT_S = 60.0


def learners(section: str) -> Iterator[str]:
    """A table of functions for each side of each work. Raises what the measurements raise."""
    for model, members, steps in WORKS[section]:
        for side, text in measures.profiled(model, members, "fp16", steps):
            yield f"-- {model} m={members}, {side}, rank 0, {steps} steps\n" + re.sub(r"(?m)^\s*$\n", "", text)


def all_reduce(*, tls: bool) -> str:
    """The innermost functions of rank 0 of two peers, with the part of its samples. Raises SidesError."""
    if (spy := shutil.which("py-spy")) is None:
        raise SidesError("the profile of the all-reduce needs py-spy: pip install py-spy")
    command = [sys.executable, "-m", "meshtraind.bench", "allreduce", "--rounds", str(ROUNDS)]
    with subprocess.Popen([*command, *["--no-tls"] * (not tls)], stdout=subprocess.DEVNULL) as bench:
        try:
            peer = _rank_0(bench)
            time.sleep(WARM_S)
            record = [spy, "record", "--pid", str(peer), "--rate", str(RATE_HZ), "--duration", str(SAMPLED_S)]
            stacks = subprocess.run(
                [*record, "--native", "--format", "raw", "--output", "/dev/stdout"],
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            bench.terminate()
    if stacks.returncode:
        raise SidesError(f"py-spy: {stacks.stderr.strip()}")
    return f"-- all-reduce m=2, {'TLS' if tls else 'no TLS'}, rank 0\n" + innermost(stacks.stdout)


def _rank_0(bench: "subprocess.Popen[bytes]") -> int:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and bench.poll() is None:
        for child in psutil.Process(bench.pid).children():
            words = child.cmdline()
            if "meshtraind.bench.peer" in words and words[words.index("--rank") + 1] == "0":
                return child.pid
        time.sleep(0.1)
    raise SidesError("the all-reduce did not start")


def innermost(stacks: str) -> str:
    """Of stacks, a line each with their count behind them: what was on top, and in what part of them.

    First by library, or package of Python code; the system's library by function, for most of its time is the kernel's.
    """
    functions: Counter[str] = Counter()
    places: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        if stack and count.isdigit():
            name = stack.rpartition(";")[2]
            functions[name] += int(count)
            places[_place(name)] += int(count)
    total = sum(functions.values())
    found = [f"{count / total:6.1%}  {name}" for name, count in places.most_common(LINES)]
    found += ["by function", *(f"{count / total:6.1%}  {name}" for name, count in functions.most_common(LINES))]
    return "\n".join(found)


def _place(function: str) -> str:
    """`copy (numpy/core/x.so)`: x.so; `f (meshwire/frames/parser.py:3)`: meshwire; `read (libc.so.6)`: itself."""
    where = re.search(r"\(([^()]+)\)$", function)
    if where is None:
        return function
    path = where[1]
    if ".py:" in path or path.startswith("<"):
        return f"Python: {path.partition('/')[0]}" if "/" in path else "Python: other"
    library = path.rpartition("/")[2]
    known = library.startswith("libc.") and not function.startswith("0x")
    return function if known else library
