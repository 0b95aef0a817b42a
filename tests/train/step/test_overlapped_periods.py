"""Periods of local steps whose rounds nobody waits for (R9 with a bound s > 0), against a few lines of torch."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.train.session import LearnerSession
from meshwire.messages.learner import EndPeriod
from tests.tiers import mostly_slow
from tests.train.localdaemon import AT_THE_SCRIPTS_RATE, LocalDaemon
from tests.train.replicas import adamw, assert_equal, distance, net, sgd

TOLERANCE = 1e-6  # relative: differences of weights round otherwise than weights do
Make = Callable[[nn.Module], torch.optim.Optimizer]
Vector = list[Tensor]  # by parameter


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    x, y = batch(rank, number)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def trained(make: Make, steps: int, *, members: int = 2, norm: bool = False, **spec: Any) -> list[nn.Sequential]:
    replicas = [net(norm=norm) for _ in range(members)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], make(replicas[rank]))
        for number in range(steps):
            step(model, optimizer, rank, number)

    with LocalDaemon(members, **AT_THE_SCRIPTS_RATE, **spec) as daemon:
        daemon.run(script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
    assert_equal(replicas)
    return replicas


def values(model: nn.Module) -> Vector:
    return [p.detach().clone() for p in model.parameters()]


def load(model: nn.Module, vector: Vector) -> None:
    for p, value in zip(model.parameters(), vector, strict=True):
        p.data.copy_(value)


def delayed_averaging(make: Make, periods: int, h: int, delay: int, members: int = 2) -> nn.Module:
    """DGA (Zhu et al. 2021, algorithm 1) with K = h, D = delay * h: each goes on from its own weights; `delay` periods
    later what it had changed in a period becomes the mean of what all had changed."""
    learners = [(model := net(), make(model)) for _ in range(members)]
    changed: list[list[Vector]] = []
    for number in range(periods + delay):
        if number < periods:
            changed.append([])
            for rank, (model, optimizer) in enumerate(learners):
                before = values(model)
                for at in range(h):
                    step(model, optimizer, rank, number * h + at)
                changed[-1].append([p - q for p, q in zip(before, values(model), strict=True)])
        if number >= delay:
            of_all = changed[number - delay]
            for own, (model, _) in zip(of_all, learners, strict=True):
                means = [torch.stack(each).mean(0) for each in zip(*of_all, strict=True)]
                load(model, [w + o - m for w, o, m in zip(values(model), own, means, strict=True)])
    return learners[0][0]


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize(("h", "delay"), mostly_slow([(3, 1), (1, 2), (4, 3)]))
def test_with_plain_averaging_they_are_delayed_gradient_averaging(make: Make, h: int, delay: int) -> None:
    models = trained(make, 6 * h, sync=f"local:{h},ssp:{delay}", visibility="fixed")
    assert distance(models[0], delayed_averaging(make, 6, h, delay)) <= TOLERANCE


@pytest.mark.parametrize("delay", [1, 2])
def test_a_period_of_one_step_is_the_same_bound_without_periods(delay: int) -> None:
    """R9 and O2 together: of SGD, to fp32 rounding, which is a fifth of the tolerance."""
    periods = trained(sgd, 12, sync=f"local:1,ssp:{delay}", visibility="fixed")
    steps = trained(sgd, 12, sync=f"ssp:{delay}", visibility="fixed")
    assert distance(periods[0], steps[0]) <= TOLERANCE


def test_a_bound_of_zero_is_the_mode_without_one() -> None:
    assert_equal([*trained(adamw, 12, sync="diloco:3,ssp:0"), *trained(adamw, 12, sync="diloco:3")])


@pytest.mark.parametrize(("own", "share"), [("0", 0.0), ("1/m", 0.5), ("1", 1.0)])
def test_an_outer_step_that_comes_late(own: str, share: float) -> None:
    """O2 with DiLoCo's outer optimizer: a period begins at base + c * (ahead - base), where `ahead` is the base after
    the outer optimizer has stepped on the own period on its way, its momentum as it will be."""
    h, periods = 2, 6
    models = trained(sgd, h * periods, sync=f"diloco:{h},ssp:1", visibility="fixed", own=own)
    base = net()
    outer = torch.optim.SGD(base.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    on_their_way: list[Vector] = []
    for number in range(periods + 1):
        changes = []
        for rank in range(2 if number < periods else 0):
            twin = net()
            load(twin, values(base))
            if on_their_way:
                ahead = torch.optim.SGD(twin.parameters(), lr=0.7, momentum=0.9, nesterov=True)
                ahead.load_state_dict(copy.deepcopy(outer.state_dict()))
                for p, change in zip(twin.parameters(), on_their_way[rank], strict=True):
                    p.grad = change
                ahead.step()
                pairs = zip(values(base), values(twin), strict=True)
                load(twin, [b + share * (a - b) for b, a in pairs])
            start, inner = values(twin), sgd(twin)
            for at in range(h):
                step(twin, inner, rank, number * h + at)
            changes.append([p - q for p, q in zip(start, values(twin), strict=True)])
        if on_their_way:
            for p, *of_all in zip(base.parameters(), *on_their_way, strict=True):
                p.grad = torch.stack(of_all).mean(0)
            outer.step()
        on_their_way = changes
    assert distance(models[0], base) <= 10 * TOLERANCE


def test_no_learner_waits_for_the_round_of_its_period() -> None:
    """R1: with s=1 the second period runs while the first one's round is held back, and the third does not begin."""
    replicas = [net() for _ in range(2)]
    taken: list[int] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(12):
            if rank == 0 and number in (5, 8):
                taken.append(daemon.round)
            if rank == 0 and number == 5:
                daemon.release(1)
            step(model, optimizer, rank, number)

    with LocalDaemon(2, sync="local:3,ssp:1", straggler="wait") as daemon:
        daemon.hold(1)
        daemon.run(script)
        assert daemon.round == 4
    assert taken[0] == 0, "five steps were taken, and no round was complete"
    assert_equal(replicas)


