"""The manifest of a checkpoint: every byte counts, and nothing in it is believed. The schedule: who saves when."""

import hashlib
import json
from collections import Counter
from typing import Any

import pytest

from meshwire import limits
from meshwire.checkpoints.manifest import CheckpointManifest, GenerationRecord, UnitRecord, unit_file
from meshwire.jobs.checkpoint_schedule import CheckpointSchedule, CheckpointTurn, schedule_of
from meshwire.messages.generation import DealState
from meshwire.messages.job import Member
from meshwire.messages.learner import SampleSpace
from meshwire.messages.link import Software
from meshwire.messages.rounds import SampleBlock
from tests.computing import computing

JOB = "1kx3m9q2v7bd"
MEMBERS = tuple(Member(device=f"{n:064x}", incarnation=n, name=name) for n, name in enumerate(("anna", "bert", "ä")))


def manifest(**changes: Any) -> CheckpointManifest:
    first = computing(JOB, MEMBERS[0].device, MEMBERS)
    generation = first.model_copy(update={"number": 2, "parent": first.digest(), "ranks": (0, 2), "learning": (2,)})
    fields: dict[str, Any] = {
        "job": JOB,
        "spec": "1" * 64,
        "round": 77,
        "generation": GenerationRecord.of(generation),
        "chain": "c" * 32,
        "model": "2" * 64,
        "plan": "3" * 64,
        "samples": 4000,
        "space": SampleSpace(total=1000, batch=32, whole_batches=False, drop_last=False),
        "deal": DealState(
            epoch=0,
            position=200,
            returned=(SampleBlock(epoch=0, first=3, end=7),),
            held=((0, (SampleBlock(epoch=0, first=7, end=9),)), (2, ())),
            sizes=((0, 32),),
        ),
        "created_at_s": 1_790_000_000.1,
        "software": Software(meshtrain="0.1.0", python="3.11.7", torch=None, system="Linux x86_64"),
        "units": (UnitRecord(size_bytes=7, sha256="a" * 64), UnitRecord(size_bytes=9, sha256="b" * 64)),
    }
    return CheckpointManifest(**(fields | changes))


def respelled(**changes: Any) -> bytes:
    """A manifest with other fields and the right hash: by somebody who knows how."""
    good = manifest().encode()
    body = json.loads(good)["checkpoint"]
    body.update(changes)
    return sealed(json.dumps(body).encode())


def sealed(body: bytes) -> bytes:
    return b'{"sha256": "%s", "checkpoint": %s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def test_a_manifest_is_json_and_gives_back_what_was_written() -> None:
    made = manifest()
    assert CheckpointManifest.decode(made.encode()) == made
    assert json.loads(made.encode())["checkpoint"]["round"] == 77
    back = made.generation.generation(JOB)
    assert (back.number, back.ranks, back.learning, back.members) == (2, (0, 2), (2,), MEMBERS)
    assert f"{back.hash64():016x}" == made.generation.hash
    assert [unit.blob().size_bytes for unit in made.units] == [7, 9]
    assert unit_file(12) == "12.safetensors"
    without = manifest(space=None, deal=None)
    assert CheckpointManifest.decode(without.encode()) == without


def test_a_manifest_from_before_generations_named_their_root_is_read() -> None:
    """Upgrades: its job is resumed by those that computed then; its generation's hash is not to be had any more."""
    written = json.loads(manifest().encode())["checkpoint"]["generation"]
    for name in ("root", "counted", "gone"):
        del written[name]
    old = CheckpointManifest.decode(respelled(generation=written | {"hash": "0" * 16}))
    generation = old.generation.generation(JOB)
    assert (generation.root, generation.counted, generation.provisional) == (2, (2,), False)


def test_every_changed_bit_and_every_cut_is_found() -> None:
    good = manifest().encode()
    for place in range(len(good)):
        for bit in range(8):
            changed = bytearray(good)
            changed[place] ^= 1 << bit
            with pytest.raises(ValueError, match=r"."):
                CheckpointManifest.decode(bytes(changed))
        with pytest.raises(ValueError, match=r"."):
            CheckpointManifest.decode(good[:place])
    for longer in (good + b" ", b" " + good, good + good):
        with pytest.raises(ValueError, match=r"."):
            CheckpointManifest.decode(longer)


