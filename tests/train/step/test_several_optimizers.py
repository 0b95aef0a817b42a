"""Several models and optimizers in one job, as a GAN has them: each backward pass is a round, for one of them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshtrain as mt
from meshtrain.errors import NotSupported, RequestError, UsageError
from meshtrain.train.api import joined
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.model.memory_needs import model_size
from meshtrain.train.model.state import ReplicaState, RoundProgress
from meshtrain.train.model.tensors import build, collect
from meshtrain.train.optim.hyperparameters import Hyperparameters
from meshtrain.train.partial.masks import Masks
from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import assert_equal

BATCH = 4


class Gan:
    """A generator and a discriminator, each with an optimizer of its own, of another kind."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=0.02, betas=(0.5, 0.9))
        self.of_discriminator = torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.8)
        self.schedule: Any = None

    @property
    def parts(self) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        return [self.generator, self.discriminator], [self.of_discriminator, self.of_generator]

    @property
    def whole(self) -> nn.ModuleList:
        return nn.ModuleList(self.parts[0])

    def iterate(self, real: Tensor, noise: Tensor) -> None:
        """As in torch's DCGAN tutorial, but for one backward pass of the discriminator's loss."""
        bce = nn.functional.binary_cross_entropy_with_logits
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        self.of_discriminator.zero_grad()
        fake = self.generator(noise)
        loss = bce(self.discriminator(real), ones) + bce(self.discriminator(fake.detach()), zeros)
        loss.backward()
        self.of_discriminator.step()
        self.of_generator.zero_grad()
        bce(self.discriminator(self.generator(noise)), ones).backward()
        self.of_generator.step()


def batches(number: int, ranks: range) -> tuple[Tensor, Tensor]:
    """What these ranks draw in one iteration, joined: real samples and noise."""
    generators = [torch.Generator().manual_seed(100 * number + rank) for rank in ranks]
    real = torch.cat([torch.randn(BATCH, 2, generator=generator) + 1 for generator in generators])
    return real, torch.cat([torch.randn(BATCH, 3, generator=generator) for generator in generators])


@pytest.mark.parametrize("members", [1, 2, 3])
def test_it_trains_as_one_process_does_with_all_batches(members: int) -> None:
    """O1: the discriminator that the generator sees has stepped on the mean of all; to fp32 rounding."""
    gans = [Gan() for _ in range(members)]

    def script(session: LearnerSession, rank: int) -> None:
        gan = gans[rank]
        session.prepare(*joined(*gan.parts))
        for number in range(8):
            gan.iterate(*batches(number, range(rank, rank + 1)))

    with LocalDaemon(members) as daemon:
        daemon.run(script)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
        assert daemon.models[0].manifest.several_optimizers
    assert_equal([gan.whole for gan in gans])
    alone = Gan()
    for number in range(8):
        alone.iterate(*batches(number, range(members)))
    for ours, plain in zip(gans[0].whole.parameters(), alone.whole.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=1e-6)


def test_what_another_optimizer_has_is_not_sent() -> None:
    """O5: in a round of the discriminator nobody uses the generator's parameters, whatever lies in their `p.grad`."""
    seen: list[list[bool]] = []

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        gan = Gan()
        session.prepare(*joined(*gan.parts))
        for number in range(2):
            gan.iterate(*batches(number, range(1)))
        assert all(p.grad is not None for p in gan.generator.parameters())
        gan.of_discriminator.zero_grad()
        gan.discriminator(torch.ones(1, 2)).sum().backward()
        seen.append([p.grad is not None for model in gan.parts[0] for p in model.parameters()])
        gan.of_discriminator.step()

    with LocalDaemon(2) as daemon:
        daemon.run(script)
    assert seen == [[False] * 4 + [True] * 4] * 2


