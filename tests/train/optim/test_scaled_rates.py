"""O12: `--scale-lr` against one process with the joint batch and the scaled rate; what it does to momentum, schedules,
views, and rounds that not all are in."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.errors import NotSupported, RequestError, UsageError
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.optim.scaled_rates import LEGAL, check_scaled, rates_times
from meshtrain.train.session import LearnerSession
from meshwire.codecs.registry import parse_codec
from meshwire.model.plan import plan_buckets
from meshwire.sync_modes.rate_rule import RULE_OF, RateRule, parse_rate_rule
from tests.tiers import mostly_slow
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import adamw, assert_equal, batch, distance, momentum, net, sgd, step

BATCH = 4
Make = Callable[[nn.Module], torch.optim.Optimizer]


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, nn.Sequential)
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


class Run:
    """A script that is a job on some learners, and one process on their joint batches.

    Args:
        micro: batches that the script accumulates for a step.
        clip: largest norm.
    """

    def __init__(self, make: Make, *, micro: int = 1, clip: float | None = None) -> None:
        self.make, self.micro, self.clip = make, micro, clip
        self.rates: list[float] = []  # of rank 0's first group, behind each step, as the script reads it

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, clip: Any) -> None:
        if self.clip is not None:
            clip(model.parameters(), self.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    def job(self, members: int, rule: str, total: int, epochs: int = 2, **spec: Any) -> tuple[list[nn.Module], Any]:
        """Models of all ranks, and what each drew, by step."""
        data = TensorDataset(*batch(1, total))
        models: list[nn.Module] = [net() for _ in range(members)]

        def script(session: LearnerSession, rank: int) -> list[list[tuple[Tensor, Tensor]]]:
            model, optimizer, loader = session.prepare_with_loader(
                models[rank], self.make(models[rank]), DataLoader(data, batch_size=BATCH, shuffle=True)
            )
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            drawn: list[list[tuple[Tensor, Tensor]]] = []
            held: list[tuple[Tensor, Tensor]] = []
            for _ in range(epochs):
                for x, y in loader:
                    held.append((x, y))
                    if len(held) < self.micro:
                        with session.no_sync():
                            (loss_of(model, x, y) / self.micro).backward()
                        continue
                    (loss_of(model, x, y) / self.micro).backward()
                    self.step(model, optimizer, schedule, session.clip_grad_norm_)
                    drawn.append(held)
                    held = []
                    if rank == 0:
                        self.rates.append(optimizer.param_groups[0]["lr"])
            return drawn

        with LocalDaemon(members, scale_lr=parse_rate_rule(rule), **spec) as daemon:
            drawn = daemon.run(script)
            assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
        return models, drawn

    def alone(self, drawn: Any, factor: Callable[[int, int], float]) -> nn.Module:
        """One process in plain torch. `factor`: of a round, from 1, with so many samples."""
        model = net()
        optimizer = self.make(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for number in range(len(drawn[0])):
            batches = [each for rank in drawn for each in rank[number]]
            samples = sum(len(x) for x, _ in batches)
            for x, y in batches:
                (loss_of(model, x, y) * (len(x) / samples)).backward()
            own = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] *= factor(number + 1, samples)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rate
            schedule.step()
        return model


@pytest.mark.parametrize(
    ("members", "make", "options"),
    mostly_slow(
        [
            (3, two_groups, {}),
            (2, momentum, {"clip": 0.05}),
            (2, momentum, {"micro": 2}),
            (4, sgd, {}),
        ],
        quick=3,
    ),
)
def test_it_is_one_process_with_the_joint_batch_and_the_scaled_rate(
    members: int, make: Make, options: dict[str, Any]
) -> None:
    """Goyal et al. 2017, sections 2.1 and 2.2, to 1e-6: with momentum, schedules that multiply the last rate, param
    groups, clipping, accumulation, and a last round of an epoch that is short."""
    run = Run(make, **options)
    models, drawn = run.job(members, "linear,warmup=4", 5 * members * BATCH + (members if run.micro == 1 else 0))
    assert_equal(models)
    alone = BATCH * run.micro

    def factor(round_: int, samples: int) -> float:
        return 1 + (max(1.0, samples / alone) - 1) * min(1.0, (round_ - 1) / 4)

    reference = run.alone(drawn, factor)
    assert distance(models[0], reference) <= 1e-6
    assert distance(models[0], run.alone(drawn, lambda *_: 1.0)) > 1e-3, "it makes a difference"
    began = make(net()).param_groups[0]["lr"]
    assert run.rates == pytest.approx([began * 0.9**number for number in range(1, len(run.rates) + 1)]), "unscaled"


def test_the_warmup_is_five_epochs_of_the_loader_where_none_is_typed() -> None:
    """Goyal et al. 2017, section 2.2: 15 rounds of 8 samples where an epoch has 24."""
    run = Run(momentum)
    models, drawn = run.job(2, "linear", 24, epochs=6)
    assert len(drawn[0]) == 18
    reference = run.alone(drawn, lambda round_, _: 1 + min(1.0, (round_ - 1) / 15))
    assert distance(models[0], reference) <= 1e-6


def test_of_adamw_it_is_the_root() -> None:
    """Krizhevsky 2014, section 5. Four learners: twice the rate."""
    run = Run(adamw)
    models, drawn = run.job(4, "sqrt,warmup=0", 4 * 4 * BATCH, epochs=1)
    assert_equal(models)
    assert distance(models[0], run.alone(drawn, lambda *_: 2.0)) <= 1e-5


def test_one_learner_is_as_without_it_bit_for_bit() -> None:
    """Also where its last batch is short."""
    scaled, drawn = Run(momentum).job(1, "linear,warmup=0", 5 * BATCH + 1)
    plain = Run(momentum).alone(drawn, lambda *_: 1.0)
    assert_equal([scaled[0], plain])


def test_batches_of_a_sampler_of_its_own_count_by_what_they_hold() -> None:
    """No size is said there, so a round counts by its leader's own samples."""
    data = TensorDataset(*batch(1, 24))
    sampler = [list(range(at, at + 3)) for at in range(0, 24, 3)]
    models = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> list[tuple[Tensor, Tensor]]:
        model, optimizer, loader = session.prepare_with_loader(
            models[rank], sgd(models[rank]), DataLoader(data, batch_sampler=sampler)
        )
        drawn = []
        for x, y in loader:
            step(model, optimizer, (x, y))
            drawn.append((x, y))
        return drawn

    with LocalDaemon(2, scale_lr=parse_rate_rule("linear,warmup=0")) as daemon:
        drawn = daemon.run(script)
    reference = net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for ours, theirs in zip(*drawn, strict=True):
        step(reference, optimizer, (torch.cat([ours[0], theirs[0]]), torch.cat([ours[1], theirs[1]])))
    assert distance(models[0], reference) <= 1e-6