@pytest.mark.parametrize(
    "data",
    [
        respelled(format=2),
        respelled(round=-1),
        respelled(round=2**32),
        respelled(round=77.0),
        respelled(round="77"),
        respelled(job="../../etc"),
        respelled(chain="C" * 32),
        respelled(units=[]),
        respelled(units=[{"size_bytes": 1, "sha256": "a" * 64, "name": "../0.safetensors"}]),
        respelled(units=[{"size_bytes": -1, "sha256": "a" * 64}]),
        respelled(units=[{"size_bytes": 2**60, "sha256": "a" * 64}]),
        respelled(units=[7] * 1_000_000),
        respelled(units=[{"size_bytes": 1, "sha256": "a" * 64}] * (limits.TENSORS_MAX + 3)),
        respelled(created_at_s="today"),
        respelled(deal=None),
        respelled(surprise=1),
        sealed(respelled()[86:-2].replace(b"1790000000.1", b"NaN")),
        sealed(b"[" * 100_000),
        sealed(b"null"),
        sealed(b"\xff"),
        b"",
        bytes(limits.CHECKPOINT_MANIFEST_BYTES_MAX + 1),
    ],
    ids=lambda data: repr(data[80:120]),
)
def test_a_hostile_manifest_is_refused(data: bytes) -> None:
    """With a hash that is right: strict types, limits, no unknown fields."""
    with pytest.raises(ValueError, match=r"."):
        CheckpointManifest.decode(data)


def test_members_that_are_not_the_generations_are_refused() -> None:
    body = json.loads(manifest().encode())["checkpoint"]["generation"]
    for change in ({"learning": [0]}, {"number": 3}, {"parent": None}, {"members": body["members"][:2]}):
        with pytest.raises(ValueError, match="the generation's hash is not that of its members"):
            CheckpointManifest.decode(respelled(generation=body | change))


# The schedule


def saves(schedule: CheckpointSchedule, learning: tuple[int, ...], moments: list[tuple[int, float]]) -> Counter[int]:
    """How often each member saves, at rounds and ages."""
    turns = {rank: CheckpointTurn(schedule, rank, schedule.slot(*moments[0])) for rank in learning}
    return Counter(rank for moment in moments for rank in learning if turns[rank].due(*moment, learning))


def test_by_default_two_members_save_every_five_minutes_in_turns() -> None:
    moments = [(second, float(second)) for second in range(3601)]
    assert saves(CheckpointSchedule(), (0, 1, 2), moments) == {0: 8, 1: 8, 2: 8}
    assert CheckpointSchedule().keep == 3


@pytest.mark.parametrize("learning", [(0,), (3,), (0, 1), (1, 4, 5), (0, 2, 3, 9), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_all_pay_alike_and_never_twice_in_a_slot(learning: tuple[int, ...], copies: int) -> None:
    schedule = CheckpointSchedule(every_rounds=10, copies=copies)
    slots = 60 * len(learning)
    found = [schedule.writers(slot, learning) for slot in range(slots)]
    assert found[0] == learning[:copies], "the lowest ones first"
    assert all(len(set(ranks)) == len(ranks) == min(copies, len(learning)) for ranks in found)
    counts = Counter(rank for ranks in found for rank in ranks)
    assert len(set(counts.values())) == 1
    moments = [(round_, 0.0) for round_ in range(10 * slots)]
    assert sum(saves(schedule, learning, moments).values()) == (slots - 1) * min(copies, len(learning))


def test_a_turn_is_taken_once_also_after_a_pause() -> None:
    """A laptop that slept through several slots saves at most once."""
    turn = CheckpointTurn(CheckpointSchedule(every_s=10), rank=0, slot=0)
    assert [turn.due(1, age_s, (0, 1)) for age_s in (5.0, 11.0, 12.0, 19.9, 55.0, 56.0)] == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert not turn.due(1, 20.0, (0, 1)), "a clock that was set back"
    assert not turn.due(1, 70.0, ()), "nobody computes"


@pytest.mark.parametrize("wrong", [{"every_s": 0}, {"every_rounds": 0}, {"copies": 0}, {"keep": 0}])
def test_a_schedule_that_saves_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        CheckpointSchedule(**wrong)


@pytest.mark.parametrize(
    ("every", "schedule"),
    [
        ("5", CheckpointSchedule()),
        ("0.5", CheckpointSchedule(every_s=30.0)),
        ("500r", CheckpointSchedule(every_rounds=500)),
        ("off", None),
    ],
)
def test_what_a_person_says_of_it(every: str, schedule: CheckpointSchedule | None) -> None:
    assert schedule_of(every) == schedule


@pytest.mark.parametrize("every", ["", "0", "0.0", "0r", "-5", "5m", "1e3", "r", "nan", "5\n", "never"])
def test_what_is_no_schedule(every: str) -> None:
    with pytest.raises(ValueError, match="use minutes"):
        schedule_of(every)
