"""How costs grow, and how many peers fill the air: what is pure in `scalepage`; and that the page is of its file."""

from itertools import count
from pathlib import Path

import pytest

from tests.bench.journal import Journal
from tests.bench.scalepage import CROSSINGS, FRAME_S, PEERS, TLS_TCP_IP_BYTES, PairCost, growth, named, page

RESULTS = Path(__file__).parent / "results"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (dict.fromkeys(PEERS, 3.0), "constant"),
        ({m: 2.0 * (m - 1) for m in PEERS}, "m"),
        ({m: 0.1 * (m - 1) ** 2 for m in PEERS}, "m^2"),
        ({m: (m - 1) ** 1.5 for m in PEERS}, "m^1.5"),
        ({m: 40.0 + (m == 4) for m in PEERS}, "constant"),
        (dict.fromkeys(PEERS, 0.0), "none"),
        ({64: 1.0}, "none"),
    ],
)
def test_growth_is_named(values: dict[int, float], name: str) -> None:
    assert named(growth(values)) == name


@pytest.mark.parametrize("rate", [0.1, 1.0, 30.0])
def test_the_air_is_full_with_the_first_peers_that_say_more_than_it_carries(rate: float) -> None:
    cost = PairCost(messages=2.0, frame_bytes=500.0, messages_s=2.6, bytes_s=1000.0)
    pair_bytes_s = rate * (500.0 + 2 * TLS_TCP_IP_BYTES) + 1000.0 + 2.6 * TLS_TCP_IP_BYTES
    full = next(m for m in count(2) if 8 * CROSSINGS * m * (m - 1) * pair_bytes_s > 20e6)
    assert cost.peers_by_bytes(rate, mbit=20.0) == full - 1
    busy = next(m for m in count(2) if CROSSINGS * m * (m - 1) * FRAME_S * (2.0 * rate + 2.6) > 1)
    assert cost.peers_by_frames(rate) == busy - 1


def test_the_page_is_made_of_its_file() -> None:
    assert page(Journal(RESULTS / "scale.jsonl")) == (RESULTS / "scale.md").read_text("utf-8")
