"""Ranks that torchrun starts: what they refuse and how they end, with the name of what is wrong (O1, O6, V1)."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.errors import UsageError
from meshtrain.train import api
from meshtrain.train.single import SingleProcess
from meshtrain.train.torchrun.distributed_session import DistributedSession
from meshtrain.train.torchrun.launched import Launched, launched
from tests.train.rankprocesses import errors, results

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
TORCHS = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def prepared(session: DistributedSession, scaler: Any = None) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    return session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor = X) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()


def test_a_launcher_is_found_by_its_variables() -> None:
    assert launched({}) is None
    assert launched(TORCHS) == Launched(1, 3)
    assert launched({**TORCHS, "LOCAL_RANK": "0"}) == Launched(1, 3, 0)
    assert launched({"RANK": "0", "WORLD_SIZE": "1"}) is None


def test_in_a_job_its_folder_and_its_log_are_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """P9."""
    monkeypatch.chdir(tmp_path)
    session = DistributedSession(Launched(0, 1))
    session.log({"loss": 0.5})
    assert session.output_dir == Path("out", "rank0")
    assert not capsys.readouterr().out
    monkeypatch.setenv("MESHTRAIN_JOB_ID", "1kx3000000aa")
    monkeypatch.setenv("MESHTRAIN_OUTPUT", str(tmp_path / "of the job"))
    session.log({"loss": 0.5})
    DistributedSession(Launched(1, 2)).log({"loss": 0.7})
    assert session.output_dir == tmp_path / "of the job"
    assert capsys.readouterr().out == "step 1: loss 0.5\n"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"MASTER_ADDR": ""}, "WORLD_SIZE=3 .* MASTER_ADDR is not set"),
        ({"RANK": "", "MASTER_PORT": ""}, "RANK, MASTER_PORT are not set"),
        ({"RANK": "3"}, "RANK=3 with WORLD_SIZE=3"),
        ({"RANK": "one"}, "RANK='one' is not a number"),
    ],
)
def test_half_a_launcher_is_refused(changes: dict[str, str], text: str) -> None:
    """Else each process would train by itself, without a word."""
    with pytest.raises(UsageError, match=text):
        launched({**TORCHS, **changes})


def test_srun_without_torchs_variables_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    assert launched({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}) is None
    assert "started this script 4 times, and each of them trains alone" in caplog.text


def _usage(session: DistributedSession, _: int) -> list[str]:
    """One rank, which makes every mistake that it can go on from."""
    texts = []

    def refuse(script: Any, *arguments: Any) -> None:
        with pytest.raises(UsageError) as error:
            script(*arguments)
        texts.append(str(error.value))

    refuse(next, session.steps(3))
    refuse(session.prepare, torch.nn.parallel.DistributedDataParallel(nn.Linear(1, 1)), None)
    model, optimizer = prepared(session)
    refuse(prepared, session)
    with session.no_sync():
        model(X).sum().backward()
    refuse(optimizer.step)
    model(X).sum().backward()
    refuse(session.barrier)
    refuse(lambda: model(X).sum().backward())
    optimizer.step()
    assert optimizer.step(lambda: model(X).sum().backward() or 3.0) == 3.0
    numbers = []
    for number in session.steps(4):
        numbers.append(number)
        step(model, optimizer)
    assert numbers == [3, 4]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(X).sum()).backward()
    refuse(scaler.step, optimizer)
    refuse(session.log, {"loss": "low"})
    session.finish()
    refuse(session.barrier)
    return texts


def test_what_a_script_must_not_do(tmp_path: Path) -> None:
    """O6: each error names the call and the remedy."""
    (texts,) = results(tmp_path, 1, _usage)
    wanted = ["before mt.prepare", "model.module", "called before", "no_sync", "between backward", "second backward"]
    wanted += ["GradScaler", "not one number", "finish"]
    assert len(texts) == len(wanted)
    assert all(word in text for word, text in zip(wanted, texts, strict=True)), texts


def _uneven(session: DistributedSession, rank: int) -> None:
    model, optimizer = prepared(session)
    for _ in range(2 + rank):
        step(model, optimizer)
    session.finish()


def _barrier_alone(session: DistributedSession, rank: int) -> None:
    model, optimizer = prepared(session)
    step(model, optimizer)
    if rank:
        session.barrier()
    step(model, optimizer)


def _other_model(session: DistributedSession, rank: int) -> None:
    model = nn.Linear(4, 2 + rank)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _not_a_number(session: DistributedSession, rank: int) -> None:
    model, optimizer = prepared(session)
    step(model, optimizer)
    step(model, optimizer, X * float("nan") if rank else X)


def _lost(session: DistributedSession, rank: int) -> None:
    model, optimizer = prepared(session)
    step(model, optimizer)
    if rank:
        raise ValueError("disk full")
    step(model, optimizer)


@pytest.mark.parametrize(
    ("script", "first", "second"),
    [
        (_uneven, "", "UsageError: rank 0 has finished after 2 steps, and this rank takes step 3"),
        (_barrier_alone, "UsageError: rank 1 is in barrier 1, and this rank takes step 2", "UsageError: rank 0 takes"),
        (_other_model, "RequestError: what rank 1 gave .* weight has shape", "RequestError: what rank 1 gave"),
        (_not_a_number, "NonFiniteGradient: .* what rank 1 has for weight", "NonFiniteGradient: .* rank 1"),
        (_lost, "ConnectionLost: this rank .* step 2, and another one cannot be reached", "ValueError: disk full"),
    ],
)
def test_ranks_that_do_not_go_together_end_with_a_reason(script: Any, first: str, second: str, tmp_path: Path) -> None:
    """V1 among them: all ranks see that the sum is not finite, and whose fault it is."""
    for error, wanted in zip(errors(tmp_path, 2, script), (first, second), strict=True):
        assert bool(error) == bool(wanted), error
        assert re.search(wanted, error), error


def _overflow(session: DistributedSession, rank: int) -> tuple[list[float], float, int]:
    """The second step has a gradient that is not finite, the third one a buffer."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if rank else 16.0)
    model, largest = nn.Linear(4, 2), torch.zeros(())
    model.register_buffer("largest", largest)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer, scaler)
    sums = []
    for number in range(4):
        optimizer.zero_grad()
        if (rank, number) == (1, 2):
            largest.fill_(float("inf"))
        x = X * float("inf") if (rank, number) == (1, 1) else X * (1 + rank)
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        sums.append(float(model.weight.sum() + largest))
    return sums, scaler.get_scale(), next(session.steps(9))