def test_a_called_period_ends_with_the_next_local_step() -> None:
    """R9: its weight is that of the samples so far; the next one is whole again."""
    replicas = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(9):
            if (rank, number) == (1, 2):
                daemon.notify(1, EndPeriod(step=1))
                daemon.notify(1, EndPeriod(step=7))  # which is not at hand
            step(model, optimizer, rank, number)

    with LocalDaemon(2, sync="local:6,ssp:2", straggler="wait") as daemon:
        daemon.run(script)
        ends = [body.step for rank, body in daemon.stepped if rank == 1]
        steps = [event for event in daemon.events if event.startswith("1 bucket 0 ")]
    assert ends == [1, 2], "after 3 local steps, and after 6 more"
    assert steps == ["1 bucket 0 of step 1", "1 bucket 0 of step 2"]
    assert_equal(replicas)


@pytest.mark.parametrize("norm", [False, True])
def test_the_base_is_shown_and_saved_in_the_middle_of_a_period(norm: bool, tmp_path: Path) -> None:
    """O7, J1: beside local weights that began ahead of it. Then these are back, bit for bit, and go on as they would
    have."""

    def job(*, look: bool) -> list[nn.Sequential]:
        replicas = [net(norm=norm) for _ in range(2)]
        bases: list[nn.Sequential] = []

        def script(session: LearnerSession, rank: int) -> None:
            model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
            for number in range(14):
                step(model, optimizer, rank, number)
                if look and number in (0, 5, 8, 10):
                    own = copy.deepcopy(model)
                    with session.base():
                        bases.append(copy.deepcopy(model))
                    assert_equal([own, model])
                    assert distance(own, bases[-1]) > 1e-3
                if look and number == 7:
                    daemon.save(rank, 1, tmp_path / str(rank))

        with LocalDaemon(2, sync="local:4,ssp:1", visibility="fixed") as daemon:
            daemon.run(script)
            assert len(daemon.saved) == (2 if look else 0)
            assert [body.error for _, body in daemon.saved if body.error] == []
        return replicas

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    assert_equal([*job(look=True), *job(look=False)])


