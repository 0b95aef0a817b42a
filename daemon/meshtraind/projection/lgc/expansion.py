"""The means of a round that sends chosen values or latents of them: zeros, but at the places that all share."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from meshtraind.codecs.base import Values
from meshtraind.parts.segments import Form
from meshtraind.projection.expansion import Expansion
from meshtraind.projection.lgc.leader import Places
from meshwire.layout.lgc import PIECE_BLOCKS, Chosen
from meshwire.model.plan import aligned

if TYPE_CHECKING:
    from meshtraind.projection.lgc.projection import LearnedGradients


class ChosenExpansion(Expansion):
    """Arguments as of `Expansion`."""

    def __init__(self, form: Form, number: int, owner: "LearnedGradients", sent: Values, values: Values) -> None:
        super().__init__(form.layout.plan, sent, values)
        assert isinstance(form.layout.shorter, Chosen)
        self._chosen = form.layout.shorter
        self._number = number
        self._owner = owner
        self._means: Values = np.empty((PIECE_BLOCKS, self._chosen.block_chosen), np.float32)
        self._scratch: Values = np.empty(self._means.size, np.float32)

    def _expand(self, bucket: int) -> Iterator[Callable[[], None]]:
        model, sent = self._chosen.model.buckets[bucket], self._chosen.plan.buckets[bucket]
        out = self._values[model.start : model.start + model.count]
        if bucket >= self._chosen.model.coded_buckets:
            np.copyto(out, self._sent[sent.start : sent.start + sent.count])
            return
        places, latents, size = (
            self._owner.places(self._number, bucket),
            self._chosen.latents,
            self._chosen.block_values,
        )
        for first in range(0, len(places), PIECE_BLOCKS):
            run = places[first : first + PIECE_BLOCKS]
            start = sent.start + first * latents
            of_run = self._sent[start : start + len(run) * latents]
            yield partial(self._expand_piece, run, of_run, out, slice(first * size, (first + len(run)) * size))
        yield partial(self._clear_padding, bucket)

    def _expand_piece(self, places: Places, latents: Values, out: Values, run: slice) -> None:
        out[run] = 0.0
        means = self._means[: len(places)]
        self._owner.map(self._number).decode_into(latents, means, self._scratch)
        out[places] = means

    def _clear_padding(self, bucket: int) -> None:
        spans = self._chosen.model.buckets[bucket].spans
        for span in self._chosen.model.spans[spans.start : spans.stop]:
            end = span.start + span.count
            self._values[end : span.start + aligned(span.count)] = 0.0
