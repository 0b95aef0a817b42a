"""Which settings a job can have, what each would cost, and which of them to take."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from meshwire.codecs.registry import parse_codec
from meshwire.collectives.strategy import collective_for, topologies_for
from meshwire.model.fragments import manifest_under
from meshwire.model.manifest import ModelManifest
from meshwire.model.schedule import refusal
from meshwire.planning.network import Network
from meshwire.planning.price import JobSettings, Price, Pricing
from meshwire.planning.quality import EVIDENCE, PERIODS_OF_SGD, Quality, Tried
from meshwire.planning.step_trace import StepTrace
from meshwire.sync_modes.codec_for_mode import codec_of, suits
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from meshwire.sync_modes.rate_rule import RULE_OF

LEVEL_PART = 0.03  # who is slower by less than this is as fast: the model is not more exact
DEFAULT = ("fp32", "bsp")
EVERY = tuple(
    Tried(codec, sync) for codec, sync in product(*(dict.fromkeys(each) for each in zip(*EVIDENCE, strict=True)))
)
"""Each codec that was measured under each mode that was, measured together or not."""


def job_settings(codec: str | None, sync: str, topology: str | None = None) -> JobSettings:
    """As `submit` would take them. Raises ValueError, which says what is legal."""
    mode = sync_settings(sync)
    return JobSettings(collective_for(codec_of(mode, codec), topology), mode)


def legal_settings(manifest: ModelManifest, tried: Sequence[Tried] = tuple(EVIDENCE)) -> Iterator[JobSettings]:
    """What `submit` takes for this model of `tried` (`EVERY`: all that fits together), over each of its topologies but
    those that somebody has to say more of, as who belongs to which group.

    Those that replace the script's optimizer (`--sync demo`, `--codec dgc`) are left out: it is not known whether they
    suit it.
    """
    for codec_text, sync_text in tried:
        codec, sync = parse_codec(codec_text), sync_settings(sync_text)
        if not suits(sync, codec) or codec.momentum or sync.signs:
            continue
        if manifest_under(manifest, sync).travel is not None and refusal(sync, codec) is not None:
            continue
        for topology in topologies_for(codec.family, codec.reduction):
            if not topology.named_min:
                yield JobSettings(collective_for(codec, topology.name), sync)


NO_PERIODS: frozenset[str] = frozenset()
"""Rounds of gradients alone."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """What somebody has typed of a job's settings, as texts; None: it is to be chosen.

    Attributes:
        periods: the modes with a period that may be chosen, as typed; None: all.
        own_rate: local steps are to take the script's rate (`--scale-lr none`).
    """

    sync: str | None = None
    codec: str | None = None
    topology: str | None = None
    periods: frozenset[str] | None = None
    own_rate: bool = False

    def suiting(self, optimizer: str | None) -> "Pinned":
        """The same for scripts with this optimizer of torch.optim; None: it is none of these. Where nobody knows how
        long local steps are to be (O13), or they are not to be so long, periods were never tried for as many steps, and
        only a person takes them."""
        rule = RULE_OF.get(optimizer or "")
        if self.sync is not None or self.periods is not None or (rule == "sqrt" and not self.own_rate):
            return self
        return replace(self, periods=PERIODS_OF_SGD if rule == "linear" else NO_PERIODS)

    def settings(self, manifest: ModelManifest) -> list[JobSettings]:
        """Those that `submit` takes for this model and that have all that is pinned: of what was measured, and where
        nothing was, what `submit` itself would add. Raises ValueError where what is pinned is not legal."""
        legal = [each for each in legal_settings(manifest, self._tried()) if self._may_be(each.sync, manifest)]
        if self.topology is None:
            return legal
        found = {}
        for each in legal:
            try:
                collective = collective_for(each.codec, self.topology)
            except ValueError:  # this codec does not go over that topology
                continue
            found[str(each.codec), each.sync.text()] = replace(each, collective=collective)
        return list(found.values())

    def _may_be(self, sync: SyncSettings, manifest: ModelManifest) -> bool:
        if not sync.period or self.sync is not None:
            return True
        grows = manifest.travel is not None  # by rounds, of which there would be fewer
        return not grows and (self.periods is None or sync.text() in self.periods)

    def _tried(self) -> list[Tried]:
        mode = sync_settings(self.sync or DEFAULT[1])
        codec = str(codec_of(mode, self.codec))
        found = [
            tried if self.sync is None else Tried(tried.codec, mode.text())
            for tried in EVIDENCE
            if (self.sync is None or tried.sync == mode.measured_as) and (self.codec is None or tried.codec == codec)
        ]
        return found or [Tried(codec, mode.text())]


NOTHING = Pinned()


def wished(settings: Sequence[JobSettings], quality: Quality) -> list[JobSettings]:
    """Those of the wished quality that we would recommend; where there are none, for something else was typed, those
    that give up least."""
    good = [each for each in settings if quality.allows(each.quality) and each.measured]
    if good or not settings:
        return good
    order = list(Quality)
    least = min(order.index(each.quality) for each in settings)
    return [each for each in settings if order.index(each.quality) == least]


def priced(
    pricing: Pricing, settings: Sequence[JobSettings], steps: Sequence[StepTrace], network: Network
) -> list[Price]:
    """Those first that come to a loss soonest. Of a codec whose price is not known none."""
    prices = [pricing.price(each, steps, network) for each in settings if pricing.knows(each.codec)]
    return sorted(prices, key=lambda price: -price.useful_samples_s)


def chosen(prices: Sequence[Price], quality: Quality) -> Price:
    """The fastest of those that are wished for; of several that are as fast, to within what the model can tell, the one
    that gives up least, over the codec's usual topology. Raises ValueError when there is none."""
    found = [price for price in prices if quality.allows(price.settings.quality) and price.settings.measured]
    if not found:
        raise ValueError(f"none of {len(prices)} settings is {quality}")
    return preferred(found)


def preferred(prices: Sequence[Price]) -> Price:
    """The fastest; of several that are as fast, to within what the model can tell, the one that gives up least, over
    the codec's usual topology."""
    most = max(price.useful_samples_s for price in prices)
    level = [price for price in prices if price.useful_samples_s >= (1 - LEVEL_PART) * most]
    return min(level, key=_preference)


def given_up(settings: JobSettings) -> tuple[int, float, int, bool]:
    """How much is given up: a key to sort by, the least first. Nothing of the loss where that is within the noise, and
    the most where nobody knows; and of what is alike in that, the least where weights never differ."""
    worth = settings.worth if settings.measured else 0.0
    codec = str(settings.codec)
    return list(Quality).index(settings.quality), -worth, settings.sync.period, codec != DEFAULT[0]


def _preference(price: Price) -> tuple[tuple[int, float, int, bool], bool, float]:
    other = price.settings.collective != collective_for(price.settings.codec)
    return given_up(price.settings), other, -price.useful_samples_s
