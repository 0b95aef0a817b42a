"""`--sync bsp,accumulate=A` (O6): a round after A steps of a script that knows nothing of it, against one process whose
batches are A times as large."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.errors import NotSupported, RequestError, UsageError
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.partial.progressive import Progressive
from meshtrain.train.session import LearnerSession
from meshwire.model.masks import MaskSettings
from meshwire.sync_modes.rate_rule import parse_rate_rule
from tests.tiers import mostly_slow
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import Batch, adamw, assert_equal, batch, distance, momentum, net, step

BATCH = 4
Drawn = list[list[list[tuple[Tensor, Tensor]]]]  # by epoch, by round, by step


def joined(parts: Sequence[Batch]) -> Batch:
    x, y = zip(*parts, strict=True)
    return torch.cat(x), torch.cat(y)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def trained(
    members: int, steps: int, total: int, make: Any, *, clip: float | None = None, set_to_none: bool = True, **spec: Any
) -> tuple[list[nn.Module], list[Drawn], LocalDaemon]:
    """Two epochs of a script that steps after each batch. What each rank drew, and the daemons, which are closed."""
    data = TensorDataset(*batch(1, total))
    models: list[nn.Module] = [net() for _ in range(members)]

    def script(session: LearnerSession, rank: int) -> Drawn:
        model, optimizer, loader = session.prepare_with_loader(
            models[rank], make(models[rank]), DataLoader(data, batch_size=BATCH, shuffle=True)
        )
        drawn: Drawn = []
        for _ in range(2):
            batches = []
            for x, y in loader:
                optimizer.zero_grad(set_to_none=set_to_none)
                loss_of(model, x, y).backward()
                if clip is not None:
                    session.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                batches.append((x, y))
            drawn.append([batches[at : at + steps] for at in range(0, len(batches), steps)])
        return drawn

    with LocalDaemon(members, sync=f"bsp,accumulate={steps}", **spec) as daemon:
        drawn = daemon.run(script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
    return models, drawn, daemon


def alone(drawn: list[Drawn], make: Any, *, clip: float | None = None, scaled: bool = False) -> nn.Module:
    """One process in plain torch, on all that belongs to a round at once."""
    model = net()
    optimizer = make(model)
    rate = optimizer.param_groups[0]["lr"]
    for epoch in range(len(drawn[0])):
        for number in range(len(drawn[0][epoch])):
            parts = [each for rank in drawn for each in rank[epoch][number]]
            x, y = joined(parts)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaled:
                optimizer.param_groups[0]["lr"] = rate * max(1.0, len(x) / BATCH)
            optimizer.step()
    return model


@pytest.mark.parametrize(
    ("members", "steps", "make", "options"),
    mostly_slow(
        [
            (2, 4, momentum, {}),
            (3, 4, adamw, {"set_to_none": False}),
            (2, 8, momentum, {"clip": 0.05}),  # each round ends with its epoch
            (2, 4, momentum, {"clip": 0.05}),
            (2, 2, momentum, {}),
            (1, 4, momentum, {}),
        ],
        quick=3,
    ),
)
def test_it_is_one_process_with_a_larger_batch(members: int, steps: int, make: Any, options: dict[str, Any]) -> None:
    """To 1e-6, with uneven batches, and rounds that end with an epoch: each sample is in a round of its own epoch."""
    total = 5 * members * BATCH + members
    models, drawn, daemon = trained(members, steps, total, make, **options)
    assert_equal(models)
    rounds = -(-6 // steps)
    assert all(len(epoch) == rounds for rank in drawn for epoch in rank), "6 batches an epoch"
    assert daemon.round == 2 * rounds
    weights = [round_.done.weight for _, round_ in sorted(daemon.rounds.rounds.items()) if round_.done is not None]
    assert sum(weights[:rounds]) == sum(weights[rounds:]) == total
    clip = options.get("clip")
    assert distance(models[0], alone(drawn, make, clip=clip)) <= (1e-5 if make is adamw else 1e-6)


def grown() -> Progressive:
    torch.manual_seed(0)
    return Progressive([nn.Linear(4, 4), nn.Linear(4, 4)], [nn.Linear(4, 2), nn.Linear(4, 2)], every=2, warmup=1)


@pytest.mark.parametrize(
    ("make_model", "make", "spec"),
    [
        (net, momentum, {"masks": MaskSettings(sparsity=0.5, every=2)}),
        (grown, momentum, {}),
        (net, momentum, {"codec": "dgc:0.5"}),
    ],
    ids=["masks", "growing", "momentum"],
)
def test_it_is_a_larger_batch_too_where_not_all_travels(make_model: Any, make: Any, spec: dict[str, Any]) -> None:
    """Masks change, and a model grows, by rounds, as without; a codec that keeps the momentum has it of their mean."""

    def train(sync: str, batches: int) -> nn.Module:
        models: list[nn.Module] = [make_model() for _ in range(2)]

        def script(session: LearnerSession, rank: int) -> None:
            model, optimizer = session.prepare(models[rank], make(models[rank]))
            for number in range(0, 12, batches):
                step(model, optimizer, joined([batch(100 * rank + at) for at in range(number, number + batches)]))

        with LocalDaemon(2, sync=sync, **spec) as daemon:
            daemon.run(script)
            assert daemon.round == 6
        assert_equal(models)
        return models[0]

    assert distance(train("bsp,accumulate=2", 1), train("bsp", 2)) <= 1e-6


def test_a_scaled_rate_counts_all_of_its_batches() -> None:
    """O12: two learners with three batches each step at six times the script's rate."""
    rule = parse_rate_rule("linear,warmup=0")
    models, drawn, _ = trained(2, 3, 12 * BATCH, momentum, scale_lr=rule)
    assert_equal(models)
    assert distance(models[0], alone(drawn, momentum, scaled=True)) <= 1e-6


