"""What is told of a gather before a job begins (C2)."""

import pytest

from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.collectives.cost import cost_note, sent_bits_max
from meshwire.collectives.strategy import collective_for, topology_of
from meshwire.collectives.topology import bucket_shards

ring_program = topology_of("ring").program
gather_program = topology_of("gather").program


@pytest.mark.parametrize("members", range(1, 9))
def test_the_times_are_those_of_the_programs(members: int) -> None:
    """So many segments leave a rank for each of the vector's."""
    ranks, segments = tuple(range(members)), 64 * members
    shards = bucket_shards(segments, members, 0)
    bits = 16 * (1 + 2 / 65536)  # fp16 with its scales
    round_ring = sum(shards[shard].segment_count for shard in ring_program(ranks, 0).sends()) / segments
    assert sent_bits_max(collective_for(parse_codec("fp16")), members) == pytest.approx(bits * round_ring)
    topk, gathered = parse_codec("topk"), parse_codec("topk:gather")
    to_all = len(gather_program(ranks, 0).sends())
    assert sent_bits_max(collective_for(gathered), members) == pytest.approx(
        to_all * 8 * topk.segment_bytes_max(65536) / 65536
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_is_said_of_other_ways(name: str) -> None:
    assert cost_note(collective_for(parse_codec(name)), 8) is None


def test_two_devices_are_told_nothing() -> None:
    """Each sends its part once, and by way of owners two halves."""
    assert cost_note(collective_for(parse_codec("topk:1,gather")), 2) is None
    assert sent_bits_max(collective_for(parse_codec("topk:gather")), 2) == sent_bits_max(
        collective_for(parse_codec("topk")), 2
    )


def test_what_it_costs_is_told() -> None:
    note = cost_note(collective_for(parse_codec("topk:0.01,gather")), 4)
    assert note is not None
    assert note.startswith(
        "codec topk:gather with 4 devices: each sends 2 times what it would without gather, at most 0."
    )
    assert "fp16" not in note
    note = cost_note(collective_for(parse_codec("topk:0.5,gather")), 4)
    assert note is not None
    assert note.endswith("That can be more than --codec fp16 takes, which leaves nothing out (24 bits)")


def test_a_tree_tells_what_its_root_sends() -> None:
    note = cost_note(collective_for(parse_codec("fp16"), "tree"), 8)
    assert note is not None
    assert note.startswith("--topology tree with 8 devices: one sends 1.71 times what each does on a ring; if rank 0")
    assert cost_note(collective_for(parse_codec("fp16"), "butterfly"), 8) is None
    assert cost_note(collective_for(parse_codec("fp16"), "tree"), 1) is None


@pytest.mark.parametrize(
    ("codec", "topology", "said"),
    [
        (
            "fp16",
            "star:1",
            "2 times what each does on a ring; if rank 1 has a cable, the air of one WiFi cell is taken 0.67",
        ),
        (
            "int8",
            "star",
            "2 times what each does on a ring; if rank 0 has a cable, the air of one WiFi cell is taken 0.67",
        ),
        ("fp16", "sharded:0,3", "1.33 times what each does on a ring; if ranks 0, 3 have a cable, the air of one WiFi"),
        ("fp16", "gather", "--topology gather with 4 devices: one sends 2 times what each does on a ring"),
        ("fp16", "sharded", None),
    ],
)
def test_who_sends_more_than_on_a_ring_is_told(codec: str, topology: str, said: str | None) -> None:
    """And what a cable there would spare."""
    note = cost_note(collective_for(parse_codec(codec), topology), 4)
    assert note is None if said is None else said in (note or "")
    if topology == "gather":
        assert note is not None
        assert "cable" not in note
