"""What waits for a link: made into frames only when the link can take them, a slice at a time."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from meshtraind.runtime.timeslice import Slices
from meshtraind.transport.round_link import RoundLink
from meshwire.frames.header import Header

Item = TypeVar("Item")
Frame = tuple[Header, memoryview | None]


class Outbox(Generic[Item]):
    """One queue to each member that is sent to, and one for work that is nobody else's. All wait for `start`.

    It belongs to one generation: with it ends what still waits.

    Args:
        links: the way to each other member, by rank.
        prepare: does an item's arithmetic; returns the frame to send, None for an item of one's own.
    """

    def __init__(self, links: Mapping[int, RoundLink], prepare: Callable[[Item], Frame | None]) -> None:
        self._links = links
        self._prepare = prepare
        self._queues: dict[int, deque[Item]] = {}
        self._local: deque[Item] = deque()  # a world of one has nobody to send to
        self._slices = Slices(self._next)
        self._started = False
        self._unsubscribe: list[Callable[[], None]] = []

    def start(self) -> None:
        """Sending begins, on the links that there are now: one that is lost later takes nothing more."""
        self._started = True
        self._links = dict(self._links)
        self._unsubscribe = [link.on_writable(self._slices.run) for link in self._links.values()]
        self._slices.run()

    def put(self, to: int | None, item: Item) -> None:
        """Queues an item for the member `to`; None: it is only to be prepared. `pump` gets it going."""
        queue = self._local if to is None else self._queues.setdefault(to, deque())
        queue.append(item)

    def pump(self) -> None:
        """Prepares and sends while links can take it."""
        if self._started:
            self._slices.run()

    def close(self) -> None:
        """Drops what waits and lets go of the links."""
        self._started = False
        self._slices.stop()
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._queues.clear()
        self._local.clear()

    def _next(self) -> bool:
        if self._local:
            self._prepare(self._local.popleft())
            return True
        for peer, queue in self._queues.items():
            link = self._links.get(peer)  # none: it was lost, and another generation will go on without it
            if queue and link is not None and link.writable:
                frame = self._prepare(queue.popleft())
                assert frame is not None
                link.send_chunk(*frame)
                return True
        return False
