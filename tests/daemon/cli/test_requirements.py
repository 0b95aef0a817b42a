"""`submit -r`: what is read of requirements.txt and pyproject.toml, and what is refused."""

from pathlib import Path

import pytest

from meshtrain.cli.submission.requirements import read_requirements
from meshtrain.cli.ui.errors import CliError
from meshwire import limits


def read(folder: Path, text: str, name: str = "requirements.txt") -> tuple[str, ...]:
    (folder / name).write_text(text)
    return read_requirements([folder / name])


def test_names_versions_extras_and_markers(tmp_path: Path) -> None:
    text = """
# what the model needs
einops >= 0.8   # tensors
accelerate[test]==1.0 ; python_version > "3.9"
tokenizers>=0.20,\\
  <0.22
einops>=0.8
"""
    assert read(tmp_path, text) == (
        "einops>=0.8",
        'accelerate[test]==1.0; python_version > "3.9"',
        "tokenizers<0.22,>=0.20",
    )


def test_a_file_may_include_another(tmp_path: Path) -> None:
    (tmp_path / "base.txt").write_text("einops\n")
    assert read(tmp_path, "-r base.txt\nwandb\n") == ("einops", "wandb")
    assert read(tmp_path, "--requirement=base.txt\n") == ("einops",)
    with pytest.raises(CliError, match="includes itself"):
        read(tmp_path, "-r requirements.txt\n")


def test_dependencies_of_a_project(tmp_path: Path) -> None:
    assert read(tmp_path, '[project]\ndependencies = ["einops>=0.8"]\n', "pyproject.toml") == ("einops>=0.8",)
    assert read(tmp_path, "[tool.black]\nline-length = 3\n", "pyproject.toml") == ()
    with pytest.raises(CliError, match="not a list"):
        read(tmp_path, '[project]\ndependencies = "einops"\n', "pyproject.toml")
    with pytest.raises(CliError, match=r"pyproject\.toml: "):
        read(tmp_path, "[project\n", "pyproject.toml")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-e .", "pip's options"),
        ("--index-url https://example.org", "pip's options"),
        ("--extra-index-url=https://example.org", "pip's options"),
        ("./wheels/mine.whl", "line 2"),
        ("mine @ file:///home/anna/mine", "not there on the others"),
        ("einops >> 3", "line 2"),
        ("x" * (limits.REQUIREMENT_CHARS_MAX + 1), "characters"),
    ],
)
def test_what_others_could_not_install_is_refused_by_its_line(tmp_path: Path, line: str, why: str) -> None:
    with pytest.raises(CliError, match=why) as caught:
        read(tmp_path, f"einops\n{line}\n")
    assert "requirements.txt, line 2" in str(caught.value)


def test_a_file_that_is_not_there_and_too_many_packages(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot be read"):
        read_requirements([tmp_path / "none.txt"])
    with pytest.raises(CliError, match=f"at most {limits.REQUIREMENTS_MAX}"):
        read(tmp_path, "".join(f"package{number}\n" for number in range(limits.REQUIREMENTS_MAX + 1)))
