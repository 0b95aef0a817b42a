"""R9, O8, --sync muloco: Muon takes the local steps of hidden matrices, AdamW all others (ALGORITHMS section 5)."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.errors import NotSupported
from meshtrain.examples.gpt import GPT, GPTConfig
from meshtrain.train.model.memory_needs import model_size
from meshtrain.train.partial.progressive import Progressive
from meshtrain.train.periods.inner_muon import hidden_matrices
from meshtrain.train.session import LearnerSession
from meshtrain.train.step.preparation import check_optimizer, describe_model
from meshwire.codecs.registry import FP32
from meshwire.sync_modes.mode import sync_settings
from tests.train.localdaemon import AT_THE_SCRIPTS_RATE, LocalDaemon

RATE, DECAY, PERIOD, STEPS, MEMBERS = 0.02, 0.1, 2, 8, 2
# Relative. A sum in another order may round one value to another bfloat16: a millionth more of momentum moves a matrix
# by 7e-5. A step that is 1 % too large moves it by 4e-3.
TOLERANCE = 2e-4
SETTINGS = sync_settings(f"muloco:{PERIOD}")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3))


MATRICES = ("0.weight", "2.weight")  # 4.weight is the output layer's


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def trained(*, scheduled: bool) -> list[nn.Sequential]:
    """The members' models in the end."""
    replicas = [net() for _ in range(MEMBERS)]

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(replicas[rank], adamw(replicas[rank]))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) if scheduled else None
        for number in range(STEPS):
            step(model, optimizer, 100 * rank + number)
            if schedule is not None:
                schedule.step()

    with LocalDaemon(MEMBERS, sync=SETTINGS.text(), **AT_THE_SCRIPTS_RATE) as daemon:
        daemon.run(script)
    return replicas


def orthogonalised(momentum: Tensor) -> Tensor:
    """Five quintic Newton-Schulz iterations, in bfloat16 (Jordan et al. 2024)."""
    x = momentum.bfloat16()
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm()
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), wide, beta=3.4445)
    return (wide if x.shape[0] <= x.shape[1] else wide.T).float()


class ByHand:
    """One member's inner steps, in a few lines."""

    def __init__(self, model: nn.Module) -> None:
        self.matrices = [model.get_parameter(name) for name in MATRICES]
        self.momenta = [torch.zeros_like(each) for each in self.matrices]
        of_muon = {id(each) for each in self.matrices}
        others = [each for each in model.parameters() if id(each) not in of_muon]
        self.others = torch.optim.AdamW(others, lr=RATE, weight_decay=DECAY)
        self.rate = RATE

    def zero_grad(self) -> None:
        for each in self.matrices:
            each.grad = None
        self.others.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.others.param_groups[0]["lr"] = self.rate
        self.others.step()
        for matrix, momentum in zip(self.matrices, self.momenta, strict=True):
            assert matrix.grad is not None
            momentum.mul_(0.95).add_(matrix.grad, alpha=0.05)
            update = orthogonalised(matrix.grad.lerp(momentum, 0.95))
            matrix.mul_(1 - self.rate * DECAY)
            matrix.sub_(self.rate * 0.2 * math.sqrt(max(matrix.shape)) * update)


