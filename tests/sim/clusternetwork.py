"""Virtual time, and the links between the daemons of a cluster: late, reset, half-open, deaf, cut in two, and healed.

A link keeps the order of each way; the two ways, and different links, are independent. While a way is dark its messages
wait, as TCP would send them again; whoever hears nothing for `patience` closes the link. A closed one is dialled anew.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from random import Random
from typing import Protocol

Event = Callable[[], None]

DIAL_S = (0.1, 0.5)  # after a loss, while a job waits for the peer
DIAL_AGAIN_S = (0.4, 1.0)
SILENCE_SPREAD = 0.25  # of patience: heartbeats have their own times


class Clock:
    """Events in virtual time; those of one instant in the order in which they were made."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def at(self, delay_s: float, event: Event) -> None:
        self.at_time(self.now_s + delay_s, event)

    def at_time(self, time_s: float, event: Event) -> None:
        """What is due already happens now."""
        heapq.heappush(self._queue, (max(self.now_s, time_s), next(self._order), event))

    def run_until(self, end_s: float, events_max: int) -> None:
        """Raises AssertionError when that takes more events than can be: a livelock."""
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, event = heapq.heappop(self._queue)
            event()
            self.events += 1
            assert self.events < events_max, "livelock"
        self.now_s = end_s


class Wake(Enum):
    """In which order a process that slept finds what has happened meanwhile: its timers are due, its sockets full."""

    IN_ORDER = "as it happened"
    TIMERS_FIRST = "timers first"
    MESSAGES_FIRST = "messages first"


class Node:
    """One process at the ends of links. What happens to it while it sleeps happens when it wakes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.alive = True
        self.asleep = False
        self.silent = False  # it died without a word
        self.links: dict[int, Link] = {}  # by the other's number
        self._backlog: list[tuple[bool, Event]] = []  # is it of the network

    def do(self, event: Event) -> None:
        """Something of its own is due."""
        self._do(False, event)

    def hear(self, event: Event) -> None:
        """Something comes from the network."""
        self._do(True, event)

    def _do(self, heard: bool, event: Event) -> None:
        if self.alive and self.asleep:
            self._backlog.append((heard, event))
        elif self.alive:
            self.happen(event)

    def happen(self, event: Event) -> None:
        """It is awake, and this befalls it now."""
        event()

    def wake(self, order: Wake) -> None:
        """What has happened happens now."""
        self.asleep = False
        backlog, self._backlog = self._backlog, []
        if order is not Wake.IN_ORDER:
            backlog.sort(key=lambda entry: entry[0] is (order is Wake.TIMERS_FIRST))
        for heard, event in backlog:
            self._do(heard, event)

    def linked(self, peer: "Node", link: "Link") -> None:
        """A link is up, or has replaced another."""
        raise NotImplementedError

    def unlinked(self, peer: "Node", link: "Link", reason: str) -> None:
        """A link is gone. Another may have replaced it already."""
        raise NotImplementedError

    def received(self, peer: "Node", link: "Link", body: object) -> None:
        """On a link that is up."""
        raise NotImplementedError


class Way:
    """One direction of a link."""

    def __init__(self, free_s: float) -> None:
        self.free_s = free_s
        self.dark_since_s: float | None = None
        self.sent_s = -1.0  # of the newest batch
        self.sent = 0  # batches
        self.due = 0  # of them: those that would have arrived, if the way is dark
        self.waiting: deque[list[object]] = deque()  # the newest ones


class Fin:
    """The last word on a link."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Link:
    """One connection. Each side learns of its beginning and end on its own."""

    def __init__(self, dialler: Node, other: Node) -> None:
        self.dialler = dialler
        self.ends = (dialler, other)
        self.ways: dict[Node, Way] = {}  # by receiver
        self.closed: set[Node] = set()
        self.dead = False  # nothing passes any more, and nobody is told

    def other(self, end: Node) -> Node:
        return self.ends[end is self.ends[0]]


class SentWatcher(Protocol):
    """Whoever looks at what is sent."""

    def sent(self, sender: Node, body: object) -> None:
        """A node sends a message on one of its links; what goes to all is told once for each link."""


