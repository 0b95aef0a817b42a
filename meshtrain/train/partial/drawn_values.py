"""Which values of each tensor a round carries, where these are drawn anew (`--sync local:H,stream=P,random`)."""

import torch

from meshwire.model.drawn_parts import DrawnParts
from meshwire.model.manifest import ModelManifest
from meshwire.sync_modes.mode import SyncSettings


class DrawnValues:
    """The places of the values that travel, made for one round at a time."""

    def __init__(self, parts: DrawnParts) -> None:
        self._parts = parts
        self._round = 0
        self._places: dict[int, torch.Tensor] = {}  # in that round, by tensor

    def places(self, number: int, index: int) -> torch.Tensor:
        """Of a trained tensor, in a round: indices into its values in row-major order, each once, on the CPU."""
        if number != self._round:
            self._places.clear()
            self._round = number
        if index not in self._places:
            walk = self._parts.of(number, index)
            self._places[index] = (walk.first + walk.stride * torch.arange(walk.steps)) % walk.length
        return self._places[index]


def drawn_values(manifest: ModelManifest, sync: SyncSettings, seed: int) -> DrawnValues | None:
    """Those of a job; None where parts are not drawn.

    Args:
        seed: of the job.
    """
    return DrawnValues(DrawnParts(manifest.tensors, sync.fragments, seed)) if sync.random else None
