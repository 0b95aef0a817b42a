"""DGC's momentum correction: the momentum of SGD, kept by each worker, before anything is left out (Lin et al. 2018).

With u the velocity and v the worker's residual, both in units of w*g (`error_feedback.py`), a round with the gradient g
does

    u <- mu u + g,  v <- v + u            (Nesterov: v <- v + g + mu u, with the new u),

sends the largest of v, and leaves v minus what was sent; where something was sent, u becomes 0, so that old momentum
does not carry a value on that has just moved. Without that masking, what is sent in the end is the sum of all
velocities, exactly as SGD with momentum steps. The velocity is kept as mu times that where Nesterov is asked for.
"""

import math

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.contributions.error_feedback import Feedback, Velocity
from meshwire.codecs.spec import CodecSpec
from meshwire.model.manifest import Momentum
from meshwire.model.plan import Plan, Span


def correction_of(
    codec: CodecSpec, momentum: Momentum | None, feedback: Feedback | None, plan: Plan
) -> "MomentumCorrection | None":
    """The momentum correction of a job; None for a codec that does not take momentum over."""
    if momentum is None or feedback is None or feedback.velocity is None:
        return None
    return MomentumCorrection(feedback.velocity, momentum, codec.number("clip"), plan)


class MomentumCorrection:
    """Adds one member's momentum to what it sends, and clips its gradients, as DGC does.

    Args:
        velocity: decays by the momentum's factor.
        clip: the norm that the mean gradient of a tensor may have before it is added, if it were that of all m members
            together; one member's is clipped to 1/sqrt(m) of it. 0: none is clipped.
    """

    def __init__(self, velocity: Velocity, momentum: Momentum, clip: float, plan: Plan) -> None:
        self.velocity = velocity
        self._nesterov_factor = np.float32(momentum.factor) if momentum.nesterov else None
        self._clip = clip
        self._spans = [[plan.spans[index] for index in bucket.spans] for bucket in plan.buckets]

    def accumulate(
        self, number: int, bucket: int, residual: Values, gradient: Values, weight: float, members: int
    ) -> Values:
        """Adds a round's velocity to the residual.

        Args:
            residual, gradient: of the bucket; the gradient is w*g, and only read. It may hold what is not finite.

        Returns the velocity of the bucket, to be cleared where it is sent. `velocity.cancel` takes it back.
        """
        start = self._spans[bucket][0].start
        velocity = self.velocity.begin(number, start, len(gradient), weight)
        if self._clip:
            gradient = self._clipped(bucket, start, gradient, weight * self._clip / math.sqrt(members))
        if self._nesterov_factor is None:
            velocity += gradient
            residual += velocity
        else:
            velocity += self._nesterov_factor * gradient
            residual += velocity
            residual += gradient
        return velocity

    def _clipped(self, bucket: int, start: int, gradient: Values, norm_max: float) -> Values:
        clipped = gradient.copy()
        for span in self._spans[bucket]:
            values = _of(clipped, span, start)
            norm = float(np.linalg.norm(values.astype(np.float64)))  # fp32 would overflow
            if norm > norm_max:
                values *= np.float32(norm_max / norm)
        return clipped


def _of(run: Values, span: Span, start: int) -> Values:
    return run[span.start - start : span.start - start + span.count]
