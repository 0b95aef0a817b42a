"""A script under torchrun trains as in a job with --sync bsp --codec fp32: the same samples in the same steps, the same
averages, the same models (O1, O5, O6, X1, X4)."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from meshtrain.train.partial.progressive import Progressive
from meshtrain.train.session import LearnerSession
from meshtrain.train.torchrun import distributed_session
from meshtrain.train.torchrun.distributed_session import DistributedSession
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import Bind
from meshwire.samples.epochs import part_of_epoch
from meshwire.samples.ledger import Ledger
from meshwire.sync_modes.mode import SyncSettings
from tests.train.localdaemon import LocalDaemon
from tests.train.rankprocesses import results

RANKS, EPOCHS, TOTAL, BATCH = 3, 2, 44, 4  # the last turn of an epoch is short: 8 samples for three ranks
TOLERANCE = 1e-5


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(TOTAL, 6, generator=generator)

    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.x[index].sum().view(1)


class Branched(nn.Module):
    """With statistics, an integer buffer, a part that one rank alone uses, and one that nobody does."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh())
        self.outer = nn.Linear(16, 1)
        self.own = nn.Linear(16, 1)
        self.unused = nn.Linear(16, 1)
        self.rank = rank
        filled(self, rank)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        output: Tensor = self.outer(hidden) + (self.own(hidden) if self.rank == 1 else 0.0)
        return output


def growing(rank: int) -> nn.Module:
    """It grows after three steps, and trains the new stage alone in the first of those that follow."""
    model = Progressive(
        [nn.Sequential(nn.Linear(6, 16), nn.Tanh()), nn.Linear(16, 16)], [nn.Linear(16, 1), nn.Linear(16, 1)], 3, 1
    )
    return filled(model, rank)


def filled(model: nn.Module, rank: int) -> nn.Module:
    generator = torch.Generator().manual_seed(rank)  # learners of a job are threads here, which share torch's own
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return model


def train(
    session: LearnerSession | DistributedSession, rank: int, micro: int = 1, made: Callable[[int], nn.Module] = Branched
) -> dict[str, Any]:
    """What a script does. Returns whatever can be compared."""
    model = made(rank)
    unused = model.unused.weight if isinstance(model, Branched) else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 + rank)  # rank 0's counts
    loader = DataLoader(Numbered(), batch_size=BATCH, shuffle=True)
    model, optimizer, prepared = session.prepare_with_loader(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    seen, losses, norms, none = [], [], [], []
    for _ in range(EPOCHS):
        batches = list(prepared) if micro > 1 else prepared
        for at, (indices, x, y) in enumerate(batches):
            seen.append(indices.tolist())
            last = at % micro == micro - 1 or at == len(prepared) - 1
            with contextlib.nullcontext() if last else session.no_sync():
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
            losses.append(loss.item())
            if last:
                none.append(unused is None or unused.grad is None)
                norms.append(float(session.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=bool(rank))
    session.barrier()
    session.finish()
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    return {"seen": seen, "losses": losses, "norms": norms, "none": none, "state": state}


def accumulated(session: LearnerSession | DistributedSession, rank: int) -> dict[str, Any]:
    return train(session, rank, micro=2)


def grown(session: LearnerSession | DistributedSession, rank: int) -> dict[str, Any]:
    return train(session, rank, made=growing)


@pytest.mark.parametrize("script", [train, accumulated, grown])
def test_losses_samples_and_models_are_those_of_a_job(script: Any, tmp_path: Path) -> None:
    """O1, O5, O6, X4: from different starts, with clipping, a scheduler, statistics, unused and half-used parameters,
    gradients that are None or zeros, and a short last turn; with two batches a step, and models that grow, too."""
    with LocalDaemon(RANKS, seed=distributed_session.DEFAULT_SEED) as daemon:
        job = daemon.run(script)
    launched = results(tmp_path, RANKS, script)
    for there, here in zip(launched, job, strict=True):
        assert there["seen"] == here["seen"]
        assert there["none"] == here["none"]
        for what in ("losses", "norms"):
            assert there[what] == pytest.approx(here[what], rel=TOLERANCE, abs=1e-6), what
        for name, value in here["state"].items():
            close = torch.tensor(there["state"][name]), torch.tensor(value)
            torch.testing.assert_close(*close, rtol=TOLERANCE, atol=1e-6, msg=name)
            assert there["state"][name] == launched[0]["state"][name], f"ranks differ in {name}"
    assert all(launched[0]["none"])
    every = sorted(index for rank in launched for indices in rank["seen"] for index in indices)
    assert every == sorted(list(range(TOTAL)) * EPOCHS)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 150), st.booleans())
def test_an_epochs_part_is_what_a_ledger_grants(members: int, batch: int, more: int, drop_last: bool) -> None:
    """X1, X4: each rank knows beforehand, epoch after epoch, what the ledger of a job in lockstep would grant it."""
    total = (members * batch if drop_last else members) + more
    ledger = Ledger(
        SampleSpace(total=total, batch=batch, whole_batches=False, drop_last=drop_last), range(members), SyncSettings()
    )
    for rank in range(members):
        part = part_of_epoch(total, batch, members, rank, drop_last=drop_last)
        planned = [(epoch, first, end) for epoch in range(3) for first, end in part]
        blocks = [block for held in ledger.batches(rank) for block in held]
        granted = [(block.epoch, block.first, block.end) for block in blocks]
        assert len(granted) >= min(32, len(part))
        assert granted[: len(planned)] == planned[: len(granted)]
    binds = {
        rank: Bind(round=1, step=1, base=0, weight=1.0, samples=ledger.batches(rank)[0]) for rank in range(members)
    }
    assert not isinstance(ledger.complete(binds), str)
