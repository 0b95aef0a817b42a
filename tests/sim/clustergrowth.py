"""What the machines of a daemon keep: how many items lie in each of their containers, by class and attribute.

Looked at twice, with rounds in between: what has grown with the rounds will fill the memory of a laptop that trains for
weeks. Only the real modules are looked into; the simulator's own notes may grow.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from tests.sim.clusterdaemon import Daemon

OURS = ("meshwire.", "meshtraind.")


def kept(daemon: Daemon) -> Counter[str]:
    """Items by "Class.attribute", of all that one daemon keeps of a job. A deque that has a limit is bounded."""
    rounds = daemon.rounds
    roots: list[object] = [daemon.host, daemon.donor, daemon.checkpointer, daemon.handler]
    if rounds is not None:
        roots.append(rounds.shipped)
    found: Counter[str] = Counter()
    seen: set[int] = set()
    while roots:
        one = roots.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name, value in _attributes(one):
            inside = list(_items(value))
            bounded = isinstance(value, deque) and value.maxlen is not None
            found[f"{type(one).__name__}.{name}"] += 0 if bounded else len(inside)
            roots += [each for each in (value, *inside) if type(each).__module__.startswith(OURS)]
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int], rounds: int) -> dict[str, int]:
    """What has at least one more item for every ten rounds in between, and how many."""
    more = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in more.items() if count * 10 >= rounds}


def _attributes(one: object) -> Iterator[tuple[str, object]]:
    if is_dataclass(one):
        yield from ((field.name, getattr(one, field.name)) for field in fields(one))
    else:
        yield from vars(one).items()


def _items(value: object) -> Iterator[object]:
    """All that lies in a container, and in those within it."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        for each in value:
            yield each
            yield from _items(each)
