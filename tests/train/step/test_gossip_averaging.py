"""Weights that are mixed within a period (R9, `,gossip=G`), against Gossip-PGA in a few lines of torch."""

import copy
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.train.periods import mixed_weights
from meshtrain.train.session import LearnerSession
from meshwire.sync_modes.neighbours import Turn, neighbours
from tests.train.localdaemon import AT_THE_SCRIPTS_RATE, LocalDaemon
from tests.train.replicas import adamw, assert_equal, distance, momentum, net, sgd

TOLERANCE = 1e-6  # relative: differences of weights round otherwise than weights do
Make = Callable[[nn.Module], torch.optim.Optimizer]
Loses = Callable[[int, int, Turn], bool]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours are threads here: whose step took a millisecond, waits longer than that for them."""
    monkeypatch.setattr(mixed_weights, "wait_s", lambda _step_s: 10.0)


def batch(rank: int, number: int, count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 2, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    data, target = batch(rank, number)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(data), target).backward()
    optimizer.step()


def nothing_is_lost(_sender: int, _receiver: int, _turn: Turn) -> bool:
    return False


def trained(
    make: Make,
    steps: int,
    *,
    members: int = 2,
    loses: Loses = nothing_is_lost,
    loss: Callable[[nn.Module, int, int], Tensor] | None = None,
    watched: dict[tuple[int, int], nn.Module] | None = None,
    **spec: Any,
) -> list[nn.Sequential]:
    """The replicas. `watched`: is given copies of what each rank holds behind each step."""
    replicas = [net() for _ in range(members)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], make(replicas[rank]))
        for number in range(steps):
            if loss is None:
                step(model, optimizer, rank, number)
            else:
                optimizer.zero_grad()
                loss(model, rank, number).backward()
                optimizer.step()
            if watched is not None:
                watched[rank, number] = copy.deepcopy(replicas[rank])

    with LocalDaemon(members, **AT_THE_SCRIPTS_RATE, **spec) as daemon:
        daemon.loses = loses
        daemon.run(script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
    assert_equal(replicas)
    return replicas


def averaged(weights: Sequence[tuple[float, nn.Module]]) -> list[Tensor]:
    each = [[factor * p.detach() for p in model.parameters()] for factor, model in weights]
    return [torch.stack(of_all).sum(0) for of_all in zip(*each, strict=True)]


def gossip_pga(make: Make, steps: int, h: int, g: int, members: int, over: Any) -> nn.Module:
    """Algorithm 1 of Chen et al. 2021 (arXiv 2105.09080), mixing behind each g-th step."""
    learners = [(model := net(), make(model)) for _ in range(members)]
    for number in range(steps):
        for rank, (model, optimizer) in enumerate(learners):
            step(model, optimizer, rank, number)
        round_, taken = number // h + 1, number % h + 1
        models, everybody = [model for model, _ in learners], range(members)
        if taken == h or number == steps - 1:
            mixed = [averaged([(1 / members, model) for model in models])] * members
        elif taken % g == 0:
            around = [neighbours(over, Turn(round_, taken // g), rank, everybody) for rank in everybody]
            mixed = [
                averaged([(1 - sum(one.weight for one in of), models[rank]), *((o.weight, models[o.rank]) for o in of)])
                for rank, of in enumerate(around)
            ]
        else:
            continue
        for model, values in zip(models, mixed, strict=True):
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.data.copy_(value)
    return learners[0][0]


def test_two_that_mix_after_each_step_are_bsp() -> None:
    """With plain SGD: the mean of two weights after a step each is the step by the mean of both gradients."""
    mixed = trained(sgd, 12, sync="local:6,gossip=1")
    assert distance(mixed[0], trained(sgd, 12, sync="bsp")[0]) <= TOLERANCE
    assert distance(mixed[0], trained(sgd, 12, sync="local:6")[0]) > 10 * TOLERANCE


@pytest.mark.parametrize("make", [sgd, momentum, adamw])
@pytest.mark.parametrize(("over", "g", "steps"), [("pairs", 1, 12), ("ring", 2, 15)])
def test_it_is_gossip_with_periodic_global_averaging(make: Make, over: str, g: int, steps: int) -> None:
    """Of four, also where the script ends within a period."""
    models = trained(make, steps, members=4, sync=f"local:6,gossip={g},over={over}")
    assert distance(models[0], gossip_pga(make, steps, 6, g, 4, over)) <= TOLERANCE


def linear(model: nn.Module, rank: int, number: int) -> Tensor:
    """Its gradients are the same at all weights: so are own changes, whatever is mixed."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    terms = [(p * torch.randn(p.shape, generator=generator)).sum() for p in model.parameters()]
    return torch.stack(terms).sum()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("over", ["pairs", "ring"])
