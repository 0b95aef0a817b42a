"""W4: control messages, from value to bytes and back; and what is not one."""

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done, Envelope, Failure, Role, decode, encode
from meshwire.messages.generation import CaughtUp, DealState, ServedRound
from meshwire.messages.learner import Stop
from meshwire.messages.link import Heartbeat, Refuse
from meshwire.messages.local import GetJobs
from meshwire.messages.rounds import Bind, SampleBlock
from tests.wire.wirevalues import MESSAGES, messages


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_message_comes_back_as_it_was(name: str) -> None:
    # How long a nested message takes to make says how busy the machine is.
    @settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
    @given(messages(MESSAGES[name]), st.sampled_from(Role), st.integers(1, 2**63 - 1))
    def check(body: Wire, role: Role, number: int) -> None:
        envelope = Envelope(role, 0 if role is Role.NOTICE else number, body)
        assert decode(encode(envelope)) == envelope

    check()


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_unknown_fields_are_refused(name: str) -> None:
    refused = decode(pack([Role.NOTICE, 0, name, {"surplus": 1}]))
    assert isinstance(refused, str)
    assert f"message {name}: " in refused


def pack(plain: object) -> bytes:
    packed: bytes = msgpack.packb(plain, use_bin_type=True)
    return packed


def nested(depth: int) -> object:
    plain: object = 1
    for _ in range(depth):
        plain = [plain]
    return plain


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (pack([0, 0, "done", {}]) + b"\x00", "not msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\x91" * 5000 + b"\x01", "not msgpack"),
        (b"\xd6\xff\x00\x00\x00\x00", "not msgpack"),  # a timestamp: no extension types
        (b"\x94\x00\x00\xa4done\x81\x01\x02", "not msgpack"),  # a map's keys are text
        (pack({"role": 0}), "not [role, id, type, fields]"),
        (pack([0, 0, "done"]), "not [role, id, type, fields]"),
        (pack([9, 0, "done", {}]), "unknown message role 9"),
        (pack([True, 1, "done", {}]), "unknown message role True"),
        (pack(["0", 0, "done", {}]), "unknown message role '0'"),
        (pack([0, 1, "done", {}]), "does not suit its role"),
        (pack([1, 0, "done", {}]), "does not suit its role"),
        (pack([1, 2**63, "done", {}]), "does not suit its role"),
        (pack([1, -1, "done", {}]), "does not suit its role"),
        (pack([0, 0, "x" * 5000, {}]), "unknown message type 'xxx"),
        (pack([0, 0, ["done"], {}]), "unknown message type ['done']"),
        (pack([0, 0, "done", []]), "message done: "),
        (pack([0, 0, "done", {"surplus": 1}]), "message done: surplus: "),
        (pack([0, 0, "refuse", {}]), "message refuse: reason: "),
        (pack([0, 0, "refuse", {"reason": 5}]), "message refuse: reason: "),
        (pack([0, 0, "refuse", {"reason": "x" * (limits.REFUSAL_CHARS_MAX + 1)}]), "message refuse: reason: "),
        (pack([0, 0, "refuse", {"reason": nested(500)}]), "message refuse: reason: "),
        (pack([0, 0, "done", {str(number): 0 for number in range(65)}]), "exceeds max_map_len(64)"),
        (pack([0, 0, "done", {"\x1b[2J\n" + "x" * 100_000: 0}]), r"message done: \x1b[2J\nxxx"),
    ],
)
def test_what_is_wrong_is_named(payload: bytes, reason: str) -> None:
    refused = decode(payload)
    assert isinstance(refused, str)
    assert reason in refused
    assert len(refused) < 500, "a refusal is shown to people"


@given(st.binary(max_size=300))
def test_no_bytes_make_the_decoder_raise(payload: bytes) -> None:
    assert isinstance(decode(payload), str | Envelope)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=10,
)


@given(st.data())
def test_no_values_make_the_decoder_raise(data: st.DataObject) -> None:
    """Well-formed msgpack with any value in any field of any message."""
    name = data.draw(st.sampled_from(sorted(MESSAGES)))
    known = st.dictionaries(st.sampled_from([*MESSAGES[name].model_fields, "surplus"]), plain_values)
    fields = data.draw(known | plain_values)
    decoded = decode(pack([data.draw(st.sampled_from(Role)), data.draw(st.integers(0, 3)), name, fields]))
    assert isinstance(decoded, str | Envelope)