class Network:
    """Among nodes that all know each other.

    Args:
        delays_s: of one message; one of these is drawn.

    Attributes:
        watcher: sees what is sent; None: nobody looks.
    """

    def __init__(self, clock: Clock, random: Random, patience_s: float, delays_s: tuple[float, ...]) -> None:
        self._clock = clock
        self._random = random
        self._patience_s = patience_s
        self._delays_s = delays_s
        self._nodes: dict[int, Node] = {}
        self._links: list[Link] = []
        self._dark: Counter[tuple[int, int]] = Counter()  # by sender and receiver
        self.watcher: SentWatcher | None = None

    # Nodes.

    def add(self, node: Node, *, dial: bool = True) -> None:
        """A process starts; it takes the place of one that has ended."""
        self._nodes[node.number] = node
        for number in sorted(self._nodes):
            if dial and number != node.number:
                self._clock.at(self._random.uniform(0.0, 0.2), partial(self._dial, node, number))

    def found(self) -> None:
        """Links between all nodes, at once."""
        for one, other in itertools.combinations(self._nodes.values(), 2):
            link = self._new_link(one, other, greeted=True)
            for end in link.ends:
                end.links[link.other(end).number] = link
            for end in link.ends:
                end.hear(partial(end.linked, link.other(end), link))

    def end(self, node: Node, *, silent: bool) -> None:
        """The process is killed, and its sockets are closed; or `silent`: the device loses its power."""
        node.alive, node.silent = False, silent
        for link in list(node.links.values()):
            self._shut(link, node, "closed")
        self._update()

    def sleep(self, node: Node) -> None:
        node.asleep = True
        self._update()

    def wake(self, node: Node, order: Wake = Wake.IN_ORDER) -> None:
        for link in self._links:  # the silence was its own
            if node in link.ways and link.ways[node].dark_since_s is not None:
                self._begin_dark(link, node)
        node.wake(order)
        self._update()

    # Faults.

    def darken(self, sender: int, receiver: int) -> None:
        """Nothing passes from one to the other, until as many `lighten`."""
        self._dark[sender, receiver] += 1
        self._update()

    def lighten(self, sender: int, receiver: int) -> None:
        if self._dark[sender, receiver]:
            self._dark[sender, receiver] -= 1
            self._update()

    def lighten_all(self) -> None:
        self._dark.clear()
        self._update()

    def reset(self, one: int, other: int) -> None:
        """Both are told at once that their link is gone; what was on the way is lost."""
        if (link := self._nodes[one].links.get(other)) is not None:
            link.dead = True
            for end in link.ends:
                self._clock.at(self._delay_s(), partial(end.hear, partial(self._lost, link, end, "reset")))

    def half_open(self, one: int, other: int) -> None:
        """Their link is gone and neither is told."""
        if (link := self._nodes[one].links.get(other)) is not None:
            link.dead = True
            self._update()

    def refuses(self, one: int, peer: Node) -> bool:
        """Where that process was a fresh dial is refused: the device is there, and nobody listens."""
        pair = one, peer.number
        dark = self._dark[pair] or self._dark[pair[::-1]]
        return not peer.alive and not peer.silent and not dark

    def refuse(self, link: Link, end: Node, reason: str) -> None:
        """One side closes."""
        self._lost(link, end, reason)

    # Sending.

    def send(self, link: Link, sender: Node, body: object) -> None:
        if sender not in link.closed:
            if self.watcher is not None:
                self.watcher.sent(sender, body)
            self._send(link, link.other(sender), body)

    def _send(self, link: Link, receiver: Node, body: object) -> None:
        way, now_s = link.ways[receiver], self._clock.now_s
        if way.sent_s == now_s and way.waiting:
            way.waiting[-1].append(body)
            return
        way.sent_s = now_s
        way.sent += 1
        way.waiting.append([body])
        self._pass_on(link, receiver, way.sent)

    def _pass_on(self, link: Link, receiver: Node, number: int) -> None:
        """The batches up to this one will arrive."""
        way, now_s = link.ways[receiver], self._clock.now_s
        way.free_s = max(now_s + self._delay_s(), way.free_s)
        self._clock.at(way.free_s - now_s, partial(self._arrive, link, receiver, number))

    def _arrive(self, link: Link, receiver: Node, number: int) -> None:
        way = link.ways[receiver]
        way.due = max(way.due, number)
        if link.dead or receiver in link.closed or way.dark_since_s is not None:
            return
        while way.waiting and way.sent - len(way.waiting) < way.due:
            receiver.hear(partial(self._hand_over, link, receiver, way.waiting.popleft()))

    def _hand_over(self, link: Link, receiver: Node, batch: list[object]) -> None:
        sender = link.other(receiver)
        for body in batch:
            if receiver in link.closed or not receiver.alive:
                return
            if isinstance(body, Fin):
                self._lost(link, receiver, body.reason)
            elif receiver.links.get(sender.number) is link:
                receiver.received(sender, link, body)

    # Beginning and end of links.

    def _new_link(self, dialler: Node, other: Node, *, greeted: bool) -> Link:
        link = Link(dialler, other)
        self._links = [known for known in self._links if len(known.closed) < 2]
        self._links.append(link)
        for end in link.ends:
            delay_s = 0.0 if greeted else self._delay_s()
            link.ways[end] = Way(self._clock.now_s + delay_s)
            if not greeted:
                self._clock.at(delay_s, partial(end.hear, partial(self._greet, link, end)))
        return link

    def _dial(self, node: Node, number: int) -> None:
        if not node.alive or number in node.links:
            return
        peer = self._nodes[number]
        pair = node.number, number
        dark = self._dark[pair] or self._dark[pair[::-1]]
        if node.asleep or peer.asleep or not peer.alive or dark:
            self._clock.at(self._random.uniform(*DIAL_AGAIN_S), partial(self._dial, node, number))
        else:
            self._new_link(node, peer, greeted=False)

    def _greet(self, link: Link, end: Node) -> None:
        """W4: of two connections the one that the lower device dialled stays."""
        other = link.other(end)
        if link.dead or end in link.closed or self._is_dark(link, end):
            self._shut(link, end, "not answered")
            self._redial(end, other.number)
            return
        there = end.links.get(other.number)
        if there is not None and there.other(end) is other and there.dialler.number <= link.dialler.number:
            self._shut(link, end, "there is a link already")
            return
        end.links[other.number] = link
        if there is not None:
            self._shut(there, end, "a better link has replaced it")
            end.unlinked(there.other(end), there, "replaced")
        end.linked(other, link)

    def _lost(self, link: Link, end: Node, reason: str) -> None:
        other = link.other(end)
        if end in link.closed:
            return
        self._shut(link, end, reason)
        if end.links.get(other.number) is link:
            del end.links[other.number]
            end.unlinked(other, link, reason)
        self._redial(end, other.number)

    def _shut(self, link: Link, end: Node, reason: str) -> None:
        if end in link.closed:
            return
        link.closed.add(end)
        if not link.dead and not end.silent:
            self._send(link, link.other(end), Fin(reason))

    def _redial(self, node: Node, number: int) -> None:
        self._clock.at(self._random.uniform(*DIAL_S), partial(self._dial, node, number))

    # Darkness.

    def _is_dark(self, link: Link, receiver: Node) -> bool:
        sender = link.other(receiver)
        return bool(link.dead or sender.silent or sender.asleep or self._dark[sender.number, receiver.number])

    def _update(self) -> None:
        for link in self._links:
            for receiver, way in link.ways.items():
                dark = self._is_dark(link, receiver)
                if dark and way.dark_since_s is None:
                    self._begin_dark(link, receiver)
                elif not dark and way.dark_since_s is not None:
                    way.dark_since_s = None
                    self._pass_on(link, receiver, way.due)

    def _begin_dark(self, link: Link, receiver: Node) -> None:
        since_s = link.ways[receiver].dark_since_s = self._clock.now_s
        wait_s = self._patience_s * self._random.uniform(1.0, 1.0 + SILENCE_SPREAD)
        self._clock.at(wait_s, partial(self._listen, link, receiver, since_s))

    def _listen(self, link: Link, receiver: Node, since_s: float) -> None:
        if link.ways[receiver].dark_since_s == since_s and receiver.alive and not receiver.asleep:
            self._lost(link, receiver, "silent")

    def _delay_s(self) -> float:
        return self._random.choice(self._delays_s)
