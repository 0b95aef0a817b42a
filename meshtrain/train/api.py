"""Which world this process trains in: a job's, or its own."""

from meshtrain.train.alone import Alone

_world: Alone | None = None


def world() -> Alone:
    """The world of this process, entered at the first call."""
    global _world
    if _world is None:
        _world = Alone()
    return _world
