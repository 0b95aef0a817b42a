"""What real jobs leave on real disks: nothing when they do not fit, only their results when they have ended."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from meshtrain.client import RequestError as Refused
from meshtrain.demo.localmesh import LocalMesh
from meshwire import limits
from tests.daemon import realjobs as jobs

pytestmark = pytest.mark.timeout(180)

SMALL_DISK_BYTES = 24 * limits.MIB  # of which a quarter is kept in reserve
DATA_BYTES = 20 * limits.MIB
MOUNT = 'mount -t tmpfs -o size="$1",mode=0700 tmpfs "$0" && shift && exec "$@"'


@pytest.fixture
def mesh() -> Iterator[LocalMesh]:
    """Two daemons, the second with its data folder on a small disk."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root on Linux")
    mounted: list[Path] = []

    class WithASmallDisk(LocalMesh):
        def prefix(self, data_dir: Path) -> Sequence[str]:
            if data_dir.name != "small":
                return ()
            mounted.append(data_dir)
            return ("sh", "-c", MOUNT, str(data_dir), str(SMALL_DISK_BYTES))

    try:
        with WithASmallDisk(["large", "small"], lambda _line: None) as mesh:
            yield mesh
    finally:
        for data_dir in mounted:
            if os.path.ismount(data_dir):
                subprocess.run(["umount", str(data_dir)], check=True, timeout=10)
            shutil.rmtree(data_dir.parent)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def files_below(folder: Path) -> set[str]:
    """The files below a folder that a daemon may be emptying: a folder that is gone holds none."""
    found = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return {path.relative_to(folder).as_posix() for path in found}


def test_a_job_that_does_not_fit_is_refused_and_one_that_does_leaves_its_results(
    mesh: LocalMesh, tmp_path: Path
) -> None:
    """Disk full while receiving a job: folder, needed and free bytes are named, and nothing is left."""
    large, small = mesh.daemons
    data, too_large, other = (tmp_path / name for name in ("data", "too_large", "other"))
    for folder in (data, too_large, other):
        folder.mkdir()
    (data / "a.bin").write_bytes(os.urandom(DATA_BYTES))
    wanted = (
        r"small could not receive the job: not enough space in .*small/blobs: 20\.\d MiB needed.*, \d+\.\d MiB free; "
        r"free at least \d\.\d MiB there"
    )
    with pytest.raises(Refused, match=wanted):
        jobs.submit(large, too_large, jobs.TRAIN, data=data)
    until(lambda: not list((small.data_dir / "jobs").glob("*")) and not list((large.data_dir / "jobs").glob("*")))
    assert not list((small.data_dir / "blobs").rglob("*.part"))

    different = jobs.TRAIN.replace("torch.manual_seed(0)", "torch.manual_seed(os.getpid())")
    ended = jobs.run(large, other, different)
    assert ended.state == "succeeded", ended.error
    shipped = {hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.rglob("*") if path.is_file()}
    for daemon in mesh.daemons:
        rank = next(rank for rank, member in enumerate(ended.members) if member.name == daemon.name)
        folder, blobs = daemon.data_dir / "jobs" / ended.job, daemon.data_dir / "blobs"
        results = {f"logs/{rank}.log", f"logs/{rank}.times", f"out/{rank}/sub/weights.txt", "course.msgpack"}
        until(partial(_holds_only, folder, results))
        until(partial(_holds_only, blobs, {f"{name[:2]}/{name}" for name in shipped}))
        assert files_below(folder) == results


def _holds_only(folder: Path, files: set[str]) -> bool:
    return files_below(folder) <= files
