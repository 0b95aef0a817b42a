"""The memory in which a learner shows its neighbours its weights, and finds theirs; and what is said of it (R9)."""

from collections.abc import Callable, Iterator, Mapping

import torch

from meshtrain.train.link.channel import Channel
from meshtrain.train.link.shared_slots import SharedSlots, view
from meshwire.messages.learner import LearnerTurn, Shown, TurnNews
from meshwire.model.plan import Span
from meshwire.sync_modes.neighbours import Turn

OWN_SLOT = 0


class SlotWeights:
    """What lies in a neighbour's slot. It may be read until the next turn begins.

    Attributes:
        weight: W_ij, of these in the mixture.
    """

    def __init__(self, weight: float, theirs: torch.Tensor, shown: torch.Tensor, places: "Places") -> None:
        self.weight = weight
        self._theirs = theirs
        self._shown = shown
        self._places = places

    def difference(self, position: int) -> torch.Tensor:
        """Theirs less what was shown to them, of the parameter at `position`, at least in fp32."""
        theirs, shown = (view(slot, *self._places[position]).float() for slot in (self._theirs, self._shown))
        return theirs - shown  # in memory of its own: the slot's may be written again

    @property
    def is_finite(self) -> bool:
        """Whether all of theirs are numbers."""
        return all(bool(view(self._theirs, *place).isfinite().all()) for place in self._places.values())


Places = Mapping[int, tuple[Span, torch.Size]]
"""Where each trained parameter lies in a slot, by its position."""


class NeighbourSlots:
    """A learner's neighbours, as far as it knows of them: slots, and its daemon's word on what lies in them.

    Args:
        places: of the trained parameters.
    """

    def __init__(self, slots: SharedSlots, places: Places, channel: Channel) -> None:
        self._slots = slots
        self._places = places
        self._channel = channel
        self._told: Turn | None = None  # the newest that the daemon was told of
        self._is_free = True  # the own slot may be written
        self._news: TurnNews | None = None  # the newest of the turn of now
        self._turn: Turn | None = None  # None: its period has ended, or its own weights could not be shown
        self._given: set[int] = set()  # slots
        channel.route(TurnNews, self._on_news)

    def begin(self, turn: Turn, apart: Callable[[int], torch.Tensor]) -> None:
        """Shows `apart`, what the own weights are apart from the base by, in this turn. Where the turn before is still
        being sent, nothing is shown or mixed in this one."""
        self._channel.look()
        shown = self._is_free
        if shown:
            own = self._slots.mixed(OWN_SLOT)
            for position, (span, shape) in self._places.items():
                view(own, span, shape).copy_(apart(position))
        self._told, self._turn = turn, turn if shown else None
        self._is_free = False
        self._news = None
        self._given = set()
        self._channel.tell(LearnerTurn(round=turn.round, turn=turn.number, shown=shown))

    def come(self, wait_s: float) -> Iterator[SlotWeights]:
        """What has come in the turn of now and was not given yet. Waits for the rest of it, but no longer.

        Raises JobStopped.
        """
        if self._turn is None:
            return
        self._channel.wait_at_most(wait_s, self._is_complete)
        for one in () if self._news is None else self._news.shown:
            if one.slot not in self._given:
                self._given.add(one.slot)
                weights = self._weights(one)
                if weights.is_finite:  # else its learner will make the round void
                    yield weights

    def end_period(self) -> None:
        """The turn of now is over: nothing more of it is given."""
        self._turn = None

    def _weights(self, one: Shown) -> SlotWeights:
        return SlotWeights(one.weight, self._slots.mixed(one.slot), self._slots.mixed(OWN_SLOT), self._places)

    def _is_complete(self) -> bool:
        return self._news is not None and not self._news.awaited

    def _on_news(self, news: TurnNews) -> None:
        if self._told == (news.round, news.turn):
            self._news = news
            self._is_free = news.sent
