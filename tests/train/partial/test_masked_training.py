"""`--masks` (ALGORITHMS section 3, FedDST): all members train with the same mask, which changes by a dense mean."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.train.partial.mask_choice import largest, moved
from meshtrain.train.session import LearnerSession
from meshwire.model.masks import MaskSettings, split
from meshwire.sync_modes.mode import sync_settings
from tests.train.localdaemon import AT_THE_SCRIPTS_RATE, LocalDaemon
from tests.train.replicas import assert_equal

MEMBERS, ROUNDS = 2, 8
MASKS = MaskSettings(sparsity=0.8, every=3, move=0.5, until=8)  # changes in rounds 3 and 6
Make = Callable[[nn.Module], torch.optim.Optimizer]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    convolution = nn.Conv2d(
        2, 6, 3, bias=False
    )  # a bias before BatchNorm has noise as its gradient, and Adam divides it
    return nn.Sequential(
        convolution, nn.BatchNorm2d(6), nn.Tanh(), nn.Flatten(), nn.Linear(96, 20), nn.Tanh(), nn.Linear(20, 5)
    )


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 2, 6, 6, generator=generator), torch.randint(5, (4,), generator=generator)


def backward(model: nn.Module, rank: int, step: int) -> None:
    images, classes = batch(rank, step)
    nn.functional.cross_entropy(model(images), classes).backward()


def masks_of(settings: MaskSettings) -> dict[str, int]:
    """How many weights of each tensor are kept."""
    named = list(net().named_parameters())
    kept = split([tuple(p.shape) for _, p in named], settings.sparsity)
    return {named[index][0]: count for index, count in kept.items()}


@dataclass
class Trained:
    """What a rank has after a run.

    Attributes:
        kept: after each round, where each masked tensor is not zero.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    kept: list[dict[str, Tensor]]


def train(
    make: Make = momentum,
    masks: MaskSettings | None = MASKS,
    *,
    after: int = 0,
    sync: str = "bsp",
    before: Callable[[LocalDaemon], None] = lambda _: None,
    prepared: Callable[[LocalDaemon], None] = lambda _: None,
    max_norm: float = float("inf"),
    **spec: Any,
) -> tuple[LocalDaemon, list[Trained]]:
    """ROUNDS rounds of a job with bsp, or those behind round `after`."""
    names = masks_of(masks) if masks is not None else {}
    models = [net() for _ in range(MEMBERS)]

    def script(session: LearnerSession, rank: int) -> Trained:
        model = models[rank]
        trained = Trained(model, make(model), [])
        session.prepare(model, trained.optimizer)
        if rank == 0:
            prepared(daemon)
        for step, _ in enumerate(session.steps(ROUNDS * sync_settings(sync).round_steps), after):
            trained.optimizer.zero_grad()
            backward(model, rank, step)
            session.clip_grad_norm_(model.parameters(), max_norm)
            trained.optimizer.step()
            with session.base(), torch.no_grad():
                trained.kept.append({name: p != 0 for name, p in model.named_parameters() if name in names})
        session.finish()
        return trained

    with LocalDaemon(MEMBERS, masks=masks, sync=sync, **AT_THE_SCRIPTS_RATE, **spec) as daemon:
        before(daemon)
        ranks = daemon.run(script)
        assert daemon.hashes
        assert all(len(of_round) == MEMBERS for of_round in daemon.hashes.values())
    return daemon, ranks


