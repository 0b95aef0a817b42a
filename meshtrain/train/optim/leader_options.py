"""What the leader of a round decides for all who apply it: the optimizer's options and the limit of clipping.

The leader is the contributor with the largest step of its own (tie: the lowest rank). Its options travel with its bind,
so that schedulers, hand-written rates and limits act on all replicas alike, whatever each script says at the moment:
O3 (leader's options), O4 (clipping) and O12 (scaled rates).
"""

from torch.optim import Optimizer

from meshtrain.train.optim.clipping import Clipping
from meshtrain.train.optim.hyperparameters import Hyperparameters, RoundOptions
from meshtrain.train.optim.scaled_rates import ScaledRates
from meshwire.messages.learner import RoundDone
from meshwire.messages.rounds import Bytes


class LeaderOptions:
    """Says this learner's options in its binds, and reads those of the leaders of rounds.

    Args:
        rates: what learning rates are multiplied by; None: by nothing.

    Attributes:
        hyperparameters: the options that travel: numbers of the param groups.
        clipping: which limit rules the rounds that are applied late.
        rates: what learning rates are multiplied by.
    """

    def __init__(self, optimizer: Optimizer, rates: ScaledRates | None = None) -> None:
        self.hyperparameters = Hyperparameters(optimizer)
        self.clipping = Clipping()
        self.rates = rates or ScaledRates(None)

    def pack(self, alone: float = 1.0) -> bytes:
        """The options for the bind of the step that begins. Raises MeshtrainError for one that cannot be told, as
        NaN.

        Args:
            alone: samples of such a step where one learner trains by itself.
        """
        told = None if self.rates.rule is None else alone
        return self.hyperparameters.pack(self.clipping.bound, clip_known=self.clipping.known, alone=told)

    def unpack(self, packed: Bytes) -> RoundOptions | None:
        """The options of a round; None when nobody has sent any. Raises MeshtrainError if they do not suit the
        optimizer."""
        return self.hyperparameters.unpack(packed) if packed else None

    def of_another(self, done: RoundDone, own: Bytes) -> RoundOptions | None:
        """The options of a round, where they are others than those of this learner's bind; None: they are the same, but
        for how many samples a step has, or nobody has sent any. Raises as `unpack`."""
        if done.hyperparameters == own:
            return None
        told, mine = self.unpack(done.hyperparameters), self.unpack(own)
        if told is None or mine is None:
            return told
        return None if told.model_copy(update={"alone": mine.alone}) == mine else told

    def rate_factor(self, done: RoundDone) -> float:
        """What rates are multiplied by in a round that is about to be stepped on. Raises as `unpack`."""
        return 1.0 if self.rates.rule is None else self.rates.begin_round(done, self.unpack(done.hyperparameters))

    def clip_limit(self, told: RoundOptions | None) -> float | None:
        """The largest norm that a round with these options is to have; None: it is not clipped."""
        told = told or RoundOptions(groups=())
        return self.clipping.ruling(told.clip, known=told.clip_known)
