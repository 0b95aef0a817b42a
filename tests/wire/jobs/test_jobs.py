"""The job life cycle as a table, and job ids."""

import random
import re

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.jobs.lifecycle import (
    _ID_ALPHABET,
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
        assert advance(state, JobEvent.LOSE) is JobState.LOST
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
        if event in TRANSITIONS[stopping] and event not in (JobEvent.STOPPED, JobEvent.LOSE):
            stopping = advance(stopping, event)
    assert advance(stopping, JobEvent.STOPPED) is JobState.CANCELLED


@given(st.binary(min_size=8, max_size=16))
@settings(max_examples=100)
def test_ids_match_their_pattern(random_bytes: bytes) -> None:
    job_id = new_job_id(random_bytes)
    assert re.fullmatch(JOB_ID_PATTERN, job_id)
    assert 0 <= job_number(job_id) < 2**64


@given(st.lists(st.integers(0, 2**64 - 1).map(lambda chance: chance.to_bytes(8, "big")), min_size=2, unique=True))
@settings(max_examples=100)
def test_every_character_of_an_id_is_chance(chances: list[bytes]) -> None:
    """Neighbours share no more than strangers: each character follows from five bits of its own."""
    used = {int.from_bytes(chance, "big") % 2**60 for chance in chances}
    ids = {new_job_id(chance) for chance in chances}
    assert len(ids) == len(used)
    assert {id_[0] for id_ in ids} == {_ID_ALPHABET[chance % 32] for chance in used}


def test_a_short_prefix_tells_jobs_of_one_minute_apart() -> None:
    chance = random.Random(18)
    ids = [new_job_id(chance.randbytes(8)) for _ in range(20)]
    assert len({id_[:3] for id_ in ids}) == 20


def test_ids_and_numbers_are_golden() -> None:
    """W1: the number in frame headers is part of the wire."""
    assert new_job_id(bytes(8)) == "000000000000"
    assert new_job_id(b"\xff" * 8) == "zzzzzzzzzzzz"
    assert job_number("000000000000") == 0xF7B11509F4D675C3


def test_bad_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="3 random bytes"):
        new_job_id(b"abc")
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
