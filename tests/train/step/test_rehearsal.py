"""X4: a step that is rehearsed, over an epoch that was over before this learner came, changes nothing anywhere."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.train.data.deal import Deal
from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon
from tests.train.model.test_saving import STEPS, Net, adamw, batch, sync_of

MODES: dict[str, dict[str, Any]] = {
    "bsp": sync_of(0),
    "ssp": sync_of(2, "1"),
    "local": {"sync": "local:2"},
}


def rehearse(session: LearnerSession, model: Net, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """What a script does with a batch, with all that `mt` has for it; twice, and once more with a closure."""
    assert session._engine is not None
    session._engine.begin_rehearsal()
    for number in (100, 101):
        optimizer.zero_grad()
        with session.no_sync() if number == 100 else contextlib.nullcontext():
            scaler.scale(model(batch(0, number)).square().mean()).backward()
        assert any(parameter.grad is not None for parameter in model.parameters())
        scaler.unscale_(optimizer)
        assert session.clip_grad_norm_(model.parameters(), 1e-3) > 1e-3
        scaler.step(optimizer)
        scaler.update()
        session.log({"loss": 1.0})
    assert optimizer.step(lambda: 7.0) == 7.0
    session._engine.end_rehearsal()


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("mode", MODES)
def test_a_rehearsed_step_changes_nothing(mode: str, scaled: bool) -> None:
    """Neither base nor buffers nor gradients that were accumulated, the optimizer's state or the scaler's."""

    def run(rehearsed: tuple[int, ...]) -> tuple[dict[int, dict[int, bytes]], list[Any], int]:
        models = [Net(rank) for rank in range(2)]
        ends: list[Any] = [{}, {}]

        def script(session: LearnerSession, rank: int) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=scaled)
            model, optimizer = session.prepare(models[rank], adamw(models[rank]), scaler)
            for number in range(1, STEPS + 1):
                optimizer.zero_grad()
                if mode != "local":
                    with session.no_sync():
                        scaler.scale(model(batch(rank, 50 + number)).square().mean()).backward()
                if rank == 1 and number in rehearsed:
                    rehearse(session, model, optimizer, scaler)
                scaler.scale(model(batch(rank, number)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                if rank == 1 and -number in rehearsed:
                    rehearse(session, model, optimizer, scaler)
            ends[rank] = scaler.state_dict()

        with LocalDaemon(2, hash_every=1, **MODES[mode]) as daemon:
            daemon.run(script)
            return daemon.hashes, [*ends, *(model.state_dict() for model in models)], len(daemon.logs)

    hashes, ends, logged = run((1, 4, -5, -STEPS))
    expected_hashes, expected_ends, _ = run(())
    assert hashes == expected_hashes
    assert str(ends) == str(expected_ends)
    assert logged == 0


@pytest.mark.parametrize("mode", MODES)
def test_whoever_evaluates_or_waits_after_a_loop_that_was_left_sees_the_base(mode: str) -> None:
    """A script that leaves its loop over an epoch that is over has not ended the rehearsal: its end does; and a barrier
    inside the loop, where rounds may be applied, ends it meanwhile."""

    def script(session: LearnerSession, rank: int) -> None:
        model = Net(0)
        optimizer = adamw(model)
        session.prepare(model, optimizer)
        engine = session._engine
        assert engine is not None
        before = {name: value.clone() for name, value in model.state_dict().items()}

        def unchanged() -> bool:
            return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

        def rehearsed() -> None:
            model(batch(rank, 1)).sum().backward()
            assert not unchanged(), "a forward pass moves BatchNorm's statistics"

        engine.begin_rehearsal()
        rehearsed()
        session.barrier()
        assert unchanged()
        assert engine.steps.rehearsal.on
        rehearsed()
        with session.base():
            assert unchanged()
        assert engine.steps.rehearsal.on
        session.finish()
        assert unchanged()
        assert not engine.steps.rehearsal.on

    with LocalDaemon(2, **MODES[mode]) as daemon:
        daemon.run(script)
        assert daemon.round == 0


def loss_of(model: Net, batch: list[torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0]).square().mean()
    return loss


def steps_behind_its_loop(session: LearnerSession, model: Net, loader: Any, optimizer: Any, scaler: Any) -> None:
    """Accumulates two batches a step, and steps on what is left."""
    count = 0
    for count, each in enumerate(loader, 1):
        with contextlib.nullcontext() if count % 2 == 0 else session.no_sync():
            scaler.scale(loss_of(model, each)).backward()
        if count % 2 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    if count % 2:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def fetches_ahead(_: LearnerSession, model: Net, loader: Any, optimizer: Any, scaler: Any) -> None:
    batches = iter(loader)
    at_hand = next(batches, None)
    while at_hand is not None:
        following = next(batches, None)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, at_hand)).backward()
        scaler.step(optimizer)
        scaler.update()
        at_hand = following


def takes_one_batch(_: LearnerSession, model: Net, loader: Any, optimizer: Any, scaler: Any) -> None:
    """Its iteration is over before the batch is used."""
    each = next(iter(loader))
    optimizer.zero_grad()
    scaler.scale(loss_of(model, each)).backward()
    scaler.step(optimizer)
    scaler.update()


def steps_twice_on_each(_: LearnerSession, model: Net, loader: Any, optimizer: Any, scaler: Any) -> None:
    for each in loader:
        for _again in range(2):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, each)).backward()
            scaler.step(optimizer)
            scaler.update()


class LateDeal(Deal):
    """A deal whose first epochs, so many as its thread has `late.past`, were over before it was made: those below 0."""

    late = threading.local()

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.epoch -= getattr(self.late, "past", 0)


@pytest.mark.parametrize("mode", MODES)
def test_epochs_that_are_over_come_with_the_state_and_are_run_through_first(mode: str) -> None:
    """They are known before the script has its model back: nobody counts on a learner that has them before it."""
    data = TensorDataset(torch.randn(8, 6, generator=torch.Generator().manual_seed(3)))

    def script(session: LearnerSession, _: int) -> None:
        model = Net(0)
        loader = session.prepare_with_loader(model, adamw(model), DataLoader(data, batch_size=2))[2]
        for _over in range(2):
            assert len(list(loader)) == 1
            assert not daemon.ready
        next(iter(loader))
        assert daemon.ready

    with LocalDaemon(1, **MODES[mode]) as daemon:
        daemon.epochs_over = 2
        daemon.run(script)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("looped", [False, True], ids=["no loop", "one loop"])
def test_a_script_that_steps_outside_its_loop_takes_part_with_the_second_step(
    looped: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would rehearse for ever, and nobody would hear of it. The first step may still be on the loop's last batch."""
    monkeypatch.setattr("meshtrain.train.session.Deal", LateDeal)
    data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(3)))
    ready: list[bool] = []

    def script(session: LearnerSession, rank: int) -> None:
        LateDeal.late.past = 2 * rank
        model = Net(0)
        model, optimizer, loader = session.prepare_with_loader(model, adamw(model), DataLoader(data, batch_size=2))
        if rank == 0:
            return
        if looped:
            next(iter(loader))
        for _ in range(2):
            ready.append(1 in daemon.ready)
            optimizer.zero_grad()
            model(batch(rank, 1)).square().mean().backward()
            optimizer.step()
        ready.append(1 in daemon.ready)

    with LocalDaemon(2, **MODES[mode]) as daemon:
        daemon.run(script)
    assert ready == [False, False, True]