def test_nothing_changes_before_the_last_step_and_gradients_are_the_scripts_own() -> None:
    stepped: list[int] = []

    def script(session: LearnerSession, rank: int) -> None:
        model = net()
        optimizer = momentum(model)
        optimizer.register_step_post_hook(lambda *_: stepped.append(rank))
        session.prepare(model, optimizer)
        for number in range(6):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            x, y = batch(10 * rank + number)
            own = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            waits = number % 3 != 2
            same = [torch.equal(p.grad, g) for p, g in zip(model.parameters(), own, strict=True) if p.grad is not None]
            assert len(same) == 4
            assert all(same) == waits
            optimizer.step()
            moved = not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            assert moved != waits

    with LocalDaemon(2, sync="bsp,accumulate=3") as daemon:
        daemon.run(script)
        assert daemon.round == 2
    assert sorted(stepped) == [0, 0, 1, 1]


def test_a_barrier_and_the_end_of_the_script_end_a_round() -> None:
    """So nothing that was computed is lost, and all hold the same behind it."""
    models = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(models[rank], momentum(models[rank]))
        for number in range(2):
            step(model, optimizer, batch(10 * rank + number))
        session.barrier()
        for number in range(2, 7):
            step(model, optimizer, batch(10 * rank + number))

    with LocalDaemon(2, sync="bsp,accumulate=4") as daemon:
        daemon.run(script)
        assert daemon.round == 3, "of two, four and one"
    reference = net()
    optimizer = momentum(reference)
    for numbers in ((0, 1), (2, 3, 4, 5), (6,)):
        parts = [batch(10 * rank + number) for rank in range(2) for number in numbers]
        step(reference, optimizer, joined(parts))
    assert_equal(models)
    assert distance(models[0], reference) <= 1e-6


def test_steps_are_numbered_as_the_script_takes_them() -> None:
    """X6: `mt.steps` gives each its own number, also behind a round that a barrier has ended early."""
    told: list[list[int]] = [[], []]

    def script(session: LearnerSession, rank: int) -> None:
        model = net()
        session.prepare(model, optimizer := momentum(model))
        for number in session.steps(9):
            told[rank].append(number)
            step(model, optimizer, batch(10 * rank + number))
            if number == 2:
                session.barrier()

    with LocalDaemon(2, sync="bsp,accumulate=3") as daemon:
        daemon.run(script)
    assert told == [[*range(1, 9)]] * 2, "rounds of two, three and three"


