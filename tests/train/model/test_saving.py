"""A replica saved after any round, and learners that begin from it: bit for bit as if they had always been there."""

import contextlib
import json
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor, nn

from meshtrain.errors import JobStopped, MeshtrainError
from meshtrain.train.model import tensors
from meshtrain.train.model.state import ReplicaState, RoundProgress
from meshtrain.train.optim.hyperparameters import RoundOptions
from meshtrain.train.partial.masks import Masks
from meshtrain.train.session import LearnerSession
from meshwire.checkpoints.manifest import unit_file
from meshwire.messages.learner import LearnerSaved, RoundDone, StepLost
from meshwire.sync_modes.rate_rule import parse_rate_rule
from tests.tiers import mostly_slow
from tests.train.localdaemon import LocalDaemon
from tests.train.localrounds import LocalRound

STEPS, SAVED_AFTER = 10, 5

Make = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Moment:
    """After one rank's step of this number; 0: before its first one."""

    session: LearnerSession
    optimizer: torch.optim.Optimizer
    rank: int
    number: int


Each = Callable[[Moment], None]


class Net(nn.Module):
    """Tied weights, BatchNorm with its float and integer buffers, a frozen parameter and a frozen mask."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6)
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.register_buffer("mask", torch.rand(6, generator=generator) > 0.3)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.norm(self.first(x)) * self.mask) + self.frozen
        return y


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two param groups with options of their own."""
    biases = [p for name, p in model.named_parameters() if "bias" in name and p.requires_grad]
    others = [p for name, p in model.named_parameters() if "bias" not in name and p.requires_grad]
    return torch.optim.AdamW([{"params": others, "lr": 0.02}, {"params": biases, "weight_decay": 0.0}], lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9, nesterov=True)


class Counting(torch.optim.SGD):
    """Writes an option in every step, which is state of the base then (O3)."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.9
        return super().step(closure)


def counting(model: nn.Module) -> torch.optim.Optimizer:
    return Counting([p for p in model.parameters() if p.requires_grad], lr=0.05)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + number))


def nothing(_: Moment) -> None:
    """Just trains."""


def train(
    daemon: LocalDaemon,
    make: Make,
    numbers: range,
    seed: int,
    each: Each = nothing,
    *,
    decayed: bool = True,
    prepared: Each = nothing,
) -> list[tuple[Net, torch.optim.Optimizer]]:
    """Every rank takes the steps of these numbers; `each` is called after each, and `prepared` before the first one."""
    models = [Net(seed + rank) for rank in range(daemon.members)]
    optimizers = [make(model) for model in models]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(models[rank], optimizers[rank])
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95) if decayed else None
        prepared(Moment(session, optimizer, rank, 0))
        for number in numbers:
            optimizer.zero_grad()
            model(batch(rank, number)).square().mean().backward()
            session.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            each(Moment(session, optimizer, rank, number))

    daemon.run(script)
    return list(zip(models, optimizers, strict=True))


def replay(daemon: LocalDaemon, recorded: LocalDaemon) -> None:
    """Its rounds have the means and verdicts that were recorded, whatever its learners compute."""

    def verdict(number: int, round_: LocalRound) -> RoundDone:
        known = recorded.rounds.rounds[number]
        assert known.means is not None
        assert known.done is not None
        round_.means = known.means
        return known.done

    vars(daemon.rounds)["_verdict"] = verdict


def saving(daemon: LocalDaemon, folder: Path, after: int = SAVED_AFTER) -> Each:
    """Rank 1 is asked after its first step."""
    folder.mkdir()

    def each(now: Moment) -> None:
        if (now.rank, now.number) == (1, 1):
            daemon.save(1, after, folder)

    return each


def sync_of(staleness: int, own: str = "0") -> dict[str, Any]:
    return {"sync": f"ssp:{staleness}", "visibility": "fixed", "own": own} if staleness else {"sync": "bsp"}


def units_of(daemon: LocalDaemon) -> int:
    ((rank, saved),) = daemon.saved
    assert (rank, saved.error) == (1, None)
    return saved.units


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """All of it, with tensors as lists: equal when bit-equal."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    states = [
        {k: v.tolist() if isinstance(v, Tensor) else v for k, v in optimizer.state[p].items()}
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    return [states, groups]


