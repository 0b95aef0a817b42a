"""`--sync sma:H`: synchronous model averaging, against algorithm 1 of CROSSBOW in a few lines of torch."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.train.session import LearnerSession
from meshwire.sync_modes.mode import SMA_MOMENTUM
from tests.tiers import mostly_slow
from tests.train.localdaemon import AT_THE_SCRIPTS_RATE, LocalDaemon
from tests.train.replicas import Batch, adamw, assert_equal, batch, distance, momentum, net, sgd, step

TOLERANCE = 1e-6  # relative: w - z rounds once in fp32, and so does each step of it
EPOCHS = 2
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Crossbow:
    """Koliousis et al. 2019, algorithm 1, with H steps in place of one, and samples for weights; in double precision
    but for the steps."""

    def __init__(self, make: Make, members: int, mu: float) -> None:
        self.learners = [(model := net(), make(model)) for _ in range(members)]
        self.z = [p.detach().double() for p in net().parameters()]
        self.before = [z.clone() for z in self.z]
        self.mu = mu

    def round(self, batches: Sequence[Sequence[Batch]]) -> None:
        """By learner, those of its local steps."""
        for (model, optimizer), own in zip(self.learners, batches, strict=True):
            for each in own:
                step(model, optimizer, each)
        counts = [sum(len(x) for x, _ in own) for own in batches]
        places = zip(*(model.parameters() for model, _ in self.learners), strict=True)
        for at, replicas in enumerate(places):
            z = self.z[at]
            apart = [w.detach().double() - z for w in replicas]
            for w, d in zip(replicas, apart, strict=True):
                w.data.copy_(w.double() - d / len(self.learners))
            mean = sum(n * d for n, d in zip(counts, apart, strict=True)) / sum(counts)
            self.z[at], self.before[at] = z + mean + self.mu * (z - self.before[at]), z

    def begin_again(self, rank: int) -> None:
        for w, z in zip(self.learners[rank][0].parameters(), self.z, strict=True):
            w.data.copy_(z)

    @property
    def central(self) -> nn.Module:
        model = net()
        for p, z in zip(model.parameters(), self.z, strict=True):
            p.data.copy_(z)
        return model


def epochs_of(make: Make, members: int, total: int, **spec: Any) -> tuple[LocalDaemon, list[Any], list[Any], list[Any]]:
    """A job of EPOCHS epochs: its daemon, its models, what each learner computed with at the end, and what its ranks
    drew by epoch."""
    dataset = TensorDataset(*batch(1, total))
    models, own = [net() for _ in range(members)], [net() for _ in range(members)]

    def script(session: LearnerSession, rank: int) -> list[list[Batch]]:
        model, optimizer = models[rank], make(models[rank])
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        model, optimizer, loader = session.prepare_with_loader(model, optimizer, loader)
        drawn: list[list[Batch]] = []
        for _ in range(EPOCHS):
            drawn.append([])
            for x, y in loader:
                drawn[-1].append((x, y))
                step(model, optimizer, (x, y))
        own[rank].load_state_dict(model.state_dict())
        return drawn

    with LocalDaemon(members, **AT_THE_SCRIPTS_RATE, **spec) as daemon:
        drawn = daemon.run(script)
        assert daemon.hashes
        assert all(len(of) == members and len(set(of.values())) == 1 for of in daemon.hashes.values())
    assert_equal(models)
    return daemon, models, own, drawn


@pytest.mark.parametrize("make", mostly_slow([momentum, adamw, sgd]))
@pytest.mark.parametrize(
    ("members", "total", "sync"),
    [
        (2, 41, "sma:3"),
        (3, 50, "sma:2,momentum=0.9"),
        (3, 47, "sma:4,momentum=0"),
        (2, 24, "sma"),
        (1, 20, "sma:2"),
        (1, 20, "sma:2,momentum=0"),
    ],
)
def test_models_are_those_of_algorithm_1(make: Make, members: int, total: int, sync: str) -> None:
    """The central model and each learner's own weights, also where an epoch's end ends a period and batches differ.
    Alone and without momentum the two change places in each round."""
    daemon, models, own, drawn = epochs_of(make, members, total, sync=sync)
    settings = daemon.spec.sync
    reference = Crossbow(make, members, settings.outer_momentum)
    for epoch in range(EPOCHS):
        for first in range(0, len(drawn[0][epoch]), settings.period):
            reference.round([of[epoch][first : first + settings.period] for of in drawn])
    assert distance(models[0], reference.central) <= 2 * TOLERANCE
    for model, (expected, _) in zip(own, reference.learners, strict=True):
        assert distance(model, expected) <= 2 * TOLERANCE
    if members > 1:
        assert min(distance(model, models[0]) for model in own) > 1e-3, "own weights are not the base"


class Watched:
    """What each learner computes with after each of its steps, its gradients in it, and the base, by parameter."""

    def __init__(self, members: int, sync: str, rounds: int, make: Make = sgd, *, still_after: int = 1000) -> None:
        """Without a loader: all batches count alike. Behind `still_after` rounds nothing is learnt any more."""
        self.own: list[list[list[Tensor]]] = [[] for _ in range(members)]
        self.gradients: list[list[list[Tensor]]] = [[] for _ in range(members)]
        self.base: list[list[list[Tensor]]] = [[] for _ in range(members)]
        self.models = [net() for _ in range(members)]

        def script(session: LearnerSession, rank: int) -> None:
            model, optimizer = session.prepare(self.models[rank], make(self.models[rank]))
            for number in range(rounds * daemon.spec.sync.period):
                if number // daemon.spec.sync.period == still_after:
                    optimizer.param_groups[0]["lr"] = 0.0
                step(model, optimizer, batch(100 * rank + number))
                self.own[rank].append(_values(model))
                self.gradients[rank].append([p.grad.double() for p in model.parameters() if p.grad is not None])
                with session.base():
                    self.base[rank].append(_values(model))
                assert all(torch.equal(p, q) for p, q in zip(_values(model), self.own[rank][-1], strict=True)), "O7"

        with LocalDaemon(members, sync=sync) as daemon:
            daemon.run(script)


def _values(model: nn.Module) -> list[Tensor]:
    return [p.detach().double() for p in model.parameters()]


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in values])


@pytest.mark.parametrize("members", [1, 2, 3])
def test_without_gradients_nothing_is_lost_and_own_weights_come_nearer(members: int) -> None:
    """ALGORITHMS 2, SMA: with mu = 0 the sum of all models stays; what learners differ by from their mean shrinks by
    1 - 1/m in a round, and the mean's distance from z is multiplied by -1/m."""
    still = 4
    seen = Watched(members, "sma:1,momentum=0", 10, still_after=still)
    own = torch.stack([torch.stack([_flat(at) for at in of]) for of in seen.own])  # [rank, round, value]
    z = torch.stack([_flat(at) for at in seen.base[0]])
    total = own.sum(0) + z
    drift = (total[still:] - total[still - 1]).norm(dim=1) / total[still - 1].norm()
    assert float(drift.max()) <= TOLERANCE
    assert float((total[still - 1] - total[0]).norm() / total[0].norm()) > 1e-2, "while it learns it moves"
    mean = own.mean(0) - z
    among = own - own.mean(0)
    alpha = 1 / members
    for at in range(still, len(z)):
        assert float((mean[at] + alpha * mean[at - 1]).norm()) <= TOLERANCE * float(z[at].norm())
        assert float((among[:, at] - (1 - alpha) * among[:, at - 1]).norm()) <= TOLERANCE * float(z[at].norm())
    assert float(mean[still].norm()) > 1e-3
    assert members == 1 or float(among[:, still].norm()) > 1e-3


