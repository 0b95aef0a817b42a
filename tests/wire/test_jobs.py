"""The job life cycle as a table, and job ids."""

import re

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.jobs import (
    EXIT_CODES,
    JOB_ID_PATTERN,
    TERMINAL_STATES,
    TRANSITIONS,
    IllegalTransitionError,
    JobEvent,
    JobRecord,
    JobState,
    advance,
    job_number,
    new_job_id,
)

DEVICE = "ab" * 32


def test_an_undisturbed_job_succeeds() -> None:
    state = JobState.OFFERED
    for event in (
        JobEvent.ACCEPT,
        JobEvent.FILES_COMPLETE,
        JobEvent.START,
        JobEvent.LEARNER_STARTED,
        JobEvent.LEARNER_DONE,
        JobEvent.ALL_DONE,
    ):
        state = advance(state, event)
    assert state is JobState.SUCCEEDED


def test_every_pair_is_a_transition_or_an_error_that_names_both() -> None:
    for state in JobState:
        for event in JobEvent:
            if event in TRANSITIONS[state]:
                assert advance(state, event) in JobState
            else:
                with pytest.raises(IllegalTransitionError, match=rf"{state.value}.*'{event.value}'"):
                    advance(state, event)


def test_a_job_can_always_fail_be_cancelled_or_be_lost_until_it_has_ended() -> None:
    """No state is a trap: each way out is there, and a stop takes one more event at most."""
    for state in set(JobState) - TERMINAL_STATES:
        assert advance(state, JobEvent.DAEMON_DIED) is JobState.LOST
        for event in (JobEvent.FAIL, JobEvent.CANCEL):
            stopping = advance(state, event)
            if stopping not in TERMINAL_STATES:
                assert advance(stopping, JobEvent.STOPPED) in TERMINAL_STATES


def test_every_state_is_reachable_and_every_end_has_an_exit_code() -> None:
    reached = {JobState.OFFERED}
    while more := {after for state in reached for after in TRANSITIONS[state].values()} - reached:
        reached |= more
    assert reached == set(JobState)
    assert set(EXIT_CODES) == TERMINAL_STATES
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert EXIT_CODES[JobState.SUCCEEDED] == 0


@given(
    st.sampled_from([JobState.STARTING, JobState.RUNNING, JobState.FINISHING]),
    st.lists(st.sampled_from(JobEvent)),
)
@settings(max_examples=100)
def test_the_first_cause_of_an_end_stands(state: JobState, crossing: list[JobEvent]) -> None:
    """News that cross on the way cannot turn a cancelled job into a failed or a successful one."""
    stopping = advance(state, JobEvent.CANCEL)
    for event in crossing:
        if event in TRANSITIONS[stopping] and event not in (JobEvent.STOPPED, JobEvent.DAEMON_DIED):
            stopping = advance(stopping, event)
    assert advance(stopping, JobEvent.STOPPED) is JobState.CANCELLED


@given(st.binary(min_size=4, max_size=16), st.floats(0, 2**35 - 1))
@settings(max_examples=100)
def test_ids_match_their_pattern(random_bytes: bytes, now_s: float) -> None:
    job_id = new_job_id(random_bytes, now_s)
    assert re.fullmatch(JOB_ID_PATTERN, job_id)
    assert 0 <= job_number(job_id) < 2**64


@given(st.integers(0, 2**35 - 2), st.binary(min_size=4, max_size=4), st.binary(min_size=4, max_size=4))
@settings(max_examples=100)
def test_ids_sort_by_submission(now_s: int, first: bytes, second: bytes) -> None:
    assert new_job_id(first, now_s) < new_job_id(second, now_s + 1)


def test_ids_and_numbers_are_golden() -> None:
    """W1: the number in frame headers is part of the wire."""
    assert new_job_id(b"\x00\x00\x00\x00", 0.0) == "000000000000"
    assert new_job_id(b"\xff\xff\xff\xff", 1_790_000_000.9) == "1nb2ew0zzzzz"
    assert job_number("000000000000") == 0xF7B11509F4D675C3


def test_bad_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="3 random bytes"):
        new_job_id(b"abc", 0.0)
    with pytest.raises(ValueError, match="clock"):
        new_job_id(b"abcd", -5.0)
    for bad in ("", "ABCDEFGHJKMN", "00000000000l", "0000000000000", "000000000000\n"):
        with pytest.raises(ValueError, match="not a job id"):
            job_number(bad)


def test_a_record_travels() -> None:
    record = JobRecord(
        id="000000000000",
        name="gpt",
        spec={"script": "train.py", "args": ["--lr", "1e-3"], "env": {"A": "b"}},
        state=JobState.RUNNING,
        members=(DEVICE,),
        submitter=DEVICE,
        created_s=1.5,
    )
    assert JobRecord.load(msgpack.unpackb(record.pack())) == record