@pytest.mark.parametrize("make", mostly_slow([adamw, sgd, counting]))
@pytest.mark.parametrize(("staleness", "own"), [(0, "0"), (2, "0"), (2, "1")])
def test_a_run_goes_on_from_what_was_saved(make: Make, staleness: int, own: str, tmp_path: Path) -> None:
    """J1: learners with other weights and fresh optimizers load round 5, and have the base of each later round."""
    decayed = make is not counting
    with LocalDaemon(2, **sync_of(staleness, own)) as first:
        ended = train(first, make, range(1, STEPS + 1), 0, saving(first, tmp_path / "saved"), decayed=decayed)
    assert first.saved == [(1, LearnerSaved(number=1, round=SAVED_AFTER, units=units_of(first)))]
    files = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert files == sorted(unit_file(unit) for unit in range(units_of(first)))
    with LocalDaemon(2, **sync_of(staleness, own)) as second:
        second.begin_from(tmp_path / "saved", SAVED_AFTER, units_of(first))
        replay(second, first)
        resumed = train(second, make, range(SAVED_AFTER + 1, STEPS + 1), 50, decayed=False)
    assert second.round == first.round == STEPS
    assert [told.round for rank, told in second.applied if rank == 0] == list(range(SAVED_AFTER + 1, STEPS + 1))
    for round_ in range(SAVED_AFTER + 1, STEPS + 1):
        assert second.hashes[round_][0] == first.hashes[round_][0], f"the base after round {round_}"
    for (model, optimizer), (like, other) in zip(resumed, ended, strict=True):
        assert model.state_dict().keys() == like.state_dict().keys()
        assert all(torch.equal(value, like.state_dict()[name]) for name, value in model.state_dict().items())
        assert state_of(optimizer)[0] == state_of(other)[0]
        if make is counting:
            assert state_of(optimizer)[1] == state_of(other)[1], "what steps have written goes on"


@pytest.mark.parametrize(("make", "rule"), [(sgd, "linear,warmup=8"), (adamw, "sqrt,warmup=3")])
def test_scaled_rates_go_on_with_the_rounds(make: Make, rule: str, tmp_path: Path) -> None:
    """O12: where a warm-up is, or was, follows from the round, so a state holds nothing of it."""
    scale_lr = parse_rate_rule(rule)
    with LocalDaemon(2, scale_lr=scale_lr) as first:
        train(first, make, range(1, STEPS + 1), 0, saving(first, tmp_path / "saved"))
    with LocalDaemon(2, scale_lr=scale_lr) as second:
        second.begin_from(tmp_path / "saved", SAVED_AFTER, units_of(first))
        replay(second, first)
        train(second, make, range(SAVED_AFTER + 1, STEPS + 1), 50, decayed=False)
    for round_ in range(SAVED_AFTER + 1, STEPS + 1):
        assert second.hashes[round_][0] == first.hashes[round_][0], f"the base after round {round_}"


def test_the_base_is_saved_where_a_view_is_shown(tmp_path: Path) -> None:
    """O7: asked long after its round, at a boundary to which the learner comes with its own gradients ahead."""
    (tmp_path / "saved").mkdir()
    with LocalDaemon(2, **sync_of(2, "1")) as daemon:

        def each(now: Moment) -> None:
            if (now.rank, now.number) == (1, 6):
                daemon.save(1, 0, tmp_path / "saved")

        train(daemon, adamw, range(1, STEPS + 1), 0, each)
    round_ = daemon.saved[0][1].round
    assert 3 <= round_ <= 6
    with LocalDaemon(2, **sync_of(2, "1")) as again:
        again.begin_from(tmp_path / "saved", round_, units_of(daemon))
        train(again, adamw, range(0), 50)
    assert again.hashes[round_] == daemon.hashes[round_]


