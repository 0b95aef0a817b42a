"""J3: from what the members of a generation go on in which no learner computes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from meshwire.messages.generation import Standing


@dataclass(frozen=True, slots=True)
class WayOn:
    """As in `Enter`. `source`: whose saved state all go back to, if they do."""

    way: Literal["on", "back", "wait", "lost", "failed"]
    source: int | None = None


def at_beginning(standings: Mapping[int, Standing], cut: int) -> bool:
    """G9: whether none of those that bring a history has been in a generation in which learners compute."""
    brought = [held for held in standings.values() if held.generation is not None]
    return bool(brought) and all(held.holding.prepared is not None and held.complete == cut for held in brought)


def way_on(standings: Mapping[int, Standing], cut: int, reload: Collection[int]) -> WayOn:
    """What follows from the promises of all members.

    Nothing is given up where a member's learner holds the base or will find it in memory, or can load a state that
    another has: others load it from there (J1). Else all go back to the newest checkpoint of a member whose history is
    kept, as long as a learner is left that could load it; of several the lowest rank's. Where there is none, they wait
    for somebody else who has a base. Without a learner that is to come the job has failed.
    """
    holdings = {rank: held.holding for rank, held in standings.items() if rank not in reload}
    states = [held.state for held in holdings.values() if held.state is not None and held.state <= cut]
    loadable = [held.loads_after for held in holdings.values() if held.loads_after is not None]
    begins = bool(loadable) and at_beginning(standings, cut)
    if begins or any(held.base for held in holdings.values()) or (states and loadable and max(states) >= min(loadable)):
        return WayOn("on")
    saved = {rank: held.saved[0] for rank, held in holdings.items() if held.saved is not None and held.saved[0] <= cut}
    runs = any(held.holding.loads_after is not None for held in standings.values())
    if not runs or not saved:
        return WayOn("wait" if runs else "failed")
    return WayOn("back", max(saved, key=lambda rank: (saved[rank], -rank)))
