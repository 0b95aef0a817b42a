"""R6: m devices with n learners each train as m*n devices do, and are m devices to the daemons."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.errors import MeshtrainError, NonFiniteGradient, NotSupported, RequestError
from meshtrain.train.session import LearnerSession
from meshwire.sync_modes.rate_rule import parse_rate_rule
from tests.tiers import mostly_slow
from tests.train.crewdevices import run_crews
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import adamw, assert_equal, batch, distance, momentum, net, sgd, step

TOLERANCE = 1e-6  # relative: sums of four are made in another order
EPOCHS = 2
BATCH = 4
Make = Callable[[nn.Module], torch.optim.Optimizer]
Run = tuple[list[nn.Module], list[list[list[int]]], LocalDaemon]


def trained(
    devices: int, learners: int, total: int, make: Make = sgd, *, norm: bool = False, whole: bool = False, **spec: Any
) -> Run:
    """The model of each learner, the samples that it drew batch by batch, and the daemon."""
    dataset = TensorDataset(torch.arange(total), *batch(1, total))
    replicas: list[nn.Module] = [net(norm=norm) for _ in range(devices * learners)]

    def loader() -> DataLoader[Any]:
        if not whole:
            return DataLoader(dataset, batch_size=BATCH, shuffle=True)
        batches = [list(range(first, min(first + 3, total))) for first in range(0, total, 3)]
        return DataLoader(dataset, batch_sampler=batches)

    def script(session: LearnerSession, rank: int) -> list[list[int]]:
        model, optimizer, dealt = session.prepare_with_loader(replicas[rank], make(replicas[rank]), loader())
        drawn = []
        for _ in range(EPOCHS):
            for indices, x, y in dealt:
                drawn.append(indices.tolist())
                step(model, optimizer, (x, y))
        session.log({"rank": float(rank)})
        return drawn

    with LocalDaemon(devices, learners=learners, hash_every=1, **spec) as daemon:
        drawn = run_crews(daemon, script) if learners > 1 else daemon.run(script)
        assert daemon.hashes
        assert all(len(ranks) == devices for ranks in daemon.hashes.values())
    return replicas, drawn, daemon


@pytest.mark.parametrize("make", mostly_slow([momentum, adamw]))
@pytest.mark.parametrize("sync", ["bsp", "local:3", "diloco:2", "sma:2"])
def test_two_devices_of_two_learners_are_four_devices(sync: str, make: Make) -> None:
    """To 1e-6; each learner draws what that device would, in the same order."""
    crews, theirs, daemon = trained(2, 2, 64, make, sync=sync)
    alone, ours, _ = trained(4, 1, 64, make, sync=sync)
    assert theirs == ours
    assert_equal(crews)
    assert distance(crews[0], alone[0]) <= TOLERANCE
    rounds = daemon.rounds.rounds.values()
    assert sum(bind.weight for each in rounds for bind in each.binds.values()) == EPOCHS * 64


@pytest.mark.parametrize("rule", [None, "linear", "linear,warmup=4"])
def test_two_learners_of_one_device_are_two_devices_to_the_last_bit(rule: str | None) -> None:
    """A sum of two has one order. Scaled rates rise over as many epochs of all samples (O12)."""
    scale_lr = None if rule is None else parse_rate_rule(rule)
    crew, theirs, _ = trained(1, 2, 40, momentum, scale_lr=scale_lr)
    alone, ours, _ = trained(2, 1, 40, momentum, scale_lr=scale_lr)
    assert theirs == ours
    assert_equal([*crew, *alone])


@pytest.mark.parametrize("total", [41, 43, 47, 6])
@pytest.mark.parametrize("sync", ["bsp", "local:3"])
def test_each_sample_counts_once_whatever_is_left_over(total: int, sync: str) -> None:
    """X1, W3: by all learners together in each epoch, and each learner has one in each step."""
    crews, drawn, daemon = trained(2, 2, total, sync=sync)
    assert_equal(crews)
    steps = len(drawn[0])
    assert all(len(each) == steps for each in drawn)
    for epoch in range(EPOCHS):
        of_epoch = [batches[epoch * steps // EPOCHS : (epoch + 1) * steps // EPOCHS] for batches in drawn]
        assert all(each for learner in of_epoch for each in learner)
        assert sorted(i for learner in of_epoch for each in learner for i in each) == list(range(total))
    rounds = daemon.rounds.rounds.values()
    assert sum(bind.weight for each in rounds for bind in each.binds.values()) == EPOCHS * total
    assert sum(each.samples for _, each in daemon.stepped) == EPOCHS * total


def test_batches_of_the_scripts_own_sampler_are_dealt_whole() -> None:
    crews, drawn, daemon = trained(2, 2, 35, whole=True)
    assert_equal(crews)
    assert sorted(i for learner in drawn for each in learner for i in each) == sorted([*range(35)] * EPOCHS)
    assert sum(each.samples for _, each in daemon.stepped) == EPOCHS * 35


@pytest.mark.parametrize("sync", ["bsp", "local:3"])
def test_shares_by_speed_and_statistics_of_batches(sync: str) -> None:
    """X4a, O5: batches of a new size are cut as others are. BatchNorm's statistics are the mean of all learners', its
    counts their maximum. Nobody idles before the end."""
    crews, drawn, daemon = trained(2, 2, 72, norm=True, sync=sync, shares="speed")
    assert_equal(crews)
    assert sorted(i for learner in drawn for each in learner for i in each) == sorted([*range(72)] * EPOCHS)
    assert [one for _, one in daemon.idle if one.finished] == [one for _, one in daemon.idle][-2:]


def test_values_are_the_first_learners_and_ranks_count_all() -> None:
    _, _, daemon = trained(2, 2, 16)
    assert sorted((rank, dict(told.values)["rank"]) for rank, told in daemon.logs) == [(0, 0.0), (1, 2.0)]


def test_all_begin_from_the_first_learners_state() -> None:
    """J1: also where each has drawn weights of its own, on all devices."""
    models = [nn.Linear(4, 2) for _ in range(4)]
    first = [p.detach().clone() for p in models[0].parameters()]

    def script(session: LearnerSession, rank: int) -> tuple[int, list[torch.Tensor]]:
        model = models[rank]
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
        session.prepare(model, optimizer)
        begun = [p.detach().clone() for p in model.parameters()]
        assert optimizer.param_groups[0]["lr"] == 0.1
        step(model, optimizer, batch(rank))
        assert session.world_size == 4
        return session.rank, begun

    with LocalDaemon(2, learners=2) as daemon:
        told = run_crews(daemon, script)
    assert [rank for rank, _ in told] == [0, 1, 2, 3]
    for _, begun in told:
        assert all(torch.equal(p, q) for p, q in zip(begun, first, strict=True))
    assert_equal(models)


def test_a_saved_state_is_the_first_learners_and_serves_all(tmp_path: Path) -> None:
    """A checkpoint is written once for a device; all learners of a device that begins from it go on from there."""

    def script(session: LearnerSession, rank: int) -> nn.Module:
        model = net()
        optimizer = adamw(model)
        session.prepare(model, optimizer)
        for _ in session.steps(4):
            step(model, optimizer, batch(rank))
        return model

    with LocalDaemon(1, learners=2) as daemon:

        def save() -> None:
            daemon.wait_until(lambda: bool(daemon.ready))
            daemon.save(0, 2, tmp_path)

        asking = threading.Thread(target=save)
        asking.start()
        whole = run_crews(daemon, script)
        asking.join()
        ((_, saved),) = daemon.saved
        assert (saved.error, saved.round) == (None, 2)
    with LocalDaemon(1, learners=2) as daemon:
        daemon.begin_from(tmp_path, saved.round, saved.units)
        again = run_crews(daemon, script)
        assert [applied.round for _, applied in daemon.applied] == [3, 4]
    assert_equal([*whole, *again])


@pytest.mark.parametrize("sync", mostly_slow(["bsp", "local:3"]))
def test_learners_that_come_back_run_through_epochs_that_are_over(sync: str) -> None:
    """X4: each by itself, the first one before the others have a state; with statistics of batches, and an evaluation
    behind each epoch."""
    dataset = TensorDataset(*batch(1, 40))
    replicas = [net(norm=True) for _ in range(4)]

    def script(session: LearnerSession, rank: int) -> list[int]:
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
        model, optimizer, dealt = session.prepare_with_loader(replicas[rank], momentum(replicas[rank]), loader)
        steps = []
        for _ in range(3):
            steps.append(0)
            for each in dealt:
                step(model, optimizer, each)
                steps[-1] += 1
            with session.base():
                model.eval()(each[0])
                model.train()
        return steps

    with LocalDaemon(2, learners=2, sync=sync) as daemon:
        daemon.epochs_over = 1
        steps = run_crews(daemon, script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values())
    assert [each[0] for each in steps] == [1] * 4, "one batch of an epoch that is over"
    assert len(set(map(tuple, steps))) == 1
    assert_equal(replicas)


@pytest.mark.parametrize("retry", [True, False])
def test_a_step_that_is_lost_is_lost_to_all(retry: bool) -> None:
    """R5, V2: its samples come again to the same learners, or count as seen."""
    dataset = TensorDataset(torch.arange(32), *batch(1, 32))
    replicas = [net() for _ in range(4)]

    def script(session: LearnerSession, rank: int) -> list[int]:
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
        model, optimizer, dealt = session.prepare_with_loader(replicas[rank], sgd(replicas[rank]), loader)
        seen: list[int] = []
        for indices, x, y in dealt:
            seen += indices.tolist()
            step(model, optimizer, (x, y))
        return seen

    with LocalDaemon(2, learners=2, on_nan="skip") as daemon:
        daemon.lose(1, 1, retry=retry)
        drawn = run_crews(daemon, script)
    assert_equal(replicas)
    assert set(range(32)) == {i for seen in drawn for i in seen}
    assert len(drawn[2]) == len(drawn[3])


def test_what_is_not_finite_in_the_second_learner_voids_the_round() -> None:
    """V1: with the parameter's name."""

    def script(session: LearnerSession, rank: int) -> None:
        model = net()
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        x, y = batch(rank)
        step(model, optimizer, (x * float("nan") if rank == 3 else x, y))

    with LocalDaemon(2, learners=2) as daemon, pytest.raises(NonFiniteGradient, match=r"rank 1.*holds NaN"):
        run_crews(daemon, script)


