"""P5 for every codec, from the size formula to the kernel."""

import socket
import struct
import sys

import pytest

from meshtraind.transport.connection import Connection
from meshwire.codecs.registry import FAMILIES, CodecSpec, Reduction, parse_codec
from tests.daemon.codectrips import heavy
from tests.daemon.tcpmembers import manifest_of, members, placed

MANIFEST = manifest_of([(64, 300), (40,), (3, 50, 20), (7,), ()], buffers=30)
ROUNDS = 4


_SENT_AND_AGAIN = struct.Struct("200xQQ")  # tcpi_bytes_sent, tcpi_bytes_retrans of Linux's struct tcp_info


def kernel_bytes(connection: Connection) -> int:
    """Sent so far, but for what was sent again: a busy machine acknowledges late."""
    assert connection._transport is not None
    sock = connection._transport.get_extra_info("socket")
    sent, again = _SENT_AND_AGAIN.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT_AND_AGAIN.size))
    return int(sent - again)


def every_codec() -> list[CodecSpec]:
    """Each family in each exchange; a warm-up ends within the rounds."""
    made = []
    for name, family in FAMILIES.items():
        warms_up = any(parameter.name == "warmup" for parameter in family.parameters)
        usual = f"{name}:warmup=2" if warms_up else name
        made.append(parse_codec(usual))
        if family.exchanges:
            made.append(parse_codec(f"{usual}{',' if ':' in usual else ':'}gather"))
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO")
@pytest.mark.asyncio
@pytest.mark.parametrize("codec", every_codec(), ids=str)
async def test_the_kernel_has_sent_what_the_size_formulas_say(codec: CodecSpec) -> None:
    """Every frame is its header and its segments, no byte more; all frames together are one part and one mean of each
    value, or of a gather each member's part."""
    async with members(str(codec), MANIFEST) as two:
        for number in range(ROUNDS):
            gradients = [placed(two.plan, heavy(two.plan.total_values, seed)) for seed in (2 * number, 2 * number + 1)]
            assert await two.round(gradients) is not None
        for rank in (0, 1):
            frames = two.ends[1 - rank].frames
            assert all(header.payload_bytes == len(payload) for header, payload in frames)
            assert kernel_bytes(two.connections[rank]) == sum(
                two.frame_bytes(header, payload) for header, payload in frames
            )
        layouts = [two.forms.of(number).layout for number in range(1, ROUNDS + 1)]
        payload_bytes = sum(len(payload) for end in two.ends for _, payload in end.frames)
        most = 2 * sum(layout.total_bytes for layout in layouts)  # 2 (m-1) vectors, or m (m-1)
        fixed = all(layout.fixed for layout in layouts) and codec.reduction is not Reduction.GATHER
        assert payload_bytes == most if fixed else 0 < payload_bytes <= most
