"""Messages between two daemons that measure the link between them (W7).

Its chunks are frames of no job, whose `generation` is the measurement's number and whose `round` is the leg's.
"""

from typing import Annotated

from pydantic import Field

from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.envelope import message

MeasurementNumber = Annotated[int, Field(ge=1, lt=2**62)]  # chosen by chance by who asks
LegNumber = Annotated[int, Field(ge=1, le=3)]


@message("measure.link")
class MeasureLink(Wire):
    """Request: takes part in measuring this link. Event: `MeasureReady`. Reply: `Done`, when all legs are over."""

    number: MeasurementNumber


@message("measure.ready")
class MeasureReady(Wire):
    """Event: chunks may come from now on. `wired`: this end's interface has a cable; None: the system does not say."""

    wired: bool | None


@message("ask.speed")
class AskSpeed(Wire):
    """Request: how fast this device computes. Reply: `ComputeSpeed`."""


@message("speed")
class ComputeSpeed(Wire):
    """Reply: how long a calculation takes that is the same everywhere; it tells devices apart, and nothing more."""

    kernel_s: Annotated[float, Field(gt=0, le=limits.SPEED_S_MAX)]


@message("probe.taken")
class ProbeTaken(Wire):
    """Notice: so many bytes of a leg's payloads have come. Who sends goes no further than a window beyond them."""

    number: MeasurementNumber
    leg: LegNumber
    taken_bytes: Annotated[int, Field(ge=1, le=limits.MEASURE_LEG_BYTES_MAX)]


@message("probe.end")
class ProbeEnd(Wire):
    """Notice, behind the last chunk of a leg: no more of it comes from this side."""

    number: MeasurementNumber
    leg: LegNumber
