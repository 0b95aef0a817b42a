"""ProgFed (T1): the model grows by the round's number, and what is not trained neither moves nor travels."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshtrain as mt
from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.partial.progressive import Progressive
from meshtrain.train.session import LearnerSession
from meshtrain.train.single import SingleProcess
from meshwire.model.plan import aligned
from meshwire.sync_modes.mode import sync_settings
from tests.train.localdaemon import AT_THE_SCRIPTS_RATE, LocalDaemon

EVERY, WARMUP = 4, 2


def growing(stages: int = 3, every: int = EVERY, warmup: int = WARMUP) -> Progressive:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(stages)]
    return Progressive(parts, [nn.Linear(6, 2) for _ in range(stages)], every, warmup)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *, keep: bool = False) -> None:
    x, y = batch(seed)
    optimizer.zero_grad(set_to_none=not keep)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """Of each parameter and buffer, itself and what the optimizer keeps of it."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: [tensor.detach().clone(), *(v.clone() for v in optimizer.state.get(tensor, {}).values())]
        for name, tensor in tensors.items()
    }


def moved(before: dict[str, list[Tensor]], after: dict[str, list[Tensor]]) -> set[str]:
    """The parts of the model of which anything is another than before."""
    return {
        ".".join(name.split(".")[:2])
        for name in before
        if len(before[name]) != len(after[name])
        or not all(torch.equal(p, q) for p, q in zip(before[name], after[name], strict=True))
    }


