"""Sizes of a model and its optimizer, against what torch allocates; and the world that ends at `mt.prepare`."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshtrain.errors import NotSupported
from meshtrain.train.dry_run import MeasuringProcess
from meshtrain.train.model import tensors
from meshtrain.train.model.memory_needs import learner_bytes, model_size
from meshwire.memory_layout.footprint import Measurement
from meshwire.memory_layout.shared_slots import (
    MEASURE_CODEC_VARIABLE,
    MEASURE_SCALE_LR_VARIABLE,
    MEASURE_SYNC_VARIABLE,
    MEASURE_VARIABLE,
)
from meshwire.sync_modes.mode import sync_settings
from tests.daemon.realjobs import WITHOUT_COMPILER
from tests.tiers import mostly_long

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

MAKES: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW with amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": torch.optim.RMSprop,
    "RMSprop, all": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


def network() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 10))
    model[2].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("name", MAKES)
def test_optimizer_state_is_what_torch_makes(name: str) -> None:
    """The table, and the state that is there after a step, agree, both before and after it."""
    model = network()
    optimizer = MAKES[name](list(model.parameters()))
    built = tensors.build(model, "")
    before = model_size(built, optimizer)
    model(torch.ones(4, 30)).sum().backward()
    optimizer.step()
    made = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    assert before.optimizer_known
    assert before.optimizer_state == made
    assert model_size(built, optimizer) == before


def test_kinds_of_tensors() -> None:
    model = network()
    size = model_size(tensors.build(model, ""), torch.optim.SGD(model.parameters(), lr=0.1))
    assert size.parameters == 4 * (30 * 20 + 20 + 20 + 20 + 20 * 10)
    assert size.frozen == 4 * 10
    assert size.buffers == 4 * 20 + 4 * 20 + 8


def test_an_unknown_optimizer_is_guessed_and_said_so() -> None:
    class Mine(torch.optim.Optimizer):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            """Nothing."""

    model = network()
    size = model_size(tensors.build(model, ""), Mine(model.parameters(), {}))
    assert (size.optimizer, size.optimizer_known) == ("Mine", False)
    assert size.optimizer_state == 2 * size.parameters


def test_the_learner_holds_base_view_and_own_gradients_only_with_an_overlay() -> None:
    """O2: c=0 computes on the base itself."""
    model = network()
    built, optimizer = tensors.build(model, ""), torch.optim.SGD(model.parameters(), lr=0.1)
    size = model_size(built, optimizer)
    plain = learner_bytes(built, optimizer, 0.0, sync_settings("ssp:2"))
    assert plain == 2 * size.parameters + size.frozen + 2 * size.buffers
    assert learner_bytes(built, optimizer, 0.5, sync_settings("ssp:2")) == plain + 4 * size.parameters


def test_an_optimizer_whose_rate_cannot_be_scaled_is_refused_before_a_job_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O12: in the script's process, as with --sync and --codec below."""
    file, model = tmp_path / "size.json", network()
    asked = {MEASURE_VARIABLE: str(file), MEASURE_SYNC_VARIABLE: "bsp", MEASURE_CODEC_VARIABLE: "fp32"}
    for name, value in {**asked, MEASURE_SCALE_LR_VARIABLE: "linear"}.items():
        monkeypatch.setenv(name, value)
    process = MeasuringProcess.take()
    assert process is not None
    with pytest.raises(NotSupported, match=r"--scale-lr linear is for torch\.optim\.SGD, and AdamW"):
        process.prepare(model, torch.optim.AdamW(model.parameters()))
    assert not file.exists()
    with pytest.raises(SystemExit):
        process.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert Measurement.model_validate_json(file.read_text()).size.optimizer == "SGD"


SCRIPT = f"""{WITHOUT_COMPILER}
import sys
import torch
import meshtrain as mt

assert mt.world_size() == 1
(mt.output_dir() / "early.txt").write_text("x")
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(range(3))
mt.prepare(model, optimizer, *([loader] if sys.argv[1] == "loader" else []))
print("trained")
"""


def measured(work: Path, file: Path, how: str, sync: str, codec: str) -> "subprocess.CompletedProcess[str]":
    asked = {MEASURE_VARIABLE: str(file), MEASURE_SYNC_VARIABLE: sync, MEASURE_CODEC_VARIABLE: codec}
    return subprocess.run(
        [sys.executable, "train.py", how],
        cwd=work,
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "codec", "complaint"),
    mostly_long(
        [
            ("demo", "dct", "--sync demo steps on signs, and AdamW would not"),
            ("bsp", "dgc", "--codec dgc takes over the momentum of SGD"),
        ],
        1,
    ),
)
def test_what_the_job_would_refuse_is_refused(tmp_path: Path, sync: str, codec: str, complaint: str) -> None:
    """So that the dry run says so, before a job does on all devices."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = measured(tmp_path, tmp_path / "size.json", "none", sync, codec)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert not (tmp_path / "size.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", mostly_long(["loader", "none"], 1))
def test_a_measured_script_ends_at_prepare(tmp_path: Path, how: str) -> None:
    """It writes the sizes, trains nothing, and leaves nothing in the user's folder."""
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "measuring").mkdir()
    (work / "train.py").write_text(SCRIPT)
    file = tmp_path / "measuring" / "size.json"
    done = measured(work, file, how, "bsp", "fp32")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    measurement = Measurement.model_validate_json(file.read_text())
    assert [tensor.shape for tensor in measurement.manifest.tensors] == [(2, 3), (2,)]
    assert measurement.size.optimizer_state == 2 * measurement.size.parameters == 2 * 4 * 8
    assert [path.name for path in work.iterdir()] == ["train.py"]
