"""torch's own suite for torch.distributed, over the daemons of three laptops on this machine.

    python -m tests.torch_backend.conformance [--tests NAME ...] [--write]

Takes about two minutes; `--write` writes what was seen into `conformance.json`, beside this file.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from meshtrain.demo.localmesh import LocalMesh
from meshwire.messages.job import JobSummary
from tests.daemon import realjobs as jobs

NAMES = ("anna", "bert", "cleo")
WORKER = Path(__file__).with_name("suite_worker.py")
RESULTS = Path(__file__).with_name("conformance.json")
# Its log is made in C++, which knows two names and looks for gloo's own object where it reads "gloo".
OF_ANOTHER_NAME = {
    "test_ddp_logging_data_cpu": "compares the backend's name in DistributedDataParallel's log with gloo"
}
TEST_TIMEOUT_S = 40
TIMEOUT_S = 900.0


def run(mesh: LocalMesh, folder: Path, tests: tuple[str, ...]) -> tuple[JobSummary, dict[str, tuple[str, str]]]:
    """What became of each test, and why: "fail" where any rank failed, "name" of those that fail by the name alone.

    Without names, of all.
    """
    shared = folder / "shared"
    shared.mkdir()
    options = json.dumps({"folder": str(shared), "timeout_s": TEST_TIMEOUT_S, "tests": tests})
    submitted = jobs.submit(mesh.daemons[0], folder, WORKER.read_text(), args=(options,))
    ended = jobs.ended(mesh.daemons[0], submitted.job)
    seen = [
        json.loads(jobs.read(mesh.daemons[0], submitted.job, "output", rank, "results.json"))
        for rank in range(len(mesh.daemons))
    ]
    results = {}
    for name in seen[0]:
        of_ranks = [each[name] for each in seen]
        failed = next((each for each in of_ranks if each[0] == "fail"), of_ranks[0])
        by_name = failed[0] == "fail" and name in OF_ANOTHER_NAME
        results[name] = ("name", OF_ANOTHER_NAME[name]) if by_name else (failed[0], failed[1])
    return ended, results


def main() -> int:
    """The exit code: 1 where a test failed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tests", nargs="*", default=(), help="names; without, all of them")
    arguments.add_argument("--write", action="store_true", help="write conformance.json")
    asked = arguments.parse_args()
    jobs.TIMEOUT_S = TIMEOUT_S
    with LocalMesh(NAMES, print) as mesh, tempfile.TemporaryDirectory() as folder:
        _, results = run(mesh, Path(folder), tuple(asked.tests))
    for name, (what, why) in results.items():
        if what == "fail":
            sys.stdout.write(f"FAIL {name}\n{why}\n")
    counts = Counter(what for what, _ in results.values())
    sys.stdout.write(f"torch {torch.__version__}, world {len(NAMES)}: {dict(counts)}\n")
    if asked.write:
        by_result = {what: sorted(name for name, seen in results.items() if seen[0] == what) for what in sorted(counts)}
        text = {"torch": torch.__version__, "world": len(NAMES), **by_result}
        RESULTS.write_text(json.dumps(text, indent=1) + "\n")
    return bool(counts["fail"])


if __name__ == "__main__":
    sys.exit(main())
