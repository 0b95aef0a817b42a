"""Steps on own weights between two rounds (R9, O8): local SGD and DiLoCo, against a few lines of torch."""

import contextlib
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.errors import NonFiniteGradient, UsageError
from meshtrain.train.session import LearnerSession
from meshwire.sync_modes.rate_rule import parse_rate_rule
from meshwire.sync_modes.settings_changes import SettingsChange, SettingsChanges
from tests.tiers import mostly_slow
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import Batch, adamw, assert_equal, batch, distance, momentum, net, sgd, step

TOLERANCE = 1e-6  # relative: base - (base - w) rounds once in fp32, w * d / w a few times
EPOCHS = 2
Make = Callable[[nn.Module], torch.optim.Optimizer]


def local_sgd(make: Make, drawn: list[list[list[Batch]]], period: int) -> nn.Module:
    """Stich 2019: H steps on each learner, then the mean of their weights, by samples. AdamW's are longer, and weights
    decay by as much as otherwise (O13).

    Args:
        drawn: batches by rank and epoch.
    """
    learners = [(model := net(), make(model)) for _ in drawn]
    for _, optimizer in learners:
        if isinstance(optimizer, torch.optim.AdamW):
            optimizer.param_groups[0]["lr"] *= math.sqrt(len(drawn))
            optimizer.param_groups[0]["weight_decay"] /= math.sqrt(len(drawn))
    for epoch in range(EPOCHS):
        for first in range(0, len(drawn[0][epoch]), period):
            for (model, optimizer), batches in zip(learners, drawn, strict=True):
                for each in batches[epoch][first : first + period]:
                    step(model, optimizer, each)
            counts = [sum(len(x) for x, _ in batches[epoch][first : first + period]) for batches in drawn]
            for places in zip(*(model.parameters() for model, _ in learners), strict=True):
                mean = sum(p.detach().double() * n for p, n in zip(places, counts, strict=True)) / sum(counts)
                for p in places:
                    p.data.copy_(mean)
    return learners[0][0]


def epochs_of(
    make: Make, members: int, total: int, changes: SettingsChanges = (), **spec: Any
) -> tuple[LocalDaemon, list[Any], list[Any]]:
    """A job of EPOCHS epochs: its daemon, its models, and what its ranks drew by epoch."""
    dataset = TensorDataset(torch.arange(total), *batch(1, total))
    replicas = [net() for _ in range(members)]

    def script(session: LearnerSession, rank: int) -> list[list[Any]]:
        model, optimizer = replicas[rank], make(replicas[rank])
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        model, optimizer, loader = session.prepare_with_loader(model, optimizer, loader)
        drawn: list[list[Any]] = []
        for _ in range(EPOCHS):
            drawn.append([])
            for indices, x, y in loader:
                drawn[-1].append((indices, x, y))
                step(model, optimizer, (x, y))
        return drawn

    with LocalDaemon(members, **spec) as daemon:
        daemon.rounds.changes = changes
        drawn = daemon.run(script)
        assert daemon.hashes
        assert all(len(ranks) == members for ranks in daemon.hashes.values())
    assert_equal(replicas)
    return daemon, replicas, drawn