# --- Rounds that not all are in ---


def stepped_on(daemon: LocalDaemon, make: Make, factor: Callable[[int, float], float]) -> nn.Module:
    """Plain torch on the means of all rounds, in order. `factor`: of a round with so many contributors."""
    model = net()
    optimizer = make(model)
    own = [group["lr"] for group in optimizer.param_groups]
    plan = plan_buckets(daemon.models[0].manifest, daemon.spec.bucket_bytes, parse_codec(daemon.spec.codec))
    for number, round_ in sorted(daemon.rounds.rounds.items()):
        if round_.done is None or round_.done.void:
            continue
        assert round_.means is not None
        for span in plan.spans:
            parameter, values = model.get_parameter(span.name), round_.means[span.start : span.start + span.count]
            parameter.grad = torch.from_numpy(values.copy()).view_as(parameter)
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate * factor(number, float(len(round_.binds)))
        optimizer.step()
    return model


@pytest.mark.parametrize(("make", "rule"), [(momentum, "linear,warmup=6"), (adamw, "sqrt,warmup=0")])
def test_it_follows_who_is_there(make: Make, rule: str) -> None:
    """Rank 1 is passed over, comes back, and leaves, so that rounds are of two batches or one. Who has contributed and
    who applies a round later step alike, bit for bit. Without a loader each learner counts as one batch."""
    models = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(models[rank], make(models[rank]))
        for number in range(10 - 4 * rank):
            step(model, optimizer, batch(100 * rank + number))

    with LocalDaemon(2, sync="ssp:2", straggler="carry", scale_lr=parse_rate_rule(rule)) as daemon:
        daemon.pass_over(1, 2)
        daemon.run(script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
    contributors = [len(round_.binds) for _, round_ in sorted(daemon.rounds.rounds.items())]
    assert contributors[1] == contributors[-1] == 1 < max(contributors)
    assert_equal(models)
    told = parse_rate_rule(rule)

    def factor(number: int, contributors: float) -> float:
        whole = contributors if told.kind == "linear" else math.sqrt(contributors)
        return whole if not told.warmup or number > told.warmup else 1 + (whole - 1) * (number - 1) / told.warmup

    assert_equal([models[0], stepped_on(daemon, make, factor)])
    assert distance(models[0], stepped_on(daemon, make, lambda *_: 1.0)) > 1e-3


def test_leader_says_what_a_step_has_alone() -> None:
    """Rank 1 accumulates where rank 0 does not: for all the round counts by rank 0's single batch, which leads."""
    models = [net() for _ in range(2)]
    data = TensorDataset(*batch(1, 12 * BATCH))

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer, loader = session.prepare_with_loader(
            models[rank], sgd(models[rank]), DataLoader(data, batch_size=BATCH)
        )
        micro = 1 + rank
        for number, (x, y) in enumerate(loader, 1):
            if number % micro:
                with session.no_sync():
                    loss_of(model, x, y).backward()
                continue
            loss_of(model, x, y).backward()
            optimizer.param_groups[0]["lr"] = 0.01 * number / micro  # set behind the bind, alike on both
            optimizer.step()
            optimizer.zero_grad()
            if number == 2 * micro:
                break

    with LocalDaemon(2, shares="speed", scale_lr=parse_rate_rule("linear,warmup=0")) as daemon:
        daemon.run(script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
        weights = [round_.done.weight for round_ in daemon.rounds.rounds.values() if round_.done is not None]
    assert weights == [3 * BATCH] * 2, "rank 0's one batch and rank 1's two"


def test_what_goes_ahead_of_the_base_is_scaled_as_the_newest_round() -> None:
    """O2, with SGD and c = 1: base - lr * factor * (own gradients that no round has covered)."""
    models = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> list[float]:
        model, optimizer = session.prepare(models[rank], torch.optim.SGD(models[rank].parameters(), lr=0.05))
        own: list[Tensor] = []
        moved: list[float] = []
        for number in range(6):
            step(model, optimizer, batch(100 * rank + number))
            grad = next(model.parameters()).grad
            assert grad is not None
            own.append(grad.clone())
            view = next(model.parameters()).detach().clone()
            with session.base():
                base = next(model.parameters()).detach().clone()
            uncovered = torch.stack(own[max(number - 1, 0) :]).sum(0)
            moved.append(float((base - view).norm() / (0.05 * uncovered).norm()))
            torch.testing.assert_close((base - view) / moved[-1], 0.05 * uncovered, rtol=1e-4, atol=1e-6)
        return moved

    rule = RateRule(kind="linear", warmup=4)
    with LocalDaemon(2, sync="ssp:2", visibility="fixed", own="1", scale_lr=rule) as daemon:
        for moved in daemon.run(script):
            # behind step n the rounds up to n - 2 are in the base; before the first one nothing is known
            assert moved == pytest.approx([1.0, 1.0, 1.0, 1.25, 1.5, 1.75], rel=1e-4)


def test_several_optimizers_each_step_at_the_scaled_rate_in_their_turn() -> None:
    """O11. What two learners with equal samples make is what one makes at twice the rate."""

    def train(members: int, rate: float, rule: str | None) -> list[nn.Module]:
        models = [nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]) for _ in range(members)]
        for model in models:
            for parameter in model.parameters():
                nn.init.constant_(parameter, 0.1)

        def script(session: LearnerSession, rank: int) -> None:
            first, second = models[rank]
            turns = [torch.optim.SGD(each.parameters(), lr=rate, momentum=0.5) for each in (first, second)]
            session.prepare(models[rank], JointOptimizer(turns))
            for number in range(6):
                x, y = batch(number)
                turns[number % 2].zero_grad()
                loss_of(models[rank][number % 2], x, y).backward()
                turns[number % 2].step()

        scale_lr = None if rule is None else parse_rate_rule(rule)
        with LocalDaemon(members, scale_lr=scale_lr) as daemon:
            daemon.run(script)
        return list(models)

    scaled, plain = train(2, 0.05, "linear,warmup=0"), train(1, 0.1, None)
    assert distance(scaled[1], plain[0]) <= 1e-6


