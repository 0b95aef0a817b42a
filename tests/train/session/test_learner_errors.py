"""What a script does wrong, or the mesh meets, is an error that names it; the other learners do not hang."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

import meshtrain as mt
from meshtrain.errors import (
    ConnectionLost,
    JobStopped,
    MeshtrainError,
    NonFiniteGradient,
    NotSupported,
    RequestError,
    UsageError,
)
from meshtrain.train.link import channel
from meshtrain.train.session import LearnerSession
from tests.train.localdaemon import LocalDaemon

X = torch.linspace(-1, 1, 24).view(4, 6)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def alone(script: Callable[[LearnerSession], Any], **spec: Any) -> Any:
    with LocalDaemon(1, **spec) as daemon:
        return daemon.run(lambda session, rank: script(session))[0]  # noqa: ARG005


def prepared(session: LearnerSession) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    return session.prepare(model, sgd(model))


def refused(script: Callable[[LearnerSession], Any], error: type[Exception], text: str, **spec: Any) -> None:
    with pytest.raises(error, match=text):
        alone(script, **spec)


# The backward pass (O6)


def test_second_backward_names_no_sync() -> None:
    """O6: a second backward without no_sync before step() is an error that names it."""

    def script(session: LearnerSession) -> None:
        model, _ = prepared(session)
        model(X).sum().backward()
        model(X).sum().backward()

    refused(script, UsageError, r"second backward\(\).*no_sync")


def test_step_on_unsynchronised_gradients() -> None:
    def script(session: LearnerSession) -> None:
        model, optimizer = prepared(session)
        with session.no_sync():
            model(X).sum().backward()
        optimizer.step()

    refused(script, UsageError, "no_sync")


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool, head: bool) -> None:
        super().__init__()
        self.body, self.head = net(), nn.Linear(2, 2) if head else nn.Identity()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        result: Tensor = self.head(checkpoint(self.body, x, use_reentrant=self.use_reentrant))
        return result


@pytest.mark.parametrize("head", [False, True])
def test_reentrant_checkpointing_is_refused_by_name(head: bool) -> None:
    def script(session: LearnerSession) -> None:
        model = Checkpointed(True, head)
        session.prepare(model, sgd(model))
        model(X).sum().backward()

    refused(script, NotSupported, "use_reentrant=False")


def test_other_checkpointing_works() -> None:
    def script(session: LearnerSession) -> Tensor:
        model = Checkpointed(False, True)
        session.prepare(model, sgd(model))
        model(X).sum().backward()
        gradient = model.body[0].weight.grad
        assert isinstance(gradient, Tensor)
        return gradient

    assert alone(script).abs().sum() > 0


def test_backward_after_a_failed_one() -> None:
    """Buckets that have left cannot be withdrawn (V1)."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
            raise RuntimeError("out of memory")

    def script(session: LearnerSession) -> None:
        model, _ = prepared(session)
        hidden = Broken.apply(model[0](X))  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="out of memory"):
            model[2](hidden).sum().backward()
        model(X).sum().backward()

    refused(script, UsageError, "earlier backward pass.*failed")


def test_sparse_gradients_are_refused_by_name() -> None:
    def script(session: LearnerSession) -> None:
        model = nn.ModuleDict({"words": nn.Embedding(10, 4, sparse=True)})
        session.prepare(model, sgd(model))

    refused(script, NotSupported, "words makes sparse gradients")


# NaN (V1)


def train_with_nan(session: LearnerSession, rank: int) -> list[float | None]:
    model, optimizer = prepared(session)
    seen: list[float | None] = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(X).sum()
        if step == 1 and rank == 1:
            loss = loss + model[2].bias.sum() * float("nan")  # type: ignore[operator]
        loss.backward()
        seen.append(None if model[0].weight.grad is None else float(model[0].weight.grad.sum()))  # type: ignore[operator]
        optimizer.step()
    return seen


def test_nan_stops_and_names_parameter_round_and_peer() -> None:
    """V1 with --on-nan stop, on every peer."""
    told = []

    def script(session: LearnerSession, rank: int) -> None:
        with pytest.raises(NonFiniteGradient) as caught:
            train_with_nan(session, rank)
        told.append(str(caught.value))
        assert caught.value.round == 2

    with LocalDaemon(2) as daemon:
        daemon.run(script)
    assert len(set(told)) == 1
    assert "round 2" in told[0]
    assert "rank 1 (bert): 2.bias" in told[0]


def test_nan_is_skipped_on_all_peers() -> None:
    """V1 with skip, O1: a void round leaves p.grad None on all; the next ones go on."""
    with LocalDaemon(2, on_nan="skip") as daemon:
        results = daemon.run(train_with_nan)
        assert all(seen[1] is None and seen[0] is not None and seen[2] is not None for seen in results)
        assert {applied.round for _, applied in daemon.applied} == {1, 2, 3}
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values())


# What is not supported, or misused