def test_what_was_accumulated_for_one_leaves_with_its_round() -> None:
    """O6, with two optimizers: the passes under `no_sync` count, as in one process."""
    gans = [Gan() for _ in range(3)]

    def script(session: LearnerSession | None, rank: int) -> None:
        gan = gans[rank]
        if session is not None:
            session.prepare(*joined(*gan.parts))
        for number in range(3):
            gan.of_generator.zero_grad()
            if session is not None:
                with session.no_sync():
                    gan.generator(torch.ones(2, 3)).square().sum().backward()
            else:
                gan.generator(torch.ones(2, 3)).square().sum().backward()
            gan.of_discriminator.zero_grad()
            gan.discriminator(torch.ones(2, 2)).square().sum().backward()  # another's round comes between
            gan.of_discriminator.step()
            gan.generator(torch.full((2, 3), float(number))).square().sum().backward()
            gan.of_generator.step()

    with LocalDaemon(2) as daemon:
        daemon.run(script)
    script(None, 2)
    for ours, plain in zip(gans[0].whole.parameters(), gans[2].whole.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_two_steps_behind_one_backward_pass_are_refused() -> None:
    """Others hold the state behind the first of them already."""

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        gan = Gan()
        session.prepare(*joined(*gan.parts))
        gan.discriminator(gan.generator(torch.ones(1, 3))).sum().backward()
        gan.of_discriminator.step()
        gan.of_generator.step()

    with (
        LocalDaemon(2) as daemon,
        pytest.raises(UsageError, match=r"Adam steps on gradients .* each backward pass is for"),
    ):
        daemon.run(script)


def test_who_steps_out_of_turn_is_told_the_order() -> None:
    """O11: which optimizer steps on a round follows from its number, on all peers."""

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        gan = Gan()
        session.prepare(*joined(*gan.parts))
        gan.generator(torch.ones(1, 3)).sum().backward()
        gan.of_generator.step()

    with (
        LocalDaemon(2) as daemon,
        pytest.raises(UsageError, match=r"Adam steps where it is SGD's turn: .* in the order"),
    ):
        daemon.run(script)


@pytest.mark.parametrize("turns", [(0, 1), (0, 0, 0, 1)])
def test_one_may_step_several_times_in_a_row(turns: tuple[int, ...]) -> None:
    """As a Wasserstein GAN's critic does."""

    gans = [Gan() for _ in range(3)]  # not in the threads, which share torch's generator

    def train(session: LearnerSession | None, rank: int) -> nn.Module:
        gan = gans[rank]
        optimizers = gan.parts[1]
        if session is not None:
            session.prepare(*joined(gan.parts[0], [optimizers[at] for at in turns]))
        for number in range(3 * len(turns)):
            model = (gan.discriminator, gan.generator)[turns[number % len(turns)]]
            optimizers[turns[number % len(turns)]].zero_grad()
            model(torch.full((2, 2 if model is gan.discriminator else 3), float(number))).square().sum().backward()
            optimizers[turns[number % len(turns)]].step()
        return gan.whole

    with LocalDaemon(2) as daemon:
        ours = daemon.run(train)[0]
    for got, wanted in zip(ours.parameters(), train(None, 2).parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_who_begins_in_the_middle_of_an_iteration_catches_up(tmp_path: Path) -> None:
    """J1, O11: the state that is loaded ends with the discriminator's round, and the script begins with the
    discriminator's pass. It rehearses that one, and goes on bit for bit as whoever was there all the time."""
    whole = [Gan(), Gan()]

    with LocalDaemon(2, promises=False) as daemon:

        def all_of_it(session: LearnerSession, rank: int) -> None:
            gan = whole[rank]
            session.prepare(*joined(*gan.parts))
            if not rank:
                daemon.save(0, 3, tmp_path)
            for number in range(4):
                gan.iterate(*batches(number, range(rank, rank + 1)))

        daemon.run(all_of_it)
        ((_, saved),) = daemon.saved
        assert saved.round == 3
    later = [Gan(), Gan()]

    def from_round_4(session: LearnerSession, rank: int) -> None:
        gan = later[rank]
        session.prepare(*joined(*gan.parts))
        assert session._engine is not None
        assert session._engine.steps.rehearsal.on
        for number in range(1, 4):
            gan.iterate(*batches(number, range(rank, rank + 1)))

    with LocalDaemon(2) as daemon:
        daemon.begin_from(tmp_path, 3, saved.units)
        daemon.run(from_round_4)
        assert daemon.round == 8
    assert_equal([gan.whole for gan in (*whole, *later)])


def test_an_end_in_the_middle_of_an_iteration_leaves_nothing_rehearsed() -> None:
    """Whoever has stopped before the others are done would else be given its own earlier buffers for the base's."""
    ends: list[bool] = []

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        gan = Gan()
        session.prepare(*joined(*gan.parts))
        gan.iterate(*batches(0, range(1)))
        assert session._engine is not None
        gan.of_discriminator.zero_grad()
        gan.discriminator(torch.ones(1, 2)).sum().backward()
        gan.of_discriminator.step()
        joint = session._engine._base.step.optimizer
        assert isinstance(joint, JointOptimizer)
        joint.passed -= 1  # as if rounds had gone on without this learner
        session._engine.steps.take_turns()
        assert session._engine.steps.rehearsal.on
        session._engine.close()
        ends.append(session._engine.steps.rehearsal.on)

    with LocalDaemon(1) as daemon:
        daemon.run(script)
    assert ends == [False]


def test_rounds_that_are_applied_late_are_stepped_by_whose_turn_they_are() -> None:
    """R5, O11: one has no samples left, and takes the rounds of the other, whose optimizers go on in turn."""
    gans = [Gan(), Gan()]

    def script(session: LearnerSession, rank: int) -> None:
        gan = gans[rank]
        session.prepare(*joined(*gan.parts))
        for number in range(2 if rank else 5):
            gan.iterate(*batches(number, range(rank, rank + 1)))
        if rank:
            assert session._engine is not None
            base = session._engine._base
            session._engine.wait_idle("no samples", lambda: base.applied == 10, "the others' rounds")

    with LocalDaemon(2, shares="speed") as daemon:
        daemon.run(script)
    assert_equal([gan.whole for gan in gans])


def test_a_step_without_a_backward_pass_changes_nothing() -> None:
    def script(session: LearnerSession, rank: int) -> bool:  # noqa: ARG001
        gan = Gan()
        session.prepare(*joined(*gan.parts))
        before = copy.deepcopy(gan.whole.state_dict())
        gan.of_discriminator.step()
        return all(torch.equal(value, before[name]) for name, value in gan.whole.state_dict().items())

    with LocalDaemon(1) as daemon:
        assert daemon.run(script) == [True]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"sync": "ssp:2"}, r"--sync ssp:2 with several optimizers: .* Use --sync bsp"),
        ({"sync": "local:2"}, r"--sync local:2 with several optimizers"),
        ({"codec": "topk:0.1"}, r"--codec topk:0.1.* with several optimizers: .* fp32, fp16 or bf16"),
        ({"codec": "powersgd:2"}, r"--codec powersgd:2.* with several optimizers"),
    ],
)
def test_what_cannot_be_is_refused_by_name(spec: dict[str, Any], why: str) -> None:
    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        session.prepare(*joined(*Gan().parts))

    with LocalDaemon(1, **spec) as daemon, pytest.raises(NotSupported, match=why):
        daemon.run(script)


