"""Parts of a model that take turns (R9, `,stream=P,tau=T`), against streaming DiLoCo in a few lines of torch."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshtrain.errors import NonFiniteGradient, NotSupported
from meshtrain.train.session import LearnerSession
from meshwire.model.masks import MaskSettings
from tests.tiers import mostly_slow
from tests.train.localdaemon import AT_THE_SCRIPTS_RATE, LocalDaemon
from tests.train.partsinturns import EPOCHS, Make, batch_of, trained, whole_epochs
from tests.train.replicas import adamw, assert_equal, distance, net, sgd, step

TOLERANCE = 1e-6  # relative: differences of weights round otherwise than weights do
OWN_PART = 0.5  # alpha of the paper
Vector = list[Tensor]  # by parameter


def parts_of(model: nn.Module, parts: int) -> list[list[int]]:
    """Positions of parameters: cut by hand for `net`, whose tensors have 32, 8, 16 and 2 values (64 with a norm)."""
    assert [p.numel() for p in model.parameters()] == [32, 8, 16, 2]
    return {1: [[0, 1, 2, 3]], 2: [[0], [1, 2, 3]], 4: [[0], [1], [2], [3]]}[parts]


class Streaming:
    """Streaming DiLoCo, algorithm 2 of Douillard et al. 2025 (arXiv 2501.18512), in one process."""

    def __init__(self, make: Make, members: int, parts: int, rate: float, momentum: float) -> None:
        self.learners = [(model := net(), make(model)) for _ in range(members)]
        self.base = net()
        self.parts = parts_of(self.base, parts)
        self.outer = torch.optim.SGD(self.base.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
        self.round = 0
        self.changes: list[tuple[int, Tensor]] = []  # of the round under way, by position

    def local_step(self, number: int) -> None:
        for rank, (model, optimizer) in enumerate(self.learners):
            step(model, optimizer, batch_of(rank, number))

    def send(self) -> None:
        part = self.parts[self.round % len(self.parts)]
        self.round += 1
        base = list(self.base.parameters())
        local = [list(model.parameters()) for model, _ in self.learners]
        self.changes = [(at, torch.stack([(base[at] - own[at]).detach() for own in local]).mean(0)) for at in part]

    def take_in(self, own_part: float) -> None:
        base = list(self.base.parameters())
        for at, change in self.changes:
            base[at].grad = change
        self.outer.step()
        self.outer.zero_grad()
        for model, _ in self.learners:
            own = list(model.parameters())
            for at, _ in self.changes:
                own[at].data.copy_(own_part * own[at].data + (1 - own_part) * base[at].data)
        self.changes = []


def streamed(
    make: Make, steps: int, h: int, parts: int, tau: int, members: int = 2, rate: float = 0.7, momentum: float = 0.9
) -> nn.Module:
    """The base after so many local steps, and after the rounds that bring what is left of them into it."""
    run = Streaming(make, members, parts, rate, momentum)
    since = 0
    for number in range(steps):
        run.local_step(number)
        since += 1
        if run.changes and since == tau:
            run.take_in(OWN_PART)
        if since == h // parts:
            run.send()
            since = 0
            if not tau:
                run.take_in(0.0)
    left = parts - 1  # the script's end, behind a whole period
    if since:
        left = parts
        if run.changes:
            run.take_in(OWN_PART)
    elif run.changes:
        run.take_in(0.0)
    for _ in range(left):
        run.send()
        run.take_in(0.0)
    return run.base


@pytest.mark.parametrize("make", mostly_slow([adamw, sgd]))
@pytest.mark.parametrize(
    ("h", "parts", "tau", "steps"),
    [(4, 2, 0, 16), (4, 4, 0, 13), (6, 2, 1, 18), (6, 2, 2, 17), (6, 2, 3, 16), (4, 1, 2, 12)],
)
def test_they_are_streaming_diloco(make: Make, h: int, parts: int, tau: int, steps: int) -> None:
    """Whether the script ends behind a period or within one: the model is then the base, and all local steps are in."""
    sync = f"diloco:{h},stream={parts}" + (f",tau={tau}" if tau else "")
    models = trained(make, steps, sync=sync, **AT_THE_SCRIPTS_RATE)
    assert distance(models[0], streamed(make, steps, h, parts, tau)) <= 10 * TOLERANCE


@pytest.mark.parametrize("tau", [0, 1])
def test_with_plain_averaging_each_part_in_turn_is_averaged(tau: int) -> None:
    """Outer rate 1 without momentum, H = P, so that a period is one step."""
    models = trained(sgd, 12, sync="local:4,stream=4" + (f",tau={tau}" if tau else ""))
    assert distance(models[0], streamed(sgd, 12, 4, 4, tau, rate=1.0, momentum=0.0)) <= TOLERANCE


@pytest.mark.parametrize("sync", ["diloco:3", "local:3"])
def test_one_part_is_the_mode_without_parts(sync: str) -> None:
    """Bit for bit, though local weights are kept otherwise."""
    assert_equal([*trained(adamw, 12, norm=True, sync=f"{sync},stream=1"), *trained(adamw, 12, norm=True, sync=sync)])


@pytest.mark.parametrize("tau", [0, 2])
def test_a_job_of_one_member(tau: int) -> None:
    models = trained(adamw, 15, members=1, sync="diloco:6,stream=2" + (f",tau={tau}" if tau else ""))
    assert distance(models[0], streamed(adamw, 15, 6, 2, tau, members=1)) <= 10 * TOLERANCE


def test_equal_data_on_all_learners_is_one_learner() -> None:
    """With BatchNorm, whose statistics travel in every round. (Where a round is taken in later it is not: the base that
    local weights are mixed with is of before.)"""
    replicas = trained(sgd, 14, norm=True, sync="local:4,stream=2", same_data=True)
    alone = net(norm=True)
    optimizer = sgd(alone)
    for number in range(14):
        step(alone, optimizer, batch_of(0, number))
    assert distance(replicas[0], alone) <= 10 * TOLERANCE


@pytest.mark.parametrize(("sync", "total"), [("local:4,stream=2", 41), ("diloco:4,stream=2,tau=1", 40)])
def test_each_sample_is_in_one_round_and_an_epochs_end_brings_all_parts_together(sync: str, total: int) -> None:
    """X1, R9: behind the last batch of an epoch each part has a round, of samples that count once."""
    rounds = whole_epochs(sync, total).rounds.rounds
    # What a round weighs is all that its part has changed by: two parts see each sample once each.
    assert sum(bind.weight for each in rounds.values() for bind in each.binds.values()) == EPOCHS * 2 * total
    lengths = {len(each.sent) and max(each.sent.values()) for each in rounds.values()}
    assert lengths == {32, 48}, "T1: each round carries one part, each tensor rounded up to 16 values"


def test_a_round_weighs_all_that_is_behind_the_change_of_its_part() -> None:
    """R2, as everywhere: by the samples behind it, of several periods. Without a loader each period weighs 1."""
    replicas = [net() for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(3):
            step(model, optimizer, batch_of(rank, number))

    with LocalDaemon(2, sync="local:2,stream=2") as daemon:
        daemon.run(script)
        weights = [[bind.weight for _, bind in sorted(each.binds.items())] for each in daemon.rounds.rounds.values()]
    assert weights == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0], [1.0, 1.0]], "the last round is for the other part alone"


@pytest.mark.parametrize("tau", [0, 1])
@pytest.mark.parametrize("on_nan", ["skip", "stop"])
def test_a_void_round_gives_local_steps_up(on_nan: str, tau: int) -> None:
    """V1: who has brought NaN begins again from the base everywhere, for all of its weights are of it, the others with
    the part that was to travel."""
    replicas = [net(norm=True) for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], adamw(replicas[rank]))
        for number in range(16):
            x, y = batch_of(rank, number)
            step(model, optimizer, (x, y * float("nan") if (rank, number) == (1, 3) else y))

    with LocalDaemon(2, sync="local:4,stream=2" + (f",tau={tau}" if tau else ""), on_nan=on_nan) as daemon:
        if on_nan == "stop":
            with pytest.raises(NonFiniteGradient, match=r"change by local steps holds NaN"):
                daemon.run(script)
            return
        daemon.run(script)
        void = [number for number, each in daemon.rounds.rounds.items() if each.done is not None and each.done.void]
    assert void == [2]
    assert_equal(replicas)
    assert all(torch.isfinite(value).all() for value in replicas[0].state_dict().values())


def test_a_void_round_is_taken_in_with_its_delay_and_nothing_of_the_own_stays() -> None:
    """V1, R9: at the same local step by all, also by who was its cause and has begun anew before."""
    replicas = [net() for _ in range(2)]
    held: list[tuple[nn.Module, nn.Module]] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(5):  # of periods of 2; behind the first step of the third one
            x, y = batch_of(rank, number)
            step(model, optimizer, (x, y * float("nan") if (rank, number) == (1, 3) else y))
        own = copy.deepcopy(model)
        with session.base():
            held.append((own, copy.deepcopy(model)))

    with LocalDaemon(2, sync="local:4,stream=2,tau=1", on_nan="skip") as daemon:
        daemon.run(script)
    for own, base in held:
        pairs = list(zip(own.parameters(), base.parameters(), strict=True))
        assert [torch.equal(p, q) for p, q in pairs] == [False, True, True, True], "of the void round's part alone"


def test_a_void_round_leaves_the_other_parts_of_who_is_not_its_cause() -> None:
    own: list[Vector] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(2):
            x, y = batch_of(rank, number)
            step(model, optimizer, (x, y * float("nan") if (rank, number) == (1, 1) else y))
            if rank == 0:
                own.append([p.detach().clone() for p in model.parameters()])
        with session.base():
            bases.append(copy.deepcopy(model))

    replicas = [net() for _ in range(2)]
    bases: list[nn.Module] = []
    with LocalDaemon(2, sync="local:2,stream=2", on_nan="skip") as daemon:
        daemon.run(script)
    base = list(bases[0].parameters())
    assert torch.equal(own[1][1], base[1]), "of the void round's part"
    assert not torch.equal(own[1][0], base[0]), "of the other part"


@pytest.mark.parametrize(
    ("sync", "how"),
    [
        ("local:8,stream=4", "NaN"),
        ("local:8,stream=4,tau=1", "NaN"),
        ("local:2,stream=1", "NaN"),
        ("local:8,stream=4", "lost"),
        ("diloco:4,stream=2", "lost"),
        ("local:2,stream=1", "lost"),
    ],
)
def test_who_loses_its_local_steps_at_the_end_ends_with_the_others_all_the_same(sync: str, how: str) -> None:
    """R9: it has nothing left to bring, and is in all rounds that the others need to bring their parts together: else
    these would end without it, and its final model lack them."""
    replicas, own = [net() for _ in range(2)], net()
    steps = 8

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(steps):
            x, y = batch_of(rank, number)
            broken = how == "NaN" and (rank, number) == (1, steps - 1)
            step(model, optimizer, (x, y * float("nan") if broken else y))
        if rank == 0:
            own.load_state_dict(model.state_dict())

    with LocalDaemon(2, sync=sync, on_nan="skip") as daemon:
        periods = steps // daemon.spec.sync.round_steps
        if how == "lost":
            daemon.lose(1, periods, retry=True)
        daemon.run(script)
        rounds, settings = daemon.rounds.rounds, daemon.spec.sync
    assert_equal(replicas)
    assert sorted(rounds) == list(range(1, periods + settings.fragments))
    assert all(sorted(each.binds) == [0, 1] for each in rounds.values())
    first = periods + 1 if how == "NaN" else periods  # of the rounds in which the second one has nothing to bring
    weights = [rounds[number].binds[1].weight for number in range(first, len(rounds) + 1)]
    assert all(weight < 1e-5 for weight in weights)
    if settings.outer_rate == 1.0 and not settings.delay and how == "lost":
        assert distance(replicas[0], own) <= 10 * TOLERANCE, "so what the first one brings counts in full"


@pytest.mark.parametrize("tau", [0, 1])
def test_who_ends_sooner_takes_the_rounds_of_the_others_still(tau: int) -> None:
    """As who came in while the others brought their parts together, and is ahead of them since: its final model has
    all that theirs have."""
    replicas = [net(norm=True) for _ in range(2)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(8 - 2 * rank):
            step(model, optimizer, batch_of(rank, number))

    with LocalDaemon(2, sync="diloco:4,stream=4" + (f",tau={tau}" if tau else "")) as daemon:
        daemon.run(script)
        binds = [sorted(each.binds) for each in daemon.rounds.rounds.values()]
    assert binds == [[0, 1]] * 9 + [[0]] * 2
    assert_equal(replicas)


@pytest.mark.parametrize("tau", [0, 1])
def test_after_an_epoch_that_ends_with_a_void_round_all_go_on_in_step(tau: int) -> None:
    """R9, X4: behind each epoch all are in equally many rounds, and stand on the base."""
    dataset = TensorDataset(*batch_of(9, 1, 24))
    replicas = [net() for _ in range(2)]
    at_ends: list[list[nn.Module]] = [[], []]

    def script(session: LearnerSession, rank: int) -> None:
        loader = DataLoader(dataset, batch_size=4)
        model, optimizer, loader = session.prepare_with_loader(replicas[rank], sgd(replicas[rank]), loader)
        for epoch in range(3):
            for number, (x, y) in enumerate(loader):
                broken = (rank, epoch, number) == (1, 0, 2)
                step(model, optimizer, (x, y * float("nan") if broken else y))
            at_ends[rank].append(copy.deepcopy(model))

    sync = "local:4,stream=4" + (f",tau={tau}" if tau else "")
    with LocalDaemon(2, sync=sync, on_nan="skip") as daemon:
        daemon.run(script)
        binds = [sorted(each.binds) for each in daemon.rounds.rounds.values()]
        void = [number for number, each in daemon.rounds.rounds.items() if each.done is not None and each.done.void]
    assert void == [3]
    assert binds == [[0, 1]] * (3 * (3 + 3))
    for epoch in range(3):
        assert_equal([at_ends[0][epoch], at_ends[1][epoch]])
    assert_equal(replicas)


def test_a_lost_period_is_given_up_with_all_that_is_apart() -> None:
    """R5: its samples are dealt again, so nothing of it may stay in the weights."""
    replicas = [net() for _ in range(2)]
    behind: list[nn.Module] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(7 if rank == 0 else 8):
            step(model, optimizer, batch_of(rank, number))
            if rank == 1 and number == 2:
                own = copy.deepcopy(model)
                with session.base():
                    assert_equal([own, copy.deepcopy(model)])
                behind.append(own)

    with LocalDaemon(2, sync="local:4,stream=4") as daemon:
        daemon.lose(1, 3, retry=True)
        daemon.run(script)
    assert behind
    assert_equal(replicas)


@pytest.mark.parametrize("tau", [0, 2])
def test_the_base_is_shown_in_the_middle_and_a_barrier_brings_all_parts_together(tau: int) -> None:
    """O7: the base, whatever is on its way; then the own weights are back, bit for bit."""
    replicas = [net(norm=True) for _ in range(2)]
    behind: list[nn.Module] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
        for number in range(11):  # of periods of 4
            step(model, optimizer, batch_of(rank, number))
        own = copy.deepcopy(model)
        with session.base():
            assert distance(own, model) > 1e-3
        assert_equal([own, model])
        session.barrier()
        behind.append(copy.deepcopy(model))
        step(model, optimizer, batch_of(rank, 11))

    with LocalDaemon(2, sync="diloco:8,stream=2" + (f",tau={tau}" if tau else "")) as daemon:
        daemon.run(script)
    assert_equal(behind)
    assert_equal(replicas)


@pytest.mark.parametrize("after_round", [1, 6])
def test_a_state_holds_the_base_and_the_outer_momentum_of_the_parts_that_had_a_round(
    after_round: int, tmp_path: Path
) -> None:
    """J1: who begins from it stands on the base with all parts. Behind a barrier that is where the others are too:
    three steps have brought three rounds there, and the barrier those of the other parts."""

    def run(daemon: LocalDaemon, first: int) -> list[nn.Sequential]:
        replicas = [net(norm=True) for _ in range(2)]

        def script(session: LearnerSession, rank: int) -> None:
            model, optimizer = session.prepare(replicas[rank], sgd(replicas[rank]))
            if rank == 0 and not first:
                daemon.save(0, after_round, tmp_path)
            for number in range(first, 9):
                if number == 3 and first == 0:
                    session.barrier()
                step(model, optimizer, batch_of(rank, number))

        daemon.run(script)
        return replicas

    with LocalDaemon(2, sync="diloco:4,stream=4") as daemon:
        whole = run(daemon, 0)
        saved = [body for _, body in daemon.saved]
    assert [(body.round, body.error) for body in saved] == [(after_round, None)]
    with LocalDaemon(2, sync="diloco:4,stream=4") as daemon:
        daemon.begin_from(tmp_path, after_round, saved[0].units)
        resumed = run(daemon, 3)
    assert_equal(resumed)
    if after_round == 6:
        assert_equal([*whole, *resumed])


def test_what_does_not_go_with_parts_is_named() -> None:
    def script(session: LearnerSession, _: int) -> None:
        model = net()
        session.prepare(model, sgd(model))

    for sync, masks, told in (
        ("local:4,stream=2", MaskSettings(sparsity=0.5), "omit ,stream="),
        ("local:8,stream=8", None, "use stream=1, 2, 4"),
    ):
        with LocalDaemon(1, sync=sync, masks=masks) as daemon, pytest.raises(NotSupported, match=told):
            daemon.run(script)
