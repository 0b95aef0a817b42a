"""O3: what a bind says of the optimizer's options, and what is accepted of it."""

import contextlib
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from torch import nn

from meshtrain.errors import MeshtrainError
from meshtrain.train.optim.hyperparameters import Hyperparameters
from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon


def adamw(**options: Any) -> torch.optim.Optimizer:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [
        {"params": first.parameters()},
        {"params": second.parameters(), "lr": 0.2, "fused": False},
    ]
    return torch.optim.AdamW(groups, lr=0.1, **options)


def test_values_are_in_force_and_then_put_back() -> None:
    leader, follower = adamw(betas=(0.5, 0.6), amsgrad=True), adamw()
    leader.param_groups[1]["lr"] = np.float32(0.25)  # as a schedule in numpy sets it
    mine = Hyperparameters(follower)
    told = mine.unpack(Hyperparameters(leader).pack(None, clip_known=True))
    before = [dict(group) for group in follower.param_groups]
    with contextlib.suppress(ZeroDivisionError), mine.in_force(told.groups):
        assert [group["lr"] for group in follower.param_groups] == [0.1, 0.25]
        assert all(group["betas"] == (0.5, 0.6) and group["amsgrad"] is True for group in follower.param_groups)
        assert [group["fused"] for group in follower.param_groups] == [None, False], "how, not what"
        raise ZeroDivisionError
    assert [dict(group) for group in follower.param_groups] == before


def test_rate_in_a_tensor_stays_the_same_tensor() -> None:
    """A capturable optimizer's graph refers to it."""
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=rate)
    own = Hyperparameters(optimizer)
    values = own.unpack(own.pack(None, clip_known=True)).groups
    with own.in_force(({**values[0], "lr": 0.5},)):
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == 0.5
    assert rate.item() == torch.tensor(0.1).item()


class Counting(torch.optim.SGD):
    """Keeps a count of its steps among the options, as some optimizers keep what they estimate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([{"params": model.parameters(), "count": 0}], lr=0.1)

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["count"] += 1
        return super().step(closure)


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_a_step_writes_is_of_the_base(staleness: int) -> None:
    """O2: it advances with every round, also where binds carry what it was rounds ago and rates that differ."""

    def script(session: LearnerSession, rank: int) -> int:
        model = nn.Linear(3, 1)
        optimizer = Counting(model)
        session.prepare(model, optimizer)
        for number in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1 + number + rank
        session.finish()
        assert optimizer.param_groups[0]["lr"] == 5.1 + rank
        return int(optimizer.param_groups[0]["count"])

    with LocalDaemon(2, sync=f"ssp:{staleness}", straggler="wait") as daemon:
        assert daemon.run(script) == [6, 6] == [daemon.round] * 2
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"


def test_what_schedulers_keep_in_the_groups_does_not_travel() -> None:
    """A peer with a scheduler and one without have the same names."""
    optimizer = adamw()
    own = Hyperparameters(optimizer)
    before = own.pack(1.0, clip_known=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "initial_lr" in optimizer.param_groups[0]
    assert own.pack(1.0, clip_known=True) == before


def test_rate_that_is_no_number_is_an_error_of_this_peer() -> None:
    optimizer = adamw()
    own = Hyperparameters(optimizer)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(MeshtrainError, match="options of AdamW cannot be told"):
        own.pack(None, clip_known=True)


def packed(**changes: Any) -> bytes:
    plain = msgpack.unpackb(Hyperparameters(adamw()).pack(None, clip_known=True))
    result: bytes = msgpack.packb({**plain, **changes})
    return result


def group(**changes: Any) -> dict[str, Any]:
    plain = msgpack.unpackb(packed())
    return {**plain["groups"][0], **changes}


@pytest.mark.parametrize(
    "hostile",
    [
        b"\xc1",
        b"",
        msgpack.packb(7),
        packed(clip=-1.0),
        packed(clip=float("nan")),
        packed(more=1),
        packed(groups=[]),
        packed(groups=[group(), group(), group()]),
        packed(groups=[group(), group(lr=float("nan"))]),
        packed(groups=[group(), group(lr="0.1")]),
        packed(groups=[group(), group(lr=[0.1])]),
        packed(groups=[group(), group(betas=0.9)]),
        packed(groups=[group(), group(betas=[0.9, 0.9, 0.9])]),
        packed(groups=[group(), group(params=0)]),
        packed(groups=[group(), {}]),
    ],
)
def test_hostile_bytes_are_an_error_that_says_so(hostile: bytes) -> None:
    with pytest.raises(MeshtrainError, match="options of a round"):
        Hyperparameters(adamw()).unpack(hostile)