def test_a_scaler_is_refused() -> None:
    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        session.prepare(*joined(*Gan().parts), torch.amp.GradScaler("cpu"))

    with LocalDaemon(1) as daemon, pytest.raises(NotSupported, match="a GradScaler with several optimizers"):
        daemon.run(script)


def test_peers_with_other_optimizers_are_told_apart() -> None:
    def script(session: LearnerSession, rank: int) -> None:
        gan = Gan()
        first = gan.of_generator if rank else torch.optim.AdamW(gan.generator.parameters())
        session.prepare(*joined(gan.parts[0], [first, gan.of_discriminator]))

    with LocalDaemon(2) as daemon, pytest.raises(RequestError, match="AdamW"):
        daemon.run(script)


def test_without_a_job_nothing_is_changed() -> None:
    plain, prepared = Gan(), Gan()
    models, optimizers, loader = mt.prepare(*prepared.parts, [1, 2])
    assert models == prepared.parts[0]
    assert optimizers == prepared.parts[1]
    assert loader == [1, 2]
    for number in range(3):
        for gan in (plain, prepared):
            gan.iterate(*batches(number, range(2)))
    assert_equal([plain.whole, prepared.whole])


def test_one_model_and_one_optimizer_in_lists_are_no_joint_one() -> None:
    gan = Gan()
    _, optimizer = joined([gan.generator], [gan.of_generator])
    assert optimizer is gan.of_generator


def test_a_state_holds_what_all_optimizers_keep(tmp_path: Path) -> None:
    """J1: whoever loads it goes on bit for bit as whoever has written it."""
    gans = [Gan(), Gan()]
    gans[0].of_generator.param_groups[0]["lr"] = 0.01
    states = []
    for gan in gans:
        whole, optimizer = joined(*gan.parts)
        tensors = build(whole, "joint", None, None)
        states.append(ReplicaState(tensors, optimizer, Masks(tensors, None)))
    for number in range(3):
        gans[0].iterate(*batches(number, range(1)))
    states[0].export(tmp_path, lambda _: None, RoundProgress(round=6))
    states[1].load(range(states[1].count), tmp_path, 6)
    assert states[0].digests() == states[1].digests()
    for gan in gans:
        gan.iterate(*batches(9, range(1)))
    assert_equal([gan.whole for gan in gans])
    assert gans[1].of_generator.param_groups[0]["lr"] == 0.01


def test_its_state_is_that_of_its_members() -> None:
    gan = Gan()
    whole, joint = joined(*gan.parts)
    assert isinstance(joint, JointOptimizer)
    first = next(whole.parameters())
    assert first not in joint.state
    assert len(joint.state) == 0
    assert joint.state.get(first, {}) == {}
    assert not gan.of_generator.state, "looking makes none"
    gan.iterate(*batches(0, range(1)))
    assert len(joint.state) == 8
    assert {id(p) for p in joint.state} == {id(p) for p in whole.parameters()}
    joint.state[first] = {"step": 7}
    assert gan.of_generator.state[first] == {"step": 7}
    joint.state.clear()
    assert not gan.of_generator.state
    assert not gan.of_discriminator.state


def test_memory_is_what_all_of_them_take() -> None:
    gan = Gan()
    whole, joint = joined(*gan.parts)
    specs, _ = collect(whole)
    size = model_size(build(whole, "joint", None, None), joint)
    of_generator, of_discriminator = (sum(p.numel() for p in model.parameters()) for model in gan.parts[0])
    assert size.optimizer_state == 4 * (2 * of_generator + of_discriminator)
    assert size.optimizer == "SGD and Adam"
    assert size.optimizer_known
    assert len(specs) == 8


def test_options_of_all_travel_with_a_bind() -> None:
    """O3: a rate that a scheduler has changed on the leader counts on all."""
    gan = Gan()
    _, joint = joined(*gan.parts)
    told = Hyperparameters(joint)
    gan.of_discriminator.param_groups[0]["lr"] = 0.5
    groups = told.unpack(told.pack(None, clip_known=False)).groups
    assert [group["lr"] for group in groups] == [0.5, 0.02]
