"""G1 on a network of its own: a machine that is cut off does not refuse, and one where nobody listens does."""

import asyncio
import socket

import pytest

from meshtraind.peers.refused_dial import refuses
from meshwire.addresses import Address
from tests.lab.lab import Lab, lab_unavailable

pytestmark = pytest.mark.skipif(lab_unavailable() is not None, reason=str(lab_unavailable()))

GRACE_S = 0.3  # with the patience of 5 s


def test_who_is_cut_off_is_not_taken_for_gone() -> None:
    with Lab(stations=2, rate_mbit=50) as lab:
        with lab.inside(1), socket.create_server((lab.host(1), 0)) as listener:
            there = Address(host=lab.host(1), port=listener.getsockname()[1])
            with lab.inside(0):
                assert not asyncio.run(refuses(there, GRACE_S)), "it listens"
                lab.plug(1, into=False)
                assert not asyncio.run(refuses(there, GRACE_S)), "its packets are lost, the neighbour is known"
                lab.plug(1, into=True)
        with lab.inside(0):
            assert asyncio.run(refuses(there, GRACE_S)), "nobody listens there any more"
            lab.plug(1, into=False)
            assert not asyncio.run(refuses(there, GRACE_S)), "nor does anybody, and nobody says so"