@pytest.mark.parametrize("sync", ["local:5", "diloco:5"])
def test_a_round_is_of_own_changes_whatever_was_lost(
    seed: int, over: str, sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base after each round is as without mixing, although weights came to one side, or to none."""
    monkeypatch.setattr(mixed_weights, "wait_s", lambda _step_s: 10.0 if seed else 0.0)  # then all come late
    random = Random(seed)
    lost = {
        (sender, receiver, n): random.random() < 0.5 for sender in range(3) for receiver in range(3) for n in range(20)
    }

    def loses(sender: int, receiver: int, turn: Turn) -> bool:
        return lost[sender, receiver, turn.number]

    own: dict[tuple[int, int], nn.Module] = {}
    mixed: dict[tuple[int, int], nn.Module] = {}
    alone = trained(sgd, 13, members=3, loss=linear, sync=sync, watched=own)
    models = trained(sgd, 13, members=3, loss=linear, sync=f"{sync},gossip=1,over={over}", loses=loses, watched=mixed)
    assert distance(models[0], alone[0]) <= TOLERANCE
    for behind_round in (4, 9):
        assert distance(mixed[1, behind_round], own[1, behind_round]) <= TOLERANCE
    if seed:  # else it is the clock's to say
        assert any(distance(mixed[rank, 3], own[rank, 3]) > 1e-3 for rank in range(3))


FAR = 1000.0  # so that rounding of what weights are themselves is far below


def taken_apart(
    codec: str, sync: str, eigenvector: Sequence[float], *, by: float = FAR
) -> tuple[list[list[Tensor]], nn.Module]:
    """One step takes four learners so far apart along this, and no gradient follows. What is left of it behind each
    step, by parameter, [rank, value], as a part of `by`; and the model in the end, behind the period's round."""

    def apart(model: nn.Module, rank: int, number: int) -> Tensor:
        distance_ = eigenvector[rank] if number == 0 else 0.0
        return torch.stack([p.sum() for p in model.parameters()]).sum() * -distance_

    def far(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=by)

    watched: dict[tuple[int, int], nn.Module] = {}
    models = trained(far, 5, members=4, loss=apart, watched=watched, codec=codec, sync=sync)
    start = [p.detach().double().flatten() for p in net().parameters()]
    held = {key: [p.detach().double().flatten() for p in model.parameters()] for key, model in watched.items()}
    left = [
        [torch.stack([held[rank, number][at] - begun for rank in range(4)]) / by for at, begun in enumerate(start)]
        for number in range(5)
    ]
    return left, models[0]


@pytest.mark.parametrize(("codec", "tolerance"), [("fp32", 1e-6), ("bf16", 2.0**-7)])
def test_what_is_apart_contracts_by_the_rings_second_eigenvalue(codec: str, tolerance: float) -> None:
    """Along an eigenvector each turn leaves a third of what all are apart from their mean by, to a part of that third,
    and the mean is where it was, to a part of FAR. And a round behind it leaves everybody where all have begun."""
    eigenvector = [math.cos(2 * math.pi * rank / 4) for rank in range(4)]
    left, _ = taken_apart(codec, "local:5,gossip=1,over=ring", eigenvector)
    for number in range(4):
        for tensor in left[number]:
            expected = 3.0 ** -(number + 1) * torch.tensor(eigenvector).double().unsqueeze(1).expand_as(tensor)
            assert float((tensor - tensor.mean(0) - expected).norm()) <= tolerance * float(expected.norm())
            assert float(tensor.mean(0).abs().max()) <= 1e-6
    _, in_the_end = taken_apart(codec, "local:5,gossip=1,over=ring", eigenvector, by=1.0)
    assert distance(in_the_end, net()) <= tolerance


def test_pairs_of_four_have_the_mean_behind_two_turns() -> None:
    """And not behind one. A period of five steps has four turns, and what is the mean remains it."""
    left, _ = taken_apart("fp32", "local:5,gossip=1,over=pairs", [1.0, 2.0, -4.0, 1.0])
    assert all(float(tensor.abs().min()) >= 0.5 for tensor in left[0])
    assert all(float(tensor.norm() / left[0][at].norm()) <= 1e-6 for each in left[1:] for at, tensor in enumerate(each))


def test_statistics_of_batch_norm_go_through_rounds_alone() -> None:
    """Only trained parameters are mixed; the buffers' differences travel in rounds, as ever."""
    replicas = [net(norm=True) for _ in range(2)]
    held: dict[tuple[int, int], Tensor] = {}

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(6):
            step(model, optimizer, rank, number)
            held[rank, number] = replicas[rank].state_dict()["1.running_mean"].clone()

    with LocalDaemon(2, sync="local:3,gossip=1") as daemon:
        daemon.run(script)
    assert_equal(replicas)
    assert all(not torch.equal(held[0, number], held[1, number]) for number in (0, 1, 3, 4))
    assert all(torch.equal(held[0, number], held[1, number]) for number in (2, 5))