def test_what_a_member_lacks_fits_into_a_message_however_many_members_and_batches() -> None:
    """X1, X2, G4: each of the most members has as many batches in a round, or in hand, as it may claim, none of which
    follows another: so it is after many have come and gone."""
    blocks = tuple(SampleBlock(epoch=70_000, first=2**31 + at, end=2**31 + at + 1) for at in range(1024))
    blocks *= limits.CLAIM_BATCHES_MAX // len(blocks)
    deal = DealState(
        epoch=1, position=0, returned=(), held=tuple((rank, blocks) for rank in range(64)), sizes=(), claim=4096
    )
    bind = Bind(round=1, step=1, base=0, weight=1.0, samples=blocks)
    served = ServedRound(
        round=1, void=False, reason="", binds=tuple((rank, bind) for rank in range(64)), poisons=(), used=bytes(1000),
        integers=(), squared_norm=1.0, chain=bytes(16), poisoned=b"", size_bytes=1,
    )  # fmt: skip
    for reply in (CaughtUp(rounds=(), deal=deal), CaughtUp(rounds=(served,))):
        assert len(encode(Envelope(Role.REPLY, 1, reply))) > limits.CONTROL_BYTES_MAX


def test_a_message_of_more_than_the_limit_is_not_made() -> None:
    with pytest.raises(ValueError, match=f"failure of .* exceeds {limits.MESSAGE_BYTES_MAX}"):
        encode(Envelope(Role.FAILURE, 1, Failure(error="x" * limits.MESSAGE_BYTES_MAX)))


@pytest.mark.parametrize(
    ("envelope", "golden"),
    [
        (Envelope(Role.REQUEST, 1, Heartbeat()), "9401" "01" "a9686561727462656174" "80"),
        (Envelope(Role.REPLY, 300, Done()), "9403" "cd012c" "a4646f6e65" "80"),
        (Envelope(Role.NOTICE, 0, Refuse(reason="no")), "9400" "00" "a6726566757365" "81" "a6726561736f6e" "a26e6f"),
        (Envelope(Role.REQUEST, 2, GetJobs(prefix="")), "9401" "02" "a86765742e6a6f6273" "81" "a6707265666978" "a0"),
        (Envelope(Role.NOTICE, 0, Stop(reason="end")), "9400" "00" "a473746f70" "81" "a6726561736f6e" "a3656e64"),
    ],
)  # fmt: skip
def test_golden_messages(envelope: Envelope, golden: str) -> None:
    """Peers of this wire version agree on every byte."""
    assert encode(envelope).hex() == golden
    assert decode(bytes.fromhex(golden)) == envelope


def schemas(schema: object) -> Iterator[dict[str, Any]]:
    """All of the numbers that a message holds, however deep."""
    if isinstance(schema, dict):
        if schema.get("type") in ("int", "float"):
            yield schema
        for part in schema.values():
            yield from schemas(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from schemas(part)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_number_has_bounds_within_which_files_are_sought_and_sums_are_made(name: str) -> None:
    for schema in schemas(MESSAGES[name].__pydantic_core_schema__):
        if schema["type"] == "int":
            low, high = schema.get("ge", schema.get("gt")), schema.get("le", schema.get("lt"))
            assert isinstance(low, int)
            assert isinstance(high, int)
            assert -(2**63) <= low <= high <= 2**64


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("fetch", {"offset_bytes": 2**64 - 1}, "offset_bytes: Input should be less than or equal to 1099511627776"),
        ("fetch", {"offset_bytes": 2**63}, "offset_bytes: "),
        ("round.fetch", {"offset_bytes": 2**63}, "offset_bytes: "),
        ("fetched", {"total_bytes": -1}, "total_bytes: "),
        ("job.hash", {"round": 2**63}, "round: "),
        ("job.rank", {"metrics": {"exposed_s": float("inf")}}, "metrics.exposed_s: "),
        ("job.rank", {"metrics": {"step_s": float("nan")}}, "metrics.step_s: "),
        ("job.offer", {"spec": {"created_at_s": 1e300}}, "spec.created_at_s: "),
    ],
)
def test_numbers_that_no_arithmetic_takes_are_refused_by_name(name: str, fields: dict[str, Any], reason: str) -> None:
    """A message with an offset that no file has ended in a traceback, and a time without end in the list of jobs."""
    with pytest.raises(ValidationError) as refused:
        MESSAGES[name].load(fields)
    wrong = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in refused.value.errors()]
    assert any(text.startswith(reason) and "required" not in text for text in wrong), wrong
