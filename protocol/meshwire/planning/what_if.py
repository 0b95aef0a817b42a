"""Is the network the bottleneck for this model: what a job would do over networks that are not there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwire.planning.choose import DEFAULT, NOTHING, Pinned, chosen, job_settings, priced
from meshwire.planning.network import Network
from meshwire.planning.price import Binds, JobSettings, Price, Pricing
from meshwire.planning.quality import Quality
from meshwire.planning.step_trace import StepTrace

NetworkOf = Callable[[int, float], Network]
"""Makes a network of so many equal peers, at a rate in bytes a second; how they are linked it knows alone."""

RATE_BYTES_S_MIN, RATE_BYTES_S_MAX = 1e4, 1e11  # between which a rate is looked for: 0.08 Mbit/s to 800 Gbit/s
RATE_PRECISION = 1.05  # the rate that is found is at most so many times the smallest


@dataclass(frozen=True, slots=True)
class Cell:
    """What was found for one network: so many peers at one rate. A row of the table.

    Attributes:
        best: the best settings of the wished quality.
        default: those of `submit --no-plan`.
        waits_for: what a step mostly waits for with the best ones.
    """

    bytes_s: float
    peers: int
    best: Price
    default: Price
    waits_for: Binds


class WhatIf:
    """Equal peers, of which each steps as one machine was seen to.

    Args:
        quality: that is wished for.
        pinned: what comes into question.
    """

    def __init__(
        self, pricing: Pricing, step: StepTrace, network_of: NetworkOf, quality: Quality, pinned: Pinned = NOTHING
    ) -> None:
        self._pricing = pricing
        self._step = step
        self._network_of = network_of
        self.quality = quality
        self._settings = [each for each in pinned.settings(pricing.manifest) if pricing.knows(each.codec)]
        self._default = job_settings(*DEFAULT)

    def cells(self, rates: Sequence[float], peers: Sequence[int]) -> Iterator[Cell]:
        """Finds the best settings for each rate and number of peers, in the order of the table; each takes a while."""
        for bytes_s in rates:
            for count in peers:
                default = self._priced([self._default], bytes_s, count)[0]
                best = self.best(bytes_s, count)
                steps, network = (self._step,) * count, self._network_of(count, bytes_s)
                yield Cell(bytes_s, count, best, default, self._pricing.waits_for(best.settings, steps, network))

    def best(self, bytes_s: float, peers: int, quality: Quality | None = None) -> Price:
        """The best settings of the wished quality, or of another one."""
        wished = quality or self.quality
        settings = [each for each in self._settings if wished.allows(each.quality)]
        return chosen(self._priced(settings, bytes_s, peers), wished)

    def rate_for(self, against_one: float, peers: int, *, default: bool = False) -> float | None:
        """The smallest rate, in bytes a second, at which so many peers do so many times what one does alone; None if no
        rate is enough. With the best settings, or with the defaults."""

        def reached(bytes_s: float) -> bool:
            price = self._priced([self._default], bytes_s, peers)[0] if default else self.best(bytes_s, peers)
            return price.against_one >= against_one

        low, high = RATE_BYTES_S_MIN, RATE_BYTES_S_MAX
        if not reached(high):
            return None
        while high > low * RATE_PRECISION:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if reached(middle) else (middle, high)
        return high

    def _priced(self, settings: Sequence[JobSettings], bytes_s: float, peers: int) -> list[Price]:
        return priced(self._pricing, settings, (self._step,) * peers, self._network_of(peers, bytes_s))
