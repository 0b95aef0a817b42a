"""What the script's `optimizer.step()` does with a period, by R9 (`--sync local:H`): a step on weights of its own.

Each learner takes H local steps with the script's own optimizer, whose state is its own, by O8 (inner state). Then
base - local weights, what these steps have changed, is its contribution to a round, weighed by the samples of all of
them. The outer optimizer takes the mean of all contributions into the base as if it were a gradient, and the local
weights begin again from there: local SGD with plain averaging (Stich 2019, arXiv 1805.09767), DiLoCo with Nesterov
momentum (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

With a bound s > 0 (`,ssp:S`) nobody waits for the round: the next period begins at once, where the outer optimizer
would bring the base by the own periods on their way, and rounds that have arrived go into the base between two periods.
With plain averaging that is delayed gradient averaging (Zhu et al. 2021, "DGA", algorithm 1) with K = H and D = s*H.

With parts that take turns (`,stream=P`) a period is H/P steps long, its round is of one part (`FragmentWeights`), and
with `,tau=T` that is taken in behind step T of the next period.

With neighbours (`,gossip=G`) weights are mixed within a period (`MixedWeights`), and rounds are as without.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from meshtrain.train.model.frozen_check import FrozenCheck
from meshtrain.train.model.step_patch import ReplacedStep
from meshtrain.train.optim.loss_scaling import LossScaling
from meshtrain.train.optim.optimizer_step import OptimizerStep
from meshtrain.train.optim.rehearsal import Rehearsal
from meshtrain.train.step.base import Base, WorkingWeights
from meshtrain.train.step.boundary import StepBoundary
from meshtrain.train.step.contribution import StepContribution
from meshtrain.train.step.mask_growth import MaskGrowth
from meshwire.messages.learner import EndPeriod
from meshwire.sync_modes.mode import SyncSettings


class PeriodWeights(WorkingWeights, Protocol):
    """The weights that local steps move, with the base beside them; and how what they have changed gets into a round.

    With `local:H` and its kin they begin each period on the base (`LocalWeights`), with `sma:H` they go on
    (`CentralAverage`), with `,stream=P` each part of them follows the rounds of its own (`FragmentWeights`), and with
    `,gossip=G` they are mixed with those of neighbours (`MixedWeights`).
    """

    @property
    def beside(self) -> list[torch.Tensor]:
        """What lies beside the parameters, which may be the base. Whoever replaces one gives an equal one."""

    @property
    def apart(self) -> bool:
        """Whether more rounds are to follow, without local steps, until all of the weights have had one."""

    @property
    def in_flight(self) -> int:
        """The step whose round is on its way, and is to be taken in within the next period; 0: none is."""

    def weight(self, round_: int, samples: float, *, moved: bool) -> float:
        """What a contribution to this round weighs, in samples: those behind the change that it carries.

        Args:
            samples: of the period that ends, or of the last one.
            moved: whether there is one: whether local steps were taken since the round before.
        """

    def difference(self, position: int) -> torch.Tensor:
        """What the parameter at `position` contributes, at least in fp32: where its change began - local weights."""

    def keep(self, step: int, round_: int) -> None:
        """The contribution of this step is on its way into a round that nobody waits for."""

    def stepped(self, round_: int, taken: int) -> None:
        """A local step was taken behind which the period goes on: they may be mixed with those of neighbours.

        Args:
            round_: that the period ends in.
            taken: local steps of the period so far.
        """

    def take_part(self, members: int) -> None:
        """The contribution is in a round of so many members, which is about to go into the base."""

    def mixing(self) -> AbstractContextManager[None]:
        """Inside, a round that is taken in leaves of the local weights what it is to leave within a period."""

    def end_period(self) -> None:
        """Its contribution has left, and its round is in the base, or on its way."""

    def begin_anew(self) -> None:
        """What local steps have changed is lost: the parameters hold the base, and so do all local weights."""


class LocalStep:
    """From its creation until `close`, the script's `optimizer.step()` is this object's; each H-th call ends a period,
    whose H the daemon has said with the word to begin it (C3).

    A step that a GradScaler skips is one too: every learner's periods take equally many batches.

    Args:
        step: of the script's optimizer, which moves the local weights.
        base: with the outer optimizer, which rounds are applied with.
        weights: the local weights, and the base beside them.
        growth: what stands for the change of weights that are left out.
        sync: the bound s, and after how many steps a round is taken in that nobody waits for.

    Attributes:
        number: of the local step at hand, from 1.
        rehearsal: of steps over epochs of which there is nothing for this learner (X4).
    """

    def __init__(
        self,
        step: OptimizerStep,
        base: Base,
        contribution: StepContribution,
        boundary: StepBoundary,
        weights: PeriodWeights,
        growth: MaskGrowth,
        scaling: LossScaling,
        sync: SyncSettings,
    ) -> None:
        self._own = step
        self._base = base
        self._contribution = contribution
        self._boundary = boundary
        self._weights = weights
        self._growth = growth
        self._scaling = scaling
        self._waits = sync.staleness == 0
        self._delay = sync.delay
        self._called = 0  # this step's period ends with the local step at hand
        self._frozen = FrozenCheck(base.means.tensors, step.optimizer)
        self.rehearsal = Rehearsal(base.means.parameters(), base.buffers, scaling, growth)
        self._taken = 0  # steps of this period
        self._counted = False  # the optimizer has stepped, and its scaler has not returned yet
        self.number = 1
        self._replaced = ReplacedStep(step.optimizer, self._step)
        scaling.watch(step.optimizer, self._after_scaler, self.rehearsal.updated)

    def take_turns(self) -> None:
        """Nothing: several optimizers are refused with a period."""

    def stop_catching_up(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """The optimizer steps as it did before."""
        self._replaced.close()
        self._scaling.close()
        self._growth.close()

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients are never averaged with a period."""
        return nullcontext()

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Torch's own: gradients are this learner's."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def end_period(self) -> bool:
        """Ends the period with the steps that it has, where no further one can follow soon: at the end of an epoch's
        samples, in a barrier, at the script's end. Returns whether there were any.

        Of parts that take turns each has a round then, one after the other: all local weights are the base's behind it.

        Raises:
            NonFiniteGradient: the round is void, with `--on-nan stop` (V1, non-finite values).
        """
        weights = self._weights
        if not (self._taken or weights.apart or weights.in_flight):
            return False
        while self._taken or weights.apart:
            self._end_round()
        self._take_in()
        return True

    def _end_round(self) -> None:
        """What local steps have changed becomes a round."""
        moved, self._taken = self._taken > 0, 0
        self._take_in(mixes=moved)
        contribution, weights, growth = self._contribution, self._weights, self._growth
        spans = self._base.means.plan.spans
        contribution.begin()
        contribution.weigh(weights.weight(contribution.round, contribution.weight, moved=moved))
        for position, index in enumerate(contribution.trained):
            if index in contribution.spans:
                change = weights.difference(position)
                contribution.write(index, growth.added_to(spans[index].tensor, change))
                contribution.send_full()
        self._boundary.show_own_buffers()
        contribution.seal()
        contribution.sealed = True
        done = None
        if self._waits:
            done = contribution.wait_round()
            if done is not None:
                weights.take_part(done.contributors.bit_count())
                self._base.apply(done)
            lost = done is None or done.void
        else:
            lost = contribution.poisoned  # what is not finite would spread over all periods that begin ahead by it
            if not lost or self._delay:  # then all take it in at the same step, void or not
                weights.keep(contribution.step, contribution.round)
            if not lost:
                contribution.keep_buffers()
        weights.end_period()
        growth.forget()
        if lost:
            self._forget_local_steps(all_of_them=done is None or contribution.poisoned)
        self._boundary.end_step(done)

    def _take_in(self, *, mixes: bool = False) -> None:
        """The round on its way, if there is one, is taken in. `mixes`: local steps were taken meanwhile."""
        weights = self._weights
        with weights.mixing() if mixes else nullcontext():
            self._boundary.take_in(lambda: not weights.in_flight)

    def end_early(self, call: EndPeriod) -> None:
        """Another learner has ended its period: this one ends with the local step at hand, or the next one."""
        self._called = call.step

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if self.rehearsal.on:
            return self.rehearsal.step(closure)
        self._boundary.check_step()
        self._frozen.check()
        self._boundary.save_in_period()
        result = self._own_step(closure)
        self._base.means.masks.hold_weights()
        self._counted = self._scaling.active
        self._count_step()
        return result

    def _own_step(self, closure: Callable[[], Any] | None) -> Any:
        """The optimizer's state goes with the base that is kept (J3), and is of no use while it changes: torch's own
        optimizers change nothing before they have run the closure, which may take as long as the whole step."""
        optimizer, kept = self._own.optimizer, self._base.kept
        if closure is not None and type(optimizer).__module__.startswith("torch.optim."):
            result = self._own.original(_and_then(closure, kept.dirty))
        else:
            kept.dirty()
            result = self._own.original(closure)
        kept.clean(self._base.applied)
        return result

    def _after_scaler(self) -> None:
        if not self._counted and not self.rehearsal.on:
            self._count_step()
        self._counted = False

    def _count_step(self) -> None:
        self.number += 1
        self._taken += 1
        if self._taken == self._delay:
            self._take_in(mixes=True)
        due = self._taken >= self._boundary.local_steps
        if due or self._called == self._contribution.step:
            self._end_round()
        else:
            self._weights.stepped(self._contribution.round, self._taken)

    def _forget_local_steps(self, *, all_of_them: bool) -> None:
        """Those of a period that is in no round. What has made the weights infinite or NaN is in the optimizer's state
        as well. `all_of_them`: not only of the part of the model whose turn it was."""
        if all_of_them:
            self._weights.begin_anew()
        self._base.buffers.restore()
        if self._contribution.poisoned:
            kept = self._base.kept
            kept.dirty()
            self._own.forget()
            kept.clean(self._base.applied)


def _and_then(closure: Callable[[], Any], follows: Callable[[], None]) -> Callable[[], Any]:
    def both() -> Any:
        result = closure()
        follows()
        return result

    return both
