"""Which of the devices that are there should train a model together, and with which settings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshwire.planning.choose import DEFAULT, LEVEL_PART, Pinned, job_settings, preferred, priced, wished
from meshwire.planning.measured_link import MeasuredLink, measured_network
from meshwire.planning.network import USUAL_WORK, DaemonWork, Network
from meshwire.planning.price import Binds, JobSettings, Price, Pricing
from meshwire.planning.quality import Quality
from meshwire.planning.step_trace import StepTrace

PAYS_FROM = 1.05  # of one alone: less is not worth a second laptop, and less than the prediction is sure of
NOTHING = Pinned()
EVERY_GROUP_OF = 4  # others: of more, the fastest one, two, three and so on


@dataclass(frozen=True, slots=True)
class Option:
    """One way to train: who, how, and what that costs.

    Attributes:
        others: that train with this device, by their place among the links.
        waits_for: what a step mostly waits for.
    """

    others: tuple[int, ...]
    price: Price
    waits_for: Binds


class MeshPlan:
    """This device and those that it has measured links to, of which each steps as this one was seen to.

    Args:
        links: to the others, in the order in which a job has them as members.
        pinned: what is not chosen, for it was typed.
        work: of each daemon's processor.
    """

    def __init__(
        self,
        pricing: Pricing,
        step: StepTrace,
        links: Sequence[MeasuredLink],
        pinned: Pinned = NOTHING,
        work: DaemonWork = USUAL_WORK,
    ) -> None:
        self._work = work
        self._pricing = pricing
        self._step = step
        self._links = links
        self._settings = [each for each in pinned.settings(pricing.manifest) if pricing.knows(each.codec)]

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
        """The best settings of the wished quality for one group."""
        return self._option(group, preferred(self._priced(wished(self._settings, quality), group)))

    def default(self, group: tuple[int, ...]) -> Option:
        """What `submit --no-plan` does."""
        return self._option(group, self._priced([job_settings(*DEFAULT)], group)[0])

    def _option(self, group: tuple[int, ...], price: Price) -> Option:
        steps, network = self._steps(group), self._network(group)
        return Option(group, price, self._pricing.waits_for(price.settings, steps, network))

    def _priced(self, settings: Sequence[JobSettings], group: tuple[int, ...]) -> list[Price]:
        return priced(self._pricing, settings, self._steps(group), self._network(group))

    def _network(self, group: tuple[int, ...]) -> Network:
        return measured_network([self._links[at] for at in group], self._work)

    def _steps(self, group: tuple[int, ...]) -> tuple[StepTrace, ...]:
        return (self._step,) * (1 + len(group))


def fastest(options: Sequence[Option]) -> Option | None:
    """The option to take: of those that are as fast, to within what the model can tell, the one with the fewest
    devices. None: one alone is faster, or hardly slower."""
    most = max(option.price.samples_s for option in options)
    level = [option for option in options if option.price.samples_s >= (1 - LEVEL_PART) * most]
    best = min(level, key=lambda option: (len(option.others), -option.price.samples_s))
    return best if best.price.against_one >= PAYS_FROM else None
