"""What the leader of a round decides for all who apply it: the optimizer's options and the limit of clipping.

The leader is the contributor with the largest step of its own (tie: the lowest rank). Its options travel with its bind,
so that schedulers, hand-written rates and limits act on all replicas alike, whatever each script says at the moment:
O3 (leader's options) and O4 (clipping).
"""

from torch.optim import Optimizer

from meshtrain.train.optim.clipping import Clipping
from meshtrain.train.optim.hyperparameters import Hyperparameters, RoundOptions
from meshwire.messages.rounds import Bytes


class LeaderOptions:
    """Says this learner's options in its binds, and reads those of the leaders of rounds.

    Attributes:
        hyperparameters: the options that travel: numbers of the param groups.
        clipping: which limit rules the rounds that are applied late.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.hyperparameters = Hyperparameters(optimizer)
        self.clipping = Clipping()

    def pack(self) -> bytes:
        """The options for the bind of the step that begins. Raises MeshtrainError for one that cannot be told, as
        NaN."""
        return self.hyperparameters.pack(self.clipping.bound, clip_known=self.clipping.known)

    def unpack(self, packed: Bytes) -> RoundOptions | None:
        """The options of a round; None when nobody has sent any. Raises MeshtrainError if they do not suit the
        optimizer."""
        return self.hyperparameters.unpack(packed) if packed else None

    def clip_limit(self, told: RoundOptions | None) -> float | None:
        """The largest norm that a round with these options is to have; None: it is not clipped."""
        told = told or RoundOptions(groups=())
        return self.clipping.ruling(told.clip, known=told.clip_known)
