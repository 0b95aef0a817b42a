"""What a codec and a mode cost in loss at equal samples, as far as this project has measured it.

Two tables; each row names the file under `tests/bench/results` that it is from, and a test compares it with that file.
What is not in the first one was not measured, and counts as `fast`. No codec is safer than fp32 is in the same mode.

What is safe was tried with four models: two small ones in `codecs.md`, two of 11 M parameters in `target.md`. What is
only fast is chosen by how soon it comes to a loss, so by the second table, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


class Quality(StrEnum):
    """How sure it is that a job learns as it would with the exact mean after every step."""

    EXACT = "exact"  # it computes that mean, but for rounding
    SAFE = "safe"  # its loss was within the noise of the exact mean's own seeds wherever it is judged
    FAST = "fast"  # it was behind in one of them, or was not measured

    def allows(self, other: "Quality") -> bool:
        """Whether who wants this one takes that one too."""
        order = list(Quality)
        return order.index(other) <= order.index(self)


class Tried(NamedTuple):
    """A codec under a mode, as typed."""

    codec: str
    sync: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was measured of it.

    Attributes:
        behind_nats: by how much its held-out loss was above that of fp32 under bsp, where that was most; 0 for none.
        source: file under `tests/bench/results`.
    """

    quality: Quality
    behind_nats: float
    source: str


_CODECS, _TARGET, _GRID = "codecs.md", "target.md", "grid.md"
_EXACT, _SAFE, _FAST = Quality
_ROWS = (
    ("fp32", "bsp", _EXACT, 0.0, "demo_matrix.md"),
    ("fp16", "bsp", _EXACT, 0.0, "demo_matrix.md"),
    ("bf16", "bsp", _EXACT, 0.0, "demo_matrix.md"),
    ("fp32", "ssp:1", _FAST, 0.0516, "modes.md"),
    ("fp32", "ssp:2", _FAST, 0.0488, "modes.md"),
    ("int8", "bsp", _SAFE, 0.0125, _CODECS),
    ("int8:sr", "bsp", _SAFE, 0.0156, _CODECS),
    ("int4", "bsp", _SAFE, 0.0183, _TARGET),
    ("int4:sr", "bsp", _SAFE, 0.0177, _CODECS),
    ("nf4", "bsp", _SAFE, 0.0117, _CODECS),
    ("int8", "ssp:2", _FAST, 0.0445, _CODECS),
    ("int4", "ssp:2", _FAST, 0.0316, _CODECS),
    ("qsgd", "bsp", _FAST, 0.0200, _CODECS),
    ("twobit", "bsp", _FAST, 0.0638, _CODECS),
    ("terngrad", "bsp", _FAST, 0.0667, _CODECS),
    ("topk:0.1", "bsp", _FAST, 0.1279, _CODECS),
    ("topk:0.1,gather", "bsp", _FAST, 0.0947, _CODECS),
    ("onebit:40", "bsp", _FAST, 0.1537, _CODECS),
    ("powersgd", "bsp", _FAST, 0.0660, _CODECS),
    ("fp32", "local:2", _SAFE, 0.0, _TARGET),
    ("nf4", "local:2", _SAFE, 0.0118, _CODECS),
    ("fp32", "local:4", _FAST, 0.0245, _GRID),
    ("int8", "local:4", _FAST, 0.0258, _GRID),
    ("fp32", "local:8", _FAST, 0.0220, _CODECS),
    ("int8", "local:8", _FAST, 0.0224, _CODECS),
    ("fp32", "local:8,ssp:1", _FAST, 0.0551, _CODECS),
    ("int8", "local:8,ssp:1", _FAST, 0.0586, _CODECS),
    ("nf4", "local:4", _FAST, 0.0209, _GRID),
    ("fp32", "diloco:8", _FAST, 0.2012, _CODECS),
    ("topk:0.015625,chunk=4096,decay=0.95,senders+2bit", "sparseloco:8", _FAST, 0.0836, _CODECS),
    ("topk:0.015625,chunk=4096,decay=0.95,senders+2bit", "sparseloco:8,ssp:1", _FAST, 0.1594, _CODECS),
    ("fp32", "diloco:8,ssp:1", _FAST, 0.5032, _CODECS),
    ("onebit", "bsp", _FAST, 0.3617, _CODECS),
    ("topk", "bsp", _FAST, 0.3815, _CODECS),
    ("sidco", "bsp", _FAST, 0.3740, _CODECS),
    ("dct", "bsp", _FAST, 0.5469, _CODECS),
    ("lgc", "bsp", _FAST, 0.3718, _CODECS),
    ("homomorphic", "bsp", _FAST, 0.3044, _CODECS),
    ("cocktail", "bsp", _FAST, 1.0472, _CODECS),
    ("randomk:0.1", "bsp", _FAST, 0.5757, _CODECS),
)
EVIDENCE: Mapping[Tried, Evidence] = MappingProxyType(
    {Tried(codec, sync): Evidence(quality, behind, source) for codec, sync, quality, behind, source in _ROWS}
)


# By which part of the 512 steps of `grid.md` the exact mean, with a schedule of as many steps, is at the loss at which
# this way ends: four laptops, the demo's GPT, AdamW.
_WORTH = (
    ("fp32", "local:4", 0.97),
    ("nf4", "local:4", 0.97),
    ("int8", "local:4", 0.96),
    ("int8", "local:8", 0.88),
    ("powersgd", "bsp", 0.73),
    ("nf4", "local:4,ssp:1", 0.82),
    ("int8", "local:8,ssp:1", 0.65),
    ("fp32", "diloco:128", 0.46),
    ("topk:0.015625,chunk=4096,decay=0.95,senders+2bit", "sparseloco:8", 0.63),
    ("topk:0.015625,chunk=4096,decay=0.95,senders+2bit", "sparseloco:8,ssp:1", 0.64),
    ("topk:0.015625,chunk=4096,decay=0.95,senders+2bit", "sparseloco:32", 0.42),
)
WORTH: Mapping[Tried, float] = MappingProxyType({Tried(codec, sync): worth for codec, sync, worth in _WORTH})


_KNOWN = [*_WORTH, *((codec, sync, 1.0) for codec, sync, quality, _, _ in _ROWS if quality is not _FAST)]
_BEST_WORTH = {sync: max(worth for _, other, worth in _KNOWN if other == sync) for _, sync, _ in _KNOWN}

PERIODS_OF_SGD = frozenset({"local:2", "local:4", "local:8"})
"""The modes with a period in which SGD was near enough, too: with two models of 11 M parameters (`target.md`,
`goals.md`). Where rounds overlap, or are sparse, one laptop alone was sooner at its loss."""


def quality_of(codec: str, sync: str) -> Quality:
    """What a codec does to the loss in a mode, each by its own text, as measured; `fast` where nothing was."""
    found = EVIDENCE.get(Tried(codec, sync))
    return Quality.FAST if found is None else found.quality


def worth_of(codec: str, sync: str) -> float:
    """What a sample is worth, in samples in step with fp32, when a loss is to be reached: 1 where it is safe. A codec
    that was not measured counts as the best that was in its mode, for it is hardly better; without one nothing is taken
    off."""
    if quality_of(codec, sync) is not Quality.FAST:
        return 1.0
    return WORTH.get(Tried(codec, sync), _BEST_WORTH.get(sync, 1.0))


def recommendable(codec: str, sync: str) -> bool:
    """Whether it is known how soon it comes to a loss."""
    return quality_of(codec, sync) is not Quality.FAST or Tried(codec, sync) in WORTH