@pytest.mark.parametrize("members", [2, 3])
def test_with_gradients_the_sum_of_all_models_moves_by_them_alone(members: int) -> None:
    """ALGORITHMS 2, SMA: with mu = 0 the sum of all own weights and z changes by -eta * sum g, and z is the mean of
    what all had stepped to. On real daemons: `test_real_equalities.py`."""
    seen = Watched(members, "sma:1,momentum=0", 10)
    own, gradients = (
        torch.stack([torch.stack([_flat(at) for at in of]) for of in each]) for each in (seen.own, seen.gradients)
    )
    z = torch.stack([_flat(at) for at in seen.base[0]])
    stepped = own[:, :-1] - 0.05 * gradients[:, 1:]
    total, before = own[:, 1:].sum(0) + z[1:], stepped.sum(0) + z[:-1]
    assert float((total - before).norm() / before.norm()) <= TOLERANCE
    assert float((z[1:] - stepped.mean(0)).norm() / z[1:].norm()) <= TOLERANCE
    assert float((own[0, 1:] - z[1:]).norm() / z[1:].norm()) > 1e-3, "own weights are not the base"


@pytest.mark.parametrize(("members", "mu"), [(1, 0.9), (2, 0.0), (2, 0.9), (3, 0.5)])
def test_how_fast_the_central_model_moves(members: int, mu: float) -> None:
    """m / (m + 1 - mu) of what the learners' steps change in the mean, in the long run."""
    replicas = [nn.Linear(3, 1, bias=False) for _ in range(members)]
    inputs = [torch.tensor([[1.0, -2.0, 0.5]]) * (rank + 1) for rank in range(members)]
    bases: list[Tensor] = []

    def script(session: LearnerSession, rank: int) -> None:
        nn.init.zeros_(replicas[rank].weight)
        model, optimizer = session.prepare(replicas[rank], torch.optim.SGD(replicas[rank].parameters(), lr=0.01))
        for _ in range(2 * 40):
            optimizer.zero_grad()
            model(inputs[rank]).sum().backward()
            optimizer.step()
            if rank == 0:
                with session.base():
                    bases.append(model.weight.detach().double().clone())

    with LocalDaemon(members, sync=f"sma:2,momentum={mu}", hash_every=0) as daemon:
        daemon.run(script)
    change = -0.01 * 2 * torch.stack(inputs).double().mean(0)  # of a period, in the mean
    moved = (bases[79] - bases[69]) / 5  # rounds
    torch.testing.assert_close(moved, change * members / (members + 1 - mu), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("sync", ["sma:5", "sma:5,momentum=0"])
def test_the_first_round_is_that_of_local_sgd(sync: str) -> None:
    """All begin on z, so it becomes the mean of all weights, to the last bit; from the second on they differ."""
    ends = []
    for mode, rounds in ((sync, 1), ("local:5", 1), (sync, 2), ("local:5", 2)):
        seen = Watched(3, mode, rounds, adamw)
        assert_equal(seen.models)
        ends.append(seen.models[0])
    assert_equal(ends[:2])
    assert distance(ends[2], ends[3]) > 1e-3


def test_a_learner_that_begins_from_a_state_begins_on_the_base(tmp_path: Path) -> None:
    """J1, O8: its own weights are in no state. The central model's momentum is; what others' weights were is lost with
    all of them."""
    reference = Crossbow(sgd, 2, SMA_MOMENTUM)

    def batches(first: int) -> list[list[Batch]]:
        return [[batch(100 * rank + first + n) for n in range(3)] for rank in range(2)]

    def run(daemon: LocalDaemon, first: int, last: int) -> list[nn.Sequential]:
        replicas = [net() for _ in range(2)]

        def script(session: LearnerSession, rank: int) -> None:
            model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
            if rank == 0 and not first:
                daemon.save(0, 2, tmp_path)
            for number in range(first, last):
                step(model, optimizer, batch(100 * rank + number))

        daemon.run(script)
        return replicas

    with LocalDaemon(2, sync="sma:3") as daemon:
        run(daemon, 0, 7)
        saved = [body for _, body in daemon.saved]
    assert [(body.round, body.error) for body in saved] == [(2, None)]
    with LocalDaemon(2, sync="sma:3") as daemon:
        daemon.begin_from(tmp_path, 2, saved[0].units)
        replicas = run(daemon, 6, 12)
    for first in (0, 3):
        reference.round(batches(first))
    for rank in range(2):
        reference.begin_again(rank)
    for first in (6, 9):
        reference.round(batches(first))
    assert_equal(replicas)
    assert distance(replicas[0], reference.central) <= TOLERANCE


def test_a_void_round_and_a_lost_step_begin_again_on_the_base() -> None:
    """V1: on all, with momentum as it was. R5: on the learner whose step is lost; its samples are dealt again."""

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(8):
            x, y = batch(10 * rank + number)
            step(model, optimizer, (x, y * float("nan") if (rank, number) == (1, 3) else y))

    replicas = [net(), net()]
    with LocalDaemon(2, sync="sma:2", on_nan="skip") as daemon:
        daemon.run(script)
        verdicts = [each.done is not None and each.done.void for each in daemon.rounds.rounds.values()]
        assert verdicts == [False, True, False, False]
    reference = Crossbow(sgd, 2, SMA_MOMENTUM)
    reference.round([[batch(10 * rank + number) for number in (0, 1)] for rank in range(2)])
    for rank in range(2):
        reference.begin_again(rank)
    for first in (4, 6):
        reference.round([[batch(10 * rank + first + n) for n in range(2)] for rank in range(2)])
    assert_equal(replicas)
    assert distance(replicas[0], reference.central) <= TOLERANCE

    def lossy(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(6 if rank == 0 else 8):
            step(model, optimizer, batch(10 * rank + number))

    replicas = [net(), net()]
    with LocalDaemon(2, sync="sma:2") as daemon:
        daemon.lose(1, 2, retry=True)
        daemon.run(lossy)
        assert daemon.round == 3
    reference = Crossbow(sgd, 2, SMA_MOMENTUM)
    reference.round([[batch(0), batch(1)], [batch(10), batch(11)]])
    reference.begin_again(1)
    reference.round([[batch(2), batch(3)], [batch(14), batch(15)]])
    reference.round([[batch(4), batch(5)], [batch(16), batch(17)]])
    assert_equal(replicas)
    assert distance(replicas[0], reference.central) <= TOLERANCE


def test_who_was_not_in_a_round_begins_again_on_the_base() -> None:
    """R5: in a barrier while others go on. Its old weights would pull the base back. In a round without it m is the
    number of those that are in it."""
    replicas = [net() for _ in range(3)]
    dataset = TensorDataset(*batch(1, 96))
    behind: list[Any] = [None] * 3

    def script(session: LearnerSession, rank: int) -> list[Batch]:
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        model, optimizer, loader = session.prepare_with_loader(replicas[rank], sgd(replicas[rank]), loader)
        drawn = []
        for each in loader:
            drawn.append(each)
            step(model, optimizer, each)
            if len(drawn) == (2 if rank == 0 else 4):
                session.barrier()
                behind[rank] = _values(model)
            if len(drawn) == 4 + 2 * (rank > 0):
                break
        return drawn

    with LocalDaemon(3, sync="sma:2", shares="speed") as daemon:
        drawn = daemon.run(script)
        binds = [sorted(each.binds) for each in daemon.rounds.rounds.values()]
    assert binds == [[0, 1, 2], [1, 2], [0, 1, 2]]
    reference = Crossbow(sgd, 3, SMA_MOMENTUM)
    reference.round([of[:2] for of in drawn])
    others = Crossbow(sgd, 2, SMA_MOMENTUM)
    others.learners, others.z, others.before = reference.learners[1:], reference.z, reference.before
    others.round([of[2:4] for of in drawn[1:]])
    reference.begin_again(0)
    for held, (expected, _) in zip(behind, reference.learners, strict=True):
        torch.testing.assert_close(held, _values(expected), rtol=1e-5, atol=1e-6)
    reference.round([drawn[0][2:], drawn[1][4:], drawn[2][4:]])
    assert_equal(replicas)
    assert distance(replicas[0], reference.central) <= 2 * TOLERANCE


def test_buffers_are_those_of_local_sgd() -> None:
    """O5: the running means of BatchNorm are the base's behind a round, with own weights too."""
    replicas = [net(norm=True) for _ in range(2)]
    held: list[Any] = [None, None]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(4):
            step(model, optimizer, batch(100 * rank + number))
        held[rank] = copy.deepcopy(model.state_dict())

    with LocalDaemon(2, sync="sma:2") as daemon:
        daemon.run(script)
    assert_equal(replicas)
    assert torch.equal(held[0]["1.running_mean"], held[1]["1.running_mean"])
    assert not torch.equal(held[0]["0.weight"], held[1]["0.weight"])
