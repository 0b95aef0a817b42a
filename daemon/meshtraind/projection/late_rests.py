"""What rounds leave out where it is known only when they count: taken out of a residual piece by piece."""

from collections import deque
from collections.abc import Callable


class LateRests:
    """Pieces of work on one member's residual, in slices, and at the latest before the residual is sent."""

    def __init__(self) -> None:
        self._work: deque[tuple[int, Callable[[], None]]] = deque()  # with its bucket

    def put(self, bucket: int, piece: Callable[[], None]) -> None:
        """Queues a piece, well under a millisecond of work on a bucket's residual."""
        self._work.append((bucket, piece))

    def do_one(self) -> bool:
        """Does one piece. Returns False if there was none."""
        if not self._work:
            return False
        _, piece = self._work.popleft()
        piece()
        return True

    def catch_up(self, bucket: int) -> None:
        """Does all pieces of a bucket now: its residual is about to be sent."""
        for _ in range(len(self._work)):
            of, piece = self._work.popleft()
            if of == bucket:
                piece()
            else:
                self._work.append((of, piece))
