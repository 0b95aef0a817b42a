"""What a daemon refuses of a job's settings before anybody is asked to take part: what the command refuses, word for
word, for whoever submits otherwise."""

from itertools import product

import pytest

from meshtrain.cli.commands.submit import _settings
from meshtrain.cli.ui.errors import BadCommandLine
from meshtraind.jobs.spec import check_settings
from meshtraind.transport.requests import RequestFailed
from meshwire.messages.local import Submit
from tests.everysetting import MODES, TOPOLOGIES, codecs

BODY = Submit(
    name="test",
    root="/nowhere",
    manifest="/nowhere/files",
    data_root=None,
    data_manifest=None,
    script="train.py",
    args=(),
    env=(),
    on=(),
    peers=None,
    sync="bsp",
    on_nan="stop",
    seed=1,
    bucket_bytes=None,
    hash_every=0,
    trace=False,
    dry_run=False,
)


def by_daemon(sync: str, codec: str | None, topology: str | None, masks: str | None) -> str | None:
    changes = {"sync": sync, "codec": codec, "topology": topology, "masks": masks}
    try:
        check_settings(BODY.model_copy(update=changes))
    except RequestFailed as error:
        return str(error)
    return None


def by_command(sync: str, codec: str | None, topology: str | None, masks: str | None) -> str | None:
    try:
        _settings(sync, None, None, None, None, "off", codec, masks, topology, None)
    except BadCommandLine as error:
        return str(error)
    return None


@pytest.mark.parametrize("masks", [None, "0.5"])
def test_a_daemon_refuses_what_the_command_does(masks: str | None) -> None:
    of_codecs = (None, *codecs())
    asked = [*product(MODES, of_codecs, (None,)), *product(("bsp", "ssp:2"), of_codecs, TOPOLOGIES)]
    told = [(by_daemon(*each, masks), by_command(*each, masks)) for each in asked]
    assert [one for one, _ in told] == [other for _, other in told]
    assert any(one is None for one, _ in told)
    assert any(one is not None for one, _ in told)
