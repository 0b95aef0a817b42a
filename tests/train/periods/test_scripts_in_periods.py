"""What scripts do around `optimizer.step()` where local weights go on from round to round: parts that take turns,
rounds that overlap, `sma`. All of it is the learner's own (O8), so the base is as a few lines of torch make it of the
learners' weights, whatever each has done to come by them."""

import copy

import pytest
import torch
from torch import Tensor, nn

from meshtrain.errors import NotSupported
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.session import LearnerSession
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from tests.tiers import mostly_slow
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import assert_equal, batch, distance, momentum, net, sgd
from tests.train.scripts import Learner, Script

STEPS = 12
MODES = ("diloco:4,stream=2", "diloco:6,stream=2,tau=2", "sma:3", "diloco:3")
OWN_PART = 0.5  # alpha of streaming DiLoCo


class Reference:
    """The modes' definitions, of learners in one process: streaming DiLoCo (Douillard et al. 2025, algorithm 2), and
    algorithm 1 of CROSSBOW (Koliousis et al. 2019) with H steps for one."""

    def __init__(self, script: Script, sync: SyncSettings, members: int) -> None:
        self.sync = sync
        self.learners = [Learner(script) for _ in range(members)]
        for learner in self.learners:
            learner.begin()
        self.base = copy.deepcopy(self.learners[0].model)
        self.z = [p for p in self.base.parameters() if p.requires_grad]
        rate, mu = sync.outer_rate, sync.outer_momentum
        self.outer = torch.optim.SGD(self.z, rate, mu, nesterov=mu > 0 and not sync.central)
        self.parts = script.parts if sync.fragments else (tuple(range(len(self.z))),)
        self.round = 0
        self.changes: dict[int, Tensor] = {}

    def own(self, learner: Learner) -> list[Tensor]:
        return [p.data for p in learner.model.parameters() if p.requires_grad]

    def send(self) -> None:
        part = self.parts[self.round % len(self.parts)]
        self.round += 1
        owns = [self.own(learner) for learner in self.learners]
        self.changes = {at: torch.stack([self.z[at].data - own[at] for own in owns]).mean(0) for at in part}
        if self.sync.central:
            for own in owns:
                for w, z in zip(own, self.z, strict=True):
                    w.sub_((w - z.data) / len(owns))
        statistics = [list(learner.model.buffers()) for learner in self.learners]
        self.statistics = [torch.stack([each.double() for each in of]).mean(0) for of in zip(*statistics, strict=True)]
        self.sent = [[each.clone() for each in of] for of in statistics]

    def take_in(self, own_part: float) -> None:
        for at, change in self.changes.items():
            self.z[at].grad = change
        self.outer.step()
        self.outer.zero_grad()
        for learner in self.learners:
            own = self.own(learner)
            for at in () if self.sync.central else self.changes:
                own[at].copy_(own_part * own[at] + (1 - own_part) * self.z[at].data)
        self.changes = {}
        for buffer, value in zip(self.base.buffers(), self.statistics, strict=True):
            buffer.copy_(value)
        for learner, sent in zip(self.learners, self.sent, strict=True):
            for buffer, of_base, then in zip(learner.model.buffers(), self.base.buffers(), sent, strict=True):
                if buffer.is_floating_point():  # what they have moved since they were sent stays
                    buffer.add_(of_base - then)

    def run(self, steps: int) -> nn.Module:
        since = 0
        for number in range(steps):
            for rank, learner in enumerate(self.learners):
                learner.step(batch(100 * rank + number))
            since += 1
            if self.changes and since == self.sync.delay:
                self.take_in(OWN_PART)
            if since == self.sync.round_steps:
                self.send()
                since = 0
                if not self.sync.delay:
                    self.take_in(0.0)
        assert not since, "the script ends with a period here"
        if self.changes:
            self.take_in(0.0)
        for _ in self.parts[1:]:
            self.send()
            self.take_in(0.0)
        return self.base