# --- Optimizers ---

OPTIONS: dict[type[torch.optim.Optimizer], list[dict[str, Any]]] = {
    torch.optim.SGD: [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
    ],
    torch.optim.Adam: [{}, {"amsgrad": True, "weight_decay": 0.1}],
    torch.optim.AdamW: [{}, {"amsgrad": True}],
    torch.optim.RMSprop: [{}, {"momentum": 0.9, "centered": True}],
}


def test_all_that_are_legal_are_looked_at() -> None:
    assert set(OPTIONS) == {kind for kinds in LEGAL.values() for kind in kinds}
    assert set(RULE_OF) == {kind.__name__ for kind in OPTIONS}
    assert all(getattr(torch.optim, name) in LEGAL[rule] for name, rule in RULE_OF.items()), "as `plan` tells it"


@pytest.mark.parametrize(("kind", "options"), [(kind, options) for kind in OPTIONS for options in OPTIONS[kind]])
def test_what_an_optimizer_keeps_does_not_hold_its_rate(kind: Any, options: dict[str, Any]) -> None:
    """So nothing is to be corrected where the rate changes from round to round (Goyal et al. 2017, remark 2)."""
    kept = []
    for rate in (0.01, 0.03):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = kind([parameter], lr=rate, **options)
        for number in range(3):
            with torch.no_grad():
                parameter.fill_(1.0 + number)
            parameter.grad = torch.tensor([0.5, -1.0, 2.0]) * (number + 1)
            optimizer.step()
        kept.append([value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)])
    for slow, fast in zip(*kept, strict=True):
        assert torch.equal(slow, fast)