def trained(number: int, stages: int = 3) -> set[str]:
    """The parts that a round is to move, as the paper says it."""
    newest = min((number - 1) // EVERY, stages - 1)
    warming = newest > 0 and number - 1 - newest * EVERY < WARMUP
    return {f"heads.{newest}", *(f"stages.{at}" for at in range(newest if warming else 0, newest + 1))}


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("keep", [False, True])
def test_alone_a_step_moves_what_is_trained_and_nothing_else(make: Any, keep: bool) -> None:
    """No weight decay, momentum or statistics of what stands still, and state of new parts begins with them."""
    model = growing()
    optimizer = make(model)
    SingleProcess().prepare(model, optimizer)
    for number in range(1, 4 * EVERY):
        before = state(model, optimizer)
        step(model, optimizer, number, keep=keep)
        assert moved(before, state(model, optimizer)) == trained(number), number


def job(make: Any, rounds: int, members: int = 2, **spec: Any) -> tuple[LocalDaemon, list[Any], list[list[Any]]]:
    """Every rank's model, and what it was after each round."""
    models = [growing() for _ in range(members)]
    seen: list[list[Any]] = [[] for _ in range(members)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(models[rank], make(models[rank]))
        seen[rank].append(state(model, optimizer))
        for number in session.steps(rounds * sync_settings(spec.get("sync", "bsp")).round_steps):
            step(model, optimizer, 10 * number + rank, keep=True)
            seen[rank].append(state(model, optimizer))

    with LocalDaemon(members, **AT_THE_SCRIPTS_RATE, **spec) as daemon:
        daemon.run(script)
    return daemon, models, seen


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_round_moves_and_sends_what_is_trained(make: Any) -> None:
    """T1: the values that travel are those of the active parts, each tensor rounded up to a cache line; means of all
    other places are NaN here, and reach nothing. O9: replicas are bit-equal."""
    rounds = 2 * EVERY + WARMUP + 3
    daemon, models, seen = job(make, rounds)
    for p, q in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(p, q)
    assert all(p.isfinite().all() for p in models[0].parameters())
    assert len(daemon.rounds.rounds) == rounds
    floats = {**dict(models[0].named_parameters()), **dict(models[0].named_buffers())}
    for number, round_ in daemon.rounds.rounds.items():
        assert moved(seen[0][number - 1], seen[0][number]) == trained(number), number
        active = [
            tensor
            for name, tensor in floats.items()
            if tensor.is_floating_point() and ".".join(name.split(".")[:2]) in trained(number)
        ]
        assert set(round_.sent.values()) == {sum(aligned(tensor.numel()) for tensor in active)}


def test_a_run_goes_on_from_a_saved_state_across_a_growth(tmp_path: Path) -> None:
    """J1, T1: saved right before a growth, or while the rest stands still; what travels follows from the round's
    number, so it goes on bit for bit."""
    rounds = EVERY + WARMUP + 2
    folders = {after: tmp_path / str(after) for after in (EVERY, EVERY + 1)}

    def run(after: int = 0, before: Any = lambda _daemon: None, prepared: Any = lambda _daemon: None) -> Any:
        models = [growing() for _ in folders]

        def script(session: LearnerSession, rank: int) -> None:
            model, optimizer = session.prepare(models[rank], adamw(models[rank]))
            if rank == 0:
                prepared(daemon)
            for at, _ in enumerate(session.steps(rounds), 1 + after):
                step(model, optimizer, 10 * at + rank, keep=True)

        with LocalDaemon(2) as daemon:
            before(daemon)
            daemon.run(script)
        return daemon, models

    def save(daemon: LocalDaemon) -> None:
        for rank, (after, folder) in enumerate(folders.items()):
            folder.mkdir()
            daemon.save(rank, after, folder)

    daemon, whole = run(prepared=save)
    assert sorted(saved.round for _, saved in daemon.saved) == sorted(folders)
    for _, saved in daemon.saved:
        begin = (folders[saved.round], saved.round, saved.units)
        _, resumed = run(saved.round, before=lambda daemon, begin=begin: daemon.begin_from(*begin))
        for one, other in zip(whole, resumed, strict=True):
            assert one.active == other.active
            for name, value in one.state_dict().items():
                assert torch.equal(value, other.state_dict()[name]), (saved.round, name)


@pytest.mark.parametrize("sync", ["local:2", "diloco:2", "sparseloco:2", "muloco:2"])
def test_local_steps_grow_with_the_rounds_too(sync: str) -> None:
    """R9: a round is H steps; what stands still is the base's, also after the inner optimizer has stepped."""
    daemon, models, _ = job(adamw, EVERY + 1, sync=sync)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    fresh = growing()
    for name, parameter in models[0].named_parameters():
        idle = name.startswith(("stages.2", "heads.2"))
        assert torch.equal(parameter, fresh.get_parameter(name)) == idle, name
    assert models[0].active == 2
    assert len(daemon.rounds.rounds) == EVERY + 1


def signed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.1)


def test_steps_on_signs_grow_too() -> None:
    """DeMo has no sign for what did not travel, and no weight decay."""
    _, models, seen = job(signed, 2 * EVERY + 1, sync="demo", codec="dct:32,decay=0.999")
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    for number in range(1, 2 * EVERY + 2):
        assert moved(seen[0][number - 1], seen[0][number]) == trained(number), number


def test_a_model_of_one_stage_is_the_baseline() -> None:
    """Bit for bit, in what travels and in what comes of it."""
    plain = [nn.Sequential(*copy.deepcopy(list(growing(1).stages)), copy.deepcopy(growing(1).heads[0])) for _ in "ab"]
    one = [growing(1) for _ in "ab"]
    sent = []
    for models in (plain, one):

        def script(session: LearnerSession, rank: int, models: Any = models) -> None:
            model, optimizer = session.prepare(models[rank], sgd(models[rank]))
            for number in session.steps(6):
                step(model, optimizer, 10 * number + rank)

        with LocalDaemon(2) as daemon:
            daemon.run(script)
        sent.append([daemon.rounds.rounds[number].sent for number in range(1, 7)])
    assert sent[0] == sent[1]
    for p, q in zip(plain[0].state_dict().values(), one[0].state_dict().values(), strict=True):
        assert torch.equal(p, q)


def test_grown_up_it_is_the_whole_model() -> None:
    model = growing()
    model.enter_round(2 * EVERY + WARMUP + 1)
    assert (model.active, model.frozen) == (3, 0)
    whole = nn.Sequential(*model.stages, model.heads[-1])
    x, _ = batch(1)
    assert torch.equal(copy.deepcopy(model)(x), whole(x))
    model.enter_round(10**9)
    assert (model.active, model.frozen) == (3, 0)


def test_stages_that_stand_still_are_as_in_evaluation() -> None:
    model = growing()
    model.enter_round(EVERY + 1)
    model.train()
    assert [stage.training for stage in model.stages] == [False, True, True]
    model.enter_round(EVERY + WARMUP + 1)
    assert all(stage.training for stage in model.stages)
    model.eval()
    model.enter_round(2 * EVERY + 1)
    assert not any(stage.training for stage in model.stages)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"stages": 0}, "give each stage a head"),
        ({"every": 0}, "at least 1 round"),
        ({"every": 3, "warmup": 3}, "fewer than that"),
        ({"warmup": -1}, "or 0"),
    ],
)
def test_what_cannot_grow_is_refused(arguments: dict[str, int], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        growing(**arguments)


@pytest.mark.parametrize(
    ("spec", "named"),
    [({"sync": "ssp:1"}, "use --sync bsp, or local:H"), ({"codec": "powersgd:1"}, "such as int8 or topk")],
)
def test_modes_and_codecs_that_it_does_not_go_with_are_named(spec: dict[str, Any], named: str) -> None:
    with pytest.raises(NotSupported, match=named):
        job(sgd, 1, **spec)


def test_two_of_them_in_one_model_are_refused() -> None:
    model = nn.ModuleList([growing(), growing()])
    with pytest.raises(NotSupported, match=r"2 parts that are mt\.Progressive"):
        SingleProcess().prepare(model, sgd(model))


def test_it_is_part_of_the_package() -> None:
    assert mt.Progressive is Progressive
    with pytest.raises(AttributeError, match="progressiv"):
        _ = mt.progressiv  # type: ignore[attr-defined]
