"""A script that compiles nothing never imports torch's compiler; one that does has the same weights."""

import ast
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshtraind.learner import late_compiler
from meshtraind.learner.late_compiler import CHANGES, COMPILER, DISABLED
from meshtraind.learner.process import SCRIPT_RUN

TIMEOUT_S = 100.0

TRAINS = """
import sys
import torch
parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
optimizers = [torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.9), torch.optim.AdamW(parameters[1:], lr=0.1)]
def step(optimizer):
    optimizer.zero_grad()
    sum((each ** 2).sum() for each in parameters).backward()
    optimizer.step()
for optimizer in optimizers:
    step(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.is_grad_enabled()
"""
COMPILES = """
compiled = torch.compile(step, backend="eager")
for optimizer in optimizers:
    compiled(optimizer)
import torch._dynamo.utils
told.append(dict(torch._dynamo.utils.counters["frames"]))
"""
TELLS = "print(told, [each.tolist() for each in parameters])\n"


def trained(folder: Path, text: str, *, as_python_would: bool = False) -> Any:
    """What a script has printed, as a learner's or as any other."""
    script = folder / "train.py"
    script.write_text(text, "utf-8")
    how = [] if as_python_would else [str(SCRIPT_RUN), str(folder / "record"), "", ""]
    done = subprocess.run(
        [sys.executable, *how, "train.py"], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(f"[{done.stdout.replace('] [', '], [')}]")


COUNTED = "told = ['torch._dynamo' in sys.modules]\n"


@pytest.mark.slow
def test_an_optimizer_alone_imports_no_compiler(tmp_path: Path) -> None:
    """The quick tests below prove what becomes of torch's own when it comes; here torch is the real one."""
    told, _ = trained(tmp_path, TRAINS + COUNTED + TELLS)
    assert told == [False]


@pytest.mark.long
def test_from_its_import_on_the_compiler_is_told_again(tmp_path: Path) -> None:
    """Of each function that it is not to trace, when that is called."""
    imports = (
        "import torch._dynamo\nstep(optimizers[0])\n"
        "for each in (torch.optim.Optimizer.zero_grad.__wrapped__, torch.optim.Optimizer.state_dict.__wrapped__):\n"
        "    told.append(each.__dict__.get('__dynamo_disable', each) is not each)\n"
    )
    told, _ = trained(tmp_path, TRAINS + COUNTED + imports + TELLS)
    imported, called_since, not_called_since = told
    assert not imported
    assert called_since
    assert not not_called_since, "it is torch's to say so when it is called"


@pytest.mark.long
def test_a_compiled_step_is_what_it_is_without_a_job(tmp_path: Path) -> None:
    """It ends at the same weights to the bit; what stands before a step is a frame more to the compiler, and all of
    it is traced."""
    text = f"{TRAINS}told = []\n{COMPILES}{TELLS}"
    ([frames], weights), ([usual], same) = trained(tmp_path, text), trained(tmp_path, text, as_python_would=True)
    assert weights == same
    assert frames == {"total": usual["total"] + 1, "ok": usual["ok"] + 1}


# --- the same, of modules that look like torch's ---


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Imports what looks like the compiler, which is not there before."""
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)
    monkeypatch.setattr(late_compiler, "_unheard", [])

    def come() -> None:
        module = ModuleType(COMPILER)
        monkeypatch.setitem(sys.modules, COMPILER, module)
        CHANGES[COMPILER](module)

    return come


def of_torch(told: list[str]) -> ModuleType:
    """torch._compile, as far as it matters here."""
    module = ModuleType("torch._compile")

    def _disable_dynamo(fn: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
        if fn is None:
            return functools.partial(module.__dict__["_disable_dynamo"], recursive=recursive)

        @functools.wraps(fn)
        def inner(*args: Any) -> Any:
            replaced = getattr(fn, DISABLED, None)
            if replaced is None:
                told.append(f"{fn.__name__} is not traced, recursive: {recursive}")
                replaced = fn
                setattr(fn, DISABLED, lambda *of: fn(*of))
            return replaced(*args)

        return inner

    module.__dict__["_disable_dynamo"] = _disable_dynamo
    CHANGES["torch._compile"](module)
    return module


def double(value: int) -> int:
    return 2 * value


def test_the_compiler_hears_of_a_function_once_it_is_there(compiler: Callable[[], None]) -> None:
    told: list[str] = []
    module = of_torch(told)
    called, others = module._disable_dynamo(lambda value: double(value)), module._disable_dynamo(recursive=False)
    named = others(functools.wraps(double)(lambda value: double(value)))
    assert (called(1), named(2), told) == (2, 4, [])
    compiler()
    assert (called(1), named(2), named(3)) == (2, 4, 6)
    assert told == ["<lambda> is not traced, recursive: True", "double is not traced, recursive: False"]


def test_what_is_defined_behind_the_compiler_is_torchs_alone(compiler: Callable[[], None]) -> None:
    told: list[str] = []
    module = of_torch(told)
    compiler()
    assert module._disable_dynamo(lambda value: double(value))(1) == 2
    assert len(told) == 1


def test_a_torch_with_other_names_is_left_alone() -> None:
    for name in CHANGES:
        CHANGES[name](ModuleType(name))


class Gradients:
    """torch, as far as a step turns gradients off."""

    def __init__(self) -> None:
        self.enabled = True

    def set_grad_enabled(self, enabled: bool) -> "Gradients":
        self._before, self.enabled = self.enabled, enabled
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> None:
        self.enabled = self._before


class Failed(Exception):
    pass


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_step_has_gradients_off_as_torch_has_them(
    compiler: Callable[[], None], monkeypatch: pytest.MonkeyPatch, differentiable: bool
) -> None:
    """On again behind it, also where it raises; once the compiler is there, torch's own wrapping runs."""
    gradients, seen = Gradients(), list[object]()
    monkeypatch.setitem(sys.modules, "torch", gradients)
    module = ModuleType("torch.optim.optimizer")

    def separate(step: Callable[..., None]) -> Callable[..., None]:
        def separated(*args: Any) -> None:
            seen.append("torch's")
            step(*args)

        return separated

    module.__dict__["_use_grad_for_differentiable"] = separate
    CHANGES["torch.optim.optimizer"](module)

    class Optimizer:
        def __init__(self) -> None:
            self.defaults = {"differentiable": differentiable}

        @module._use_grad_for_differentiable  # type: ignore[untyped-decorator]
        def step(self, fails: bool = False) -> None:
            seen.append(gradients.enabled)
            if fails:
                raise Failed

    optimizer = Optimizer()
    optimizer.step()
    with pytest.raises(Failed):
        optimizer.step(True)
    assert gradients.enabled
    assert seen == [differentiable, differentiable]
    compiler()
    optimizer.step()
    assert seen[2] == "torch's"
