"""Whatever anybody sends to a daemon, on any of its doors: a value or a refusal."""

import pytest

from tests.daemon.decoders import DAEMON_DECODERS
from tests.wire.fuzzing import Decoder, break_in_every_way


@pytest.mark.parametrize("decoder", DAEMON_DECODERS, ids=lambda decoder: decoder.name)
def test_whatever_the_bytes_a_value_or_a_refusal(decoder: Decoder) -> None:
    break_in_every_way(decoder)
