"""`EncoderTask`: LGC's autoencoder learns here from what the daemon has seen, for the daemon has no torch."""

import numpy as np
import torch

from meshtrain.train.lgc.training import EncoderTrainingError, train_encoder
from meshwire import limits
from meshwire.layout.lgc_autoencoder import Architecture
from meshwire.messages.learner import EncoderTask, LearnerEncoder

LITTLE = np.dtype("<f4")


def train_as_asked(task: EncoderTask) -> LearnerEncoder:
    """Weights, or why there are none: training of the model goes on without, and the daemon says so in its log."""
    weights = torch.from_numpy(np.frombuffer(task.weights, LITTLE).astype(np.float32))
    rows = torch.from_numpy(np.frombuffer(task.rows, LITTLE).astype(np.float32))
    try:
        learnt = train_encoder(Architecture(task.channels), weights, rows.view(-1, limits.ENCODER_ROW_VALUES))
    except (EncoderTrainingError, RuntimeError) as error:  # torch's are RuntimeErrors: no memory, no eigenvectors
        return LearnerEncoder(number=task.number, error=str(error)[: limits.ERROR_CHARS_MAX])
    return LearnerEncoder(number=task.number, weights=learnt.numpy().astype(LITTLE).tobytes())
