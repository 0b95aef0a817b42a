"""How long the parts of a step take, by a clock that only the model moves; and the script that is ended behind it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshtrain.errors import UsageError
from meshtrain.train import traced_run
from meshtrain.train.api import joined
from meshtrain.train.dry_run import measured_model
from meshtrain.train.traced_run import StepClock, TimedStep, TracedProcess
from meshwire.memory_layout.shared_slots import (
    MEASURE_CODEC_VARIABLE,
    MEASURE_STEPS_VARIABLE,
    MEASURE_SYNC_VARIABLE,
    MEASURE_TOGETHER_VARIABLE,
    MEASURE_VARIABLE,
    WHY_NOT_SUFFIX,
)
from meshwire.planning.step_trace import WARM_UP_STEPS, TracedScript
from tests.daemon.realjobs import WITHOUT_COMPILER

FORWARD_S, BACKWARD_S, LOSS_S, STEP_S, LOADING_S = 1.0, 2.0, 0.5, 4.0, 8.0


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(traced_run, "time", made)
    return made


def slow_layer(clock: Clock) -> torch.nn.Module:
    """A linear layer that takes a second forward and two backward."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, values: torch.Tensor) -> torch.Tensor:
            clock.now_s += FORWARD_S
            return values.clone()

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            clock.now_s += BACKWARD_S
            return gradient

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2, bias=False)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Slow.apply(self.linear(values))  # type: ignore[no-untyped-call]
            return out

    return Layer()


class SlowSteps:
    """Trains three slow layers with an optimizer that takes four seconds, and batches that take eight to load."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.model = torch.nn.Sequential(*(slow_layer(clock) for _ in range(3)))

        class Sgd(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                clock.now_s += STEP_S

        self.optimizer = Sgd(self.model.parameters(), lr=0.1)

    def step(self, passes: int = 1) -> None:
        for _ in range(passes):
            self.clock.now_s += LOADING_S
            loss = self.model(torch.ones(1, 2)).sum()
            self.clock.now_s += LOSS_S
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int, passes: int = 1) -> None:
        for _ in range(count):
            self.step(passes)


def test_a_steps_parts_are_timed_and_gradients_come_from_the_last_layer_on(clock: Clock) -> None:
    """The loss, which no hook sees, counts with the backward pass."""
    train, steps = SlowSteps(clock), list[TimedStep]()
    tensors = measured_model(train.model, train.optimizer, *settings())[1]
    StepClock(train.model, train.optimizer, tensors, steps.append)
    for _ in range(2):
        train.step()
    for step in steps:
        assert (step.before_s, step.backward_s, step.after_s, step.passes) == (11.0, 6.5, 4.0, 1)
        assert step.ready_s == {2: 2.5, 1: 4.5, 0: 6.5}
    assert len(steps) == 2


def test_of_several_passes_the_last_one_counts_and_all_are_samples(clock: Clock) -> None:
    """What accumulates before it is part of what is computed before anything can be sent."""
    train, steps = SlowSteps(clock), list[TimedStep]()
    tensors = measured_model(train.model, train.optimizer, *settings())[1]
    StepClock(train.model, train.optimizer, tensors, steps.append)
    train.step(passes=3)
    assert (steps[0].before_s, steps[0].backward_s, steps[0].passes) == (2 * 17.5 + 11.0, 6.5, 3)


def test_a_step_without_a_backward_pass_is_none(clock: Clock) -> None:
    train, steps = SlowSteps(clock), list[TimedStep]()
    tensors = measured_model(train.model, train.optimizer, *settings())[1]
    StepClock(train.model, train.optimizer, tensors, steps.append)
    train.optimizer.step()
    train.step()
    assert len(steps) == 1
    assert steps[0].before_s == 11.0


def settings() -> tuple[Any, Any]:
    from meshwire.codecs.registry import FP32
    from meshwire.sync_modes.mode import sync_settings

    return sync_settings("bsp"), FP32


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a script that is to be traced for 4 steps; nothing is left for this process's exit."""
    file = tmp_path / "measured.json"
    for name, value in (
        (MEASURE_VARIABLE, str(file)),
        (MEASURE_SYNC_VARIABLE, "bsp"),
        (MEASURE_CODEC_VARIABLE, "fp32"),
        (MEASURE_STEPS_VARIABLE, "4"),
    ):
        monkeypatch.setenv(name, value)
    kept: list[Any] = []
    monkeypatch.setattr(traced_run, "atexit", SimpleNamespace(register=kept.append))
    return file


