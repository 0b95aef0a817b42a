"""Moments of the protocol at which a fault may strike: those that random times would hardly ever hit."""

from collections import defaultdict
from collections.abc import Callable
from enum import Enum


class Moment(Enum):
    """What a device does."""

    COMPLETES = "is the first that holds a round"
    PROMISES = "promises a generation"
    CATCHES_UP = "begins to catch up"
    ENTERS = "enters a generation"
    GOES_ON = "goes on in a generation"
    LOADS = "has fetched a state"


class Moments:
    """Of one cluster: what waits for them."""

    def __init__(self) -> None:
        self._waiting: defaultdict[Moment, list[Callable[[int], object]]] = defaultdict(list)

    def wait(self, moment: Moment, event: Callable[[int], object]) -> None:
        """`event` is called with the device, once."""
        self._waiting[moment].append(event)

    def come(self, moment: Moment, device: int) -> None:
        for event in self._waiting.pop(moment, ()):
            event(device)

    def clear(self) -> None:
        self._waiting.clear()
