"""How much of a vector travels, where it changes over the rounds of a job: as a person types it, and round by round."""

import re
from dataclasses import dataclass

ROUNDS_MAX = 10**7

_RAMP = re.compile(r"(?P<first>[^/]+?)\.\.(?P<last>[^/]+)/(?P<rounds>[0-9]{1,8})(?P<linear>/linear)?", re.ASCII)
_SIZE = re.compile(r"(?P<number>[0-9]{1,13}(\.[0-9]{1,9})?) ?(?P<unit>B|kB|MB|GB)?", re.ASCII)
_UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3, "B": 1}


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that goes from `first` in round 1 to `last` in round 1 + `rounds`, and stays there.

    By equal factors, as the warm-up of DGC (Lin et al. 2018, arXiv 1712.01887); or linearly in 1/rate, the compression
    ratio of VARCO (Cervino et al. 2024, arXiv 2406.17611). Both are monotone.
    """

    first: float
    last: float
    rounds: int
    linear: bool = False

    @classmethod
    def constant(cls, rate: float) -> "Ramp":
        """Always the same."""
        return cls(rate, rate, 0)

    @property
    def largest(self) -> float:
        """Of all rounds."""
        return max(self.first, self.last)

    def at(self, number: int) -> float:
        """The rate of a round; rounds count from 1. At both ends it is exact."""
        passed = number - 1
        if passed >= self.rounds:
            return self.last
        if not passed:
            return self.first
        part = passed / self.rounds
        if self.linear:
            rate = 1 / ((1 - part) / self.first + part / self.last)
        else:
            rate = self.first * (self.last / self.first) ** part
        return min(max(rate, min(self.first, self.last)), self.largest)

    def __str__(self) -> str:
        if not self.rounds:
            return number_text(self.last)
        ramp = f"{number_text(self.first)}..{number_text(self.last)}/{self.rounds}"
        return f"{ramp}/linear" if self.linear else ramp


@dataclass(frozen=True, slots=True)
class Rate:
    """A parameter that is a number in [low, high], or a ramp between two. As typed: bare, or NAME=NUMBER, or
    NAME=FIRST..LAST/ROUNDS, with /linear behind it if 1/rate is to change linearly."""

    name: str
    low: float
    high: float
    default: Ramp
    about: str

    @property
    def legal(self) -> str:
        """For people."""
        bounds = f"from {self.low:g} to {self.high:g}"
        return (
            f"a number {bounds}, or FIRST..LAST/ROUNDS with two of them: by equal factors, or with /linear behind it "
            "as VARCO"
        )

    def parse(self, text: str) -> Ramp | None:
        """None if it is not legal."""
        if (rate := self._number(text)) is not None:
            return Ramp.constant(rate)
        typed = _RAMP.fullmatch(text)
        if typed is None:
            return None
        first, last, rounds = self._number(typed["first"]), self._number(typed["last"]), int(typed["rounds"])
        if first is None or last is None or not 1 <= rounds <= ROUNDS_MAX:
            return None
        return Ramp.constant(last) if first == last else Ramp(first, last, rounds, typed["linear"] is not None)

    def bare(self, text: str) -> bool:
        """Whether it is meant where no name is typed."""
        return ".." in text or is_number(text)

    def _number(self, text: str) -> float | None:
        rate = float(text) if is_number(text) else None
        return rate if rate is not None and self.low <= rate <= self.high else None


@dataclass(frozen=True, slots=True)
class ByteSize:
    """A parameter that is a number of bytes, and none (0) by default. As typed: NAME=2MB."""

    name: str
    low: int
    high: int
    about: str
    default: float = 0.0

    @property
    def legal(self) -> str:
        """For people."""
        return f"from {size_text(self.low)} to {size_text(self.high)}"

    def parse(self, text: str) -> float | None:
        """None if it is not legal."""
        typed = _SIZE.fullmatch(text)
        if typed is None:
            return None
        size_bytes = round(float(typed["number"]) * _UNITS[typed["unit"] or "B"])
        return float(size_bytes) if self.low <= size_bytes <= self.high else None

    def bare(self, _: str) -> bool:
        """A bare number is never one of bytes."""
        return False


def size_text(size_bytes: float) -> str:
    """The shortest that is parsed to the same."""
    whole = round(size_bytes)
    unit = next(unit for unit, size in _UNITS.items() if whole % size == 0 and whole >= size)
    return f"{whole // _UNITS[unit]}{unit}"


def number_text(value: float) -> str:
    """The shorter of two texts that is parsed to the same. Without a +, behind which a codec's values are typed."""
    short = f"{value:g}"
    return (short if float(short) == value else f"{value:.17g}").replace("e+", "e")


def is_number(text: str) -> bool:
    """Whether it is typed as one."""
    try:
        float(text)
    except ValueError:
        return False
    return True
