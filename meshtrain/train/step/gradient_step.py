"""What the script's `optimizer.step()` does where each backward pass is a round (`--sync bsp`, `ssp:S`, `demo`).

With s=0 `p.grad` holds the means of the round, which `backward()` has waited for: the optimizer steps on them, as the
script may have clipped them. With s > 0 `p.grad` is this learner's own and has left already: nothing is stepped on
here, and rounds that have arrived are applied at the boundary that follows.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from meshtrain.errors import UsageError
from meshtrain.train.model.frozen_check import FrozenCheck
from meshtrain.train.model.joint_optimizer import JointOptimizer
from meshtrain.train.model.step_patch import ReplacedStep
from meshtrain.train.optim import clipping
from meshtrain.train.optim.clipping import UntouchedGradients
from meshtrain.train.optim.lent_gradients import LentGradients
from meshtrain.train.optim.loss_scaling import UNKNOWN_SCALER, LossScaling, called_by_scaler
from meshtrain.train.optim.momentum_handover import CLIPPED_LATE
from meshtrain.train.optim.optimizer_step import run_closure
from meshtrain.train.optim.rehearsal import Rehearsal
from meshtrain.train.step.base import Base
from meshtrain.train.step.boundary import StepBoundary
from meshtrain.train.step.contribution import StepContribution
from meshtrain.train.step.gradients import GradientHooks


class GradientStep:
    """From its creation until `close`, the script's `optimizer.step()` is this object's.

    Args:
        hooks: have handed the gradients of the step over.
        lent: with s=0 the means that they have become.
        staleness: the bound s.

    Attributes:
        rehearsal: of steps over epochs of which there is nothing for this learner (X4).
    """

    def __init__(
        self,
        hooks: GradientHooks,
        base: Base,
        contribution: StepContribution,
        boundary: StepBoundary,
        scaling: LossScaling,
        untouched: UntouchedGradients,
        lent: LentGradients,
        staleness: int,
    ) -> None:
        self._hooks = hooks
        self._base = base
        self._contribution = contribution
        self._boundary = boundary
        self._scaling = scaling
        self._untouched = untouched
        self._lent = lent
        self._staleness = staleness
        optimizer = base.step.optimizer
        self.rehearsal = Rehearsal(base.means.parameters(), base.buffers, scaling, hooks)
        self._joint = optimizer if isinstance(optimizer, JointOptimizer) else None
        self._catching_up = False  # rehearses until the script is where the rounds are
        self._passes = 0  # of the script's steps, those that were in a round with a later one
        self._frozen = FrozenCheck(base.means.tensors, optimizer)
        self._replaced = ReplacedStep(optimizer, self._step)
        scaling.watch(optimizer, self._after_scaler, self.rehearsal.updated, untouched.remember)

    @property
    def number(self) -> int:
        """The number of the script's step that is being computed; the first one is 1. Several of them make one of the
        mesh where gradients wait for further ones (O6)."""
        return self._contribution.step + self._passes

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate, as O6 (accumulation) has it."""
        return self._hooks.no_sync()

    def end_period(self) -> bool:
        """Gradients of steps that wait for further ones (O6) become a round now. Returns whether there were any.

        Raises as `Base.apply`, and UsageError where the script changes gradients between backward() and step() itself.
        """
        if not self._contribution.holds:
            return False
        done = self._hooks.contribute_early()
        if done is not None:
            if done.void:
                self._base.buffers.restore()
            self._boundary.apply(done)
        self._hooks.next_step()
        self._passes -= 1  # the last of those that waited was the round's
        self._boundary.end_step(done)
        self._base.options.clipping.step_ended()
        return True

    def close(self) -> None:
        """The optimizer steps as it did before."""
        self._hooks.close()
        self._replaced.close()
        self._scaling.close()

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self.rehearsal.on:
            rehearsed = self.rehearsal.step(closure)
            self._pass_turn()
            return rehearsed
        loss = run_closure(closure)
        self._check()
        if self._contribution.sealed:
            if self._joint is not None:
                self._joint.check_turn()
            self._end_step()
            self._pass_turn()
        elif self._hooks.unstepped:
            self._end_pass()
        elif self._staleness == 0:
            if self._joint is not None:
                self._joint.check_once()
            self._base.step.original()  # without a backward pass there is no step of the mesh
        return loss

    def _pass_turn(self) -> None:
        if self._joint is not None:
            self._joint.passed += 1
            self.take_turns()

    def take_turns(self) -> None:
        """Of several optimizers: rehearses passes until the script is where the rounds are. It is elsewhere where
        rounds have gone on without it, and where it began in their middle."""
        if self._joint is None or (self.rehearsal.on and not self._catching_up):
            return
        apart = self._joint.is_apart(self._boundary.decided)
        if apart and not self._catching_up:
            self.rehearsal.begin()
        elif not apart and self._catching_up:
            self.rehearsal.end()
        self._catching_up = apart

    def stop_catching_up(self) -> None:
        """What is rehearsed until the script is where the rounds are ends; `take_turns` begins it again."""
        if self._catching_up:
            self._catching_up = False
            self.rehearsal.end()

    def _after_scaler(self) -> None:
        """A GradScaler that has seen an overflow has not called `optimizer.step()`; the step is over all the same."""
        if self._contribution.sealed and not self.rehearsal.on:
            self._check()
            self._end_step(skip=True)
        elif self._hooks.unstepped and not self.rehearsal.on:
            self._end_pass()

    def _end_pass(self) -> None:
        """The script has stepped, and its gradients wait for those of further steps."""
        self._passes += 1
        self._untouched.note()
        self._hooks.next_pass()

    def _end_step(self, *, skip: bool = False) -> None:
        """Returns when the next step may start, with the model as it is to compute with.

        Args:
            skip: the optimizer does not step on the round in `p.grad` (s=0).
        """
        done = self._contribution.done
        self._untouched.note()
        if done is not None:
            if not skip:
                self._base.options.hyperparameters.note()
                # Equal options may have changed since the bind, alike on all peers, as in a script without a job.
                self._base.step_under(done, self._base.options.of_another(done, self._contribution.hyperparameters))
            if not done.start:  # other rounds may come before the next step
                self._lent.own_all()
            self._base.conclude(done)
        self._hooks.next_step()
        self._boundary.end_step(done)
        self._base.options.clipping.step_ended()

    def _check(self) -> None:
        self._boundary.check_step()
        if not self._scaling.active and called_by_scaler():
            raise UsageError(UNKNOWN_SCALER)
        self._frozen.check()
        self._hooks.check_synchronised()
        if self._staleness:
            self._untouched.check()
        elif self._base.means.tensors.manifest.momentum is not None and (changed := self._untouched.changed()):
            raise UsageError(f"{changed} between backward() and optimizer.step(): {CLIPPED_LATE}")

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """By O4 (clipping): with s=0 clips `p.grad`, with s > 0 all rounds to come.

        Returns:
            The norm before clipping: with s>0 of the newest round that was applied, 0 before the first one.

        Raises:
            UsageError: with s>0, for some of the trained parameters only.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        trained = self._base.means.parameters()
        covers, done = clipping.covers(given, trained), self._contribution.done
        if self._staleness:
            if not covers:
                raise UsageError(
                    "mt.clip_grad_norm_ of some parameters only: with a bound above 0 rounds are clipped by the norm "
                    "of all of them: give it model.parameters()"
                )
            self._base.options.clipping.note(max_norm)
            return torch.tensor(math.sqrt(self._base.squared_norm))
        if covers and self._hooks.unstepped:  # of no effect, but for a round that ends early
            self._base.options.clipping.note(max_norm)
            norm = torch.nn.utils.clip_grad_norm_(given, max_norm)
            self._untouched.remember()
            return norm
        if not covers or done is None or done.void or self._untouched.changed() is not None:
            return torch.nn.utils.clip_grad_norm_(given, max_norm)
        self._base.options.clipping.note(max_norm)
        clipping.scale(given, self._base.options.clipping.coefficient(done.squared_norm, max_norm))
        self._untouched.remember()
        return torch.tensor(math.sqrt(done.squared_norm))