class Alone:
    """The same run in one process, by the definition."""

    def __init__(self, make: Make) -> None:
        self.model = net()
        self.optimizer = make(self.model)
        named = dict(self.model.named_parameters())
        self.kept = masks_of(MASKS)
        self.places = {name: largest(named[name], count) for name, count in self.kept.items()}
        self.zero(self.model, self.optimizer)

    def round(self, number: int, means: list[Tensor], max_norm: float = float("inf")) -> None:
        """The optimizer steps under the old masks, then they change by weights before the step and means."""
        after, travelled = {}, []
        for (name, p), mean in zip(self.model.named_parameters(), means, strict=True):
            p.grad = mean.clone()
            if name in self.kept:
                after[name] = self.places[name]
                if MASKS.changes_in(number):
                    count = MASKS.moved(number, self.kept[name])
                    after[name] = moved(self.places[name], p, mean, count)
                p.grad = self.only(mean, self.places[name])
            travelled.append(mean if MASKS.changes_in(number) else p.grad)
        total = torch.stack([mean.double().norm() for mean in travelled]).norm()
        for p in self.model.parameters():
            p.grad.mul_(min(1.0, max_norm / (float(total) + 1e-6)))  # type: ignore[union-attr]
        self.optimizer.step()
        self.places = after
        self.zero(self.model, self.optimizer)

    def give(self, replica: nn.Module) -> None:
        """The replica has this base."""
        parameters = dict(self.model.named_parameters())
        for name, p in replica.named_parameters():
            p.data.copy_(parameters[name])

    def zero(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """What the masks leave out."""
        for name, p in model.named_parameters():
            if name in self.kept:
                p.data = self.only(p.data, self.places[name])
                for state in optimizer.state.get(p, {}).values():
                    if isinstance(state, Tensor) and state.shape == p.shape:
                        state.copy_(self.only(state, self.places[name]))

    def compare(self, model: nn.Module) -> None:
        """Asserts that it is this one, to fp32 rounding, and its masks exactly."""
        for (name, p), q in zip(model.named_parameters(), self.model.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-4, atol=1e-6), name
            assert torch.equal(p == 0, q == 0), name

    @staticmethod
    def only(values: Tensor, places: Tensor) -> Tensor:
        kept = torch.zeros(values.numel(), dtype=torch.bool)
        kept[places] = True
        return values.where(kept.view(values.shape), 0.0)


def means_of(members: list[list[Any]]) -> list[Tensor]:
    """Of what each member has, tensor by tensor."""
    return [torch.stack(each).mean(0) for each in map(list, zip(*members, strict=True))]


@pytest.mark.parametrize(("make", "max_norm"), [(momentum, float("inf")), (adamw, 0.05)])
def test_a_job_with_masks_is_the_definition_in_one_process(make: Make, max_norm: float) -> None:
    """Steps under the old mask, prunes by the weights that the mean was made on, regrows by the mean; all alike. Clips
    by the norm of what has travelled (O4)."""
    _, ranks = train(make, max_norm=max_norm)
    assert_equal([each.model for each in ranks])
    alone = Alone(make)
    replicas = [copy.deepcopy(alone.model) for _ in range(MEMBERS)]
    for number in range(1, ROUNDS + 1):
        for rank, replica in enumerate(replicas):
            alone.give(replica)
            replica.zero_grad()
            backward(replica, rank, number - 1)
        alone.round(number, means_of([[p.grad for p in replica.parameters()] for replica in replicas]), max_norm)
    alone.compare(ranks[0].model)


def test_local_steps_with_masks_are_the_definition_in_one_process() -> None:
    """R9: left-out weights stay zero in local steps; where masks change, summed gradients stand for their change."""
    _, ranks = train(momentum, sync="local:2")
    assert_equal([each.model for each in ranks])
    alone = Alone(lambda model: torch.optim.SGD(model.parameters(), lr=1.0))
    learners = [(model := copy.deepcopy(alone.model), momentum(model)) for _ in range(MEMBERS)]
    for number in range(1, ROUNDS + 1):
        changes = []
        for rank, (replica, optimizer) in enumerate(learners):
            alone.give(replica)
            sums = {name: torch.zeros_like(p) for name, p in replica.named_parameters()}
            for step in (2 * number - 2, 2 * number - 1):
                optimizer.zero_grad()
                backward(replica, rank, step)
                for name, p in replica.named_parameters():
                    if p.grad is not None and name in alone.kept:
                        kept = alone.only(p.grad, alone.places[name])
                        sums[name] += p.grad - kept
                        p.grad = kept
                optimizer.step()
            base = dict(alone.model.named_parameters())
            told = MASKS.changes_in(number)
            changes.append([(base[name] - p + sums[name] * told).detach() for name, p in replica.named_parameters()])
        alone.round(number, means_of(changes))
        for replica, optimizer in learners:
            alone.zero(replica, optimizer)
    alone.compare(ranks[0].model)


@pytest.mark.parametrize(("sync", "make"), [("bsp", momentum), ("local:2", adamw)])
def test_sparsity_is_exact_after_each_round_and_masks_move(sync: str, make: Make) -> None:
    """Checks of ALGORITHMS 3: sparsity exact, what is left out is zero, masks identical (`base_hash` has them too).
    They change in rounds 3 and 6 alone, and nothing of a weight is left where it has been pruned."""
    _, ranks = train(make, sync=sync)
    assert_equal([each.model for each in ranks])
    kept = masks_of(MASKS)
    assert sum(kept.values()) == round(0.2 * sum(p.numel() for p in net().parameters() if p.dim() > 1))
    for each in ranks:
        every = 2 if sync != "bsp" else 1
        for step, masks in enumerate(each.kept):
            # A kept weight can be zero: one that has just come in, until the next round.
            changed = (step + 1) // every % 3 == 0
            assert all(int(mask.sum()) == kept[name] for name, mask in masks.items()) or changed
        before, after = each.kept[1 * every], each.kept[4 * every]
        assert any(not torch.equal(before[name], after[name]) for name in kept)
        for name, p in each.model.named_parameters():
            for state in each.optimizer.state[p].values() if name in kept else ():
                if isinstance(state, Tensor) and state.shape == p.shape:
                    assert not state[p == 0].any()


@pytest.mark.parametrize("sync", ["bsp", "local:2"])
def test_without_sparsity_it_is_the_run_without_masks_bit_for_bit(sync: str) -> None:
    """Check of ALGORITHMS 3: S=0, alpha=0."""
    _, dense = train(masks=None, sync=sync)
    _, masked = train(masks=MaskSettings(sparsity=0.0, move=0.0), sync=sync)
    assert_equal([each.model for each in (*dense, *masked)])


def test_a_run_goes_on_from_a_saved_state_with_its_masks(tmp_path: Path) -> None:
    """J1, T3: saved behind a change, where kept weights can be zero, or between two; bit for bit."""
    folders = {after: tmp_path / str(after) for after in (3, 4)}

    def save(daemon: LocalDaemon) -> None:
        for rank, (after, folder) in enumerate(folders.items()):
            folder.mkdir()
            daemon.save(rank, after, folder)

    daemon, whole = train(adamw, prepared=save)
    for _, saved in daemon.saved:
        begin = (folders[saved.round], saved.round, saved.units)
        _, resumed = train(adamw, after=saved.round, before=lambda daemon, begin=begin: daemon.begin_from(*begin))  # type: ignore[misc]
        assert_equal([each.model for each in (*whole, *resumed)])
    assert sorted(saved.round for _, saved in daemon.saved) == [3, 4]


def test_a_state_without_masks_gets_them_by_magnitude(tmp_path: Path) -> None:
    """As the start does; so does one whose masks keep another number of weights."""
    folder = tmp_path / "saved"
    folder.mkdir()
    daemon, _ = train(masks=None, prepared=lambda daemon: daemon.save(0, 4, folder))
    ((_, saved),) = daemon.saved
    _, ranks = train(after=4, before=lambda daemon: daemon.begin_from(folder, 4, saved.units))
    assert_equal([each.model for each in ranks])
    assert {name: int(mask.sum()) for name, mask in ranks[0].kept[0].items()} == masks_of(MASKS)