@pytest.mark.parametrize("own", ["0", "1"])
def test_saving_changes_nothing(own: str, tmp_path: Path) -> None:
    """O7: the base is written while learners compute with views; their gradients are as if nobody had saved."""
    hashes = []
    for saved in (False, True):
        with LocalDaemon(2, **sync_of(2, own)) as daemon:
            each = saving(daemon, tmp_path / "saved") if saved else nothing
            train(daemon, adamw, range(1, STEPS + 1), 0, each)
        hashes.append(daemon.hashes)
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("sync", ["bsp", "local:2"])
def test_a_learner_whose_round_will_never_be_writes_its_base(sync: str, tmp_path: Path) -> None:
    """G4: its history is given up while it waits for the round of its step, which nobody will complete. It ends the
    step without, and writes the base that it has."""
    (tmp_path / "saved").mkdir()
    with LocalDaemon(2, sync=sync) as daemon:
        daemon.hold(3)

        def each(now: Moment) -> None:
            period = 2 if sync == "local:2" else 1
            if (now.rank, now.number) == (1, 2 * period):
                daemon.save(1, 2, tmp_path / "saved")

        def part() -> None:
            daemon.wait_until(lambda: 1 in daemon.seals.get(3, {}))
            with daemon.lock:  # whose rounds go no further
                vars(daemon.rounds)["take"] = lambda _rank, _body: None
            daemon.notify(1, StepLost(step=3, reason="its history is not kept", retry=True))
            daemon.wait_until(lambda: bool(daemon.saved))
            daemon.stop("enough")

        parting = threading.Thread(target=part)
        parting.start()
        with contextlib.suppress(JobStopped):
            train(daemon, sgd, range(1, STEPS + 1), 0, each)
        parting.join()
    assert daemon.saved == [(1, LearnerSaved(number=1, round=2, units=units_of(daemon)))]
    with LocalDaemon(2, sync=sync) as again:
        again.begin_from(tmp_path / "saved", 2, units_of(daemon))
        train(again, sgd, range(0), 50)
    assert again.hashes[2] == daemon.hashes[2]


def test_the_base_is_saved_in_the_middle_of_a_long_period(tmp_path: Path) -> None:
    """R9: nobody waits hundreds of local steps for it, and these go on as if nobody had asked."""
    hashes, seen = [], []
    for saved in (False, True):
        with LocalDaemon(2, sync="local:5") as daemon:

            def each(now: Moment, daemon: LocalDaemon = daemon, saved: bool = saved) -> None:
                if now.rank == 1 and saved and now.number == 7:
                    (tmp_path / "saved").mkdir()
                    daemon.save(1, 1, tmp_path / "saved")
                    seen.append(1 in daemon.seals.get(2, {}))
                elif now.rank == 1 and saved and now.number == 8:
                    daemon.wait_until(lambda: bool(daemon.saved))
                    seen.append(1 in daemon.seals.get(2, {}))

            train(daemon, sgd, range(1, 16), 0, each)
        hashes.append(daemon.hashes)
    assert hashes[0] == hashes[1]
    assert seen == [False, False], "before the second period had ended"
    assert daemon.saved == [(1, LearnerSaved(number=1, round=1, units=units_of(daemon)))]
    with LocalDaemon(2, sync="local:5") as again:
        again.begin_from(tmp_path / "saved", 1, units_of(daemon))
        train(again, sgd, range(0), 50)
    assert again.hashes[1] == hashes[0][1]