@pytest.mark.parametrize("make", mostly_slow([adamw, sgd, momentum]))
@pytest.mark.parametrize(("members", "total", "period"), [(1, 20, 2), (2, 40, 1), (2, 41, 3), (3, 50, 4), (2, 24, 50)])
def test_weights_are_those_of_local_sgd(make: Make, members: int, total: int, period: int) -> None:
    """ALGORITHMS 2: w <- mean of w by samples after H steps; an epoch's end ends a period. X1, X6: every sample
    of every local step is in exactly one round, and O9: replicas are bit-equal."""
    daemon, models, drawn = epochs_of(make, members, total, sync=f"local:{period}")
    batches = [[[(x, y) for _, x, y in epoch] for epoch in rank] for rank in drawn]
    assert distance(models[0], local_sgd(make, batches, period)) <= TOLERANCE
    for epoch in range(EPOCHS):
        seen = sorted(int(i) for rank in drawn for indices, _, _ in rank[epoch] for i in indices)
        assert seen == list(range(total))
    rounds = daemon.rounds.rounds.values()
    assert len(rounds) == EPOCHS * -(-len(batches[0][0]) // period)
    assert sum(bind.weight for each in rounds for bind in each.binds.values()) == EPOCHS * total
    blocks = [block for each in rounds for bind in each.binds.values() for block in bind.samples]
    assert len(set(blocks)) == len(blocks)
    assert sum(block.end - block.first for block in blocks) == EPOCHS * total


@pytest.mark.parametrize("make", [sgd, momentum])
def test_a_period_of_one_step_is_bsp(make: Make) -> None:
    """ALGORITHMS 2: by linearity, with momentum too; to fp32 rounding, for differences of weights round otherwise than
    gradients do."""
    _, periods, _ = epochs_of(make, 2, 40, sync="local:1")
    _, steps, _ = epochs_of(make, 2, 40, sync="bsp")
    assert distance(periods[0], steps[0]) <= TOLERANCE


@pytest.mark.parametrize(("sync", "visibility"), [("local:2", None), ("local:2,ssp:1", "fixed")])
def test_a_learner_takes_as_many_steps_as_it_is_told(sync: str, visibility: str | None) -> None:
    """C3: with the word to begin the period, or with the round that makes it superfluous; also where it becomes
    shorter, and several periods are on their way."""
    changes = (SettingsChange(first=4, period=5), SettingsChange(first=6, period=3))
    how = {} if visibility is None else {"visibility": visibility}
    daemon, _, _ = epochs_of(sgd, 2, 8 * (2 + 2 + 2 + 5 + 5 + 3 + 3 + 3), changes, sync=sync, **how)
    weights = [bind.weight for _, each in sorted(daemon.rounds.rounds.items()) for bind in each.binds.values()]
    late = daemon.spec.sync.staleness  # a period begins by its base, which lacks so many rounds
    steps = [2] * (3 + late) + [5] * 2 + [3] * 3
    assert [weight / 4 for weight in weights[: 2 * 6]] == [count for count in steps for _ in range(2)][: 2 * 6]


@pytest.mark.parametrize("make", [sgd, momentum])
def test_periods_begin_after_so_many_rounds(make: Make) -> None:
    """Post-local SGD (Lin et al. 2020, section 3): bsp for N rounds, then local SGD from there."""
    after, period = 3, 4
    daemon, models, drawn = epochs_of(make, 2, 80, sync=f"local:{period},after={after}")
    batches = [[(x, y) for _, x, y in (each for epoch in rank for each in epoch)] for rank in drawn]
    learners = [(model := net(), make(model)) for _ in drawn]
    per_epoch, first = len(drawn[0][0]), 0
    rounds = 0
    while first < len(batches[0]):
        rounds += 1
        left = per_epoch - first % per_epoch  # an epoch's end ends a period
        steps = 1 if rounds <= after else min(period, left)
        for (model, optimizer), of_rank in zip(learners, batches, strict=True):
            for each in of_rank[first : first + steps]:
                step(model, optimizer, each)
        for places in zip(*(model.parameters() for model, _ in learners), strict=True):
            mean = sum(p.detach().double() for p in places) / len(places)
            for p in places:
                p.data.copy_(mean)
        first += steps
    assert len(daemon.rounds.rounds) == rounds
    assert distance(models[0], learners[0][0]) <= TOLERANCE


def test_one_step_and_the_outer_step_are_nesterov_sgd() -> None:
    """ALGORITHMS 5, DiLoCo: H=1, inner SGD(eta), outer (a, mu, Nesterov) is Nesterov SGD of rate a * eta."""

    def nesterov(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.7 * 0.05, momentum=0.9, nesterov=True)

    _, periods, _ = epochs_of(sgd, 2, 40, sync="diloco:1")
    _, steps, _ = epochs_of(nesterov, 2, 40, sync="bsp")
    assert distance(periods[0], steps[0]) <= TOLERANCE


@pytest.mark.parametrize(("make", "norm"), [(adamw, False), (momentum, True)])
@pytest.mark.parametrize("period", [1, 3, 8])
def test_equal_data_on_all_learners_is_one_learner(make: Make, norm: bool, period: int) -> None:
    """ALGORITHMS 2: for any H and any optimizer, at the rate of the script: all their states stay equal. (Not BatchNorm
    under AdamW: the gradient of the bias before it is rounding alone, whose sign AdamW follows.)"""
    replicas = [net(norm=norm) for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], make(replicas[rank]))
        for number in range(16):
            step(model, optimizer, batch(number))

    with LocalDaemon(2, sync=f"local:{period}", scale_lr=parse_rate_rule("none")) as daemon:
        daemon.run(script)
        assert daemon.round == -(-16 // period)
    assert_equal(replicas)
    alone = net(norm=norm)
    optimizer = make(alone)
    for number in range(16):
        step(alone, optimizer, batch(number))
    assert distance(replicas[0], alone) <= 10 * TOLERANCE  # of 16 rounds


def test_steps_end_with_a_whole_period_and_a_barrier_ends_one() -> None:
    """X6: `mt.steps` ends behind the round with the last of so many steps. Behind a barrier all replicas hold the
    base."""
    replicas = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> list[int]:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        numbers = []
        for number in session.steps(10):
            numbers.append(number)
            step(model, optimizer, batch(100 * rank + number))
        step(model, optimizer, batch(rank))
        session.barrier()
        held = copy.deepcopy(model)
        step(model, optimizer, batch(rank))
        behind.append(held)
        return numbers

    behind: list[nn.Sequential] = []
    with LocalDaemon(2, sync="local:4") as daemon:
        assert daemon.run(script) == [list(range(1, 13))] * 2
        assert daemon.round == 5
    assert_equal(behind)
    assert_equal(replicas)


def test_the_base_is_shown_in_the_middle_of_a_period() -> None:
    """O7: `mt.base` holds the base, buffers too; then the own weights are back, bit for bit."""
    replicas = [net(norm=True) for _ in range(2)]
    bases: list[nn.Sequential] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(6):  # of periods of 4
            step(model, optimizer, batch(100 * rank + number))
        own = copy.deepcopy(model)
        with session.base():
            bases.append(copy.deepcopy(model))
            with pytest.raises(UsageError, match=r"inside `with mt\.base"):
                optimizer.step()
        assert_equal([own, model])
        assert distance(own, bases[-1]) > 1e-3

    with LocalDaemon(2, sync="local:4") as daemon:
        daemon.run(script)
    assert_equal(bases)


@pytest.mark.parametrize("sync", ["local:4", "sma:4"])
def test_a_period_that_ends_while_the_base_is_shown_has_its_buffers(sync: str) -> None:
    """O5, O7: a barrier inside `mt.base` gives the round what one outside would, BatchNorm's running means too."""

    def job(*, inside: bool) -> list[nn.Sequential]:
        replicas = [net(norm=True) for _ in range(2)]

        def script(session: LearnerSession, rank: int) -> None:
            model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
            for number in range(6):  # of periods of 4
                step(model, optimizer, batch(100 * rank + number))
            with session.base() if inside else contextlib.nullcontext():
                session.barrier()
            for number in range(4):
                step(model, optimizer, batch(100 * rank + number))

        with LocalDaemon(2, sync=sync) as daemon:
            daemon.run(script)
        return replicas

    assert_equal([*job(inside=True), *job(inside=False)])


@pytest.mark.parametrize("on_nan", ["skip", "stop"])
def test_a_void_round_gives_the_local_steps_up(on_nan: str) -> None:
    """V1: all begin again from the base; what has become NaN is not in the state of the optimizer either."""
    replicas = [net(norm=True) for _ in range(2)]
    bases: list[dict[str, Tensor]] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], adamw(replicas[rank]))
        for number in range(8):
            x, y = batch(10 * rank + number)
            step(model, optimizer, (x, y * float("nan") if (rank, number) == (1, 3) else y))
            if number == 1 or number == 3:
                bases.append({name: value.clone() for name, value in model.state_dict().items()})

    with LocalDaemon(2, sync="local:2", on_nan=on_nan) as daemon:
        if on_nan == "stop":
            with pytest.raises(NonFiniteGradient, match=r"change by local steps holds NaN"):
                daemon.run(script)
            return
        daemon.run(script)
        verdicts = [each.done is not None and each.done.void for each in daemon.rounds.rounds.values()]
        assert verdicts == [False, True, False, False]
    assert all(torch.equal(value, base[name]) for base in bases[1:] for name, value in bases[0].items())
    assert_equal(replicas)
    assert all(torch.isfinite(value).all() for value in replicas[0].state_dict().values())


