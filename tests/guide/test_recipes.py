"""Each recipe runs to its end, alone and on two daemons. `test_guides.py` has the quick part: it uses what there is."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtrain.demo.localmesh import LocalMesh

RECIPES = Path(__file__).parents[2] / "deploy/recipes"
NAMES = sorted(path.name for path in RECIPES.glob("*.py"))
NEEDS = {"lightning_trainer.py": ("lightning",), "transformers_trainer.py": ("transformers", "accelerate")}
TIMEOUT_S = 170

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[LocalMesh]:
    with LocalMesh(("anna", "bert"), print) as started:
        yield started


def run(recipe: str, command: list[str], folder: Path) -> str:
    """What it prints. Skips where what it needs is not installed."""
    missing = [package for package in NEEDS.get(recipe, ()) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"without {' and '.join(missing)}: pip install -e '.[dev,frameworks]'")
    (folder / recipe).write_bytes((RECIPES / recipe).read_bytes())
    done = subprocess.run(
        [sys.executable, *command, recipe], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("recipe", NAMES)
def test_it_runs_alone(recipe: str, tmp_path: Path) -> None:
    run(recipe, [], tmp_path)


@pytest.mark.parametrize("recipe", NAMES)
def test_it_runs_on_two(recipe: str, tmp_path: Path, mesh: LocalMesh) -> None:
    """The job succeeds, and both have the same model in the end."""
    data_dir = str(mesh.daemons[0].data_dir)
    said = run(recipe, ["-m", "meshtrain.cli", "submit", "--data-dir", data_dir, "--no-plan", "--peers", "2"], tmp_path)
    assert "on 2 devices" in said
    assert "succeeded after" in said
    if recipe != "transformers_trainer.py":  # torch's semantics: no hashes are compared
        assert "replicas bit-equal" in said
