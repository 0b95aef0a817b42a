"""What a member adds to a round whose vector is another, shorter one than the model's (`meshwire.transforms`)."""

from collections.abc import Sequence

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.feedback import Residual
from meshtraind.ownpart import Retained
from meshtraind.segments import Form, Segment


class ShorterPart(Retained):
    """Whatever s is: encoded at once, for what it leaves out enters the next one.

    The residual is of the model's vector, and counts what the shorter one is rounded to.

    Args:
        area: where it is kept.
        scratch: for the values of one segment; shared by all rounds.
        sent: for the values of the shorter vector; shared by all rounds.
        number: of the round.
        residual: the worker's.
        weight: of the part.
    """

    def __init__(
        self,
        form: Form,
        area: memoryview,
        scratch: Values,
        sent: Values,
        number: int,
        residual: Residual,
        weight: float,
    ) -> None:
        super().__init__(form.segments, area, scratch)
        self._sent = sent
        self._number = number
        self._residual = residual
        self._weight = weight

    def _encode_sent(self, segments: Sequence[Segment]) -> None:
        """Encodes what is to be sent, and leaves in its place what will be decoded."""
        for segment in segments:
            self._encode(segment, self._sent)
            np.copyto(self._sent[segment.start : segment.start + segment.count], self.values(segment))