def test_a_lost_period_is_given_up() -> None:
    """R5: its samples are dealt again, so nothing of it may stay in the weights."""
    replicas = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(6 if rank == 0 else 8):
            step(model, optimizer, batch(10 * rank + number))

    with LocalDaemon(2, sync="local:2") as daemon:
        daemon.lose(1, 2, retry=True)
        daemon.run(script)
        assert daemon.round == 3
    expected = [(model := net(), sgd(model)) for _ in range(2)]
    for numbers in ((0, 1, 10, 11), (2, 3, 14, 15), (4, 5, 16, 17)):
        for (model, optimizer), own in zip(expected, (numbers[:2], numbers[2:]), strict=True):
            for number in own:
                step(model, optimizer, batch(number))
        for p, q in zip(expected[0][0].parameters(), expected[1][0].parameters(), strict=True):
            p.data.copy_((p.data + q.data) / 2)
            q.data.copy_(p.data)
    assert_equal(replicas)
    assert distance(replicas[0], expected[0][0]) <= TOLERANCE


@pytest.mark.parametrize("sync", ["local:3", "diloco:3"])
def test_a_state_holds_what_belongs_to_the_base(sync: str, tmp_path: Path) -> None:
    """J1: learners that begin from it go on as the others do, the outer momentum with them. (Plain SGD: there is no
    state of their own.)"""

    def run(daemon: LocalDaemon, first: int) -> list[nn.Sequential]:
        replicas = [net(norm=True) for _ in range(2)]

        def script(session: LearnerSession, rank: int) -> None:
            model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
            if rank == 0 and not first:
                daemon.save(0, 2, tmp_path)
            for number in range(first, 12):
                step(model, optimizer, batch(100 * rank + number))

        daemon.run(script)
        return replicas

    with LocalDaemon(2, sync=sync) as daemon:
        whole = run(daemon, 0)
        saved = [body for _, body in daemon.saved]
    assert [(body.round, body.error) for body in saved] == [(2, None)]
    with LocalDaemon(2, sync=sync) as daemon:
        daemon.begin_from(tmp_path, 2, saved[0].units)
        assert_equal([*whole, *run(daemon, 6)])