def test_closure_optimizers_are_refused_by_name() -> None:
    """O6."""
    model = net()
    refused(lambda session: session.prepare(model, torch.optim.LBFGS(model.parameters())), NotSupported, "LBFGS")


def test_grad_scaler_that_prepare_does_not_know_is_refused() -> None:
    def script(session: LearnerSession) -> None:
        model, optimizer = prepared(session)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(X).sum()).backward()
        scaler.step(optimizer)

    refused(script, UsageError, "scaler=scaler")


def test_disabled_grad_scaler_works() -> None:
    def script(session: LearnerSession) -> None:
        model, optimizer = prepared(session)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(model(X).sum()).backward()
        scaler.step(optimizer)

    alone(script)


def test_prepare_twice() -> None:
    def script(session: LearnerSession) -> None:
        prepared(session)
        prepared(session)

    refused(script, UsageError, "called before.*as lists")


def test_parameter_outside_the_model_is_refused() -> None:
    def script(session: LearnerSession) -> None:
        model = net()
        session.prepare(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3, 5))], lr=0.1))

    refused(script, UsageError, r"shape \(3, 5\) that is not in the model")


def test_thawing_after_prepare_names_the_parameter() -> None:
    def script(session: LearnerSession) -> None:
        model = net()
        model[0].weight.requires_grad_(False)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        model[0].weight.requires_grad_(True)
        model(X).sum().backward()
        optimizer.step()

    refused(script, UsageError, "0.weight has a gradient, but was frozen")


def test_frozen_model_is_refused() -> None:
    model = net().requires_grad_(False)
    refused(lambda session: session.prepare(model, sgd(model)), NotSupported, "no trainable parameter")


def test_lazy_model_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    refused(lambda session: session.prepare(model, sgd(model)), NotSupported, "0.weight.*one batch")


def test_log_refuses_what_is_no_number() -> None:
    refused(lambda session: session.log({"loss": torch.zeros(2)}), UsageError, r"mt.log\(loss=")


def test_log_wants_names() -> None:
    """As a dict, which other loggers take, it has none; that is said with the right call, in a job or without."""
    with pytest.raises(UsageError, match=r"by name: mt\.log\(loss=loss\); of a dict mt\.log\(\*\*values\)"):
        mt.log({"loss": 1.0})


def test_log_refuses_what_no_message_holds() -> None:
    values = {f"loss of sample {number}": 0.0 for number in range(1000)}
    refused(lambda session: session.log(values), UsageError, "at most 64 numbers at a time")


def test_model_of_too_many_tensors_is_refused() -> None:
    """Before a message fails on it."""
    model = nn.ParameterDict({f"{number:05}{'x' * 500}": nn.Parameter(torch.zeros(1)) for number in range(25_000)})
    refused(lambda session: session.prepare(model, sgd(model)), NotSupported, "25000 tensors has .* bytes, at most")


def test_finished_session_takes_no_part() -> None:
    def script(session: LearnerSession) -> None:
        model, _ = prepared(session)
        session.finish()
        model(X).sum().backward()  # an ordinary model again
        session.barrier()

    refused(script, UsageError, "finish")


# Peers and daemon


def test_models_that_differ() -> None:
    """Names the first differing tensor."""

    def script(session: LearnerSession, rank: int) -> None:
        model = nn.Linear(6, 2 + rank)
        session.prepare(model, sgd(model))

    with LocalDaemon(2) as daemon, pytest.raises(RequestError, match=r"weight has shape \(2, 6\).*\(3, 6\)"):
        daemon.run(script)


def test_data_sets_that_differ() -> None:
    def script(session: LearnerSession, rank: int) -> None:
        model = net()
        session.prepare_with_loader(model, sgd(model), DataLoader(TensorDataset(torch.zeros(20 + rank, 6))))

    with LocalDaemon(2) as daemon, pytest.raises(RequestError, match=r"20 samples.*21 samples"):
        daemon.run(script)


@pytest.mark.parametrize("sync", ["bsp", "ssp:2"])
def test_a_script_may_go_on_after_a_barrier_that_cannot_be_passed(sync: str) -> None:
    """It is told to start before it computes again: a step that the daemon has not begun is a breach (R1)."""

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = prepared(session)
        if rank == 1:
            return
        with pytest.raises(RequestError, match="finished without it"):
            session.barrier()
        assert session._engine is not None
        assert session._engine.boundary._started == 1
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()

    with LocalDaemon(2, sync=sync) as daemon:
        daemon.run(script)
        assert daemon.round == 1


def test_stop_is_raised_in_the_loop() -> None:
    with LocalDaemon(2) as daemon:

        def script(session: LearnerSession, rank: int) -> None:
            model, optimizer = prepared(session)
            if rank == 1:
                daemon.stop("cancelled by anna")
                return
            while True:
                optimizer.zero_grad()
                model(X).sum().backward()
                optimizer.step()

        with pytest.raises(JobStopped, match="cancelled by anna"):
            daemon.run(script)


