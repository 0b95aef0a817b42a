"""What a membership machine was told and decided, written to DATA/jobs/ID, to be decided again (`submit --trace`).

One line an input, with its time and all effects. A daemon that comes back to the job begins a file of its own, so that
what it did before its end stays there to be read: membership.jsonl, membership-2.jsonl, ...
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from meshtraind.rounds.trace import Trace
from meshwire.membership.effects import Effect
from meshwire.membership.inputs import Input
from meshwire.membership.record import FORMAT, MembershipStart, plain

FILES_MAX = 100  # of one job on one device: a daemon that is started again and again fills no disk


class MembershipWitness(Protocol):
    """Whoever sees all that one membership machine is told and decides, in order."""

    def began(self, start: MembershipStart) -> None:
        """With what it began."""

    def took(self, input_: Input, now_s: float, effects: Sequence[Effect]) -> None:
        """It was told something; nothing of what followed has been done yet."""

    def performs(self, effect: Effect) -> None:
        """One of the effects is performed next; what that brings about comes before the next one."""

    def close(self) -> None:
        """It is told nothing more."""


class MembershipRecorder:
    """Writes it down, one line an input, as what a `MembershipFile` reads."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def began(self, start: MembershipStart) -> None:
        """The first line."""
        self._trace.write("membership", format=FORMAT, start=plain(start))

    def took(self, input_: Input, now_s: float, effects: Sequence[Effect]) -> None:
        """Another line."""
        self._trace.write("input", now_s=now_s, input=plain(input_), effects=[plain(each) for each in effects])

    def performs(self, effect: Effect) -> None:
        """It is written already."""

    def close(self) -> None:
        """Writes what is left of the file."""
        self._trace.close()


def membership_trace(folder: Path) -> Trace:
    """The next file of a job's folder; past the last of them that one is written anew."""
    names = ["membership.jsonl", *(f"membership-{number}.jsonl" for number in range(2, FILES_MAX + 1))]
    return Trace(folder / next((name for name in names if not (folder / name).exists()), names[-1]))
