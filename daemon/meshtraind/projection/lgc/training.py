"""What a member has seen of chosen values, and the autoencoder that its learner makes of them (`autoencoder.py`).

The daemon has no torch: a sample goes to the learner, weights come back. Until then, and where the learner cannot,
those of before stay.
"""

import logging

import numpy as np

from meshtraind.codecs.base import CodecError, Values
from meshtraind.projection.lgc.autoencoder import check_weights, starting_weights
from meshwire import limits
from meshwire.encoded_layout.lgc_autoencoder import GROUP_VALUES, Architecture
from meshwire.messages.learner import EncoderTask, LearnerEncoder

log = logging.getLogger(__name__)

LITTLE = np.dtype("<f4")
ROW_GROUPS = limits.ENCODER_ROW_VALUES // GROUP_VALUES
ROWS_MAX = limits.ENCODER_SAMPLE_BYTES_MAX // (limits.ENCODER_ROW_VALUES * LITTLE.itemsize)
ROWS_AT_ONCE = 8  # so that a sample is of many rounds
ROUNDS_BETWEEN = 50  # a learner takes up to a second each time


class EncoderLearning:
    """Has one member's learner train the autoencoder: collects a sample of values, asks, and takes the weights.

    Attributes:
        weights: the best that are known here; as many as the architecture has.
    """

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._rows: Values = np.zeros((ROWS_MAX, limits.ENCODER_ROW_VALUES), np.float32)
        self._seen = 0  # rows ever
        self._rounds = ROUNDS_BETWEEN
        self._number = 0
        self._waiting = False
        self.weights = starting_weights(architecture)

    def begin_round(self) -> None:
        """Notes that a round begins."""
        self._rounds += 1

    def see(self, blocks: Values) -> None:
        """Takes some rows of a round's values, which are finite, into the sample; others each time.

        Args:
            blocks: (blocks, values of a block); of each, zeros make a group.
        """
        count = -(-len(blocks) // ROW_GROUPS)
        every = -(-count // ROWS_AT_ONCE)
        for row in range(self._seen % every if every else 0, count, max(every, 1)):
            values = blocks[row * ROW_GROUPS : (row + 1) * ROW_GROUPS]
            norm = np.sqrt(np.square(values, dtype=np.float64).sum())
            if not norm:
                continue
            place = self._rows[self._seen % ROWS_MAX].reshape(ROW_GROUPS, GROUP_VALUES)
            place.fill(0.0)
            # Rounds count alike, however large their gradients are.
            np.divide(values, norm, out=place[: len(values), : values.shape[1]], casting="same_kind")
            self._seen += 1

    def task(self) -> EncoderTask | None:
        """What the learner is to do; None while it is at it, and before the sample is whole."""
        if self._waiting or self._seen < ROWS_MAX or self._rounds < ROUNDS_BETWEEN:
            return None
        self._waiting = True
        self._number += 1
        return EncoderTask(
            number=self._number,
            channels=self._architecture.channels,
            weights=self.weights.astype(LITTLE).tobytes(),
            rows=self._rows.astype(LITTLE).tobytes(),
        )

    def answered(self, body: LearnerEncoder) -> None:
        """Takes the learner's answer. One that nobody waits for was to a question of an earlier process."""
        if not self._waiting or body.number != self._number:
            return
        self._waiting = False
        self._seen = self._rounds = 0  # the next sample is a new one
        wrong = body.error
        if wrong is None:
            wrong = self._take(body.weights)
        if wrong is not None:
            log.warning("LGC's autoencoder stays as it is: %s", wrong)

    def learnt(self) -> Values:
        """The weights that this member announces when it leads."""
        return self.weights

    def learner_lost(self) -> None:
        """Forgets what was asked: another process will be asked anew."""
        self._waiting = False

    def _take(self, sent: bytes) -> str | None:
        """Returns what is wrong with the weights that were sent."""
        if len(sent) != self._architecture.weight_count * LITTLE.itemsize:
            return f"the learner sent {len(sent)} bytes for {self._architecture.weight_count} weights"
        weights = np.frombuffer(sent, LITTLE).astype(np.float32)
        try:
            check_weights(weights, self._architecture)
        except CodecError as error:
            return f"of what the learner sent, {error}"
        self.weights = weights
        return None
