"""What scripts do around `optimizer.step()`, in every mode that there is: it works, or is refused by name.

All learners have the same data, so wherever the mean of what they have is what each has, a job is one process without a
mesh. What other modes make of their learners' weights: `test_scripts_in_periods.py` (parts that take turns, `sma`),
`test_inner_muon.py`, `test_overlapped_periods.py`; and of gradients that come late: `test_stale_accumulation.py`.
"""

import importlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo

from meshtrain.errors import NotSupported
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.session import LearnerSession
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from tests.everysetting import MODES
from tests.tiers import mostly_slow
from tests.train import scripts
from tests.train.localdaemon import LocalDaemon
from tests.train.replicas import assert_equal, batch, net
from tests.train.scripts import Learner, Script

STEPS, SAMPLES = 12, 12
EXACT = Script("a schedule, accumulation, groups, a frozen parameter, BatchNorm", norm=True, frozen=True, groups=True,
               schedule=True, accumulate=True)  # fmt: skip
ROUNDED = Script("autocast, a scaler, clipping", scaled=True, clip=True)
TOLERANCES = {EXACT: 1e-5, ROUNDED: 0.05}  # of bfloat16 8 bits are left
COMPILERS = ("g++", "clang++", "cl")
Make = Callable[[Any], torch.optim.Optimizer]


def maker(sync: SyncSettings) -> Make:
    """What makes an optimizer of parameter groups: SGD without momentum, AdamW, or SGD with it, as the mode demands."""
    if sync.signs:
        return lambda groups: torch.optim.SGD(groups, lr=0.01)
    return (lambda groups: torch.optim.AdamW(groups, lr=0.01)) if sync.muon else scripts.momentum


def is_one_process(sync: SyncSettings, script: Script) -> bool:
    """Whether learners with the same data are one, in this mode. With a bound own gradients are clipped by the norm of
    an earlier round."""
    plain = not sync.period or (sync.plain_mean and not sync.central and not sync.delay)
    return plain and not sync.muon and not (script.clip and sync.staleness and not sync.period)


def trained(script: Script, sync: SyncSettings) -> list[Learner]:
    learners = [Learner(script, maker(sync)) for _ in range(2)]

    def run(session: LearnerSession, rank: int) -> None:
        learner = learners[rank]
        session.prepare(learner.model, learner.optimizer, learner.scaler)
        learner.begin()
        for number in range(STEPS):
            learner.step(batch(number, SAMPLES), session.clip_grad_norm_, session.no_sync)

    fixed = "fixed" if sync.staleness and not sync.fragments else None
    with LocalDaemon(2, sync=sync.text(), visibility=fixed) as daemon:
        daemon.run(run)
        assert all(len(set(ranks.values())) == 1 for ranks in daemon.hashes.values()), "O9: base hashes"
        assert len(daemon.hashes) == daemon.round > 0
    assert_equal([learner.model for learner in learners])
    return learners


def alone(script: Script, sync: SyncSettings) -> Learner:
    """One process in plain torch. Of `demo` the step is on signs, and of `bsp,accumulate=A` on the mean of A steps."""
    learner = Learner(script, maker(sync))
    learner.begin()
    for number in range(STEPS):
        if number % sync.accumulate == 0:
            learner.optimizer.zero_grad()
        learner.backward(batch(number, SAMPLES), share=1 / sync.accumulate)
        if (number + 1) % sync.accumulate == 0:
            learner.apply(each=torch.Tensor.sign_ if sync.signs else lambda _: None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a schedule's step before the optimizer's first
            learner.advance()
    return learner


def far(ours: Learner, theirs: Learner, *, buffers: bool) -> float:
    """Largest relative distance of any tensor."""
    worst = 0.0
    for (name, p), q in zip(ours.model.state_dict().items(), theirs.model.state_dict().values(), strict=True):
        assert torch.isfinite(p).all(), name
        if buffers or name in dict(ours.model.named_parameters()):
            worst = max(worst, float((p.double() - q.double()).norm() / q.double().norm().clamp_min(1e-12)))
    return worst


@pytest.mark.parametrize("script", [EXACT, ROUNDED], ids=lambda script: script.name)
@pytest.mark.parametrize("mode", MODES)
def test_scripts_work_in_each_mode(mode: str, script: Script) -> None:
    """O3 to O6, O8: replicas and base hashes are bit-equal; where a job is one process, it has that one's weights and
    statistics."""
    sync = sync_settings(mode)
    ours = trained(script, sync)[0]
    assert far(ours, Learner(script), buffers=False) > 0.02, "it is trained"
    if script.frozen:
        assert torch.equal(ours.model.get_parameter("0.bias"), Learner(script).model.get_parameter("0.bias"))
    if is_one_process(sync, script):
        assert far(ours, alone(script, sync), buffers=True) <= TOLERANCES[script]


def rounding(sync: SyncSettings) -> float:
    """How far two runs may be apart whose sums are made in other orders. AdamW divides by small numbers."""
    return 1e-4 if sync.muon else TOLERANCES[EXACT]


def compiled(sync: SyncSettings, backend: str) -> Learner:
    """Trained with a compiled model, which is traced anew, and is not given up for having been traced too often."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours = trained(replace(EXACT, compiled=True, backend=backend), sync)[0]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "it is compiled"
    assert far(ours, Learner(EXACT), buffers=False) > 0.02, "it is trained"
    return ours


@pytest.mark.parametrize("mode", mostly_slow(MODES))
def test_compiled_models_work(mode: str) -> None:
    """In every mode a compiled model is trained as it is without, to rounding: what it is compiled to knows nothing of
    the rounds behind its backward pass, nor of who moves its weights."""
    sync = sync_settings(mode)
    ours = compiled(sync, "eager")
    assert far(ours, trained(EXACT, sync)[0], buffers=True) <= rounding(sync)
    if is_one_process(sync, EXACT):
        assert far(ours, alone(EXACT, sync), buffers=True) <= TOLERANCES[EXACT]


@pytest.fixture(scope="module")
def _makes_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Torch's default compiler, without processes that outlive a test. What it has made once it finds again."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip(f"torch compiles for this processor with {' or '.join(COMPILERS)}, and there is none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, for its own use of what it has deprecated
        compiler = importlib.import_module("torch._inductor.compile_fx")
    with pytest.MonkeyPatch.context() as patch, compiler.config.patch(compile_threads=1):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("_makes_code")
def test_models_that_are_compiled_to_machine_code_work(mode: str) -> None:
    """With the compiler that `torch.compile(model)` has without another word: in every mode replicas and hashes are
    bit-equal, and the weights those without it, but for the order in which sums are made."""
    sync = sync_settings(mode)
    ours = compiled(sync, "inductor")
    assert far(ours, trained(EXACT, sync)[0], buffers=True) <= rounding(sync)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "bsp"])
def test_several_optimizers_are_refused_by_name(mode: str) -> None:
    """O11; with `bsp` they work: `test_several_optimizers.py`."""

    def script(session: LearnerSession, _: int) -> None:
        model = net()
        session.prepare(model, JointOptimizer([torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 2)]))

    told = rf"^--sync {re.escape(mode)} with several optimizers: .*\. Use --sync bsp$"
    with LocalDaemon(1, sync=mode) as daemon, pytest.raises(NotSupported, match=told):
        daemon.run(script)