def test_an_overflow_on_one_rank_is_a_step_that_all_skip(tmp_path: Path) -> None:
    """V1, O6: scales begin as rank 0's, and stay equal."""
    first, second = results(tmp_path, 2, _overflow)
    assert first == second
    sums, scale, next_step = first
    assert sums[2] == sums[1] == sums[0] != sums[3]
    assert (scale, next_step) == (4.0, 5)


def _read(session: DistributedSession, _: int) -> list[list[float]]:
    """Three epochs without a step, the first of which is left and gone on with."""
    model = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.arange(10.0).view(10, 1)), batch_size=2, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dealt = session.prepare_with_loader(model, optimizer, loader)[2]
    seen: list[list[float]] = []
    for limit in (2, 9, 9, 9):
        seen.append([])
        for at, (x,) in enumerate(dealt, 1):
            seen[-1] += x.flatten().tolist()
            if at == limit:
                break
    return seen


def test_an_epoch_that_was_left_is_gone_on_with(tmp_path: Path) -> None:
    """X4: each sample once an epoch, whether steps are taken or not, and another order in each."""
    first, second = results(tmp_path, 2, _read)
    epochs = [[*one, *other] for one, other in zip(first, second, strict=True)]
    whole = [epochs[0] + epochs[1], *epochs[2:]]
    assert [sorted(epoch) for epoch in whole] == [list(range(10))] * 3
    assert whole[1] != whole[2]


def _watched(session: DistributedSession, _: int) -> tuple[int, int]:
    """How many sums have begun when the backward pass reaches the first layer, and at its end."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    group, begun = session._group, []
    assert group is not None
    begin, reached = group.sum, []

    def counted(values: torch.Tensor) -> Any:
        begun.append(len(values))
        return begin(values)

    group.sum = counted  # type: ignore[method-assign]
    output = model[0](torch.ones(2, 64, requires_grad=True))
    output.register_hook(lambda _: reached.append(len(begun)))
    model[1:](output).sum().backward()
    return reached[0], len(begun)


def test_sums_begin_while_the_backward_pass_goes_on(tmp_path: Path) -> None:
    """The last layers' gradients are on their way before the first layer's are computed, on each rank alike."""
    first, second = results(tmp_path, 2, _watched)
    assert first == second
    reached, all_of_them = first
    assert reached >= all_of_them - 2 > 3


def test_the_same_file_alone_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a launcher's variables nothing is changed; with them the world is one of ranks. None opens a group."""
    for name in TORCHS:
        monkeypatch.delenv(name, raising=False)
    assert type(api._without_job()) is SingleProcess
    for name, value in TORCHS.items():
        monkeypatch.setenv(name, value)
    left = []
    monkeypatch.setattr("atexit.register", lambda *given: left.append(given))
    world = api._without_job()
    assert isinstance(world, DistributedSession)
    assert (world.rank, world.world_size, world.device.type) == (1, 3, "cpu")
    assert left == [(api._leave, world)]
    assert not torch.distributed.is_initialized()
