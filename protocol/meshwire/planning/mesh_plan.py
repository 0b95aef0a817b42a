"""Which of the devices that are there should train a model together, and with which settings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from meshwire.collectives.strategy import collective_for, topology_after, topology_by_way_of
from meshwire.planning.choose import (
    DEFAULT,
    LEVEL_PART,
    NOTHING,
    Pinned,
    given_up,
    job_settings,
    preferred,
    priced,
    wished,
)
from meshwire.planning.measured_link import MeasuredLink, measured_network
from meshwire.planning.network import USUAL_WORK, DaemonWork, Network
from meshwire.planning.price import Binds, JobSettings, Price, Pricing
from meshwire.planning.quality import Quality
from meshwire.planning.replan import RATES, SettingsForecast, StepForecast
from meshwire.planning.step_trace import StepTrace
from meshwire.sync_modes.batch_sizes import DEAD_BAND, sizes_by_speed
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from meshwire.sync_modes.settings_changes import refusal_of_codec, refusal_of_period

PAYS_FROM = 1.05  # of one alone: less is not worth a second laptop, and less than the prediction is sure of
EVERY_GROUP_OF = 4  # others: of more, the fastest one, two, three and so on
ACCUMULATED = (2, 4, 8, 16)
LARGER_FROM = 1.25  # of what the same devices do: a larger batch for less is not worth the word
LARGER_ENOUGH = 0.8  # of what the largest batch would bring


@dataclass(frozen=True, slots=True)
class Option:
    """One way to train: who, how, and what that costs.

    Attributes:
        others: that train with this device, by their place among the links.
        waits_for: what a step mostly waits for.
        speeds: in samples/s, of each member alone, this device first.
        uneven: batches differ, as the members' speeds do.
        hubs: whether the hubs that are there are in it, and rounds go by them; None: there are none.
    """

    others: tuple[int, ...]
    price: Price
    waits_for: Binds
    speeds: tuple[float, ...]
    uneven: bool = False
    hubs: bool | None = None


class MeshPlan:
    """This device and those that it has measured links to, of which each steps as this one was seen to, but as much
    faster as it computes.

    Args:
        links: to the others that train, in the order in which a job has them as members.
        hubs: links to the hubs that a job could have beside them.
        pinned: what is not chosen, for it was typed.
        work: of each daemon's processor.
        shares: whether batches may follow speed (X4a).
        ordered: whether a group's order is that of a job's ranks; else no topology is offered that names some of them.
    """

    def __init__(
        self,
        pricing: Pricing,
        step: StepTrace,
        links: Sequence[MeasuredLink],
        pinned: Pinned = NOTHING,
        work: DaemonWork = USUAL_WORK,
        *,
        shares: bool = True,
        ordered: bool = True,
        hubs: Sequence[MeasuredLink] = (),
    ) -> None:
        self._work = work
        self._hubs = () if pinned.topology is not None else tuple(hubs)
        self._shares = shares
        self._ordered = ordered and pinned.topology is None
        # What a graphics card does is another calculation.
        speeds = [link.peer_speed or 1.0 if step.device == "cpu" else 1.0 for link in links]
        self._each = [step, *(step.at_speed(speed) for speed in speeds)]
        self._pricing = pricing
        self._links = links
        self._settings = [each for each in pinned.settings(pricing.manifest) if pricing.knows(each.codec)]

    @property
    def fastest_alone(self) -> int:
        """Who is the best one alone, this device being 0: another one only where it is faster beyond doubt."""
        best = max(range(len(self._each)), key=lambda at: self._each[at].samples_s)
        return best if self._each[best].samples_s >= DEAD_BAND * self._each[0].samples_s else 0

    @property
    def step_alone(self) -> StepTrace:
        """How that one steps."""
        return self._each[self.fastest_alone]

    @property
    def everybody(self) -> tuple[int, ...]:
        """All others."""
        return tuple(range(len(self._links)))

    def groups(self) -> list[tuple[int, ...]]:
        """The groups of others that come into question, small ones first."""
        others = self.everybody
        if len(others) <= EVERY_GROUP_OF:
            return [group for count in range(1, len(others) + 1) for group in combinations(others, count)]
        fastest = sorted(others, key=lambda at: -min(self._links[at].rates_bytes_s))
        return [tuple(sorted(fastest[:count])) for count in range(1, len(fastest) + 1)]

    def options(self, quality: Quality, groups: Sequence[tuple[int, ...]] | None = None) -> Iterator[Option]:
        """The best settings of the wished quality for each group, or for these; each takes a while."""
        for group in self.groups() if groups is None else groups:
            yield self.best(group, quality)

    def best(self, group: tuple[int, ...], quality: Quality) -> Option:
        """The best settings of the wished quality for one group: by the hubs that are there, unless that is slower."""
        settings = wished(self._settings, quality)
        found = self._option(group, preferred(self._priced([*settings, *self._at_cables(settings, group)], group)))
        if by_hubs := self._priced(self._at_hubs(settings, group), group, hubs=True):
            best = self._option(group, preferred(by_hubs), hubs=True)
            if best.price.useful_samples_s >= (1 - LEVEL_PART) * found.price.useful_samples_s:
                return best
        return found

    def larger_batch(self, option: Option) -> Option | None:
        """The same devices and codec with a round after several steps (O6), as few as bring most of what that can
        bring; None: that is little, or nobody knows what the codec costs in step. Never chosen by itself, for it is
        another batch."""
        settings = option.price.settings
        if settings.sync.accumulate > 1:
            return None
        tried = [replace(settings, sync=sync_settings(f"bsp,accumulate={steps}")) for steps in ACCUMULATED]
        if not tried[0].measured:
            return None
        hubs = option.hubs is True
        prices = [self._priced([each], option.others, hubs=hubs)[0] for each in tried]
        most = max(price.useful_samples_s for price in prices)
        found = next(price for price in prices if price.useful_samples_s >= LARGER_ENOUGH * most)
        now = max(option.price.useful_samples_s, self.step_alone.samples_s)
        return self._option(option.others, found, hubs=hubs) if found.useful_samples_s >= LARGER_FROM * now else None

    def default(self, group: tuple[int, ...]) -> Option:
        """What `submit --no-plan` does, which takes hubs in."""
        settings, hubs = [job_settings(*DEFAULT)], bool(self._hubs)
        if hubs:
            settings = self._at_hubs(settings, group)
        return self._option(group, self._priced(settings, group, hubs=hubs)[0], hubs=hubs)

    def forecast(self, option: Option, quality: Quality) -> StepForecast | None:
        """What the steps of an option take at other rates of the links, with each codec and period of the wished
        quality that its rounds may go over to, the chosen ones before their equals; None where they may go over to
        none."""
        first, group = option.price.settings, option.others
        typed = str(first.collective.topology)
        found = {}
        for each in sorted([first, *wished(self._settings, quality)], key=given_up):
            if not _goes_over(first.sync, each.sync):
                continue
            if refusal_of_codec(first.sync, first.codec, each.codec) is not None:
                continue
            try:
                topology = topology_after(typed, first.codec, each.codec)
            except ValueError:  # this codec does not go that way
                continue
            found[str(each.codec), each.sync.period] = replace(each, collective=collective_for(each.codec, topology))
        steps, network = self._steps(group), self._network(group, hubs=option.hubs is True)
        networks = [network.at_rate(rate) for rate in RATES]
        curves = [
            SettingsForecast(
                codec=codec,
                period=period,
                worth=settings.worth,
                step_s=tuple(self._pricing.price(settings, steps, each).step_s for each in networks),
            )
            for (codec, period), settings in found.items()
        ]
        return StepForecast(compute_s=option.price.compute_s, each=tuple(curves)) if curves[1:] else None

    def _at_hubs(self, settings: Sequence[JobSettings], group: tuple[int, ...]) -> list[JobSettings]:
        """The same by way of the hubs."""
        first = 1 + len(group)
        return _by_way_of(range(first, first + len(self._hubs)), settings)

    def _at_cables(self, settings: Sequence[JobSettings], group: tuple[int, ...]) -> list[JobSettings]:
        """The same by way of those members that have a cable where the others have the air alone: what all send each
        other crosses that once, and not twice. At this device alone is a star as it is."""
        network = self._network(group, hubs=False)
        wired = [rank for rank, link in enumerate(network.links) if link.wired]
        mixed = len(wired) < len(network.links) and wired != [0]
        return _by_way_of(wired, settings) if self._ordered and mixed else []

    def _option(self, group: tuple[int, ...], price: Price, *, hubs: bool = False) -> Option:
        steps, network = self._steps(group), self._network(group, hubs=hubs)
        price = replace(price, alone_samples_s=self.step_alone.samples_s)
        waits_for = self._pricing.waits_for(price.settings, steps, network)
        uneven = len({step.samples for step in steps}) > 1
        speeds = tuple(self._each[at].samples_s for at in (0, *(1 + other for other in group)))
        return Option(group, price, waits_for, speeds, uneven, hubs if self._hubs else None)

    def _priced(self, settings: Sequence[JobSettings], group: tuple[int, ...], *, hubs: bool = False) -> list[Price]:
        return priced(self._pricing, settings, self._steps(group), self._network(group, hubs=hubs))

    def _network(self, group: tuple[int, ...], *, hubs: bool) -> Network:
        links = [*(self._links[at] for at in group), *(self._hubs if hubs else ())]
        return measured_network(links, self._work, known=(*self._links, *self._hubs))

    def _steps(self, group: tuple[int, ...]) -> tuple[StepTrace, ...]:
        steps = tuple(self._each[at] for at in (0, *(1 + other for other in group)))
        batch = self._each[0].samples
        speeds = [step.samples_s for step in steps]
        sizes = sizes_by_speed(speeds, batch, (batch,) * len(steps)) if self._shares else None
        if sizes is None:
            return steps
        return tuple(step.of_samples(size) for step, size in zip(steps, sizes, strict=True))


def _goes_over(before: SyncSettings, after: SyncSettings) -> bool:
    """Whether a job that runs can go over from one mode to the other: they differ by the period alone (C3)."""
    if after == before:
        return True
    return before.with_period(after.period) == after and refusal_of_period(before, after.period) is None


def _by_way_of(ranks: Sequence[int], settings: Sequence[JobSettings]) -> list[JobSettings]:
    """The same over the topology at these ranks, each codec and mode once, where the codec can go that way."""
    topology = topology_by_way_of(ranks)
    found: dict[tuple[str, str], JobSettings] = {}
    for each in settings if topology is not None else ():
        try:
            at_ranks = replace(each, collective=collective_for(each.codec, topology))
        except ValueError:  # its codec does not go that way
            continue
        found.setdefault((str(each.codec), each.sync.text()), at_ranks)
    return list(found.values())


def fastest(options: Sequence[Option]) -> Option | None:
    """The option to take: of those that are as fast, to within what the model can tell, the one with the fewest
    devices. None: one alone is faster, or hardly slower."""
    most = max(option.price.useful_samples_s for option in options)
    level = [option for option in options if option.price.useful_samples_s >= (1 - LEVEL_PART) * most]
    best = min(level, key=lambda option: (len(option.others), -option.price.useful_samples_s))
    return best if best.price.against_one >= PAYS_FROM else None
