"""What this member adds to a round that sends chosen values or latents of them, and what a leader announces."""

from typing import TYPE_CHECKING

import numpy as np

from meshtraind.codecs.base import CodecError, Values
from meshtraind.projection.contribution import Inputs, ShorterPart
from meshtraind.projection.lgc.latents import Convolved
from meshtraind.projection.lgc.residuals import Underway
from meshwire.layout.lgc import PIECE_BLOCKS, Chosen

if TYPE_CHECKING:
    from meshtraind.projection.lgc.projection import LearnedGradients

VALUE_MAX = 2.0**100  # of what is encoded: what is decoded is then finite


class ChosenPart(ShorterPart):
    """See `ShorterPart`."""

    def __init__(self, inputs: Inputs, owner: "LearnedGradients") -> None:
        super().__init__(inputs)
        assert isinstance(inputs.form.layout.shorter, Chosen)
        self._chosen = inputs.form.layout.shorter
        self._owner = owner

    def _take(self, bucket: int, raw: Values) -> None:
        model, sent = self._chosen.model.buckets[bucket], self._chosen.plan.buckets[bucket]
        of_bucket = raw[model.start : model.start + model.count]
        if bucket >= self._chosen.model.coded_buckets:
            np.copyto(self._sent[sent.start : sent.start + sent.count], of_bucket)
            super()._take(bucket, self._sent)
            return
        self._owner.rests.catch_up(bucket)
        values = self._residual.begin(self._number, model.start, model.count, self._weight)
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # found here
                np.add(values, of_bucket, out=values)
            if not (values.min(initial=0) >= -VALUE_MAX and values.max(initial=0) <= VALUE_MAX):
                raise CodecError(f"a value of bucket {bucket} is not a number, or beyond {VALUE_MAX:g}")
            self._sent[sent.start : sent.start + sent.count] = 0.0
            self._send(bucket, values)
            self._lead(bucket, values)
        except CodecError:
            self._residual.cancel(self._number, model.start)
            raise

    def _send(self, bucket: int, values: Values) -> None:
        """Encodes latents, and leaves in `values` what they do not say."""
        places, map_ = self._owner.places(self._number, bucket), self._owner.map(self._number)
        picked = values[places]
        self._owner.learning.see(picked)
        first, latents = self._chosen.plan.buckets[bucket].start, self._chosen.latents
        blocks = self._sent[first : first + len(places) * latents].reshape(len(places), latents)
        runs = [slice(start, start + PIECE_BLOCKS) for start in range(0, len(places), PIECE_BLOCKS)]
        for run in runs:
            map_.encode_into(picked[run], blocks[run].reshape(-1))
        self._encode_sent(self._segments[bucket][: self._chosen.latent_segments[bucket]])
        if isinstance(map_, Convolved):
            start = self._chosen.model.buckets[bucket].start
            self._owner.rests.keep(self._number, bucket, Underway(picked, start, self._weight, self._residual))
            values[places] = 0.0
            return
        scratch: Values = np.empty(picked[:PIECE_BLOCKS].size, np.float32)
        said: Values = np.empty_like(picked)
        for run in runs:
            map_.decode_into(blocks[run].reshape(-1), said[run], scratch)
        np.subtract(picked, said, out=picked)
        values[places] = picked

    def _lead(self, bucket: int, rest: Values) -> None:
        start, count = self._chosen.announced(bucket)
        self._owner.lead(self._chosen, self._number, bucket, rest, self._sent[start : start + count])
        for segment in self._segments[bucket][self._chosen.latent_segments[bucket] :]:
            self._encode(segment, self._sent)