def test_barriers_are_of_all_learners() -> None:
    reached: list[int] = []

    def script(session: LearnerSession, rank: int) -> int:
        model = net()
        session.prepare(model, sgd(model))
        reached.append(rank)
        session.barrier()
        return len(reached)

    with LocalDaemon(2, learners=2) as daemon:
        assert run_crews(daemon, script) == [4] * 4


def test_learners_that_prepare_different_models_are_told_what_differs() -> None:
    def script(session: LearnerSession, rank: int) -> None:
        model = nn.Linear(4, 2 + rank)
        session.prepare(model, sgd(model))

    why = r"learner 2 of this device has prepared something else than learner 1.*weight"
    with LocalDaemon(1, learners=2) as daemon, pytest.raises(RequestError, match=why):
        run_crews(daemon, script)


def test_learners_that_do_different_things_are_named() -> None:
    def script(session: LearnerSession, rank: int) -> None:
        model = net()
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        if rank == 1:
            session.barrier()
        step(model, optimizer, batch(rank))

    why = (
        "learner 2 of this device waits in barrier 1, learner 1 computes step 1: all learners of a device run the same"
    )
    with LocalDaemon(1, learners=2) as daemon, pytest.raises(AssertionError, match=why):
        run_crews(daemon, script)


def test_a_growing_model_is_refused() -> None:
    from meshtrain.train.partial.progressive import Progressive

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
        model = Progressive(stages, [nn.Linear(4, 2), nn.Linear(4, 2)], every=2, warmup=1)
        session.prepare(model, sgd(model))

    with LocalDaemon(1, learners=2) as daemon, pytest.raises(NotSupported, match="submit without --learners"):
        run_crews(daemon, script)


def test_more_learners_than_samples_are_refused() -> None:
    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = net()
        session.prepare_with_loader(model, sgd(model), DataLoader(TensorDataset(*batch(1, 3)), batch_size=1))

    why = r"fewer than the 2 members.*in groups of 2, a sample for each learner of a device"
    with LocalDaemon(2, learners=2) as daemon, pytest.raises(MeshtrainError, match=why):
        run_crews(daemon, script)
