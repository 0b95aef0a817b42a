"""Learned gradient compression: values at places that all share, and latents of them (`meshwire.sharedplaces`).

The places and the basis of round k are what was announced in the rounds from k - lag on backwards, each place once in
them, and nothing else; where nothing was, places are evenly spaced and the basis is smooth.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from meshtraind.announcing import Announced, Places, announce, default_places, heard, largest_places
from meshtraind.chosenexpansion import ChosenExpansion
from meshtraind.chosenpart import ChosenPart
from meshtraind.codecs.base import Values
from meshtraind.feedback import Residual
from meshtraind.latents import AsTheyAre, Basis, Learning, smooth_rows
from meshtraind.seeds import segment_seed
from meshtraind.segments import Form, Forms
from meshtraind.transform import Transform
from meshwire.sharedplaces import Chosen, lag

if TYPE_CHECKING:
    from meshtraind.roundmemory import Round


class LearnedGradients(Transform):
    """Arguments as of `transform_for`."""

    def __init__(
        self, forms: Forms, rounds: Mapping[int, "Round"], seed: int, staleness: int, first: int | None
    ) -> None:
        self._forms = forms
        self._seed = seed
        self._lag = lag(staleness)
        self._first = first
        self._place, self._members = 0, 1
        self._heard: dict[int, dict[int, Announced]] = {}  # by round and bucket
        self._places: dict[int, dict[int, Places]] = {}  # by round and bucket
        self._maps: dict[int, AsTheyAre | Basis] = {}  # by round
        self._leaving: Values = np.zeros(forms.shorter_values, np.float32)
        self._arriving: Values = np.empty(forms.shorter_values, np.float32)
        self.learning = Learning(next(self._chosen(form) for form in forms if form.layout.shorter).block_chosen)

    def enter(self, place: int, members: int) -> None:
        self._place, self._members = place, members

    def part(self, form: Form, area: memoryview, scratch: Values, number: int, residual: Residual) -> ChosenPart:
        self.learning.fade()
        return ChosenPart(form, area, scratch, self._leaving, number, residual, self)

    def expansion(self, form: Form, number: int, values: Values) -> ChosenExpansion:
        return ChosenExpansion(form, number, self, self._arriving, values)

    def settled(self, round_: "Round") -> None:
        chosen = self._chosen(round_.form)
        said = self._heard[round_.number] = {}
        if round_.void:
            return
        weights = {final.bucket: final.weight for final in round_.finals}
        for bucket in range(chosen.model.coded_buckets):
            start, count = chosen.announced(bucket)
            segments = round_.form.segments[bucket][chosen.latent_segments[bucket] :]
            values: Values = np.empty(sum(segment.count for segment in segments), np.float32)
            for segment in segments:
                first = segment.start - start
                payload = round_.area[segment.offset : segment.offset + segment.length]
                segment.codec.decode_into(payload, values[first : first + segment.count])
            announced = heard(chosen, round_.number, bucket, values[:count], weights[bucket])
            if announced is not None:
                said[bucket] = announced

    def forget(self, number: int) -> None:
        self._places.pop(number, None)
        self._maps.pop(number, None)
        self._heard.pop(number - self._lag - self._chosen(self._forms.of(number)).refresh + 1, None)

    @property
    def reaches_back(self) -> int:
        return 0

    # What a round is encoded and decoded with

    def places(self, number: int, bucket: int) -> Places:
        """Of the chosen values of all blocks, within the bucket: (blocks, chosen). The rounds that they were announced
        in are complete."""
        made = self._places.setdefault(number, {})
        if bucket not in made:
            made[bucket] = self._make_places(number, bucket)
        return made[bucket]

    def map(self, number: int) -> AsTheyAre | Basis:
        """Between a round's chosen values and its latents."""
        if number not in self._maps:
            chosen = self._chosen(self._forms.of(number))
            learnt = chosen.latents < chosen.block_chosen
            self._maps[number] = self._make_basis(number, chosen) if learnt else AsTheyAre()
        return self._maps[number]

    def lead(self, chosen: Chosen, number: int, bucket: int, rest: Values, out: Values) -> None:
        """What this member announces in a round: nothing, if it does not lead it.

        Args:
            rest: the bucket's values that were left out.
            out: as of `announce`.
        """
        if number // chosen.refresh % self._members != self._place:
            out.fill(0.0)
            return
        places = largest_places(chosen, number, bucket, rest)
        rows = self.learning.rows(chosen.rows) if chosen.rows and not bucket else np.empty((0, 0), np.float32)
        announce(chosen, bucket, Announced(places, rows), out)

    def _make_places(self, number: int, bucket: int) -> Places:
        chosen = self._chosen(self._forms.of(number))
        places = default_places(chosen, number, bucket)
        for source in self._sources(number, chosen):
            if (announced := self._heard_in(source, bucket)) is not None:
                blocks = chosen.announced_blocks(bucket, source)
                places[blocks.start :: blocks.step] = announced.places
        places += np.arange(len(places), dtype=np.int32)[:, None] * np.int32(chosen.block_values)
        return places

    def _make_basis(self, number: int, chosen: Chosen) -> Basis:
        rows = smooth_rows(chosen.rows, chosen.block_chosen)
        for source in self._sources(number, chosen):
            if (announced := self._heard_in(source, 0)) is not None:
                rows = announced.basis
        return Basis(rows, segment_seed(self._seed, number, 0))

    def _sources(self, number: int, chosen: Chosen) -> range:
        newest = number - self._lag
        return range(newest - chosen.refresh + 1, newest + 1)

    def _heard_in(self, number: int, bucket: int) -> Announced | None:
        if self._first is not None and number < self._first:
            return None
        if number < 1 or self._forms.of(number).layout.shorter is None:
            return None
        return self._heard[number].get(bucket)

    @staticmethod
    def _chosen(form: Form) -> Chosen:
        assert isinstance(form.layout.shorter, Chosen)
        return form.layout.shorter
