"""Requests between the daemons of the cluster: answered, refused, or lost with their link."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.sim.clusternetwork import Link, Network

if TYPE_CHECKING:
    from tests.sim.clusterdaemon import Daemon


@dataclass(frozen=True, slots=True)
class CannotAnswer:
    """`RequestError`. `generation`: by hash, the one in which rounds are not kept that were asked for."""

    reason: str
    generation: int = 0


Answer = object  # None: the link was lost, or nothing came in time


@dataclass(frozen=True, slots=True)
class Request:
    number: int
    what: object


@dataclass(frozen=True, slots=True)
class Reply:
    number: int
    answer: Answer


class Requests:
    """Those of one daemon, and those to it.

    Args:
        answer: called with what is asked and where to put the answer, now or later.
    """

    def __init__(
        self, network: Network, daemon: "Daemon", answer: Callable[[object, Callable[[Answer], None]], None]
    ) -> None:
        self._network = network
        self._daemon = daemon
        self._answer = answer
        self._numbers = itertools.count()
        self._open: dict[int, tuple[Link, Callable[[Answer], None]]] = {}

    def ask(self, link: Link, what: object, timeout_s: float, took: Callable[[Answer], None]) -> None:
        """`took` gets the answer, once."""
        number = next(self._numbers)
        if self._daemon in link.closed:
            self._daemon.later(0.0, partial(took, None))
            return
        self._open[number] = link, took
        self._network.send(link, self._daemon, Request(number, what))
        self._daemon.later(timeout_s, partial(self._took, number, None))

    def lost(self, link: Link) -> None:
        for number in [number for number, (used, _) in self._open.items() if used is link]:
            self._daemon.later(0.0, partial(self._took, number, None))

    def received(self, link: Link, body: Request | Reply) -> None:
        if isinstance(body, Reply):
            self._took(body.number, body.answer)
        else:
            self._answer(body.what, partial(self._reply, link, body.number))

    def _reply(self, link: Link, number: int, answer: Answer) -> None:
        self._network.send(link, self._daemon, Reply(number, answer))

    def _took(self, number: int, answer: Answer) -> None:
        if number in self._open:
            _, took = self._open.pop(number)
            took(answer)
