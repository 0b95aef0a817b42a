"""Learned gradient compression: values at places that all share, and latents of them (`meshwire.encoded_layout.lgc`).

The places and the basis, or autoencoder, of round k are what was announced in the rounds from k - lag backwards, each
place once in them, and nothing else; where nothing was, places are evenly spaced, and the basis is smooth.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from meshtraind.codecs.base import CodecError, Values
from meshtraind.contributions.error_feedback import Residual
from meshtraind.contributions.results import RoundResults
from meshtraind.contributions.seeds import segment_seed
from meshtraind.contributions.segments import Areas, RoundForm, RoundForms, values_in
from meshtraind.projection.base import Projection
from meshtraind.projection.contribution import Inputs, ShorterPart
from meshtraind.projection.expansion import Expansion
from meshtraind.projection.lgc.latents import AsTheyAre, Basis, Convolved, Learning, smooth_rows
from meshtraind.projection.lgc.leader import Announced, Places, announce, default_places, heard, largest_places
from meshtraind.projection.lgc.residuals import Map, Underway, WholeRests
from meshtraind.projection.lgc.training import EncoderLearning
from meshwire.encoded_layout.lgc import PIECE_BLOCKS, Chosen, lag
from meshwire.encoded_layout.lgc_autoencoder import Architecture
from meshwire.model.plan import aligned

VALUE_MAX = 2.0**100  # of what is encoded: what is decoded is then finite


class LearnedGradients(Projection):
    """Arguments as of `transform_for`.

    What a linear map leaves out of each part adds up to what it leaves out of the sum. An autoencoder's does not: what
    is decoded of a mean is another thing than the mean of what would be decoded of each part. So there a part leaves
    nothing until the round counts, and then its values but for its share of what all have decoded: in the sum over
    members nothing is lost (P1).
    """

    def __init__(
        self,
        forms: RoundForms,
        rounds: Mapping[int, RoundResults],
        seed: int,
        staleness: int,
        first: int | None,
        residual: Residual,
    ) -> None:
        self._residual = residual
        self._forms = forms
        self._seed = seed
        self._lag = lag(staleness)
        self._first = first
        self._place: int | None = 0
        self._learners = 1
        self.rests = WholeRests()
        self._heard: dict[int, dict[int, Announced]] = {}  # by round and bucket
        self._places: dict[int, dict[int, Places]] = {}  # by round and bucket
        self._maps: dict[int, Map] = {}  # by round
        self._leaving: Values = np.zeros(forms.shorter_values, np.float32)
        self._arriving: Values = np.empty(forms.shorter_values, np.float32)
        chosen = next(self._chosen(form) for form in forms if form.layout.projected)
        self.learning: Learning | EncoderLearning = Learning(chosen.rows, chosen.block_chosen)
        if chosen.convolves and chosen.rows:
            self.learning = self.encoder = EncoderLearning(Architecture(chosen.rows))

    def enter(self, place: int | None, learners: int) -> None:
        self._place, self._learners = place, learners

    def part(self, form: RoundForm, areas: Areas, scratch: Values, number: int, weight: float) -> "ChosenPart":
        self.learning.begin_round()
        seed = segment_seed(self._seed, self._place or 0, 1)
        inputs = Inputs(form, areas.take(), scratch, self._leaving, number, self._residual, weight, seed)
        return ChosenPart(inputs, self)

    def expansion(self, form: RoundForm, number: int, values: Values) -> "ChosenExpansion":
        return ChosenExpansion(form, number, self, self._arriving, values)

    def settled(self, round_: RoundResults, *, contributed: bool) -> None:
        chosen = self._chosen(round_.form)
        underway = self.rests.take(round_.number)
        if contributed and not round_.void:
            for bucket, part in underway.items():
                latents = values_in(round_.area, round_.form.segments[bucket][: chosen.latent_segments[bucket]])
                places = self.places(round_.number, bucket)
                self.rests.leave(bucket, part, chosen, places, self.map(round_.number), latents)
        said = self._heard[round_.number] = {}
        if round_.void:
            return
        weights = {final.bucket: final.weight for final in round_.finals}
        for bucket in range(chosen.model.coded_buckets):
            _, count = chosen.announced(bucket)
            values = values_in(round_.area, round_.form.segments[bucket][chosen.latent_segments[bucket] :])
            announced = heard(chosen, round_.number, bucket, values[:count], weights[bucket])
            if announced is not None:
                said[bucket] = announced

    def settle_one(self) -> bool:
        return self.rests.late.do_one()

    def forget(self, number: int) -> None:
        self._places.pop(number, None)
        self._maps.pop(number, None)
        self._heard.pop(number - self._lag - self._chosen(self._forms.of(number)).refresh + 1, None)

    @property
    def reaches_back(self) -> int:
        return 0

    # What a round is encoded and decoded with

    def places(self, number: int, bucket: int) -> Places:
        """The places of the chosen values of all blocks, within the bucket: (blocks, chosen). The rounds that they were
        announced in are complete."""
        made = self._places.setdefault(number, {})
        if bucket not in made:
            made[bucket] = self._make_places(number, bucket)
        return made[bucket]

    def map(self, number: int) -> Map:
        """Between a round's chosen values and its latents."""
        if number not in self._maps:
            chosen = self._chosen(self._forms.of(number))
            learnt = chosen.latents < chosen.block_chosen
            self._maps[number] = self._make_map(number, chosen) if learnt else AsTheyAre()
        return self._maps[number]

    def lead(self, chosen: Chosen, number: int, bucket: int, rest: Values, out: Values) -> None:
        """What this member announces in a round: nothing, if it does not lead it.

        Args:
            rest: the bucket's values that were left out.
            out: as of `announce`.
        """
        if self._place is None or number // chosen.refresh % self._learners != self._place:
            out.fill(0.0)
            return
        places = largest_places(chosen, number, bucket, rest)
        learnt = self.learning.learnt() if chosen.learnt_count and not bucket else np.empty(0, np.float32)
        announce(chosen, bucket, Announced(places, learnt), out)

    def _make_places(self, number: int, bucket: int) -> Places:
        chosen = self._chosen(self._forms.of(number))
        places = default_places(chosen, number, bucket)
        for source in self._sources(number, chosen):
            if (announced := self._heard_in(source, bucket)) is not None:
                blocks = chosen.announced_blocks(bucket, source)
                places[blocks.start :: blocks.step] = announced.places
        places += np.arange(len(places), dtype=np.int32)[:, None] * np.int32(chosen.block_values)
        return places

    def _make_map(self, number: int, chosen: Chosen) -> Basis | Convolved:
        heard_of = [self._heard_in(source, 0) for source in self._sources(number, chosen)]
        learnt = next((announced.learnt for announced in reversed(heard_of) if announced is not None), None)
        if chosen.convolves:
            return Convolved(chosen.rows, learnt)
        if learnt is None:
            rows = smooth_rows(chosen.rows, chosen.block_chosen)
        else:
            rows = learnt.reshape(chosen.rows, chosen.block_chosen)
        return Basis(rows, segment_seed(self._seed, number, 0))

    def _sources(self, number: int, chosen: Chosen) -> range:
        newest = number - self._lag
        return range(newest - chosen.refresh + 1, newest + 1)

    def _heard_in(self, number: int, bucket: int) -> Announced | None:
        if self._first is not None and number < self._first:
            return None
        if number < 1 or not self._forms.of(number).layout.projected:
            return None
        return self._heard[number].get(bucket)

    @staticmethod
    def _chosen(form: RoundForm) -> Chosen:
        assert isinstance(form.layout.shorter, Chosen)
        return form.layout.shorter


class ChosenPart(ShorterPart):
    """What this member adds to a round that sends chosen values or latents of them, and what a leader announces."""

    def __init__(self, inputs: Inputs, owner: LearnedGradients) -> None:
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
        self._owner.rests.late.catch_up(bucket)
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


class ChosenExpansion(Expansion):
    """The means of such a round: zeros, but at the places that all share. Arguments as of `Expansion`."""

    def __init__(self, form: RoundForm, number: int, owner: LearnedGradients, sent: Values, values: Values) -> None:
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
