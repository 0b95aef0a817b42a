"""Codecs that turn the model's vector into a shorter one, whose values are summed like gradients on the ring.

Which values a round sends, and what they stand for, follows from the results of earlier rounds, so all members know it
without a word. Whoever comes in later has to hold those results first.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from meshwire import limits
from meshwire.codecs.spec import CodecSpec
from meshwire.encoded_layout.encoded import LayoutPhase
from meshwire.encoded_layout.lgc import SharedPlaces
from meshwire.encoded_layout.powersgd import FactorLayouts
from meshwire.model.plan import Plan


class ProjectionLayouts(Protocol):
    """Of one family of codecs."""

    def phases(self, plan: Plan, codec: CodecSpec) -> tuple[LayoutPhase, ...]:
        """After the warm-up."""

    def builds_on(self, codec: CodecSpec, staleness: int) -> int:
        """How many rounds back a round needs the result of another one."""

    def kept_bytes(self, phases: tuple[LayoutPhase, ...], codec: CodecSpec, staleness: int) -> int:
        """What a daemon keeps for it beside rounds and residuals."""

    def sent_values(self, codec: CodecSpec, count: int) -> int:
        """How many a square matrix of about so many values takes in a round."""


TRANSFORMS: Mapping[str, ProjectionLayouts] = MappingProxyType({"powersgd": FactorLayouts(), "lgc": SharedPlaces()})
"""By family."""


def builds_on(codec: CodecSpec, staleness: int) -> int:
    """How many rounds back a round needs the result of another one; 0: none."""
    return TRANSFORMS[codec.name].builds_on(codec, staleness) if codec.family.transforms else 0


def bits_per_value(codec: CodecSpec) -> float:
    """Of one value in a full segment, the most where that follows the values or changes over the rounds, or in a square
    matrix where factors of matrices are sent."""
    count = limits.SEGMENT_VALUES_MAX
    sent = TRANSFORMS[codec.name].sent_values(codec, count) if codec.family.transforms else count
    return 8 * codec.segment_bytes_max(sent) / count
