"""Scripts as torch's tutorials, Accelerate, Lightning and HF Trainer have them run over three daemons as they are.

Each file in scripts/ is sent byte for byte and knows nothing of meshtrain; it checks by itself that the ranks have
trained together and have come to the same.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtrain.demo.localmesh import LocalMesh
from tests.daemon import realjobs as jobs
from tests.tiers import mostly_long
from tests.torch_backend import conformance

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SCRIPTS = Path(__file__).with_name("scripts")
OF_TORCH = ("ddp.py", "mingpt.py", "hooks.py", "sharded.py")
OF_FRAMEWORKS = (  # the script, what it needs, how many laptops
    ("accelerates_own.py", ("accelerate",), 2),  # with three it fails under torchrun and gloo, too
    ("lit.py", ("lightning",), 3),
    ("trainer.py", ("accelerate", "transformers"), 3),  # by accelerate, as the first one
    ("accelerated.py", ("accelerate", "transformers"), 3),  # what the first and the third one do, too
)
IN_TURN = """
import runpy
for name in {names}:
    print("--", name, flush=True)
    runpy.run_path(name, run_name="__main__")
"""


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with LocalMesh(conformance.NAMES, print) as started:
        yield started


def check_ends_well(mesh: LocalMesh, folder: Path, text: str, scripts: int, peers: int = 3, *args: str) -> None:
    ended = jobs.run(mesh.daemons[0], folder, text, as_it_is=True, peers=peers, args=args)
    assert ended.state == "succeeded", ended.error
    assert len(ended.ranks) == peers
    for rank in range(peers):
        said = jobs.read(mesh.daemons[0], ended.job, "log", rank)
        assert said.count("as it should be") == scripts, said


def test_what_torch_has(mesh: LocalMesh, tmp_path: Path) -> None:
    """DDP, saved and loaded; a Trainer with snapshots; hooks, ZeRO-1 and Join; FSDP2, DTensor and DCP. One process runs
    all of them, for torch takes as long to import as they take to train."""
    work = tmp_path / "work"
    work.mkdir()
    for name in OF_TORCH:
        (work / name).write_bytes((SCRIPTS / name).read_bytes())
    check_ends_well(mesh, tmp_path, IN_TURN.format(names=OF_TORCH), len(OF_TORCH))


@pytest.mark.parametrize(("name", "packages", "peers"), mostly_long(OF_FRAMEWORKS, 2))
def test_what_frameworks_have(
    mesh: LocalMesh, tmp_path: Path, name: str, packages: tuple[str, ...], peers: int
) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"without {' and '.join(missing)}: pip install -e '.[dev,frameworks]'")
    shared = tmp_path / "shared"
    shared.mkdir()
    check_ends_well(mesh, tmp_path, (SCRIPTS / name).read_text(), 1, peers, str(shared))


EACH_FOR_ITSELF = """
import torch.distributed as dist
dist.init_process_group()
print("alone", dist.get_world_size(), flush=True)
dist.destroy_process_group()
"""


def test_a_group_in_which_nothing_was_sent_is_no_success(mesh: LocalMesh, tmp_path: Path) -> None:
    """J4. So does Accelerate's PartialState() on a CPU: it makes a group, and has every process count itself alone."""
    ended = jobs.run(mesh.daemons[0], tmp_path, EACH_FOR_ITSELF)
    assert ended.state == "failed"
    assert "nothing was exchanged: the script has made a process group" in (ended.error or "")
