"""One idea for everything that reads what others wrote: whatever the bytes, a value or the decoder's own refusal.

Random bytes rarely get past a first check. So valid inputs are taken and broken, by bytes and by structure: a reader
is then wrong in one place and right in all others.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MUTANTS = 10  # of each valid input

# What is put into the bytes: counts that nothing follows, and what no decoder expects in the middle of a value.
HEADS = (
    b"\xdd\xff\xff\xff\xff",  # msgpack: a list of 4 billion,
    b"\xdf\xff\xff\xff\xff",  # a map,
    b"\xc6\xff\xff\xff\xff",  # bytes,
    b"\xdb\xff\xff\xff\xff",  # a text,
    b"\xc9\xff\xff\xff\xff\x01",  # an extension,
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xdc\xff\xff",
    b"\xc1",
    b"\x91" * 600,
    b"\x81\x01" * 600,
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\x00\x00\x80\x7f",  # infinity
    b"\x30\x84\xff\xff\xff\xff",  # DER: a sequence of 4 billion
    b"\xc0\x0c",  # DNS: a name that points back
    b"\x1b[2J\r\n",
    b"\xed\xa0\x80",  # half a surrogate pair
)

# What takes the place of one value inside a structure.
ODDITIES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**32,
    2**63,
    2**64 - 1,
    -(2**63),
    float("nan"),
    float("inf"),
    1e308,
    "",
    "\x1b[2J\n\u202e",
    "..",
    "x" * 5000,
    b"",
    b"\xff" * 5000,
    [],
    {},
    [[]] * 300,
    [None] * 300,
    {"surplus": 1},
)


class Refused(Exception):
    """For decoders that return what is wrong instead of raising it."""


@dataclass(frozen=True)
class Decoder:
    """Something that reads bytes of others.

    Attributes:
        decode: takes any bytes, and itself asserts what it promises of a value or a refusal.
        valid: inputs that it accepts, of every kind.
        refusals: the errors with which it refuses.
        examples: how many valid inputs a test takes; fewer where one costs milliseconds.
    """

    name: str
    decode: Callable[[bytes], object]
    valid: st.SearchStrategy[bytes]
    refusals: tuple[type[Exception], ...] = (Refused,)
    examples: int = 30

    def survives(self, data: bytes) -> bool:
        """Whether the bytes were accepted. Any other error than a refusal gets through."""
        try:
            self.decode(data)
        except self.refusals:
            return False
        return True


def break_in_every_way(decoder: Decoder) -> None:
    """The property itself: what is valid is accepted, and of what is broken nothing gets through but a refusal."""

    @settings(max_examples=decoder.examples, suppress_health_check=[HealthCheck.too_slow])
    @given(decoder.valid, decoder.valid, st.integers(0, 2**32))
    def check(data: bytes, other: bytes, seed: int) -> None:
        assert decoder.survives(data)
        rng = random.Random(seed)
        for _ in range(MUTANTS):
            decoder.survives(mutated(data, other, rng))

    check()


def mutated(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """`data` broken in one to three places, now and then with a piece of `other`, which is valid too."""
    for _ in range(rng.randint(1, 3)):
        data = _restructured(data, rng) if rng.random() < 0.5 else _broken(data, other, rng)
    return data


def _broken(data: bytes, other: bytes, rng: random.Random) -> bytes:
    start = rng.randint(0, len(data))
    end = min(len(data), start + rng.choice((0, 1, 1, 2, 4, 16)))
    from_other = rng.randint(0, len(other))
    replacement = rng.choice(
        (
            lambda: rng.randbytes(end - start),
            lambda: bytes(byte ^ (1 << rng.randrange(8)) for byte in data[start:end]),
            lambda: b"",
            lambda: data[start:end] * 2,
            lambda: rng.choice(HEADS),
            lambda: other[from_other : from_other + rng.randint(1, 64)],
        )
    )()
    rest = b"" if rng.random() < 0.1 else data[end:]  # cut off
    return data[:start] + replacement + rest


def _restructured(data: bytes, rng: random.Random) -> bytes:
    """One value of a msgpack structure replaced, removed or doubled; other data comes back as it is."""
    try:
        plain = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        return data
    packed: bytes = msgpack.packb(_changed(plain, rng))
    return packed


def _changed(plain: Any, rng: random.Random) -> Any:
    if isinstance(plain, dict) and plain and rng.random() < 0.9:
        key = rng.choice(sorted(plain, key=str))
        match rng.randrange(5):
            case 0:
                return {name: value for name, value in plain.items() if name != key}
            case 1:
                return plain | {f"{key}2": plain[key]}
            case _:
                return plain | {key: _changed(plain[key], rng)}
    if isinstance(plain, list) and plain and rng.random() < 0.9:
        at = rng.randrange(len(plain))
        match rng.randrange(5):
            case 0:
                return plain[:at] + plain[at + 1 :]
            case 1:
                return plain[:at] + plain[at : at + 1] * rng.choice((2, 70, 300)) + plain[at + 1 :]
            case _:
                return [*plain[:at], _changed(plain[at], rng), *plain[at + 1 :]]
    return rng.choice(ODDITIES)
