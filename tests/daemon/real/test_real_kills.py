"""Real learners and daemons are killed under modes that keep more than weights and gradients: 1-bit Adam, MuLoCo, parts
of a model that take turns, and weights that are mixed within a period."""

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import realjobs as jobs
from tests.lab.chaosmesh import ChaosDaemon, ChaosMesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = (
    jobs.UNTIL_STOPPED.replace(
        "torch.optim.SGD(model.parameters(), lr=0.05)", "torch.optim.AdamW(model.parameters(), lr=0.01)"
    )
    .replace(
        "        loss.backward()\n",
        """        taken = globals().get("taken", 0) + 1
        time.sleep(0.05)
        if taken == 1:
            with open(mt.output_dir() / "pids", "a") as file:
                file.write(f"{os.getpid()} ")
        (loss * float("nan") if mt.rank() == 1 and taken == 9 else loss).backward()
""",
    )
    .replace(
        # Who looks for the file a moment before the others takes one more epoch, whose rounds these apply meanwhile.
        'print("rank"',
        'mt.barrier()\nprint("rank"',
    )
)
BEFORE_ROUNDS, MORE_ROUNDS = 10, 6


@pytest.fixture
def mesh() -> Iterator[ChaosMesh]:
    with ChaosMesh(3) as started:
        yield started


@pytest.mark.parametrize(
    ("sync", "codec"),
    [
        pytest.param("bsp", "onebit:momentum,warmup=5", id="1-bit Adam", marks=pytest.mark.long),
        pytest.param("muloco:2", None, id="muloco", marks=pytest.mark.long),
        pytest.param("diloco:6,stream=3,tau=1", "int8", id="parts in turns"),
        pytest.param("local:4,stream=4,random", "fp16", id="drawn parts", marks=pytest.mark.long),
        pytest.param("local:6,gossip=1", None, id="neighbours", marks=pytest.mark.long),
    ],
)
def test_what_an_optimizer_keeps_survives_kills_and_a_round_with_nan(
    mesh: ChaosMesh, tmp_path: Path, sync: str, codec: str | None
) -> None:
    """J1, J3, V1, O8: one learner takes over what its process before has left, one loads from another; frozen second
    moments are the same everywhere, or the next bases are not (O9)."""
    first, second, third = mesh.daemons.values()
    stop = tmp_path / "stop"
    options = {"sync": sync, "codec": codec, "on_nan": "skip", "hash_every": 1, "args": (str(stop),)}
    job = jobs.submit(first, tmp_path, SCRIPT, **options).job
    everybody = (0, 1, 2)
    jobs.wait_for(first, job, lambda seen: seen.rounds >= BEFORE_ROUNDS, f"round {BEFORE_ROUNDS}")
    _kill_learner(third, job, 2)
    jobs.go_on(first, job, MORE_ROUNDS, "rounds behind the learner's return")
    second.kill()
    jobs.wait_for(first, job, lambda seen: 1 not in seen.present, "a generation without it")
    second.start()
    second.wait()
    jobs.wait_for(first, job, lambda seen: seen.learning == everybody, "its return")
    jobs.go_on(first, job, MORE_ROUNDS, "rounds behind the daemon's return")
    stop.touch()
    summary = jobs.ended(first, job)
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True
    assert summary.hashes_compared >= BEFORE_ROUNDS
    assert max(report.metrics.void_rounds for report in summary.ranks) >= 1
    weights = {
        jobs.read(daemon, job, "output", rank, "sub/weights.txt") for rank, daemon in enumerate(mesh.daemons.values())
    }
    assert sync != "bsp" or len(weights) == 1  # in a period each has its own
    assert all(math.isfinite(float(each)) for text in weights for each in text.split())


@pytest.mark.long
def test_neighbours_mix_also_with_a_learner_that_was_killed(mesh: ChaosMesh, tmp_path: Path) -> None:
    """R9: each had some of its neighbours' weights, its next process, too, and all bases are equal to the bit (O9)."""
    first, second, third = mesh.daemons.values()
    stop = tmp_path / "stop"
    options = {"sync": "local:6,gossip=1", "on_nan": "skip", "hash_every": 1, "args": (str(stop),)}
    job = jobs.submit(first, tmp_path, SCRIPT, **options).job
    jobs.wait_for(first, job, lambda seen: seen.rounds >= 3, "round 3")
    _kill_learner(third, job, 2)
    jobs.go_on(first, job, 2, "rounds behind the learner's return")
    stop.touch()
    summary = jobs.ended(first, job)
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True
    for daemon in (first, second, third):
        come, hoped = _neighbours_weights(daemon)
        assert 0 < come <= hoped


def _neighbours_weights(daemon: ChaosDaemon) -> tuple[int, int]:
    """How many came, and how many could have: as its log says once the job is over there, too."""
    deadline_s = time.monotonic() + jobs.TIMEOUT_S
    while (told := re.search(r"(\d+) of (\d+) neighbours' weights came", daemon.log_path.read_text())) is None:
        assert time.monotonic() < deadline_s, "the job does not end there"
        time.sleep(0.1)
    return int(told[1]), int(told[2])


def _kill_learner(daemon: ChaosDaemon, job: str, rank: int) -> None:
    """Returns when its next process has taken a step."""
    pids = jobs.read(daemon, job, "output", rank, "pids")
    assert daemon.kill_learner()
    deadline_s = time.monotonic() + jobs.TIMEOUT_S
    while jobs.read(daemon, job, "output", rank, "pids") == pids:
        assert time.monotonic() < deadline_s, "its next learner takes no step"
        time.sleep(0.1)