def test_options_are_those_of_the_saved_round(tmp_path: Path) -> None:
    """A learner that loads has the rate at which the others were."""
    rates: list[float] = []

    def noted(now: Moment) -> None:
        if now.rank == 0:
            rates.append(now.optimizer.param_groups[0]["lr"])

    with LocalDaemon(2, **sync_of(0)) as first:
        train(first, adamw, range(1, 9), 0, saving(first, tmp_path / "saved"))
    with LocalDaemon(2, **sync_of(0)) as second:
        second.begin_from(tmp_path / "saved", SAVED_AFTER, units_of(first))
        train(second, adamw, range(6, 8), 50, noted, decayed=False)
    # Saved at the boundary of step 5, before the schedule's own step of it.
    assert rates == pytest.approx([0.02 * 0.95**4] * 2)


def test_the_first_bind_after_a_load_carries_the_limit_of_before(tmp_path: Path) -> None:
    """O4: else peers that have taken steps and peers that have not would clip that round differently."""
    with LocalDaemon(2, **sync_of(2)) as first:
        train(first, sgd, range(1, 9), 0, saving(first, tmp_path / "saved"))
    with LocalDaemon(2, **sync_of(2)) as second:
        second.begin_from(tmp_path / "saved", SAVED_AFTER, units_of(first))
        train(second, sgd, range(6, 8), 50)
    for daemon, known in ((first, False), (second, True)):
        options = RoundOptions.load(msgpack.unpackb(daemon.buckets[1][0][0].hyperparameters))
        assert (options.clip, options.clip_known) == (0.5 if known else None, known)


def test_state_lies_in_memory_as_its_parameter() -> None:
    """A fused optimizer goes through both as they lie there."""

    def made(seed: int) -> tuple[nn.Conv2d, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 5, 3)
        model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> ReplicaState:
        built = tensors.build(model, "")
        return ReplicaState(built, optimizer, Masks(built, None))

    (one, first), (other, second) = made(0), made(1)
    for number in range(3):
        step(one, first, number)
    with tempfile.TemporaryDirectory() as folder:
        saved = state(one, first)
        saved.export(Path(folder), lambda _: None, RoundProgress(round=3))
        state(other, second).load(range(saved.count), Path(folder), 3)
    for model, optimizer in ((one, first), (other, second)):
        step(model, optimizer, 3)
    assert torch.equal(one.weight, other.weight)
    assert state_of(first) == state_of(second)


def test_not_between_backward_and_step(tmp_path: Path) -> None:
    """s=0: there buffers are of the new round and parameters of the old one; at the boundary all are of the new."""
    (tmp_path / "saved").mkdir()
    model = Net(0)
    optimizer = sgd(model)
    with LocalDaemon(1, sync="bsp") as daemon:

        def script(session: LearnerSession, rank: int) -> None:
            session.prepare(model, optimizer)
            for number in range(1, 5):
                optimizer.zero_grad()
                model(batch(rank, number)).square().mean().backward()
                if number == 3:
                    daemon.save(0, 0, tmp_path / "saved")
                    assert not daemon.saved
                optimizer.step()
                if number == 3:
                    session.barrier()  # whatever was sent has been read then

        daemon.run(script)
    ((_, saved),) = daemon.saved
    assert saved.round == 3
    with LocalDaemon(1, sync="bsp") as again:
        again.begin_from(tmp_path / "saved", 3, saved.units)
        train(again, sgd, range(4, 4), 50)
    assert again.hashes[3] == daemon.hashes[3]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_learner_in_a_barrier_saves(staleness: int, tmp_path: Path) -> None:
    """It may wait there for very long."""
    (tmp_path / "saved").mkdir()
    with LocalDaemon(2, **sync_of(staleness)) as daemon:

        def each(now: Moment) -> None:
            if now.number != 2:
                return
            if now.rank == 0:
                daemon.wait_until(lambda: daemon.rounds.learners[1].barrier == 1)
                daemon.save(1, 2 - staleness, tmp_path / "saved")
                daemon.wait_until(lambda: bool(daemon.saved))
            now.session.barrier()

        train(daemon, sgd, range(1, 4), 0, each)
    assert units_of(daemon) > 0
    assert daemon.saved[0][1].round >= 2 - staleness


