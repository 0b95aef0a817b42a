"""What a member adds to a round whose vector is another, shorter one than the model's.

Which vectors these are: `meshwire.encoded_layout.projections`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.contributions.contribution import Retained
from meshtraind.contributions.error_feedback import Residual
from meshtraind.contributions.segments import RoundForm, Segment
from meshtraind.contributions.terms import RunTerms


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a part of a shorter vector is made with.

    Attributes:
        area: where it is kept.
        scratch: for the values of one segment; shared by all rounds.
        sent: for the values of the shorter vector; shared by all rounds.
        number: of the round.
        residual: the worker's.
        weight: of the part.
        seed: of this member's part, for codecs that draw.
    """

    form: RoundForm
    area: memoryview
    scratch: Values
    sent: Values
    number: int
    residual: Residual
    weight: float
    seed: int = 0


class ShorterPart(Retained):
    """Whatever s is: encoded at once, for what it leaves out enters the next one.

    The residual is of the model's vector, and counts what the shorter one is rounded to.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs.form.segments, inputs.area, inputs.scratch)
        self._sent = inputs.sent
        self._number = inputs.number
        self._residual = inputs.residual
        self._weight = inputs.weight
        self._terms = RunTerms(inputs.seed, inputs.number, None)

    def _encode_sent(self, segments: Sequence[Segment]) -> None:
        """Encodes what is to be sent, and leaves in its place what will be decoded."""
        for segment in segments:
            self._encode(segment, self._sent, self._terms.of(segment))
            np.copyto(self._sent[segment.start : segment.start + segment.count], self.values(segment))