def test_momentum_correction_makes_the_other_form_of_sgd_torchs() -> None:
    """Goyal et al. 2017, equations 9 and 10: v = mu v (lr / lr before) + lr g; p -= v is torch's SGD where lr changes,
    and without the correction it is another optimizer."""
    rates = [0.1, 0.1, 0.2, 0.4, 0.1]
    gradients = [torch.tensor([1.0, -2.0]) / (1 + number) for number in range(len(rates))]
    ours = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([ours], lr=rates[0], momentum=0.9)
    ends = []
    for corrected in (True, False):
        place, velocity, before = torch.zeros(2), torch.zeros(2), rates[0]
        for rate, gradient in zip(rates, gradients, strict=True):
            velocity = 0.9 * velocity * (rate / before if corrected else 1.0) + rate * gradient
            place = place - velocity
            before = rate
        ends.append(place)
    for rate, gradient in zip(rates, gradients, strict=True):
        ours.grad = gradient
        with rates_times(optimizer, rate / rates[0]):
            optimizer.step()
    torch.testing.assert_close(ours.detach(), ends[0])
    assert float((ours.detach() - ends[1]).norm()) > 0.1


@pytest.mark.parametrize(
    ("make", "rule", "told"),
    [
        (torch.optim.AdamW, "linear", r"--scale-lr linear is for torch\.optim\.SGD, and AdamW .* use --scale-lr sqrt"),
        (torch.optim.Adagrad, "sqrt", r"rate of Adagrad .* linear is for .*SGD, sqrt for SGD, Adam, AdamW and RMSprop"),
        (torch.optim.Rprop, "linear,warmup=5", r"--scale-lr linear,warmup=5: how the rate of Rprop"),
    ],
)
def test_optimizers_without_a_rule_are_refused_by_name(make: Any, rule: str, told: str) -> None:
    optimizer = make(nn.Linear(2, 2).parameters())
    with pytest.raises(NotSupported, match=told):
        check_scaled(optimizer, parse_rate_rule(rule))
    several = JointOptimizer([torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), optimizer])
    with pytest.raises(NotSupported, match=told):
        check_scaled(several, parse_rate_rule(rule))


def test_a_job_refuses_such_an_optimizer_before_its_first_step() -> None:
    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = net()
        session.prepare(model, adamw(model))

    with (
        LocalDaemon(1, scale_lr=parse_rate_rule("linear")) as daemon,
        pytest.raises((NotSupported, RequestError), match="use --scale-lr sqrt"),
    ):
        daemon.run(script)


def test_a_rate_in_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=rate)
    with rates_times(optimizer, 3.0):
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(0.3)
    assert rate.item() == torch.tensor(0.1).item()


def test_a_rate_that_is_set_within_the_step_is_an_error_that_says_so() -> None:
    """Whether it is meant with the factor is not known."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    with (
        pytest.raises(UsageError, match=r"a hook of optimizer\.step\(\) sets the learning rate"),
        rates_times(optimizer, 2.0),
    ):
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
