"""A model that grows stage by stage, of which only the part that is trained is computed and exchanged: ProgFed.

As in Wang et al. 2022 (arXiv 2110.05323, section 3), sub-model b is the first b stages and head b; the last one is the
whole model. Every so many rounds it grows by one. For some rounds after that (the warm-up) only the new stage and its
head train, on what the frozen stages before it make of the input.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.model.tensors import TensorPlace
from meshwire import limits
from meshwire.model.manifest import TensorSpec
from meshwire.model.schedule import Stretch, Travel


class Progressive(nn.Module):
    """Maps an input through the stages that there are in the round at hand, and the head of the last of them.

    Which these are follows from the number of the round alone, so peers that come in later, or a job that is resumed,
    train the same. Without a job a step of the prepared optimizer is a round. What is not trained has no gradients, and
    so no optimizer touches it; stages that stand still while a new one begins are as in evaluation.

    Args:
        stages: each takes what the one before it gives; the first one the input.
        heads: as many; each takes what its stage gives, to the model's output.
        every: rounds from one growth to the next.
        warmup: of these, how many begin with the new stage and its head alone.

    Raises:
        UsageError: there are not as many heads as stages, no stage, or numbers that do not suit.

    Attributes:
        active: how many stages there are, from 1.
        frozen: how many of them stand still.
    """

    def __init__(self, stages: Iterable[nn.Module], heads: Iterable[nn.Module], every: int, warmup: int = 0) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.heads = nn.ModuleList(heads)
        if not self.stages or len(self.stages) != len(self.heads):
            raise UsageError(
                f"mt.Progressive with {len(self.stages)} stages and {len(self.heads)} heads: give each stage a head"
            )
        if every < 1 or not 0 <= warmup < every:
            raise UsageError(
                f"mt.Progressive(every={every}, warmup={warmup}): use at least 1 round from one growth to the next, "
                "and for its warm-up fewer than that, or 0"
            )
        if 2 * len(self.stages) > limits.STRETCHES_MAX:
            raise UsageError(f"mt.Progressive with {len(self.stages)} stages: at most {limits.STRETCHES_MAX // 2}")
        self._every = every
        self._warmup = warmup
        self._enter(*self._parts(1))

    def forward(self, x: Tensor) -> Tensor:
        """The output of the active sub-model."""
        with torch.no_grad():
            for stage in self.stages[: self.frozen]:
                x = stage(x)
        for stage in self.stages[self.frozen : self.active]:
            x = stage(x)
        output: Tensor = self.heads[self.active - 1](x)
        return output

    def train(self, mode: bool = True) -> "Progressive":
        """Sets the mode as every module does; stages that stand still stay as in evaluation, so their statistics stand
        still too."""
        super().train(mode)
        for stage in self.stages[: self.frozen]:
            stage.eval()
        return self

    def enter_round(self, number: int) -> None:
        """Makes the model that of this round, numbered from 1."""
        parts = self._parts(number)
        if parts != (self.active, self.frozen):
            self._enter(*parts)

    def _enter(self, active: int, frozen: int) -> None:
        self.active, self.frozen = active, frozen
        self.train(self.training)
        trained = {id(tensor) for tensor in self._trained(active, frozen)}
        for parameter in self.parameters():
            if id(parameter) not in trained:
                parameter.grad = None

    def _parts(self, number: int) -> tuple[int, int]:
        """(active, frozen) in a round."""
        active = min((number - 1) // self._every + 1, len(self.stages))
        since = number - 1 - (active - 1) * self._every
        return active, active - 1 if since < self._warmup else 0

    def _trained(self, active: int, frozen: int) -> Iterator[Tensor]:
        """The parameters and buffers that are trained in a round."""
        for part in (*self.stages[frozen:active], self.heads[active - 1]):
            yield from part.parameters()
            yield from part.buffers()

    def travel(self, specs: Sequence[TensorSpec], places: Sequence[TensorPlace]) -> Travel | None:
        """How many values of each tensor travel in which rounds, by T1 (travel); None: all of them in all rounds.

        The model may be this one, or contain it.

        Args:
            specs, places: of all tensors of the model. Those of other parts of it are always trained.
        """
        if len(self.stages) == 1:
            return None
        own = {id(tensor) for tensor in (*self.parameters(), *self.buffers())}
        firsts = [1]
        for grown in range(1, len(self.stages)):
            firsts += [grown * self._every + 1, grown * self._every + self._warmup + 1]
        stretches = []
        for first in sorted(set(firsts)):
            idle = own - {id(tensor) for tensor in self._trained(*self._parts(first))}
            counts = tuple(
                spec.count if spec.in_vector and id(place.tensor()) not in idle else 0
                for spec, place in zip(specs, places, strict=True)
            )
            stretches.append(Stretch(first=first, counts=counts))
        return Travel(stretches=tuple(stretches))


def find(model: nn.Module) -> Progressive | None:
    """The part of a model that grows. Raises NotSupported when there is more than one."""
    found = [module for module in model.modules() if isinstance(module, Progressive)]
    if len(found) > 1:
        raise NotSupported(
            f"this model has {len(found)} parts that are mt.Progressive, and only one can grow: make them one, whose "
            "stages hold the parts of all"
        )
    return found[0] if found else None