def test_a_state_holds_the_base_alone(tmp_path: Path) -> None:
    """J1: who begins from it goes on from a base behind which nothing is on its way, the outer momentum with it."""
    replicas = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(12):
            step(model, optimizer, rank, number)
            if number == 7:
                session.barrier()
                if rank == 0:
                    daemon.save(0, 4, tmp_path)

    def later(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(again[rank], sgd(again[rank]))
        for number in range(8, 12):
            step(model, optimizer, rank, number)

    with LocalDaemon(2, sync="diloco:2,ssp:1", visibility="fixed") as daemon:
        daemon.run(script)
        ((_, saved),) = daemon.saved
    assert (saved.round, saved.error) == (4, None)
    again = [net() for _ in range(2)]
    with LocalDaemon(2, sync="diloco:2,ssp:1", visibility="fixed") as daemon:
        daemon.begin_from(tmp_path, 4, saved.units)
        daemon.run(later)
    assert_equal([*replicas, *again])


def test_a_period_that_is_not_finite_stays_out_of_all_later_ones() -> None:
    """V1: its round is void, its own learner begins anew from the base, and all are equal and finite in the end."""
    replicas = [net(norm=True) for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], adamw(replicas[rank]))
        for number in range(12):
            x, y = batch(rank, number)
            optimizer.zero_grad()
            wrong = float("nan") if (rank, number) == (1, 3) else 1.0
            nn.functional.mse_loss(model(x), y * wrong).backward()
            optimizer.step()

    with LocalDaemon(2, sync="local:2,ssp:1", visibility="fixed", on_nan="skip") as daemon:
        daemon.run(script)
        void = [each.done is not None and each.done.void for each in daemon.rounds.rounds.values()]
    assert void == [False, True, False, False, False, False]
    assert_equal(replicas)
    assert all(torch.isfinite(value).all() for value in replicas[0].state_dict().values())


def test_a_lost_period_is_given_up() -> None:
    """R5: its samples are dealt again, so no later period begins ahead by it: with one learner, whose rounds are its
    own periods, the base in the end is what the other periods make of it."""
    model = net()

    def script(session: LearnerSession, rank: int) -> None:
        prepared, optimizer = session.prepare(model, sgd(model))
        for number in range(8):
            step(prepared, optimizer, rank, number)

    with LocalDaemon(1, sync="local:2,ssp:1", visibility="fixed") as daemon:
        daemon.lose(0, 2, retry=True)
        daemon.run(script)
        assert daemon.round == 3
    base, view = net(), net()
    optimizer = sgd(view)
    for number in range(8):
        if number % 2 == 0:
            start = values(view)
        step(view, optimizer, 0, number)
        if number % 2:
            changed = [p - q for p, q in zip(start, values(view), strict=True)]
            if number != 3:
                load(base, [b - c for b, c in zip(values(base), changed, strict=True)])
            load(view, values(base))
    assert distance(model, base) <= 10 * TOLERANCE


def of_small_variance() -> nn.Sequential:
    """Its BatchNorm begins with a variance of 1, and is given a thousandth of that."""
    made = net(norm=True)
    with torch.no_grad():
        made.get_parameter("0.weight").mul_(0.05)
    return made


@pytest.mark.parametrize("sync", ["local:8,ssp:1", "sparseloco:8,ssp:1", "local:16,ssp:3", "diloco:8,stream=2,tau=4"])
def test_statistics_of_overlapped_periods_do_not_pass_what_was_measured(sync: str) -> None:
    """O5: variances that fall to a thousandth fall no further: a period begins ahead by those that are on their way."""
    replicas = [of_small_variance() for _ in range(2)]
    seen: list[Tensor] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], torch.optim.SGD(replicas[rank].parameters(), lr=0.0))
        for number in range(96):
            step(model, optimizer, rank, number)
            if rank == 0 and number % 8 == 7:
                with session.base():
                    seen.append(model.get_buffer("1.running_var").clone())

    # Everybody's periods are whole ones, and rounds come when they are due, however fast each learner runs.
    with LocalDaemon(2, sync=sync, visibility="eager" if "tau" in sync else "fixed") as daemon:
        daemon.run(script)
    seen.append(replicas[0].get_buffer("1.running_var"))
    alone = of_small_variance()
    for number in range(96):
        for rank in range(2):
            alone(batch(rank, number)[0])
    measured = alone.get_buffer("1.running_var")
    assert all(bool((each > measured / 4).all()) for each in seen), seen
    assert bool((seen[-1] < 10 * measured).all()), "they have fallen"


@pytest.mark.parametrize("sync", ["local:4,ssp:1", "diloco:4,stream=2,tau=1"])
def test_a_period_that_ends_while_the_base_is_shown_shows_the_new_base(sync: str) -> None:
    """O5, O7: a barrier inside `mt.base` is behind all rounds, and the statistics shown are the last one's."""
    replicas = [net(norm=True) for _ in range(2)]
    shown: list[nn.Module] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(6):
            step(model, optimizer, rank, number)
        with session.base():
            before = model.get_buffer("1.running_mean").clone()
            session.barrier()
            assert not torch.equal(model.get_buffer("1.running_mean"), before)
            shown.append(copy.deepcopy(model))
        for number in range(4):
            step(model, optimizer, rank, number)

    with LocalDaemon(2, sync=sync) as daemon:
        daemon.run(script)
    assert_equal(shown)
