"""DESIGN 1, 7: a job moves over links alone: peers whose folders are hidden from each other train together."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from meshtrain.demo.localmesh import LocalMesh
from meshwire.messages.job import ListOutputs, Outputs
from tests.daemon import realjobs as jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NAMES = ("anna", "bert", "cleo")
SUBMITTER = "anna"

# Arguments: own data folder, the folder of all data folders, a stash, a folder to hide or "", then the command.
# In a mount namespace of its own the daemon sees nothing in these places but its own data folder.
HIDE = """
set -e
own=$1 all=$2 stash=$3 hidden=$4
shift 4
mount --bind "$own" "$stash"
mount -t tmpfs -o size=1m tmpfs "$all"
mkdir "$own"
mount --move "$stash" "$own"
if [ -n "$hidden" ]; then mount -t tmpfs -o size=1m tmpfs "$hidden"; fi
exec "$@"
"""

SCRIPT = (
    jobs.PREAMBLE
    + """
import json
from pathlib import Path

model, optimizer, loader = mt.prepare(model, optimizer, loader)
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
seen = {
    "folders": sorted(os.listdir(sys.argv[1])),
    "submitted": os.listdir(sys.argv[2]),
    "cwd": os.getcwd(),
    "data": (mt.data_dir() / "input.txt").read_text(),
    "weights": [p.flatten().tolist() for p in model.parameters()],
}
(mt.output_dir() / "seen.json").write_text(json.dumps(seen))
print("rank", mt.rank(), "is done", flush=True)
mt.finish()
"""
)


@pytest.fixture
def job_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "input.txt").write_text("what was submitted")
    return folder


@pytest.fixture
def hidden_mesh(tmp_path: Path, job_folder: Path) -> Iterator[LocalMesh]:
    """Daemons that see neither each other's data folders nor, apart from the submitter's, what is submitted."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("mount namespaces take Linux and `unshare`")
    stash = tmp_path / "stash"
    stash.mkdir()
    namespace = ["unshare", "--mount", "--propagation", "private"]
    tried = subprocess.run(
        [*namespace, "mount", "-t", "tmpfs", "tmpfs", str(stash)], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"no mount namespace can be made, which takes root: {tried.stderr.strip()}")

    class Hidden(LocalMesh):
        def prefix(self, data_dir: Path) -> Sequence[str]:
            hidden = "" if data_dir.name == SUBMITTER else str(job_folder)
            places = [str(data_dir), str(data_dir.parent), str(stash), hidden]
            return [*namespace, "sh", "-c", HIDE, "hide", *places]

    with Hidden(NAMES, print) as mesh:
        yield mesh


def test_peers_that_cannot_see_each_others_folders_train_together(hidden_mesh: LocalMesh, job_folder: Path) -> None:
    """Files, data, the start, gradients, logs and results all travel over the links."""
    mesh = hidden_mesh
    for daemon in mesh.daemons:
        theirs = Path(f"/proc/{daemon.process.pid}/root")
        assert [entry.name for entry in (theirs / mesh.folder.relative_to("/")).iterdir()] == [daemon.name]
        submitted_visible = (theirs / job_folder.relative_to("/") / "data").exists()
        assert submitted_visible == (daemon.name == SUBMITTER)

    submitter = mesh.daemons[NAMES.index(SUBMITTER)]
    submitted = jobs.submit(
        submitter, job_folder, SCRIPT, data=job_folder / "data", args=(str(mesh.folder), str(job_folder))
    )
    ranks = [member.name for member in submitted.members]
    assert sorted(ranks) == list(NAMES)
    weights = []
    for reader in mesh.daemons:
        summary = jobs.ended(reader, submitted.job)
        assert summary.state == "succeeded", summary.error
        assert summary.replicas_equal is True
        listed = reader.request(ListOutputs(job=submitted.job), jobs.TIMEOUT_S, "outputs")
        assert isinstance(listed, Outputs)
        assert sorted((file.rank, file.path) for file in listed.files) == [(rank, "seen.json") for rank in range(3)]
        for rank, owner in enumerate(ranks):
            seen = json.loads(jobs.read(reader, submitted.job, "output", rank, "seen.json"))
            assert seen["folders"] == [owner]
            assert bool(seen["submitted"]) == (owner == SUBMITTER)
            assert Path(seen["cwd"]).is_relative_to(mesh.folder / owner)
            assert seen["data"] == "what was submitted"
            assert f"rank {rank} is done" in jobs.read(reader, submitted.job, "log", rank)
            weights.append(seen["weights"])
    assert all(other == weights[0] for other in weights)
