"""What a function returned travels as data: it comes back equal, or is refused by a name, and no bytes run code."""

import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from meshtrain.errors import NotSupported
from meshtrain.train import returned_values
from meshtrain.train.returned_values import NotAResult, pack_value, unpack_value

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**63),
        2**64 - 1,
        0.1,
        "grün",
        b"\x00\xff",
        (),
        [(1, (2.5, None)), [True, {"a": {3: (b"x",)}}]],
        {None: 1, 2: "b", 2.5: [], True: 0},
    ],
)
def test_plain_values_come_back_equal_and_of_their_kind(value: Any) -> None:
    assert repr(unpack_value(pack_value(value))) == repr(value)


def test_kinds_of_ones_own_come_back_as_the_plain_kind() -> None:
    back = unpack_value(pack_value([OrderedDict(b=1, a=2), Pair(1, 2), bytearray(b"x")]))
    assert back == [{"b": 1, "a": 2}, (1, 2), b"x"]
    assert [type(each) for each in back] == [dict, tuple, bytes]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        torch.zeros(0, 3),
        torch.tensor(2.5, dtype=torch.float64, requires_grad=True),
        torch.tensor([True, False]),
        torch.eye(3).to_sparse(),
    ],
)
def test_tensors_come_back_bit_equal(tensor: torch.Tensor) -> None:
    back = unpack_value(pack_value({"t": (tensor,)}))["t"][0]
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    assert back.dtype == dense.dtype
    assert torch.equal(back, dense)


def test_a_models_state_can_be_loaded() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other.load_state_dict(unpack_value(pack_value(model.state_dict())))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_arrays_and_numbers_of_numpy_keep_their_kind() -> None:
    given: list[Any] = [
        np.eye(3)[:, ::-1],
        np.zeros((0, 2), np.int8),
        np.array(3),
        np.float32(1.5),
        np.int64(-4),
        np.float64(0.1),
    ]
    for value, back in zip(given, unpack_value(pack_value(given)), strict=True):
        assert type(back) is type(value)
        assert back.dtype == value.dtype
        assert np.array_equal(back, value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, {2}]}, "a set (result['a'][1]): numbers, texts"),
        (torch.nn.Linear(1, 1), "a model (result): return model.state_dict()"),
        ([object()], "a object (result[0])"),
        (2**70, "more than 64 bits (result): str() of it"),
        ({(1, 2): 3}, "a tuple as key: str() of it"),
        (np.array(["a"]), "numpy array of <U1 (result), which does not travel: .tolist()"),
        (["\ud800"], "no Unicode (result[0])"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place_and_the_remedy(value: Any, said: str) -> None:
    with pytest.raises(NotSupported) as raised:
        pack_value(value)
    assert said in str(raised.value)


def test_what_holds_itself_or_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotSupported, match="holds itself"):
        pack_value(endless)
    monkeypatch.setattr(returned_values, "BYTES_MAX", 100)
    with pytest.raises(NotSupported, match=r"mt\.output_dir"):
        pack_value("x" * 100)


class Trap:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code was run')",)


@pytest.mark.parametrize(
    "packed",
    [
        pickle.dumps(Trap()),
        msgpack.packb(msgpack.ExtType(returned_values.EXT_TENSOR, pickle.dumps(Trap()))),
        msgpack.packb(msgpack.ExtType(returned_values.EXT_ARRAY, b"\xff" * 16)),
        msgpack.packb(msgpack.ExtType(returned_values.EXT_TUPLE, b"\x01")),
        msgpack.packb(msgpack.ExtType(99, b"")),
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\xc0",
        pack_value([1, 2])[:-1],
    ],
)
def test_bytes_of_a_device_that_lies_are_an_error_and_run_nothing(packed: bytes) -> None:
    with pytest.raises(NotAResult):
        unpack_value(packed)


def test_tuples_in_tuples_end() -> None:
    packed = b"\xc0"
    for _ in range(returned_values.DEPTH_MAX + 2):
        packed = msgpack.packb(msgpack.ExtType(returned_values.EXT_TUPLE, b"\x91" + packed))
    with pytest.raises(NotAResult, match="deeper"):
        unpack_value(packed)
