"""O4: clipping equals torch's, one limit rules a round on all peers, and clipping without an effect is seen."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshtrain.errors import UsageError
from meshtrain.train.optim.clipping import Clipping, UntouchedGradients, checked, covers, scale


def with_gradients(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    model(torch.randn(8, 6)).square().sum().backward()
    return model


def squared_norm(model: nn.Module) -> float:
    return math.fsum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 0.5, 10.0, 1e6, math.inf])
def test_equals_torch(max_norm: float) -> None:
    """To 1e-6, also where nothing is to be clipped."""
    ours, theirs = with_gradients(), with_gradients()
    scale(ours.parameters(), Clipping.coefficient(squared_norm(ours), max_norm))
    nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


def test_gradients_of_zero_stay_zero() -> None:
    assert Clipping.coefficient(0.0, 1.0) == 1.0
    assert Clipping.coefficient(0.0, 0.0) == 0.0


def test_unused_parameters_are_left_alone() -> None:
    model = with_gradients()
    model[0].bias.grad = None
    scale(model.parameters(), 0.5)
    assert model[0].bias.grad is None


@pytest.mark.parametrize("wrong", [-1.0, math.nan, "much", None, torch.ones(2)])
def test_limits_that_are_none(wrong: float) -> None:
    for use in (checked, Clipping().note, lambda limit: Clipping.coefficient(1.0, limit)):
        with pytest.raises(UsageError, match=r"mt\.clip_grad_norm_\(\.\.\., max_norm="):
            use(wrong)


def test_limit_may_be_a_tensor() -> None:
    assert checked(torch.tensor(2.0)) == 2.0  # type: ignore[arg-type]


def test_bind_carries_the_limit_of_the_step_before() -> None:
    clipping = Clipping()
    carried = []
    for limit in (1.0, 2.0, None, 3.0, 3.0):
        carried.append(clipping.bound)
        if limit is not None:
            clipping.note(limit)
        clipping.step_ended()
    assert carried == [None, 1.0, 2.0, None, 3.0]


def test_leader_rules() -> None:
    """O3, O4: what its bind carried, also that it does not clip; of its first bind, which could not know, not."""
    clipping = Clipping()
    assert clipping.ruling(None, known=False) is None
    clipping.note(5.0)
    assert clipping.ruling(2.0, known=True) == 2.0
    assert clipping.ruling(None, known=True) is None
    assert clipping.ruling(None, known=False) == 5.0
    clipping.step_ended()
    assert clipping.ruling(None, known=False) == 5.0, "a round of first steps that comes while no step is at hand"
    clipping.note(6.0)
    assert clipping.ruling(None, known=False) == 6.0


def test_all_parameters_or_a_part() -> None:
    """The norm that travels is of all means."""
    model = with_gradients()
    weight, bias = list(model[0].parameters())
    assert covers(model.parameters(), list(model.parameters()))
    assert not covers(model[0].parameters(), model.parameters())
    assert not covers(weight, model.parameters())
    assert covers(weight, [weight])
    assert not covers([*model.parameters(), nn.Parameter(torch.zeros(1))], model.parameters())
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    assert covers([*model.parameters(), frozen], model.parameters()), "as model.parameters() of a partly frozen model"
    bias.grad = None
    assert covers([p for p in model.parameters() if p.grad is not None], model.parameters())


def plain_clipping(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)


def clipping_by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e6)


def by_hand(model: nn.Module) -> None:
    for p in list(model.parameters())[::-1]:
        assert p.grad is not None
        p.grad *= 0.5


def replaced(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad.clamp(-1, 1)


def dropped(model: nn.Module) -> None:
    model.zero_grad()


@pytest.mark.parametrize("change", [plain_clipping, clipping_by_value, by_hand, replaced, dropped])
def test_change_without_effect_is_an_error(change: Callable[[nn.Module], None]) -> None:
    """O4: also where torch's clipping multiplies by 1."""
    model = with_gradients()
    untouched = UntouchedGradients(list(model.named_parameters()))
    untouched.remember()
    untouched.check()
    change(model)
    with pytest.raises(UsageError, match=r"gradient of 0\.weight was .*mt\.clip_grad_norm_"):
        untouched.check()


def test_changes_that_are_allowed() -> None:
    """Reading, remembering again (after GradScaler's unscaling), and anything once the step has ended."""
    model = with_gradients()
    untouched = UntouchedGradients(list(model.named_parameters()))
    by_hand(model)
    untouched.check()
    untouched.remember()
    nn.utils.get_total_norm([p.grad for p in model.parameters() if isinstance(p.grad, Tensor)])
    untouched.check()
    by_hand(model)
    untouched.remember()
    untouched.check()
    untouched.forget()
    by_hand(model)
    untouched.check()


def test_gradient_that_appears_is_seen() -> None:
    model = with_gradients()
    weight = next(model.parameters())
    weight.grad = None
    untouched = UntouchedGradients(list(model.named_parameters()))
    untouched.remember()
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(UsageError, match="replaced"):
        untouched.check()
