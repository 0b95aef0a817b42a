"""G10: one of four lies. The others name it, go on without it, and end as if it had been killed at that round."""

import asyncio
import logging
from functools import cache
from typing import Any

import numpy as np
import pytest

from meshwire.header import Header
from meshwire.jobs import job_number
from meshwire.messages.job import End
from meshwire.messages.rounds import Bind, Null, Seal
from meshwire.wiretypes import Wire
from tests.daemon.liarmesh import JOB, Frame, LiarMesh, Lie, at_round, header_of, of_chunks

LIAR, ROUND, STEPS = 1, 3, 5
HONEST = (0, 2, 3)
RING, SHARDED, GATHER = "fp32", "int8", "topk:0.1,gather"


def nan(header: Header, content: bytes) -> Frame:
    return header, np.full(len(content) // 4, np.nan, "<f4").tobytes()


def garbage(header: Header, content: bytes) -> Frame:
    return header, b"\xff" * len(content)


def silent(_header: Header, _content: bytes) -> None:
    return None


def unpacked(_header: Header, _content: bytes) -> str:
    return "12 packed bytes that are no LZ4 block of 400 bytes"


def said(kind: type[Wire], **changes: Any) -> Lie:
    """Another value in messages of a kind."""

    def told(header: Header, content: bytes | Wire | None) -> list[Frame]:
        return [(header, content.model_copy(update=changes) if isinstance(content, kind) else content)]

    return told


def twice(header: Header, content: bytes | Wire | None) -> list[Frame]:
    return [(header, content)] * (2 if isinstance(content, Seal) else 1)


def nulls(header: Header, content: bytes | Wire | None) -> list[Frame]:
    return [(header, Null(round=content.round + 9) if isinstance(content, Bind) else content)]


def another_mask(header: Header) -> int:
    return header.contributors ^ (1 << LIAR)


LIES: dict[str, tuple[str, Lie, str]] = {
    "NaN in a sum": (RING, of_chunks(nan), "infinite or not a number"),
    "garbage in a part": (SHARDED, of_chunks(garbage), "int8"),
    "garbage in a gather": (GATHER, of_chunks(garbage), "the part of rank 1"),
    "no LZ4 block": (RING, of_chunks(unpacked), "no LZ4 block"),
    "a false weight in a sum": (RING, header_of(weight=lambda header: header.weight * 2), "shows the weight"),
    "a false weight of a part": (SHARDED, header_of(weight=lambda header: header.weight * 2), "shows the weight"),
    "a false mask": (RING, header_of(contributors=another_mask), "contributors"),
    "a false mask in a gather": (GATHER, header_of(contributors=lambda _header: 1), "contributors"),
    "a false counter": (RING, header_of(complete=lambda _header: 10**6), "complete"),
    "a false squared norm": (RING, header_of(squared_norm=lambda h: h.squared_norm * 2), "squared norm"),
    "no such step": (RING, header_of(step=lambda _header: 999), "program step 999"),
    "no such segment": (SHARDED, header_of(first_segment=lambda _header: 10**6), "segments 1000000"),
    "bound on a base to come": (RING, said(Bind, base=10**6), "age"),
    "another weight bound": (RING, said(Bind, weight=77.0), "shows the weight"),
    "sealed twice": (RING, twice, "sealed round 3"),
    "nulls far ahead": (RING, nulls, "nulled round"),
    "sends no chunk": (RING, of_chunks(silent, payload=False), "has sent nothing"),
    "sends no part": (SHARDED, of_chunks(silent, payload=False), "has sent nothing"),
}


@cache
def killed(codec: str, before: int) -> tuple[dict[int, bytes], dict[int, int]]:
    """The means of the same job, in which the liar is killed before this step."""
    mesh = LiarMesh(4, codec, STEPS, dies={LIAR: before})
    asyncio.run(mesh.run(HONEST))
    return mesh.peers[0].means, mesh.peers[0].contributors


@pytest.mark.parametrize("name", LIES)
def test_the_others_go_on_as_if_the_liar_had_been_killed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    codec, lie, named = LIES[name]
    mesh = LiarMesh(4, codec, STEPS)
    mesh.peers[LIAR].lie = at_round(ROUND, lie)
    with caplog.at_level(logging.ERROR):
        asyncio.run(mesh.run(HONEST))
    honest = [mesh.peers[rank] for rank in HONEST]
    assert not any(peer.failed for peer in honest), "the job goes on"
    for peer in honest:
        assert peer.means == honest[0].means, "bit-equal"
        assert LIAR not in (peer.job.generation or mesh.generation).ranks
        (refused,) = peer.job.summary().refused
        assert (refused.rank, refused.violations) == (LIAR, 1)
        assert named in refused.reason
    assert f"rank {LIAR} (n{LIAR}) was refused by rank" in caplog.text
    without = next(number for number, who in sorted(honest[0].contributors.items()) if not who >> LIAR & 1)
    means, contributors = killed(codec, without)
    assert honest[0].contributors == contributors
    assert honest[0].means == means


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_one_false_end_ends_nothing_for_the_others(outcome: Any) -> None:
    """Who says so speaks for itself."""
    mesh = LiarMesh(3, RING, STEPS)
    end = End(job=JOB, outcome=outcome, reason="I say so", now=True)

    def told(header: Header, content: bytes | Wire | None) -> list[Frame]:
        also = [(Header(header.kind, 1, job=job_number(JOB)), end)] if isinstance(content, Seal) else []
        return [(header, content), *also]

    mesh.peers[LIAR].lie = told
    asyncio.run(mesh.run((0, 2)))
    assert mesh.peers[0].ends
    assert mesh.peers[0].means == mesh.peers[2].means