def prepared(train: SlowSteps) -> TracedProcess:
    world = TracedProcess.take()
    assert world is not None
    data = torch.utils.data.TensorDataset(torch.ones(64, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    world.prepare_with_loader(train.model, train.optimizer, loader)
    return world


def test_the_script_ends_after_the_wanted_steps_and_has_told_of_them(asked: Path, clock: Clock) -> None:
    train = SlowSteps(clock)
    prepared(train)
    with pytest.raises(SystemExit) as ended:
        train.steps(WARM_UP_STEPS + 5, passes=2)
    assert ended.value.code == 0
    told = TracedScript.model_validate_json(asked.read_text())
    step = told.step
    assert (step.samples, step.before_s, step.backward_s, step.after_s) == (32, 17.5 + 11.0, 6.5, 4.0)
    assert step.ready == pytest.approx((1.0, 4.5 / 6.5, 2.5 / 6.5))
    assert told.measurement.size.optimizer == "Sgd"
    assert json.loads(asked.read_text())["step"]["device"] == "cpu"


def test_long_steps_are_not_waited_for(asked: Path, clock: Clock) -> None:
    """One step takes more than the 8 s that are timed: the second one is the last."""
    train = SlowSteps(clock)
    prepared(train)
    with pytest.raises(SystemExit):
        train.steps(WARM_UP_STEPS + 3)
    assert TracedScript.model_validate_json(asked.read_text()).step.steps == 2


def test_copies_step_for_as_long_as_each_other_from_when_all_are_there(
    asked: Path, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps that is; what is waited for at the gate is no part of a step."""
    monkeypatch.setattr(traced_run, "TOGETHER_S", 6 * 18.5)
    gate = tmp_path / "gate"
    gate.mkdir()
    monkeypatch.setenv(MEASURE_TOGETHER_VARIABLE, f"2:{gate}")

    def another_comes(_: float) -> None:
        clock.now_s += 30.0
        (gate / "another").touch()

    monkeypatch.setattr(clock, "sleep", another_comes)
    train = SlowSteps(clock)
    prepared(train)
    with pytest.raises(SystemExit):
        train.steps(WARM_UP_STEPS + 20)
    step = TracedScript.model_validate_json(asked.read_text()).step
    assert (step.steps, step.before_s) == (6, 11.0)


def test_a_copy_that_never_comes_is_not_waited_for(
    asked: Path, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    monkeypatch.setenv(MEASURE_TOGETHER_VARIABLE, f"3:{gate}")
    train = SlowSteps(clock)
    prepared(train)
    with pytest.raises(UsageError, match="1 of 3 copies of this script have come to their first timed step in 60 s"):
        train.steps(WARM_UP_STEPS)
    assert not asked.exists()


def test_a_script_that_ends_earlier_tells_what_it_can(asked: Path, clock: Clock) -> None:
    train = SlowSteps(clock)
    world = prepared(train)
    train.steps(WARM_UP_STEPS)
    world._at_exit()
    assert not asked.exists(), "these were no steps to judge by"
    train.step()
    world._at_exit()
    assert TracedScript.model_validate_json(asked.read_text()).step.steps == 1


def test_a_second_model_is_refused_as_in_a_job(asked: Path, clock: Clock) -> None:
    assert not asked.exists()
    train = SlowSteps(clock)
    world = prepared(train)
    with pytest.raises(UsageError, match="second time"):
        world.prepare(train.model, train.optimizer)


def test_of_several_optimizers_it_is_said_that_nothing_can_be_predicted(asked: Path, clock: Clock) -> None:
    """In a sentence behind the script's name, and the script ends in order: it has done nothing wrong."""
    train = SlowSteps(clock)
    other = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    world = TracedProcess.take()
    assert world is not None
    with pytest.raises(SystemExit) as ended:
        world.prepare(*joined([train.model, torch.nn.Linear(2, 2)], [train.optimizer, other]))
    assert ended.value.code == 0
    assert not asked.exists()
    said = asked.with_suffix(WHY_NOT_SUFFIX).read_text()
    assert said.startswith("gives mt.prepare several optimizers: ")
    assert "nothing can be predicted or chosen" in said


SCRIPT = f"""{WITHOUT_COMPILER}
import torch
import meshtrain as mt

model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = mt.prepare(model, optimizer)
(mt.output_dir() / "early.txt").write_text("x")
for step in mt.steps(1000):
    optimizer.zero_grad()
    loss = model(torch.ones(5, 3)).sum()
    loss.backward()
    optimizer.step()
    mt.log(loss=loss)
print("trained")
"""


@pytest.mark.slow
def test_a_real_script_is_ended_and_leaves_nothing(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "measuring").mkdir()
    (work / "train.py").write_text(SCRIPT)
    file = tmp_path / "measuring" / "measured.json"
    told = {MEASURE_VARIABLE: str(file), MEASURE_SYNC_VARIABLE: "bsp", MEASURE_CODEC_VARIABLE: "fp32"}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=work,
        env={**os.environ, **told, MEASURE_STEPS_VARIABLE: "5"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    step = TracedScript.model_validate_json(file.read_text()).step
    assert (step.steps, step.samples, len(step.ready)) == (5, 1, 4)
    assert [path.name for path in work.iterdir()] == ["train.py"]