def test_daemon_that_goes_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait has a deadline on signs of life."""
    monkeypatch.setattr(channel, "SILENCE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(channel, "LINGER_S", 0.1)
    with LocalDaemon(1) as daemon:

        def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
            model, _ = prepared(session)
            daemon.silent = True
            model(X).sum().backward()

        with pytest.raises(ConnectionLost, match=r"no sign of life.*step 1"):
            daemon.run(script)


def test_daemon_that_dies() -> None:
    with LocalDaemon(1) as daemon:
        session = LearnerSession.attach(daemon.environment(0))
        model, _ = prepared(session)
    with pytest.raises(ConnectionLost, match=r"closed|broke"):
        model(X).sum().backward()
    with pytest.raises(ConnectionLost):
        session.finish()


# Loaders


class Moody(Sampler[int]):
    """Draws from a source of its own."""

    def __init__(self) -> None:
        self.generator_of_its_own = torch.Generator()

    def __iter__(self) -> Any:
        return iter(torch.randperm(40, generator=self.generator_of_its_own).tolist())

    def __len__(self) -> int:
        return 40


DATASET = TensorDataset(torch.zeros(40, 6))


@pytest.mark.parametrize(
    ("loader", "error", "text"),
    [
        (DataLoader(DATASET, sampler=Moody()), NotSupported, "Moody.*shuffle=True"),
        (DataLoader(DATASET, sampler=DistributedSampler(DATASET, 2, 0)), NotSupported, "DistributedSampler"),
        (DataLoader(DATASET, batch_size=None), NotSupported, "batch_size=None"),
        ([1, 2, 3], NotSupported, "DataLoader, not of a list"),
        (DataLoader(TensorDataset(torch.zeros(1, 6))), UsageError, "fewer than the 2 members"),
        (DataLoader(DATASET, batch_size=30, drop_last=True), UsageError, "drop_last"),
        (
            DataLoader(DATASET, batch_sampler=BatchSampler(DistributedSampler(DATASET, 2, 0), 4, False)),
            NotSupported,
            "DistributedSampler",
        ),
    ],
)
def test_loaders_that_cannot_be_dealt(loader: Any, error: type[MeshtrainError], text: str) -> None:
    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model = net()
        session.prepare_with_loader(model, sgd(model), loader)

    with LocalDaemon(2) as daemon, pytest.raises(error, match=re.compile(text)):
        daemon.run(script)


# What prepare is given


def two() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, sgd(model)


prepare: Any = mt.prepare  # a type checker would find these

WRONGLY_GIVEN: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], object], str]] = {
    "parameters twice": (lambda m, o: prepare(m, [o, sgd(m)], [1]), "4 parameters are in several of the optimizers"),
    "two optimizers": (lambda m, o: prepare(m, o, sgd(m)), r"models and optimizers as lists: .*prepare\(\[a, b\]"),
    "no optimizer": (lambda m, _: prepare(m, [], [1]), "an empty list"),
    "a list with something else": (
        lambda m, o: prepare(m, [o, 3], [1]),
        "a torch optimizer, or a list of them, not a int",
    ),
    "two and a loader": (lambda m, o: prepare(m, o, sgd(m), [1]), "several models and optimizers as lists"),
    "a scheduler": (
        lambda m, o: prepare(m, o, [1], torch.optim.lr_scheduler.StepLR(o, 3)),
        "no learning rate scheduler: make it after mt.prepare",
    ),
    "two loaders": (lambda m, o: prepare(m, o, [1], [2]), "not a list too: other loaders"),
    "a model and its weights": (lambda m, o: prepare([m, {}], o), "as its model, or a list of them, not a dict"),
    "the wrong order": (lambda m, o: prepare(o, m), "as its model, or a list of them, not a SGD"),
}


@pytest.mark.parametrize("what", WRONGLY_GIVEN)
def test_prepare_says_what_it_takes(what: str) -> None:
    """With or without a job, and before anything is sent."""
    given, text = WRONGLY_GIVEN[what]
    with pytest.raises(UsageError, match=text):
        given(*two())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_schedule_by_the_steps_of_one_machine_is_named(when: str, caplog: pytest.LogCaptureFixture) -> None:
    """It would end in the middle of its curve, in silence: each of two devices takes half of the steps."""

    def script(session: LearnerSession, rank: int) -> None:  # noqa: ARG001
        model, optimizer = two()
        loader = DataLoader(TensorDataset(torch.zeros(40, 6)), batch_size=4)
        if when == "before":
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3 * len(loader))
        model, optimizer, loader = session.prepare_with_loader(model, optimizer, loader)
        assert len(loader) == 5
        if when == "after":
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3 * len(loader))
        session.finish()

    with LocalDaemon(2) as daemon:
        daemon.run(script)
    told = [record.getMessage() for record in caplog.records]
    if when == "after":
        assert told == []
    else:
        (only,) = told
        assert "expects 10 in an epoch, and each device takes 5; make it after mt.prepare" in only
