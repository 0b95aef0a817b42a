"""What a function returned on another device, as bytes that are data and no code: reading them runs nothing.

Numbers, texts, bytes, lists, tuples, dicts, numpy arrays and tensors, nested as one likes, in MessagePack; arrays and
tensors inside it in the format of safetensors. Subclasses (OrderedDict, named tuples) come back as the plain kind.
"""

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from meshtrain.errors import NotSupported
from meshwire import limits

EXT_TUPLE, EXT_ARRAY, EXT_SCALAR, EXT_TENSOR = 1, 2, 3, 4
DEPTH_MAX = 100
BYTES_MAX = 1024 * limits.MIB  # of one result, in memory on both sides
INSTEAD = (
    "numbers, texts, bytes, lists, tuples, dicts, numpy arrays and tensors can be returned, model.state_dict() among "
    "them; anything else goes into a file in mt.output_dir(), which `meshtrain get` fetches"
)


class NotAResult(Exception):
    """These bytes are none that `pack_value` makes; says why."""


def pack_value(value: Any) -> bytes:
    """The bytes of a result.

    Raises:
        NotSupported: something in it is none of the kinds above, or it is too large; the text says where and what to
            do instead.
    """
    packed = _packed(_plain(value, "result", 0))
    if len(packed) > BYTES_MAX:
        raise NotSupported(
            f"what the function returns takes {len(packed) / limits.MIB:.0f} MiB, at most {BYTES_MAX // limits.MIB} "
            "are brought back: write it into a file in mt.output_dir(), which `meshtrain get` fetches"
        )
    return packed


def unpack_value(packed: bytes) -> Any:
    """Reads what `pack_value` has made. Raises NotAResult for anything else."""
    try:
        return _unpacked(packed, 0)
    except NotAResult:
        raise
    except Exception as error:  # of msgpack, numpy, safetensors and torch: whatever a lying device makes them say
        raise NotAResult(f"{type(error).__name__}: {error}") from error


def _packed(plain: Any) -> bytes:
    packed: bytes = msgpack.packb(plain, use_bin_type=True)
    return packed


def _plain(value: Any, where: str, depth: int) -> Any:
    """The value in what MessagePack knows. `where` names it in an error."""
    if depth > DEPTH_MAX:
        raise NotSupported(f"what the function returns is nested deeper than {DEPTH_MAX}, or holds itself")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic | np.ndarray):
        return _plain_array(value, where)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise NotSupported(f"what the function returns holds a number of more than 64 bits ({where}): str() of it")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return _plain_text(value, where)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, tuple):
        inner = [_plain(each, f"{where}[{at}]", depth + 1) for at, each in enumerate(value)]
        return msgpack.ExtType(EXT_TUPLE, _packed(inner))
    if isinstance(value, list):
        return [_plain(each, f"{where}[{at}]", depth + 1) for at, each in enumerate(value)]
    if isinstance(value, Mapping):
        return {_plain_key(key, where): _plain(each, f"{where}[{key!r}]", depth + 1) for key, each in value.items()}
    return _plain_tensor(value, where)


def _plain_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise NotSupported(f"what the function returns holds a text that is no Unicode ({where})") from None
    return str(text)


def _plain_key(key: Any, where: str) -> Any:
    if key is not None and not isinstance(key, str | int | float | bytes):
        raise NotSupported(f"a dict that the function returns ({where}) has a {type(key).__name__} as key: str() of it")
    return _plain(key, f"a key of {where}", 0)


def _plain_array(value: Any, where: str) -> msgpack.ExtType:
    import safetensors.numpy
    from safetensors import SafetensorError

    kind = EXT_SCALAR if isinstance(value, np.generic) else EXT_ARRAY
    try:
        return msgpack.ExtType(kind, safetensors.numpy.save({"": np.ascontiguousarray(value).reshape(np.shape(value))}))
    except SafetensorError as error:
        raise NotSupported(
            f"what the function returns holds a numpy array of {np.asarray(value).dtype} ({where}), which does not "
            "travel: .tolist() makes a list of it, .astype() another kind of numbers"
        ) from error


def _plain_tensor(value: Any, where: str) -> msgpack.ExtType:
    import safetensors.torch
    import torch
    from safetensors import SafetensorError

    if isinstance(value, torch.nn.Module):
        raise NotSupported(
            f"what the function returns holds a model ({where}): return model.state_dict(), not the model"
        )
    if not isinstance(value, torch.Tensor):
        raise NotSupported(f"what the function returns holds a {type(value).__name__} ({where}): {INSTEAD}")
    try:
        dense = value.detach().to_dense() if value.layout is not torch.strided else value.detach()
        return msgpack.ExtType(EXT_TENSOR, safetensors.torch.save({"": dense.cpu().contiguous()}))
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise NotSupported(
            f"what the function returns holds a tensor of {value.dtype} ({where}), which does not travel: {error}"
        ) from error


def _unpacked(packed: bytes, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise NotAResult(f"it is nested deeper than {DEPTH_MAX}")

    def of_ext(code: int, data: bytes) -> Any:
        if code == EXT_TUPLE:
            return tuple(_unpacked(data, depth + 1))
        if code in (EXT_ARRAY, EXT_SCALAR):
            import safetensors.numpy

            array = safetensors.numpy.load(data)[""]
            return array[()] if code == EXT_SCALAR else array
        if code == EXT_TENSOR:
            import safetensors.torch

            return safetensors.torch.load(data)[""]
        raise NotAResult(f"it holds something of kind {code}: are both of the same version of meshtrain?")

    return msgpack.unpackb(packed, ext_hook=of_ext, strict_map_key=False, raw=False)