@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "scaled"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("epoch", [steps_behind_its_loop, fetches_ahead, takes_one_batch, steps_twice_on_each])
@pytest.mark.parametrize("known", [False, True], ids=["found", "known"])
def test_a_step_behind_the_loop_is_rehearsed_too(
    known: bool, epoch: Callable[..., None], mode: str, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has two epochs that are over before it begins: what leaves, and what stays, is as without them. Where it
    is told of them with its state, nobody counts on it before it has run through them."""
    monkeypatch.setattr("meshtrain.train.session.Deal", LateDeal)

    def run(over: int) -> tuple[Any, ...]:
        models = [Net(0) for _ in range(2)]
        ends: list[Any] = [None, None]
        data = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(3)))

        def script(session: LearnerSession, rank: int) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=scaled)
            past = over if rank == 1 else 0
            LateDeal.late.past = past if known else 0
            model, optimizer, loader = session.prepare_with_loader(
                models[rank], adamw(models[rank]), DataLoader(data, batch_size=2), scaler
            )
            assert session._deal is not None
            session._deal.epoch -= 0 if known else past
            for number in range(past + 2):
                assert not known or number > past or (1 in daemon.ready) == (number == 0 and not past)
                epoch(session, model, loader, optimizer, scaler)
            ends[rank] = scaler.state_dict(), optimizer.state_dict()

        with LocalDaemon(2, hash_every=1, **MODES[mode]) as daemon:
            daemon.run(script)
            sent = [
                (step, rank, [(each.weight, each.samples, each.claim) for each in buckets])
                for step, ranks in sorted(daemon.buckets.items())
                for rank, buckets in sorted(ranks.items())
            ]
            return daemon.hashes, sent, str(ends), str([model.state_dict() for model in models])

    assert run(2) == run(0)
