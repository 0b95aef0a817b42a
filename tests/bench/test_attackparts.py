"""What attacks rest on: logs are read as they grow, mutants come from their seed, and each attack says what it is."""

import random
import re
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest

from meshwire.frames.header import HEADER_BYTES, Header, Kind, decode_header
from meshwire.jobs.lifecycle import JOB_ID_PATTERN, job_number, new_job_id
from meshwire.messages.envelope import decode
from tests.bench import attack
from tests.bench.attackmutations import ENDS_JOBS, Mutants
from tests.bench.attackscene import ATTACKS, Bounds, Log

JOB = new_job_id(b"abcdefgh")
BROKEN = b"""Traceback (most recent call last):
  File "x.py", line 1, in <module>
IndexError: pop from an empty deque
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "daemon.log"
    path.write_bytes(b"before\n" + BROKEN)
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_log_tells_of_tracebacks_and_errors_that_came_since(path: Path) -> None:
    log = Log(path)
    log.read()
    assert (log.written_bytes, log.tracebacks, log.errors) == (0, 0, 0)
    said = b"10:00 ERROR meshtraind.runtime.tasks: it failed\n" + BROKEN
    for at in range(0, len(said), 7):  # as a writer is met half-way
        append(path, said[at : at + 7])
        log.read()
    assert (log.written_bytes, log.tracebacks, log.errors) == (len(said), 1, 1)
    assert log.error == "IndexError: pop from an empty deque"
    assert log.first_error == "meshtraind.runtime.tasks: it failed"


def test_a_log_that_is_rotated_is_read_on(path: Path) -> None:
    log = Log(path)
    path.replace(path.with_name("daemon.log.1"))
    path.write_bytes(b"anew\n" + BROKEN)
    log.read()
    assert (log.written_bytes, log.tracebacks) == (len(b"anew\n" + BROKEN), 1)


def test_the_same_seed_makes_the_same_mutants() -> None:
    def frames(seed: int) -> list[bytes]:
        mutants = Mutants(random.Random(seed), JOB, 7)
        return [mutants.frame() for _ in range(60)]

    assert frames(1) == frames(1) != frames(2)


def test_mutants_are_of_every_kind_and_some_come_behind_the_first_checks() -> None:
    mutants = Mutants(random.Random(1), JOB, 7)
    kinds = {"chunk": 0, "broken header": 0, "refused": 0, "accepted": 0, "of the job": 0}
    for _ in range(2000):
        data = mutants.frame()
        header = decode_header(data)
        if isinstance(header, str):
            kinds["broken header"] += 1
        elif header.kind is Kind.CHUNK:
            kinds["chunk"] += 1
        else:
            accepted = not isinstance(decode(data[HEADER_BYTES:]), str)
            kinds["accepted" if accepted else "refused"] += 1
            kinds["of the job"] += header.job == job_number(JOB)
    assert min(kinds.values()) >= 5, kinds


def test_mutants_do_not_end_the_job_that_is_to_go_on() -> None:
    """A paired device may cancel a job: that would prove nothing."""
    mutants = Mutants(random.Random(3), JOB, 7, stretched=1.0)
    for _ in range(3000):
        data = mutants.frame()
        header = decode_header(data)
        assert isinstance(header, Header)
        if header.kind is Kind.CHUNK:
            continue
        _, _, name, fields = msgpack.unpackb(data[HEADER_BYTES:])
        assert name not in ENDS_JOBS or fields["job"] != JOB


def test_each_attack_has_a_name_of_its_own_and_says_what_is_tried() -> None:
    assert {one.group for one in ATTACKS} == set(attack.GROUPS)
    assert len({one.name for one in ATTACKS}) == len(ATTACKS)
    assert not [one.name for one in ATTACKS if len(one.tried) < 40 or "|" in one.tried]
    assert re.fullmatch(JOB_ID_PATTERN, JOB)


def test_what_did_not_hold_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    one = ATTACKS[0]
    attack.show([attack.Outcome(one, held, "a|b", 1.0) for held in (True, False, None)])
    shown = capsys.readouterr().out
    assert "3 attacks: 1 did not hold, 1 left out" in shown
    assert "a\\|b" in shown


def test_bounds_stay_below_what_harms() -> None:
    """An hour at the allowed rate fills no disk: less than half of what the daemon's log may hold between rotations."""
    assert Bounds().log_bytes_per_s * 3600 <= 4 * 1024 * 1024


@pytest.mark.slow
def test_a_name_that_no_attack_has_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "tests.bench.attack", "--attack", "no such attack"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no such attack" in done.stderr
