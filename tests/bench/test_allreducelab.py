"""What no all-reduce in the lab can be faster than."""

import pytest

from meshtraind.bench.settings import Settings
from tests.bench.allreduce_lab import Network

SETTINGS = Settings(peers=4, mb=10)
ONE_WIRED = frozenset({0})


@pytest.mark.parametrize(
    ("network", "topology", "vectors"),
    [
        (Network(100), "ring", 1.5),
        (Network(100), "star:0", 3),  # what the one in the middle sends
        (Network(100, cell=True), "ring", 12),
        (Network(100, cell=True), "star:0", 12),
        (Network(100, cell=True, wired=ONE_WIRED), "ring", 9),
        (Network(100, cell=True, wired=ONE_WIRED), "star:0", 6),
    ],
)
def test_limits_are_those_of_the_links(network: Network, topology: str, vectors: float) -> None:
    """A vector of 10 MB takes 0.8 s of 100 Mbit/s. With one cable a star takes two thirds of a ring's air."""
    assert network.limit_s(SETTINGS, topology) == pytest.approx(0.8 * vectors)