def by_hand(*, scheduled: bool = False) -> nn.Module:
    """MuLoCo of all members: H inner steps each, then Nesterov's step on the mean of what they have changed."""
    base, models = net(), [net() for _ in range(MEMBERS)]
    inner: list[Any] = [ByHand(model) for model in models]
    outer = torch.optim.SGD(base.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for first in range(0, STEPS, PERIOD):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            model.load_state_dict(base.state_dict())
            for number in range(first, first + PERIOD):
                optimizer.rate = RATE * 0.5 ** (number // 3) if scheduled else RATE
                step(model, optimizer, 100 * rank + number)
        for held, *places in zip(base.parameters(), *(model.parameters() for model in models), strict=True):
            held.grad = sum((held.detach() - place.detach() for place in places), torch.zeros(())) / MEMBERS
        outer.step()
    return base


@pytest.mark.parametrize("scheduled", [False, True])
def test_members_step_as_its_authors_do(scheduled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Muon for hidden matrices with the learning rate and the decay of the script's AdamW, as they are at each step;
    Nesterov outside. Replicas are bit-equal."""
    models = trained(scheduled=scheduled)
    assert "Muon steps 2 matrices, AdamW all other parameters, 4.weight among them; use_muon=True" in caplog.text
    expected = by_hand(scheduled=scheduled)
    for (name, p), q, wanted in zip(
        models[0].named_parameters(), models[1].parameters(), expected.parameters(), strict=True
    ):
        assert torch.equal(p, q), name
        assert float((p - wanted).detach().norm() / wanted.detach().norm()) <= TOLERANCE, name


def test_a_step_turns_all_directions_alike() -> None:
    """ALGORITHMS 5: singular values of what Muon adds are near 1, but for its scale. (The net's gradients have full
    rank.)"""
    model = net()
    before = model.get_parameter("0.weight").detach().clone()

    def script(session: LearnerSession, _rank: int) -> None:
        step(*session.prepare(model, adamw(model)), 1)
        moved = before * (1 - RATE * DECAY) - model.get_parameter("0.weight").detach()
        scale = RATE * 0.2 * math.sqrt(12)
        singular = torch.linalg.svdvals(moved / scale)
        assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3

    with LocalDaemon(1, sync="muloco:5") as daemon:
        daemon.run(script)


def alone(numbers: range, daemon: LocalDaemon, save: Path | None = None) -> nn.Sequential:
    """One member's model after these steps; where there is a folder, the state after round 2 is written there."""
    model = net()

    def script(session: LearnerSession, rank: int) -> None:
        prepared, optimizer = session.prepare(model, adamw(model))
        if save is not None:
            daemon.save(rank, 2, save)
        for number in numbers:
            step(prepared, optimizer, number)

    daemon.run(script)
    return model


def test_muons_momentum_is_saved_with_the_state(tmp_path: Path) -> None:
    """O8: a learner that begins from a state has the momentum of the one that has written it. Here it is its own, so it
    ends as if it had gone on."""
    with LocalDaemon(1, sync=SETTINGS.text()) as daemon:
        whole = alone(range(STEPS), daemon, tmp_path)
        ((_, saved),) = daemon.saved
    with LocalDaemon(1, sync=SETTINGS.text()) as daemon:
        daemon.begin_from(tmp_path, 2, saved.units)
        again = alone(range(2 * PERIOD, STEPS), daemon)
    for (name, p), q in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_the_scripts_optimizer_holds_nothing_of_muons() -> None:
    """So a script may save and load it as ever: torch's AdamW cannot be given another optimizer's state."""
    model = net()

    def script(session: LearnerSession, _rank: int) -> None:
        prepared, optimizer = session.prepare(model, adamw(model))
        for number in range(PERIOD + 1):
            step(prepared, optimizer, number)
        assert {id(each) for each in optimizer.state} == {
            id(each) for name, each in model.named_parameters() if name not in MATRICES
        }
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(prepared, optimizer, PERIOD + 1)

    with LocalDaemon(1, sync=SETTINGS.text()) as daemon:
        daemon.run(script)


def test_a_void_round_leaves_no_nan_in_muons_momentum() -> None:
    """V1, O8: the state that the steps have left is forgotten, Muon's too, and all go on from the base."""
    model = net()

    def script(session: LearnerSession, _rank: int) -> None:
        prepared, optimizer = session.prepare(model, adamw(model))
        for number in range(STEPS):
            optimizer.zero_grad()
            loss = prepared(torch.full((1, 4), 0.5 + number)).square().sum()
            (loss * (float("nan") if number == PERIOD else 1.0)).backward()
            optimizer.step()

    with LocalDaemon(1, sync=SETTINGS.text(), on_nan="skip") as daemon:
        daemon.run(script)
        verdicts = [each.done is not None and each.done.void for each in daemon.rounds.rounds.values()]
    assert verdicts == [False, True, False, False]
    assert all(torch.isfinite(each).all() for each in model.parameters())


# What is Muon's


class Position(nn.Module):
    """A model whose positions are no module, and whose output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(9, 4)
        self.position_embedding = nn.Parameter(torch.zeros(3, 4))
        self.body = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.token.weight


def growing() -> nn.Module:
    return Progressive(
        [nn.Linear(4, 4), nn.Linear(4, 4)], [nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)) for _ in "ab"], every=3
    )


BLOCK = ("attention.qkv", "attention.project", "expand", "project")


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (net(), MATRICES),
        (GPT(GPTConfig(num_layers=2)), [f"blocks.{n}.{part}.weight" for n in range(2) for part in BLOCK]),
        (Position(), ["body.weight"]),
        (growing(), ["stages.0.weight", "stages.1.weight", "heads.0.0.weight", "heads.1.0.weight"]),
        (nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 2)), ["0.weight_ih_l0", "0.weight_hh_l0"]),
    ],
    ids=["perceptron", "gpt", "tied", "growing", "lstm"],
)
def test_matrices_between_embeddings_and_outputs_are_muons(model: nn.Module, names: Sequence[str]) -> None:
    """And peers compare which they are: a member whose Muon steps others is refused as one with another optimizer."""
    prepared = describe_model(model, adamw(model), SETTINGS, FP32, None)
    found = [name for name, each in model.named_parameters() if any(each is one for one in prepared.of_muon)]
    assert found == list(names)
    assert "; Muon: tensors " in prepared.tensors.manifest.optimizer
    assert not describe_model(model, adamw(model), sync_settings("local:2"), FP32, None).of_muon
    sizes = [model_size(prepared.tensors, adamw(model), of_muon).optimizer_state for of_muon in ((), prepared.of_muon)]
    assert sizes[0] - sizes[1] == 4 * sum(each.numel() for each in prepared.of_muon)


def test_a_param_group_may_say_what_is_muons() -> None:
    model = net()
    hidden, output = [model.get_parameter(name) for name in MATRICES], model.get_parameter("4.weight")
    rest = [each for each in model.parameters() if each.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": hidden, "use_muon": False},
        {"params": [output], "use_muon": True},
        {"params": rest},
    ]
    found = hidden_matrices(model, [model], torch.optim.AdamW(groups))
    assert [id(each) for each in found] == [id(output)]


# Refusals


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), r"SGD is neither: use torch\.optim\.AdamW"),
        (lambda model: torch.optim.Adam(model.parameters()), "Adam is neither: .* or submit with --sync diloco:H"),
        (lambda model: adamw(model, fused=True), "group 0 of AdamW has fused=True"),
        (lambda model: adamw(model, maximize=True), "group 0 of AdamW has maximize=True"),
    ],
)
def test_other_optimizers_are_refused_by_name(made: Any, complaint: str) -> None:
    model = net()
    with pytest.raises(NotSupported, match=complaint):
        check_optimizer(made(model), SETTINGS)
    check_optimizer(made(model), sync_settings("diloco:2"))


def test_a_torch_without_muon_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    complaint = r"torch 2\.8\.0 has none: install torch 2\.9 or newer on all devices, or submit with --sync diloco:H"
    with pytest.raises(NotSupported, match=complaint):
        check_optimizer(adamw(net()), SETTINGS)


def test_a_model_without_hidden_matrices_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2))
    with pytest.raises(NotSupported, match="kernels of convolutions are no matrices"):
        describe_model(model, adamw(model), SETTINGS, FP32, None)


def test_a_script_whose_optimizer_is_muon_keeps_it() -> None:
    """Then there is nothing that another one would have to step."""
    model = nn.Linear(3, 4, bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=RATE)
    check_optimizer(optimizer, SETTINGS)
    assert not describe_model(model, optimizer, SETTINGS, FP32, None).of_muon
