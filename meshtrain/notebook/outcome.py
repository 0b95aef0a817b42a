"""What comes of a run: what the function returned on each device and what it logged, or the error that ended it."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshtrain.errors import MeshtrainError, UsageError
from meshtrain.notebook.curves import Points
from meshtrain.pictures.curves_picture import curves_svg
from meshwire.messages.job import JobSummary
from meshwire.peer_news import name_of


class RunFailed(MeshtrainError):
    """The function ended by an error on a device, or its job was lost or cancelled. The text says where and why, with
    the traceback from there.

    Attributes:
        job: its id, for `meshtrain logs` and `meshtrain get`.
        rank: on which the error was first, where that is known.
        device: the name of that device.
        remote_traceback: as Python has printed it there; empty where there is none.
    """

    def __init__(self, text: str, job: JobSummary, rank: int | None = None, remote_traceback: str = "") -> None:
        super().__init__(f"{text}\n\n{remote_traceback}" if remote_traceback else text)
        self.job = job.job
        self.rank = rank
        self.device = None if rank is None else name_of(job, rank)
        self.remote_traceback = remote_traceback


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves of logged values, which a notebook draws. `str()` of it is the SVG file."""

    svg: str

    def __str__(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<plot: SVG of {len(self.svg)} characters>"

    def _repr_html_(self) -> str:
        """An image, so that its style is its own and not the page's."""
        return image(self.svg)


def image(svg: str) -> str:
    """HTML that shows an SVG file."""
    return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"/>'


@dataclass(frozen=True, slots=True)
class MeshRun:
    """A run that has ended well.

    Attributes:
        job: its id, for `meshtrain logs` and `meshtrain get`.
        results: what the function returned, by rank. Who was lost on the way has none.
        missing: by rank, why there is no result.
        curves: (round, mean over the devices) of each logged value, seen about once a second.
        outcome: how it ended, in a line.
    """

    job: str
    results: Mapping[int, Any]
    missing: Mapping[int, str]
    curves: Mapping[str, Points]
    outcome: str

    @property
    def result(self) -> Any:
        """What rank 0 returned, which is this laptop where it takes part. Raises UsageError where that is missing."""
        if 0 not in self.results:
            raise UsageError(f"rank 0 has no result ({self.missing.get(0, 'lost')}); .results has those of the others")
        return self.results[0]

    def plot(self) -> Plot:
        """The curves, drawn."""
        return Plot(curves_svg(self.outcome, self.curves))

    def __repr__(self) -> str:
        return f"<MeshRun: {self.outcome}; results of ranks {', '.join(map(str, self.results))}>"
