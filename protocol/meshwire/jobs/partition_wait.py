"""How long a part that is not entitled to go on waits for the others: as a person types it, and as a job has it."""

from typing import Annotated, Literal

from pydantic import Field

from meshwire import limits

NEVER: Literal["never"] = "never"
PATIENCES = 6  # the wait of a job that does not say, in patiences

PartitionWait = Annotated[float, Field(ge=0, le=limits.PARTITION_WAIT_S_MAX)] | Literal["never"]


def partition_wait(text: str) -> PartitionWait:
    """What was typed as seconds, or `never`. Raises ValueError with what to write instead."""
    if text == NEVER:
        return NEVER
    try:
        seconds_s = float(text)
    except ValueError:
        seconds_s = float("nan")
    if not 0 <= seconds_s <= limits.PARTITION_WAIT_S_MAX:  # nan is not between anything
        raise ValueError(
            f"--partition-wait {text}: use seconds (from 0 to {limits.PARTITION_WAIT_S_MAX:.0f}), or never"
        )
    return seconds_s


def partition_wait_s(chosen: PartitionWait | None, patience_s: float) -> float:
    """In seconds; infinite: for ever."""
    if chosen is None:
        return PATIENCES * patience_s
    return float("inf") if chosen == NEVER else chosen
