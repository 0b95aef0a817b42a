"""One rank of a job that runs tests of torch's own suite for torch.distributed (in the wheel: torch.testing).

Submitted as a job's script, unchanged torch and unchanged tests: they ask for gloo, and get what the job has. Each test
is a process of its own, forked here, so that nothing is left of the one before. Ranks share one machine here, for some
tests meet in a folder.
"""

import json
import os
import signal
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

options = json.loads(sys.argv[1])
os.environ.update(
    BACKEND="gloo",
    TEMP_DIR=options["folder"],
    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(options["timeout_s"]),
    OMP_NUM_THREADS="1",
)

from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

import meshtrain as mt  # noqa: E402

SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """The tests, for a backend that is called gloo."""


def run(name: str) -> tuple[str, str]:
    """Runs one test in a child. Returns "pass", "skip" or "fail", and why."""
    folder = Path(options["folder"]) / name
    folder.mkdir(exist_ok=True)
    log = folder / f"{os.environ['RANK']}.log"
    ends = Pipe()
    child = os.fork()
    if not child:
        os.environ["TEMP_DIR"] = str(folder)
        for part in ("barrier", "test_dir"):
            (folder / part).mkdir(exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        signal.alarm(options["timeout_s"])
        try:
            Suite._run(int(os.environ["RANK"]), name, str(folder / "store"), ends[1])  # type: ignore[no-untyped-call]
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        else:
            code = 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "pass", ""
    if code in SKIPS:
        return "skip", SKIPS[code]
    return "fail", f"exit code {code}\n" + log.read_text(errors="replace")[-3000:]


def main() -> None:
    names = options["tests"] or sorted(name for name in dir(Suite) if name.startswith("test_"))
    results = {}
    for name in names:
        if getattr(getattr(Suite, name), "__unittest_skip__", False):
            results[name] = ("skip", getattr(Suite, name).__unittest_skip_why__, 0.0)
            continue
        began_s = time.monotonic()
        results[name] = (*run(name), round(time.monotonic() - began_s, 2))
        sys.stdout.write(f"{results[name][0]} {name}\n")
        (mt.output_dir() / "results.json").write_text(json.dumps(results))


main()
