"""Which names of a backend mean this one."""

import pytest

from meshtrain.masquerade import is_meant


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        (None, True),
        ("gloo", True),
        ("NCCL", True),
        ("meshtrain", True),
        ("cpu:gloo", True),
        ("cpu:gloo,cuda:nccl", True),
        ("cuda:nccl, cpu:gloo", True),
        ("cpu:gloo,xpu:xccl", True),
        ("cpu:meshtrain,cuda:nccl", True),
        ("fake", False),
        ("cpu:gloo,cuda:fake", False),
        ("", False),
        ("cpu:", False),
    ],
)
def test_names(name: str | None, meant: bool) -> None:
    """Where a GPU's backend is named beside the CPU's, there is this one alone: nothing goes around the daemon."""
    assert is_meant(name) is meant
