"""What own parts leave out where only all members together know it: LGC's autoencoder (`projection.py`)."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.contributions.error_feedback import Residual
from meshtraind.projection.late_rests import LateRests
from meshtraind.projection.lgc.latents import AsTheyAre, Basis, Convolved
from meshtraind.projection.lgc.leader import Places
from meshwire.encoded_layout.lgc import PIECE_BLOCKS, Chosen

Map = AsTheyAre | Basis | Convolved


@dataclass(frozen=True, slots=True, eq=False)
class Underway:
    """What an own part had at its places, while nobody knows yet what will be decoded there.

    Attributes:
        values: (blocks, chosen).
        start: of the bucket in the model's vector.
        weight: of the part.
    """

    values: Values
    start: int
    weight: float
    residual: Residual


class WholeRests:
    """What one member's rounds leave out at chosen places: its values, less its share of what all have decoded
    there.

    Attributes:
        late: what of that is still to be done.
    """

    def __init__(self) -> None:
        self._underway: dict[int, dict[int, Underway]] = {}  # by round and bucket
        self.late = LateRests()

    def keep(self, number: int, bucket: int, part: Underway) -> None:
        """Keeps the values of a part until the round is settled, and `take` asks for them."""
        self._underway.setdefault(number, {})[bucket] = part

    def take(self, number: int) -> dict[int, Underway]:
        """What was kept of a round, by bucket; from now on it is kept no more."""
        return self._underway.pop(number, {})

    def leave(self, bucket: int, part: Underway, chosen: Chosen, places: Places, map_: Map, latents: Values) -> None:
        """Puts what a round that counts has left out into the residual, piece by piece.

        Args:
            places: of the round, as `LearnedGradients.places`.
            latents: the mean of all members'.
        """
        for first in range(0, len(places), PIECE_BLOCKS):
            run = slice(first, min(first + PIECE_BLOCKS, len(places)))
            of_run = latents[run.start * chosen.latents : run.stop * chosen.latents]
            self.late.put(bucket, partial(_leave_piece, part, run, chosen.block_values, places, map_, of_run))


def _leave_piece(part: Underway, run: slice, block_values: int, places: Places, map_: Map, latents: Values) -> None:
    values = part.values[run]
    means = np.empty_like(values)
    map_.decode_into(latents, means, np.empty(means.size, np.float32))
    first = run.start * block_values
    here = places[run] - np.int32(first)
    change: Values = np.zeros(int(here.max()) + 1, np.float32)
    change[here] = values - means * np.float32(part.weight)
    part.residual.add(part.start, part.start + first, change, part.weight)
