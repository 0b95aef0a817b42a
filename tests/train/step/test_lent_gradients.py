"""With s=0 `p.grad` is the mean where the daemon has put it (O1, M1), and the script's own where rounds may go on."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.train.optim.lent_gradients import LentGradients
from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon

STEPS = 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def parts(session: LearnerSession) -> Any:
    assert session._engine is not None
    return session._engine


def in_slot(session: LearnerSession, gradient: Tensor | None) -> bool:
    assert gradient is not None
    slot = parts(session)._base.means.slots.result
    return bool(slot.data_ptr() <= gradient.data_ptr() < slot.data_ptr() + 4 * slot.numel())


def backward(model: nn.Module, seed: int) -> None:
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def test_gradients_are_lent_without_a_copy_and_each_has_its_own_version() -> None:
    """O1; a script that changes one gradient has changed that one (O4: mt.clip_grad_norm_ asks)."""

    def script(session: LearnerSession, rank: int) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step != 1)
            backward(model, 10 * step + rank)
            assert all(in_slot(session, parameter.grad) for parameter in model.parameters())
            untouched = parts(session).steps._untouched
            assert untouched.changed() is None
            model[2].weight.grad.mul_(1.0)  # type: ignore[union-attr, operator]
            assert untouched.changed() == "the gradient of 2.weight was changed"
            optimizer.step()
            assert all(in_slot(session, parameter.grad) for parameter in model.parameters()), "as after any step"

    with LocalDaemon(2) as daemon:
        daemon.run(script)
        assert daemon.round == STEPS
        assert all(len(set(daemon.hashes[round_].values())) == 1 for round_ in range(1, STEPS + 1))


def test_a_gradient_in_other_memory_than_the_slots_is_a_copy() -> None:
    """Of a parameter of half precision, and of one whose values lie in another order (channels_last)."""
    lent = LentGradients()
    half = nn.Parameter(torch.zeros(2, 3, dtype=torch.float16))
    turned = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    for parameter in (half, turned):
        mean = torch.randn(parameter.shape)
        lent.lend(parameter, mean)
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, mean.to(parameter.dtype))
        before = parameter.grad.clone()
        mean.zero_()
        assert torch.equal(parameter.grad, before)


def test_what_is_accumulated_for_a_later_pass_is_the_scripts_own() -> None:
    """O6, R5: a round that goes on without this learner must not overwrite it."""

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with session.no_sync():
            backward(model, 1)
        assert not any(in_slot(session, parameter.grad) for parameter in model.parameters())
        first = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        parts(session)._base.means.slots.result.fill_(torch.nan)
        second = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert all(map(torch.equal, first, second))
        backward(model, 2)
        optimizer.step()

    with LocalDaemon(1) as daemon:
        daemon.run(script)


@pytest.mark.parametrize("when", ["before the step", "after it"])
def test_rounds_that_go_on_without_a_learner_leave_its_gradients_alone(when: str) -> None:
    """R5: while it is idle others' rounds come into the slot; its gradients are those of its last round. What it was
    promised with that one is so no more: its next step stands on the others' rounds (the daemon checks its age)."""
    rounds = 5
    idle_over = threading.Event()

    def others_have_gone_on() -> bool:
        with daemon.lock:
            return daemon.lock.wait_for(lambda: daemon.round >= 3, 10.0)

    def script(session: LearnerSession, rank: int) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        base = parts(session)._base
        for step in range(1, rounds + 1):
            optimizer.zero_grad()
            backward(model, step + rank)
            gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            idle = when if rank == 1 and step == 1 else ""
            if idle == "before the step":
                parts(session).wait_idle("a pause", others_have_gone_on, "others")
            optimizer.step()
            if idle == "after it":
                parts(session).wait_idle("a pause", lambda: base.applied >= 3, "others")
            kept = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            assert len(kept) == len(gradients)
            assert all(map(torch.equal, gradients, kept)), (rank, step)
            if rank == 1 and step == 2:
                idle_over.set()
                break

    with LocalDaemon(2) as daemon:
        daemon.run(script)
        assert daemon.round >= rounds
    assert idle_over.is_set()


def test_gradients_outlive_the_session() -> None:
    """After mt.finish() the daemon may use the slot, and the script still has what its last step stood on."""

    def script(session: LearnerSession, rank: int) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        backward(model, rank)
        optimizer.step()
        slot = parts(session)._base.means.slots.result
        kept = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        session.finish()
        slot.fill_(torch.nan)
        now = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert all(map(torch.equal, kept, now))

    with LocalDaemon(2) as daemon:
        daemon.run(script)


def test_a_gradient_that_was_sent_makes_room_for_the_next() -> None:
    """O1, M1: its mean takes its place; but whoever has a hook on the parameter finds it there."""
    seen: dict[str, list[bool]] = {"last layer, at the first": [], "own hook": []}

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = net()
        last, watched = model[2].weight, model[2].bias
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        seen["own hook"] = []
        watched.register_post_accumulate_grad_hook(  # type: ignore[operator]
            lambda parameter: seen["own hook"].append(parameter.grad is not None)
        )
        model[0].weight.register_hook(  # type: ignore[operator]
            lambda _: seen["last layer, at the first"].append(last.grad is None)
        )
        for step in range(2):
            optimizer.zero_grad(set_to_none=step == 0)
            backward(model, step)
            optimizer.step()

    with LocalDaemon(1) as daemon:
        daemon.run(script)
    assert seen == {"last layer, at the first": [True, True], "own hook": [True, True]}


def test_with_a_bound_gradients_stay_the_learners_own() -> None:
    """O2: nothing is released or lent, for the view is ahead by them."""

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        backward(model, 0)
        assert not any(in_slot(session, parameter.grad) for parameter in model.parameters())
        optimizer.step()

    with LocalDaemon(1, sync="ssp:1") as daemon:
        daemon.run(script)
