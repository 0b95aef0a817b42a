"""Parts that are drawn and take turns (R9, `,stream=P,random`), against SPARTA in a few lines of torch."""

import copy

import pytest
import torch
from torch import nn

from meshtrain.errors import NotSupported
from meshtrain.train.session import LearnerSession
from meshwire.model.drawn_parts import DrawnParts
from meshwire.model.manifest import TensorSpec
from tests.train.localdaemon import AT_THE_SCRIPTS_RATE, LocalDaemon
from tests.train.partsinturns import Make, batch_of, trained, whole_epochs
from tests.train.replicas import adamw, assert_equal, distance, net, sgd, step

TOLERANCE = 1e-5


class Sparta:
    """Beton et al. 2025: behind every so many steps some values of each tensor become their mean over all."""

    def __init__(self, make: Make, members: int, parts: int, seed: int) -> None:
        self.learners = [(model := net(), make(model)) for _ in range(members)]
        specs = [
            TensorSpec(name=name, shape=tuple(value.shape), dtype="float32", kind="parameter")
            for name, value in self.learners[0][0].named_parameters()
        ]
        self.drawn = DrawnParts(specs, parts, seed)
        self.round = 0

    def local_step(self, number: int) -> None:
        for rank, (model, optimizer) in enumerate(self.learners):
            step(model, optimizer, batch_of(rank, number))

    @torch.no_grad()
    def average(self) -> None:
        self.round += 1
        for index, own in enumerate(zip(*(model.parameters() for model, _ in self.learners), strict=True)):
            walk = self.drawn.of(self.round, index)
            places = torch.tensor([(walk.first + at * walk.stride) % walk.length for at in range(walk.steps)]).long()
            mean = torch.stack([value.take(places) for value in own]).mean(0)
            for value in own:
                value.put_(places, mean)


def sparta(make: Make, steps: int, h: int, parts: int, members: int = 2, seed: int = 7) -> nn.Module:
    """Behind so many local steps, and so many rounds that nothing is apart any more."""
    run = Sparta(make, members, parts, seed)
    for number in range(steps):
        run.local_step(number)
        if (number + 1) % (h // parts) == 0:
            run.average()
    for _ in range(2 * parts):
        run.average()
    return run.learners[0][0]


@pytest.mark.parametrize(
    ("make", "h", "parts", "steps"),
    [
        (sgd, 4, 4, 12),  # ends with a cycle
        (adamw, 4, 4, 13),  # within the next one
        (adamw, 6, 3, 9),  # within a period, too
        (sgd, 16, 16, 37),  # some tensors have fewer values than there are parts
        (sgd, 4, 2, 7),
    ],
)
def test_they_are_sparta(make: Make, h: int, parts: int, steps: int) -> None:
    """To the end of the script, where all replicas are the base, and no local step is missing in it."""
    models = trained(make, steps, sync=f"local:{h},stream={parts},random", **AT_THE_SCRIPTS_RATE)
    assert distance(models[0], sparta(make, steps, h, parts)) <= TOLERANCE


def test_another_seed_draws_others() -> None:
    models = trained(sgd, 9, sync="local:4,stream=4,random", seed=5)
    assert distance(models[0], sparta(sgd, 9, 4, 4, seed=5)) <= TOLERANCE < distance(models[0], sparta(sgd, 9, 4, 4))


def test_a_job_of_one_member_computes_as_without() -> None:
    models = trained(adamw, 9, members=1, sync="local:4,stream=4,random")
    alone = net()
    optimizer = adamw(alone)
    for number in range(9):
        step(alone, optimizer, batch_of(0, number))
    assert distance(models[0], alone) <= TOLERANCE


@pytest.mark.parametrize("total", [41, 48])
def test_each_sample_is_in_one_round_and_an_epochs_end_brings_all_values_together(total: int) -> None:
    """X1, R9: behind the last batch of an epoch a whole cycle of rounds follows."""
    rounds = whole_epochs("local:4,stream=4,random", total).rounds.rounds
    assert max(rounds) % 4 == 0, "the last cycle is whole"


@pytest.mark.parametrize(("rank", "number"), [(0, 2), (1, 3), (1, 8)])
def test_a_void_round_gives_local_steps_up(rank: int, number: int) -> None:
    """V1, O9: with BatchNorm, whose statistics travel in each round."""
    replicas = [net(norm=True) for _ in range(2)]

    def script(session: LearnerSession, own: int) -> None:
        model, optimizer = session.prepare(replicas[own], adamw(replicas[own]))
        for at in range(11):
            x, y = batch_of(own, at)
            step(model, optimizer, (x, y * float("nan") if (own, at) == (rank, number) else y))

    with LocalDaemon(2, sync="local:4,stream=4,random", on_nan="skip") as daemon:
        daemon.run(script)
        void = [at for at, each in daemon.rounds.rounds.items() if each.done is not None and each.done.void]
    assert void == [number + 1]
    assert_equal(replicas)
    assert all(torch.isfinite(value).all() for value in replicas[0].state_dict().values())


def test_a_lost_step_is_given_up_and_the_others_go_on() -> None:
    """R5: its learner begins again from the base, in all values."""
    replicas = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(7 if rank == 0 else 8):
            step(model, optimizer, batch_of(rank, number))
            if (rank, number) == (1, 2):
                own = copy.deepcopy(model)
                with session.base():
                    assert_equal([own, copy.deepcopy(model)])

    with LocalDaemon(2, sync="local:4,stream=4,random") as daemon:
        daemon.lose(1, 3, retry=True)
        daemon.run(script)
    assert_equal(replicas)


def test_a_barrier_within_a_cycle_brings_all_values_together() -> None:
    replicas = [net() for _ in range(3)]
    behind: list[nn.Module] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(6):
            step(model, optimizer, batch_of(rank, number))
        session.barrier()
        behind.append(copy.deepcopy(model))
        step(model, optimizer, batch_of(rank, 6))

    with LocalDaemon(3, sync="local:4,stream=4,random") as daemon:
        daemon.run(script)
    assert_equal(behind)
    assert_equal(replicas)


def test_values_go_back_where_they_came_from_in_any_order_of_memory() -> None:
    """A convolution in channels_last: places are counted in row-major order."""
    replicas = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = nn.Conv2d(2, 3, 2)
        layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
        replicas.append(nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2)))

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(5):
            generator = torch.Generator().manual_seed(10 * rank + number)
            step(model, optimizer, (torch.randn(4, 2, 3, 3, generator=generator), batch_of(rank, number)[1]))

    with LocalDaemon(2, sync="local:4,stream=4,random") as daemon:
        daemon.run(script)
    assert_equal(replicas)


def test_more_parts_than_values_are_refused() -> None:
    def script(session: LearnerSession, _: int) -> None:
        model = net()
        session.prepare(model, sgd(model))

    with (
        LocalDaemon(1, sync="local:64,stream=64,random") as daemon,
        pytest.raises(NotSupported, match="use stream=58 or less"),
    ):
        daemon.run(script)
