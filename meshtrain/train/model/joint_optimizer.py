"""Several optimizers, each with parameters of its own, as the one that a job knows: for a GAN, say.

Each backward pass is a round, and one of the optimizers steps on its means. Which one follows from the round's number:
they take turns, in the order in which they were given. So all peers step the same one, whoever was lost or comes later,
and whoever is at another place of its loop than the others sees it.

What travels with rounds and lies in states (options, momenta) is that of all of them together.
"""

import functools
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from meshtrain.errors import NotSupported, UsageError
from meshtrain.train.model.step_patch import ReplacedStep
from meshwire.codecs.spec import CodecSpec
from meshwire.model.manifest import NOT_IN_TURNS
from meshwire.sync_modes.mode import SyncSettings

TWICE = (
    "{} steps on gradients of a backward pass behind which an optimizer has stepped already: of several optimizers, "
    "each backward pass is for one. Give each a loss.backward() of its own, or put all parameters into one optimizer, "
    "as param groups"
)
ORDER = (
    "{} steps where it is {}'s turn: optimizers step in the order in which mt.prepare was given them, and one that "
    "steps several times in a row stands there as often, as in mt.prepare([g, d], [of_d, of_d, of_g], loader)"
)


class JointOptimizer(Optimizer):
    """Looks like one optimizer that has the param groups and the state of its members.

    A member's `step()` is this one's `step()`; so whoever puts another function in place of this one's, as a job does,
    has the script's call of any member.

    Args:
        turns: who steps when, at least two; one may stand there several times.

    Attributes:
        members: each once.
        passed: how many turns the script has had.
    """

    def __init__(self, turns: Sequence[Optimizer]) -> None:
        # Not Optimizer's own: it would make groups and state of its own.
        self.members = tuple({id(member): member for member in turns}.values())
        self._turns = [self.members.index(member) for member in turns]
        self.param_groups = [group for member in self.members for group in member.param_groups]
        self.state = _JointState(self.members)  # type: ignore[assignment]
        self._owner = {
            id(parameter): at
            for at, member in enumerate(self.members)
            for group in member.param_groups
            for parameter in group["params"]
        }
        shared = sum(len(group["params"]) for group in self.param_groups) - len(self._owner)
        if shared:
            raise UsageError(
                f"{shared} parameters are in several of the optimizers given to mt.prepare: give each its own"
            )
        self._steps: list[Callable[..., Any]] = [member.step for member in self.members]
        self._active = 0
        self.passed = 0
        self._replaced = [
            ReplacedStep(member, functools.partial(self._step_member, at)) for at, member in enumerate(self.members)
        ]

    def owner(self, parameter: torch.Tensor) -> int | None:
        """Which member has a parameter; None: none of them."""
        return self._owner.get(id(parameter))

    @property
    def active(self) -> Optimizer:
        """The member whose step was called last."""
        return self.members[self._active]

    def check_turn(self) -> None:
        """Raises UsageError where another member's step was called than the one whose turn it is."""
        due = self._turns[self.passed % len(self._turns)]
        if self._active != due:
            names = [type(member).__name__ for member in self.members]
            if names[self._active] == names[due]:
                names = [f"{name} ({at + 1} of {len(names)})" for at, name in enumerate(names)]
            raise UsageError(ORDER.format(names[self._active], names[due]))

    def check_once(self) -> None:
        """Raises UsageError where the member whose step was called has gradients, and no backward pass was since the
        last step of any: others hold the state behind that step already."""
        groups = self.active.param_groups
        if any(parameter.grad is not None for group in groups for parameter in group["params"]):
            raise UsageError(TWICE.format(type(self.active).__name__))

    def turn_to(self, round_: int) -> None:
        """The next `step` is that of the member whose turn this round is."""
        self._active = self._turns[(round_ - 1) % len(self._turns)]

    def is_apart(self, decided: int) -> bool:
        """Whether the script's next pass is another turn than the round after this one."""
        return (self.passed - decided) % len(self._turns) != 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps one member."""
        return self._steps[self._active](*(() if closure is None else (closure,)))

    def _step_member(self, at: int, closure: Callable[[], Any] | None) -> Any:
        self._active = at
        return self.step(closure)


class _JointState(MutableMapping[torch.Tensor, Any]):
    """The state of all members, each parameter's in that of its own."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._members = members
        self._owner = {
            parameter: member for member in members for group in member.param_groups for parameter in group["params"]
        }

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        state = self._owner[parameter].state
        if parameter not in state:
            raise KeyError(parameter)  # not made, as the members' own defaultdict would
        return state[parameter]

    def __setitem__(self, parameter: torch.Tensor, value: Any) -> None:
        self._owner[parameter].state[parameter] = value

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._owner[parameter].state[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for member in self._members:
            yield from member.state

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that one stands for: its members, or itself."""
    return optimizer.members if isinstance(optimizer, JointOptimizer) else (optimizer,)


def check_joint_mode(optimizer: Optimizer, sync: SyncSettings) -> None:
    """Raises NotSupported where several optimizers cannot be trained with this `--sync`."""
    one_at_a_time = sync.period or sync.staleness or sync.signs or sync.accumulate > 1
    if isinstance(optimizer, JointOptimizer) and one_at_a_time:
        raise NotSupported(
            f"--sync {sync.text()} with several optimizers: between two of them a step would have to wait for the "
            "round before it in any case. Use --sync bsp"
        )


def check_joint(optimizer: Optimizer, codec: CodecSpec, *, partial: bool) -> None:
    """Raises NotSupported where several optimizers cannot be trained so.

    Args:
        partial: not all values travel in all rounds (masks, a model that grows).
    """
    if not isinstance(optimizer, JointOptimizer):
        return
    if codec.error_feedback or codec.two_phases or codec.of_momentum or codec.momentum:
        raise NotSupported(f"--codec {codec} {NOT_IN_TURNS}")
    if partial:
        raise NotSupported("masks and mt.Progressive with several optimizers: prepare one that has all param groups")
