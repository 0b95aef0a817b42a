"""`submit --learners auto`: what is run, when it stops, and what is said."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshtrain.cli.planning import learner_count
from meshtrain.cli.planning.learner_count import time_learners
from meshtrain.cli.planning.script_profiles import Shipped
from meshtrain.cli.submission.measuring import NotMeasured, trace_together
from meshtrain.cli.submission.shipping import pack
from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages
from tests.daemon.realjobs import WITHOUT_COMPILER


def shipped(folder: Path, text: str = "") -> Shipped:
    (folder / "train.py").write_text(text)
    source, _ = pack(folder, "train.py", None, (), (), Stages())
    return Shipped("train.py", source, None, None, (), (), sys.executable)


class FakeCopies:
    """Stands for running copies of a script; counts what it is asked for."""

    def __init__(self, *speeds: float, device: str = "cpu", bytes_each: int = 1000) -> None:
        self.speeds, self.device, self.bytes_each = speeds, device, bytes_each
        self.asked: list[tuple[int, int]] = []

    def __call__(self, *args: object) -> tuple[list[SimpleNamespace], int]:
        _root, script, _args, _env, _data, copies, threads, _stages, _python, module = args
        assert (script, module) == ("train.py", None)
        assert isinstance(copies, int)
        assert isinstance(threads, int)
        self.asked.append((copies, threads))
        each = self.speeds[len(self.asked) - 1] / copies
        one = SimpleNamespace(step=SimpleNamespace(samples_s=each, device=self.device))
        return [one] * copies, copies * self.bytes_each


def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, copies: FakeCopies, cores: int = 8) -> str:
    monkeypatch.setattr(learner_count, "trace_together", copies)
    monkeypatch.setattr(learner_count, "_free_bytes", lambda: 10_000)
    return time_learners(shipped(tmp_path), cores, Stages()).sentence()


def test_copies_are_doubled_and_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copies = FakeCopies(120.0, 157.0, 160.0)
    said = timed(monkeypatch, tmp_path, copies)
    assert copies.asked == [(1, 8), (2, 4), (4, 2)]
    assert said == (
        "learners: 2 on each laptop, for 2 beside each other train 1.31x as fast here as one (157 samples/s, 120 alone)"
    )


@pytest.mark.parametrize(
    ("copies", "cores", "asked", "said"),
    [
        (
            FakeCopies(120.0, 125.0),
            8,
            2,
            "1.04x as fast here as one (125 samples/s, 120 alone), and they pay from",
        ),
        (FakeCopies(120.0), 1, 1, "learners: 1 on each laptop; there is one core"),
        (FakeCopies(120.0, 240.0), 3, 2, "learners: 2 on each laptop, for 2 beside each other train 2.00x as fast"),
        (FakeCopies(120.0, bytes_each=9_000), 8, 1, "1 on each laptop; there is no memory for more (1 take 8.8 KiB)"),
        (FakeCopies(120.0, device="cuda:0"), 8, 1, "1 on each laptop; on cuda:0 more are not timed"),
    ],
    ids=["no gain", "one core", "three cores", "memory", "a GPU"],
)
def test_it_stops_where_more_do_not_pay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, copies: FakeCopies, cores: int, asked: int, said: str
) -> None:
    assert said in timed(monkeypatch, tmp_path, copies, cores)
    assert len(copies.asked) == asked


def test_a_script_that_cannot_be_timed_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise NotMeasured("train.py ended with exit code 1 before its steps were timed", failed=True)

    monkeypatch.setattr(learner_count, "trace_together", fails)
    with pytest.raises(CliError, match="ended with exit code 1") as raised:
        time_learners(shipped(tmp_path), 2, Stages())
    assert raised.value.hint is not None
    assert "python train.py" in raised.value.hint


ONE_DIES = """
import os, time
from pathlib import Path

try:
    Path("second").mkdir()
except FileExistsError:
    raise SystemExit("no memory") from None
time.sleep(600)
"""


def test_a_copy_that_dies_ends_all(tmp_path: Path) -> None:
    """Here one takes hold of something, the other one ends, and nobody waits for the first."""
    (tmp_path / "train.py").write_text(ONE_DIES)
    with pytest.raises(NotMeasured, match=r"ended with exit code 1 before its steps were timed(.|\n)*no memory"):
        trace_together(tmp_path, "train.py", (), {}, None, 2, 1, Stages())


SLEEPING = """
import sys, time
import torch
import meshtrain as mt

class Sleeping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x):
        time.sleep(0.3)
        return self.linear(x)

model = Sleeping()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(4000, 2), batch_size=4)
model, optimizer, loader = mt.prepare(model, optimizer, loader)
for batch in loader:
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_copies_of_a_script_that_leaves_cores_idle_train_beside_each_other(tmp_path: Path) -> None:
    """Two sleep at the same time: twice as fast, for real; and nothing is left beside the script."""
    found = time_learners(shipped(tmp_path, WITHOUT_COMPILER + SLEEPING), 2, Stages())
    assert list(found.speeds) == [1, 2]
    assert found.speeds[2] / found.speeds[1] == pytest.approx(2, rel=0.25)
    assert found.count == 2
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