@pytest.mark.parametrize("sync", ["local:3", "sma:3"])
def test_a_state_that_is_saved_in_a_barrier_changes_nothing(sync: str, tmp_path: Path) -> None:
    """J1, R9: the parameters hold the local weights again when the learner goes on."""
    ends = []
    for saved in (False, True):
        replicas = [net() for _ in range(2)]

        def script(session: LearnerSession, rank: int) -> None:
            model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))  # noqa: B023
            for number in range(6):
                step(model, optimizer, batch(100 * rank + number))
            if rank == 1 and saved:  # noqa: B023
                daemon.wait_until(lambda: daemon.rounds.learners[0].barrier is not None)
                daemon.save(0, 1, tmp_path)
                daemon.wait_until(lambda: bool(daemon.saved))
            session.barrier()
            for number in range(6, 12):
                step(model, optimizer, batch(100 * rank + number))

        with LocalDaemon(2, sync=sync) as daemon:
            daemon.run(script)
        ends.append(replicas[0])
    assert_equal(ends)


def test_rounds_of_local_steps_are_not_clipped_after_a_job_whose_were(tmp_path: Path) -> None:
    """O4, J2: a limit for gradients, saved under a bound, is none for what local steps have changed."""
    replicas = [net(), net()]
    held: list[nn.Sequential] = []

    def clipped(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[0], sgd(replicas[0]))
        daemon.save(rank, 2, tmp_path)
        for number in range(3):
            x, y = batch(number)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            session.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            if number == 1:
                held.append(copy.deepcopy(model))

    def local(session: LearnerSession, _: int) -> None:
        model, optimizer = session.prepare(replicas[1], sgd(replicas[1]))
        for number in range(4):
            step(model, optimizer, batch(number))

    with LocalDaemon(1) as daemon:
        daemon.run(clipped)
        ((_, saved),) = daemon.saved
    assert (saved.round, saved.error) == (2, None)
    with LocalDaemon(1, sync="local:4") as daemon:
        daemon.begin_from(tmp_path, saved.round, saved.units)
        daemon.run(local)
    optimizer = sgd(held[0])
    for number in range(4):
        step(held[0], optimizer, batch(number))
    assert distance(replicas[1], held[0]) <= TOLERANCE


def test_a_step_that_a_scaler_skips_is_one_of_its_period() -> None:
    """O6: every learner's periods take equally many batches; gradients and their scale are its own."""
    replicas = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]), scaler)
        for number in range(4):
            x, y = batch(10 * rank + number)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss * (float("inf") if (rank, number) == (1, 2) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return float(scaler.get_scale())

    with LocalDaemon(2, sync="local:4") as daemon:
        assert daemon.run(script) == [2.0**10, 2.0**9]
        assert daemon.round == 1
        assert not any(each.poisons for each in daemon.rounds.rounds.values())
    assert_equal(replicas)


def test_what_a_script_does_to_its_gradients_is_its_own() -> None:
    """O4, O6: clipping and accumulation are torch's, and nothing waits in a backward pass."""
    replicas = [net() for _ in range(2)]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Any, sync: Any) -> None:
        for number in range(4):
            optimizer.zero_grad()
            for micro in range(2):
                x, y = batch(2 * number + micro)
                with sync():
                    nn.functional.mse_loss(model(x), y).backward()
            assert float(clip(model.parameters(), 0.1)) > 0.1
            optimizer.step()

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        train(model, optimizer, session.clip_grad_norm_, session.no_sync)

    with LocalDaemon(2, sync="local:2") as daemon:
        daemon.run(script)
        assert daemon.round == 2
    alone = net()
    train(alone, sgd(alone), nn.utils.clip_grad_norm_, contextlib.nullcontext)
    assert distance(replicas[0], alone) <= TOLERANCE
