"""`--sync sma:H`: own weights that go on from round to round, and a central model between them.

Synchronous model averaging (CROSSBOW, Koliousis et al. 2019, arXiv 1901.02244, algorithm 1). The base is the central
model z. After H local steps each of the m learners of a round has, with its own weights w and n samples of N in all,

    w' = w - (w - z) / m                          a step towards the central model
    z' = z + sum(n/N * (w - z)) + mu * (z - z0)   z0: z of the round before

Algorithm 1 has alpha = 1/m and equal batches; where these are equal, so is z' = z + sum(alpha * (w - z)) + ... What
travels is z - w, as with `local:H`, so z' is a step of the outer optimizer: SGD with rate 1 and plain momentum mu.

- With mu = 0, sum(n/N * w) + z/m is as before the exchange: nothing is lost between the models, nothing made.
- Without gradients and with mu = 0, w - z shrinks by 1 - 1/m in each round, as far as learners differ from their mean;
  the mean's own is multiplied by -1/m.
- In the long run z moves by m / (m + 1 - mu) of the mean of what the learners' steps change.

Not as in the original: a learner's gradients are of w after the exchange (its code takes the differences before the
step, so that both can overlap), and nothing begins again where a learning rate changes. There all w become z then, for
its rates fall a few times in a training; here schedules move with every step, and w = z in each round is `local:H`. An
old rate's distance from z is gone within some rounds by itself.
"""

from collections.abc import Sequence

import torch

from meshtrain.train.model.kept_state import NoKeptState
from meshtrain.train.optim.own_steps import OwnSteps
from meshtrain.train.periods.local_weights import LocalWeights
from meshwire.messages.learner import RoundDone


class CentralAverage(LocalWeights):
    """Local weights that a round draws to the base, and does not replace.

    They begin on the base: at the start, in a new process, after a void round (V1) or a lost step (R5), and after each
    round that this learner is not in, for old weights would pull the base back.

    Args:
        learners: of each device: all of them are in a round that one of them is in (R6).
    """

    def __init__(self, parameters: Sequence[torch.Tensor], own: OwnSteps, kept: NoKeptState, learners: int = 1) -> None:
        super().__init__(parameters, own, kept)
        self._learners = learners

    @torch.no_grad()
    def take_part(self, members: int) -> None:
        """w - (w - z) / m, where the round is not in z yet: m learners of so many members are in it."""
        for local, base in self.pairs():
            local.lerp_(base, 1.0 / (members * self._learners))

    def end_period(self) -> None:
        """The parameters hold the base; local weights are kept."""
        self.show_base()

    def follow(self, done: RoundDone) -> None:
        """The base is that after this round: a void one, or one that this learner is not in, leaves it nothing else."""
        if done.void or not done.step:
            self.begin_anew()
