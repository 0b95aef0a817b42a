"""G7: how long a part that may not go on waits for the others: what a person may type, and what it means."""

import json

import pytest
from pydantic import ValidationError

from meshwire import limits
from meshwire.jobs.partition_wait import NEVER, PATIENCES, partition_wait, partition_wait_s
from meshwire.messages.job import JobSpec
from tests.daemon.job_start.test_checkpointing import spec


@pytest.mark.parametrize(("typed", "meant_s"), [("0", 0.0), ("30", 30.0), ("2.5", 2.5), ("1e3", 1000.0)])
def test_seconds_are_seconds(typed: str, meant_s: float) -> None:
    chosen = partition_wait(typed)
    assert partition_wait_s(chosen, 5.0) == meant_s
    assert JobSpec.load(spec(partition_wait=chosen).model_dump()).partition_wait == meant_s


def test_never_is_for_ever_and_nothing_follows_from_patience() -> None:
    assert partition_wait_s(partition_wait("never"), 5.0) == float("inf")
    assert partition_wait_s(None, 5.0) == PATIENCES * 5.0
    kept = JobSpec.load(spec(partition_wait=NEVER).model_dump())
    assert kept.partition_wait == NEVER
    assert json.loads(kept.model_dump_json())["partition_wait"] == "never"


@pytest.mark.parametrize("typed", ["-1", "nan", "inf", "1e9", "soon", "", "Never", "5 s", "-0.1"])
def test_nonsense_is_named_with_what_to_write_instead(typed: str) -> None:
    with pytest.raises(ValueError, match=f"--partition-wait {typed}: use seconds .*or never"):
        partition_wait(typed)


@pytest.mark.parametrize("sent", [-1.0, float("nan"), float("inf"), limits.PARTITION_WAIT_S_MAX + 1, "soon"])
def test_nor_is_it_taken_from_other_daemons(sent: object) -> None:
    with pytest.raises(ValidationError):
        JobSpec.load(spec().model_dump() | {"partition_wait": sent})
