"""Which packages a script cannot do without."""

from pathlib import Path

import pytest

from meshtrain.packing.imports import modules_needed
from meshwire.jobs.files import FileEntry, FileManifest


def needed(
    folder: Path, files: dict[str, str], script: str = "train.py", *, as_module: bool = False
) -> tuple[str, ...]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    entries = tuple(FileEntry(path=name, size_bytes=1, sha256=bytes(32), executable=False) for name in sorted(files))
    return modules_needed(FileManifest(entries=entries), folder, script, as_module=as_module)


def test_packages_are_named_and_pythons_own_modules_are_not(tmp_path: Path) -> None:
    text = (
        "import os, einops.layers\nfrom wandb import init\nimport torch\nimport meshtrain as mt\nimport numpy as np\n"
    )
    assert needed(tmp_path, {"train.py": text}) == ("einops", "wandb")


def test_what_a_script_can_do_without_is_not_needed(tmp_path: Path) -> None:
    text = "try:\n    import wandb\nexcept ImportError:\n    wandb = None\nif True:\n    import rich\n"
    assert needed(tmp_path, {"train.py": text + "def late():\n    import tqdm\n"}) == ()


def test_shipped_modules_are_followed_and_not_looked_for(tmp_path: Path) -> None:
    files = {
        "src/train.py": "import model\nfrom parts import head\nfrom parts.body import layer\nimport fast\n",
        "src/model.py": "import einops\n",
        "src/parts/__init__.py": "from . import tail\n",
        "src/parts/tail.py": "import torchaudio\n",
        "src/parts/body.py": "from .deep import things\n",
        "src/parts/deep/__init__.py": "import accelerate\n",
        "src/fast.cpython-311-x86_64-linux-gnu.so": "",
        "src/other.py": "import never_run\n",
    }
    assert needed(tmp_path, files, "src/train.py") == ("accelerate", "einops", "torchaudio")


def test_imports_that_no_package_can_mean_are_left_to_the_script(tmp_path: Path) -> None:
    text = f"from .. import above\nfrom ... import far\nimport größe\nimport {'x' * 101}\nimport einops\n"
    assert needed(tmp_path, {"train.py": text}) == ("einops",)


def test_modules_that_import_each_other_end(tmp_path: Path) -> None:
    assert needed(tmp_path, {"train.py": "import a\n", "a.py": "import b\n", "b.py": "import a\nimport yaml\n"}) == (
        "yaml",
    )


@pytest.mark.parametrize(
    "text", ["import sys\nsys.path.insert(0, 'lib')\nimport mine\n", "import mine\ndef broken(:\n", "import \x00"]
)
def test_where_nothing_can_be_known_nothing_is_claimed(tmp_path: Path, text: str) -> None:
    assert needed(tmp_path, {"train.py": text}) == ()


def test_one_file_that_says_where_modules_are_speaks_for_all(tmp_path: Path) -> None:
    files = {"train.py": "import sys\nsys.path.append('lib')\nimport other\n", "other.py": "import mine\n"}
    assert needed(tmp_path, files) == ()


def test_of_a_module_its_packages_are_read_too_and_names_are_looked_for_where_it_is_run(tmp_path: Path) -> None:
    files = {
        "shop/__init__.py": "import einops\n",
        "shop/deep/train.py": "import helper\nimport tools\nfrom . import near\n",
        "shop/deep/near.py": "import yaml\n",
        "shop/deep/helper.py": "import never_run\n",
        "tools.py": "import tqdm\n",
    }
    found = needed(tmp_path, files, "shop/deep/train.py", as_module=True)
    assert found == ("einops", "helper", "tqdm", "yaml")
    assert "helper" not in needed(tmp_path, files, "shop/deep/train.py")