def test_a_disk_that_refuses_costs_the_checkpoint_only(tmp_path: Path) -> None:
    with LocalDaemon(2, **sync_of(0)) as daemon:

        def each(now: Moment) -> None:
            if (now.rank, now.number) == (1, 1):
                daemon.save(1, 2, tmp_path / "missing")

        train(daemon, sgd, range(1, 6), 0, each)
    ((_, saved),) = daemon.saved
    assert saved.units == 0
    assert saved.error is not None
    assert saved.error.startswith(f"cannot write {tmp_path / 'missing' / '0.safetensors'}: ")
    assert daemon.round == 5


def test_an_optimizer_with_state_beside_its_parameters_is_named(tmp_path: Path) -> None:
    with LocalDaemon(2, **sync_of(0)) as daemon:

        def each(now: Moment) -> None:
            now.optimizer.state[torch.zeros(1)]["seen"] = now.number
            if (now.rank, now.number) == (1, 1):
                (tmp_path / "saved").mkdir()
                daemon.save(1, 2, tmp_path / "saved")

        train(daemon, sgd, range(1, 6), 0, each)
    ((_, saved),) = daemon.saved
    assert saved.error is not None
    assert "SGD keeps state that belongs to no parameter" in saved.error


def test_a_scalers_scale_goes_with_the_state(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    scales: list[float] = []

    def run(daemon: LocalDaemon, initial: float, numbers: range) -> None:
        model = Net(0)
        optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=2)

        def script(session: LearnerSession, rank: int) -> None:
            session.prepare(model, optimizer, scaler=scaler)
            for number in numbers:
                if number == 5:
                    daemon.save(0, 4, tmp_path / "saved")
                    session.barrier()
                optimizer.zero_grad()
                scaler.scale(model(batch(rank, number)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())

        daemon.run(script)

    with LocalDaemon(1, sync="bsp") as first:
        run(first, 4.0, range(1, 7))
    assert scales == [4.0, 8.0, 8.0, 16.0, 16.0, 32.0]
    with LocalDaemon(1, sync="bsp") as second:
        second.begin_from(tmp_path / "saved", 4, first.saved[0][1].units)
        run(second, 1.0, range(6, 8))
    assert scales[6:] == [16.0, 32.0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("module") / "saved"
    with LocalDaemon(2, **sync_of(0)) as daemon:
        train(daemon, adamw, range(1, 7), 0, saving(daemon, folder))
    return folder, units_of(daemon)


@pytest.mark.parametrize("what", ["cut", "missing", "of another model", "of another round", "incomplete"])
def test_a_state_that_does_not_suit_is_refused(what: str, saved: tuple[Path, int], tmp_path: Path) -> None:
    folder, units = tmp_path / "state", saved[1]
    shutil.copytree(saved[0], folder)
    round_, told = SAVED_AFTER, r"unit 0 of the state in .* cannot be read"
    match what:
        case "cut":
            (folder / unit_file(0)).write_bytes((folder / unit_file(0)).read_bytes()[:50])
        case "missing":
            (folder / unit_file(0)).unlink()
        case "of another model":
            shutil.copy(folder / unit_file(1), folder / unit_file(0))
            told = "the state to load does not hold first.weight as this model has it"
        case "of another round":
            round_, told = 6, "is that after round 5, not after 6"
        case "incomplete":
            units, told = units - 1, "is that after round 0, not after 5"
    with LocalDaemon(1, sync="bsp") as daemon:
        daemon.begin_from(folder, round_, units)
        with pytest.raises(MeshtrainError, match=told):
            train(daemon, adamw, range(1, 2), 0)


def test_what_rounds_leave_is_told_as_it_was() -> None:
    """JSON has no infinity by the book; ours has."""
    made = RoundProgress(
        round=3, squared_norm=0.1, clip=float("inf"), clip_known=True, written=(("lr",), ()), scaler=None
    )
    assert RoundProgress.load(json.loads(json.dumps(made.model_dump()))) == made