def trained(script: Script, sync: str, members: int = 2) -> list[Learner]:
    learners = [Learner(script) for _ in range(members)]

    def run(session: LearnerSession, rank: int) -> None:
        learner = learners[rank]
        session.prepare(learner.model, learner.optimizer, learner.scaler)
        learner.begin()
        for number in range(STEPS):
            learner.step(batch(100 * rank + number), session.clip_grad_norm_, session.no_sync)

    with LocalDaemon(members, sync=sync) as daemon:
        daemon.run(run)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
        assert len(daemon.hashes) == daemon.round
    assert_equal([learner.model for learner in learners])
    return learners


SCRIPTS = (
    Script("a schedule of every step and clipping", schedule=True, clip=True),
    Script("accumulation, groups of parameters", accumulate=True, groups=True),
    Script("statistics of BatchNorm", norm=True, parts=((0, 1), (2, 3, 4, 5))),
    Script("a frozen parameter", frozen=True, parts=((0,), (1, 2))),
    Script("autocast, a scaler, clipping", scaled=True, clip=True),
    Script("parameters in bfloat16", dtype=torch.bfloat16),
    Script("a compiled model", compiled=True),
)


@pytest.mark.parametrize("script", mostly_slow(SCRIPTS, 5), ids=lambda script: script.name)
@pytest.mark.parametrize("sync", MODES)
def test_the_base_is_made_of_what_scripts_make_of_their_own_weights(script: Script, sync: str) -> None:
    models = [learner.model for learner in trained(script, sync)]
    expected = Reference(script, sync_settings(sync), 2).run(STEPS)
    rounded = script.scaled or script.dtype is torch.bfloat16  # 8 bits: what is apart by rounding is so by a step
    assert distance(models[0], expected) <= (0.05 if rounded else 1e-5)
    assert distance(models[0], Learner(script).model) > 0.1, "it is trained"


@pytest.mark.parametrize("sync", MODES)
def test_what_cannot_be_is_refused_by_name(sync: str) -> None:
    """O6, O11: several optimizers; those that need a closure."""

    def several(session: LearnerSession, _: int) -> None:
        model = net()
        session.prepare(model, JointOptimizer([sgd(model[0]), momentum(model[2])]))

    def closure(session: LearnerSession, _: int) -> None:
        model = net()
        session.prepare(model, torch.optim.LBFGS(model.parameters()))

    for script, told in ((several, f"--sync {sync} with several optimizers.*Use --sync bsp"), (closure, "LBFGS")):
        with LocalDaemon(1, sync=sync) as daemon, pytest.raises(NotSupported, match=told):
            daemon.run(script)


@pytest.mark.parametrize("sync", MODES)
def test_a_step_that_a_scaler_skips_counts_and_moves_nothing(sync: str) -> None:
    """O6: so periods stay equally long; a round may be due at such a step, or one to be taken in."""
    replicas = [net() for _ in range(2)]
    settings = sync_settings(sync)
    unmoved: list[int] = []

    def script(session: LearnerSession, rank: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]), scaler)
        for number in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(100 * rank + number)
            loss = nn.functional.mse_loss(model(x), y)
            overflows = number in ((1, 2, 5), (0, 3, 4, 7))[rank]
            before = copy.deepcopy(model) if overflows else None
            scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            taken = number % settings.round_steps + 1
            if before is not None and taken not in (settings.round_steps, settings.delay):
                assert_equal([before, model])
                unmoved.append(number)

    with LocalDaemon(2, sync=sync) as daemon:
        daemon.run(script)
        assert not any(each.poisons for each in daemon.rounds.rounds.values())
        assert daemon.round == STEPS // settings.round_steps + max(0, settings.fragments - 1)
    assert_equal(replicas)
    assert unmoved


@pytest.mark.parametrize("sync", MODES)
def test_the_base_is_shown_between_any_two_steps_and_nothing_is_changed_by_it(sync: str) -> None:
    """O7: also while a round is on its way."""
    plain = Script("nothing else")
    expected = trained(plain, sync)[0].model
    learners = [Learner(plain) for _ in range(2)]

    def run(session: LearnerSession, rank: int) -> None:
        learner = learners[rank]
        session.prepare(learner.model, learner.optimizer)
        learner.begin()
        for number in range(STEPS):
            with session.base(), torch.no_grad():
                learner.model(batch(number)[0])
            learner.step(batch(100 * rank + number))

    with LocalDaemon(2, sync=sync) as daemon:
        daemon.run(run)
    assert_equal([expected, *(learner.model for learner in learners)])