class Branches(nn.Module):
    """Two layers, of which a pass uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        return torch.stack([self.layers[each](x) for each in used]).sum(0)


def test_what_a_pass_does_not_reach_counts_by_the_passes_that_do() -> None:
    """O5: what none reaches keeps no gradient; what one of two does has half of it."""
    models = [Branches() for _ in range(2)]
    passes: list[tuple[int, ...]] = [(0, 1), (0,), (1,), (0, 1), (0,), (0,)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(models[rank], torch.optim.SGD(models[rank].parameters(), lr=0.1))
        for number, used in enumerate(passes):
            optimizer.zero_grad()
            x, y = batch(10 * rank + number)
            nn.functional.mse_loss(model(x, used), y).backward()
            optimizer.step()
            if number % 2:
                assert model.layers[2].weight.grad is None
                assert (model.layers[1].weight.grad is None) == (number == 5)

    with LocalDaemon(2, sync="bsp,accumulate=2") as daemon:
        daemon.run(script)
    reference = Branches()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(0, len(passes), 2):
        optimizer.zero_grad()
        for rank in range(2):
            for at in (number, number + 1):
                x, y = batch(10 * rank + at)
                (nn.functional.mse_loss(reference(x, passes[at]), y) / 4).backward()
        optimizer.step()
    assert_equal(models)
    assert distance(models[0], reference) <= 1e-6


@pytest.mark.parametrize("bad", [0, 1])
def test_what_is_not_finite_in_any_step_makes_the_round_void(bad: int) -> None:
    """V1: the whole round is skipped, by all; the next one is as if it had not been."""
    models = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(models[rank], momentum(models[rank]))
        for number in range(4):
            x, y = batch(10 * rank + number)
            step(model, optimizer, (x * float("inf") if (rank, number) == (1, bad) else x, y))

    with LocalDaemon(2, sync="bsp,accumulate=2", on_nan="skip") as daemon:
        daemon.run(script)
        rounds = [round_.done for _, round_ in sorted(daemon.rounds.rounds.items())]
        assert [done is not None and done.void for done in rounds] == [True, False]
    reference = net()
    parts = [batch(10 * rank + number) for rank in range(2) for number in (2, 3)]
    step(reference, momentum(reference), joined(parts))
    assert_equal(models)
    assert distance(models[0], reference) <= 1e-6


def test_a_second_backward_before_the_step_is_an_error_there_too() -> None:
    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = net()
        session.prepare(model, momentum(model))
        for number in range(2):
            loss_of(model, *batch(number)).backward()

    with LocalDaemon(1, sync="bsp,accumulate=3") as daemon, pytest.raises(UsageError, match=r"a second backward\(\)"):
        daemon.run(script)


def test_the_scripts_own_accumulation_is_part_of_a_step() -> None:
    models = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(models[rank], momentum(models[rank]))
        for number in range(2):
            optimizer.zero_grad()
            with session.no_sync():
                (loss_of(model, *batch(100 * rank + 2 * number)) / 2).backward()
            (loss_of(model, *batch(100 * rank + 2 * number + 1)) / 2).backward()
            optimizer.step()

    with LocalDaemon(2, sync="bsp,accumulate=2") as daemon:
        daemon.run(script)
        assert daemon.round == 1
    reference = net()
    parts = [batch(100 * rank + number) for rank in range(2) for number in range(4)]
    step(reference, momentum(reference), joined(parts))
    assert distance(models[0], reference) <= 1e-6


def test_clipping_by_torch_is_refused_where_a_round_ends_without_the_script() -> None:
    """At an epoch's end nobody clips it: `mt.clip_grad_norm_` says by what."""

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = net()
        optimizer = momentum(model)
        session.prepare(model, optimizer)
        loss_of(model, *batch(0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        session.barrier()

    with (
        LocalDaemon(1, sync="bsp,accumulate=2") as daemon,
        pytest.raises(UsageError, match=r"changes gradients after backward\(\).*clip with mt\.clip_grad_norm_"),
    ):
        daemon.run(script)


def test_several_optimizers_are_refused() -> None:
    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = net()
        turns = [torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 2)]
        session.prepare(model, JointOptimizer(turns))

    with (
        LocalDaemon(1, sync="bsp,accumulate=2") as daemon,
        pytest.raises((NotSupported, RequestError), match="--sync bsp,accumulate=2 with several optimizers"),
    ):
        daemon.run(script)


def test_with_a_scaler_an_overflow_in_any_step_skips_the_round_of_all() -> None:
    """V1, O6: each pass is divided by its own scale; who has overflown alone has shrunk by one step more."""
    models = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
        optimizer = momentum(models[rank])
        session.prepare(models[rank], optimizer, scaler)
        for number in range(6):
            x, y = batch(10 * rank + number)
            optimizer.zero_grad()
            loss = loss_of(models[rank], x * float("inf") if (rank, number) == (1, 2) else x, y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    with LocalDaemon(2, sync="bsp,accumulate=2") as daemon:
        assert daemon.run(script) == [32.0, 16.0]
        rounds = [round_.done for _, round_ in sorted(daemon.rounds.rounds.items())]
        assert [done is not None and done.void for done in rounds] == [False, True, False]
    reference = net()
    optimizer = momentum(reference)
    for numbers in ((0, 1), (4, 5)):
        step(reference, optimizer, joined([batch(10 * rank + number) for rank in range(2) for number in numbers]))
    assert_equal(models)
    assert distance(models[0], reference) <= 1e-6
