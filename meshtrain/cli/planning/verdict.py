"""What `whatif` has found, in a table and a few sentences."""

from collections.abc import Sequence
from typing import Any

from meshwire.codecs.registry import FP32
from meshwire.collectives.strategy import collective_for
from meshwire.job_figures import rate_text
from meshwire.jobs.files import human_bytes
from meshwire.planning.mesh_plan import PAYS_FROM
from meshwire.planning.price import Binds, Price, Pricing
from meshwire.planning.quality import Quality
from meshwire.planning.step_trace import StepTrace
from meshwire.planning.what_if import Cell, WhatIf

COLUMNS = ("MBIT/S", "LAPTOPS", "BEST", "SAMPLES/S", "OF ONE", "NETWORK", "TRAINING", "WAITS FOR", "DEFAULTS")
THE_DEFAULTS = "the defaults"  # bsp and fp32, over its usual topology: `submit --no-plan`
TWICE = 2.0
NEARLY_TWICE = 1.8  # what two can come to
NETWORK = (Binds.LINK, Binds.AIR, Binds.LATENCY)
WAITS_FOR = {
    Binds.COMPUTE: "computing",
    Binds.LINK: "the link",
    Binds.AIR: "the air",
    Binds.PROCESSOR: "the daemons",
    Binds.LATENCY: "latency",
}


def mbit(bytes_s: float) -> str:
    """A rate for people, in Mbit/s."""
    return f"{bytes_s * 8e-6:,.3g}" if bytes_s * 8e-6 < 1000 else f"{bytes_s * 8e-6:,.0f}"


def flags(price: Price, hubs: bool | None = None) -> str:
    """What is typed after `submit --no-plan` for these settings.

    Args:
        hubs: whether rounds go by the hubs that are there, which needs no word; None: there are none.
    """
    settings = price.settings
    typed = [] if settings.sync.text() == "bsp" else [f"--sync {settings.sync.text()}"]
    if not settings.sync.sparse and settings.codec != FP32:
        typed.append(f"--codec {settings.codec}")
    if hubs is False or (hubs is None and settings.collective != collective_for(settings.codec)):
        typed.append(f"--topology {settings.collective.topology}")
    return " ".join(typed) or THE_DEFAULTS


def times(against_one: float) -> str:
    """How many times as fast as one laptop, as people read it."""
    return f"{against_one:.2f}x" if against_one >= 0.1 else f"{against_one:.2g}x"


def milliseconds(seconds: float) -> str:
    """The time of a step's part for people."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def introduction(step: StepTrace, pricing: Pricing) -> str:
    """What was measured of the script."""
    values = sum(tensor.count for tensor in pricing.manifest.tensors if tensor.in_vector)
    parts = ", ".join(
        f"{name} {milliseconds(seconds)}"
        for name, seconds in (
            ("forward", step.before_s),
            ("backward", step.backward_s),
            ("the rest", step.after_s),
        )
    )
    return (
        f"One laptop like this one, alone: {rate_text(step.samples_s)} samples/s, a step {milliseconds(step.alone_s)} "
        f"({parts}; {step.samples} samples, {step.steps} steps on {step.device}, {step.threads} threads). "
        f"A model of {values:,} values: {human_bytes(round(pricing.round_bytes(FP32)))} in fp32."
    )


def rows(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """The rows of the table that `whatif` prints, one for each network, under COLUMNS. NETWORK, TRAINING: for how much
    of a step the busiest link, or the air, carries something, and the least busy laptop computes."""
    return [
        (
            mbit(cell.bytes_s),
            str(cell.peers),
            "train alone" if cell.best.against_one < PAYS_FROM else flags(cell.best),
            rate_text(cell.best.samples_s),
            times(cell.best.against_one),
            f"{cell.best.link_part:.0%}",
            f"{cell.best.processor_part:.0%}",
            WAITS_FOR[cell.waits_for],
            times(cell.default.against_one),
        )
        for cell in cells
    ]


def verdict(whatif: WhatIf, cells: Sequence[Cell]) -> str:
    """Is the network the bottleneck, which rate is needed, and is one laptop better alone."""
    told = [_bottleneck(cells), _rate_needed(whatif, cells)]
    if alone := _alone(whatif, cells):
        told.append(alone)
    return " ".join(told)


def _bottleneck(cells: Sequence[Cell]) -> str:
    bound = [cell for cell in cells if cell.waits_for in NETWORK]
    if not bound:
        slowest = min(cells, key=lambda cell: cell.bytes_s)
        return (
            f"The network is not the bottleneck for this model, from {mbit(slowest.bytes_s)} Mbit/s on: laptops wait "
            "for their own processors."
        )
    if len(bound) == len(cells):
        return f"The network is the bottleneck for this model, also at {mbit(max(c.bytes_s for c in cells))} Mbit/s."
    fastest = max(bound, key=lambda cell: cell.bytes_s)
    rate, peers = mbit(fastest.bytes_s), fastest.peers
    return f"The network is the bottleneck for this model up to {rate} Mbit/s (with {peers} laptops)."


def _rate_needed(whatif: WhatIf, cells: Sequence[Cell]) -> str:
    more = sorted({cell.peers for cell in cells if cell.peers > 2})
    peers, wanted = (more[0], TWICE) if more else (max(cell.peers for cell in cells), NEARLY_TWICE)
    what = "Twice the speed of one" if wanted == TWICE else f"{NEARLY_TWICE:g} times the speed of one"
    needed, default = whatif.rate_for(wanted, peers), whatif.rate_for(wanted, peers, default=True)
    if needed is None:
        return f"{what} is out of reach for {peers} laptops at any rate."
    plain = "no rate is enough" if default is None else f"{mbit(default)}"
    return f"{what} takes {mbit(needed)} Mbit/s with {peers} laptops ({plain} with the defaults)."


def _alone(whatif: WhatIf, cells: Sequence[Cell]) -> str | None:
    """Where one laptop is better alone, by how much, and what would change that."""
    rates = sorted({cell.bytes_s for cell in cells})
    lost = [rate for rate in rates if all(cell.best.against_one < PAYS_FROM for cell in cells if cell.bytes_s == rate)]
    if not lost:
        return None
    nearest = max((cell for cell in cells if cell.bytes_s == lost[-1]), key=lambda cell: cell.best.against_one)
    rate, peers, best = mbit(nearest.bytes_s), nearest.peers, nearest.best
    below = " and below" if len(lost) > 1 else ""
    text = f"At {rate} Mbit/s{below} train alone: {peers} laptops do {times(best.against_one)} of one{_by_flags(best)}."
    if whatif.quality is Quality.FAST:
        return text
    fast = whatif.best(nearest.bytes_s, peers, Quality.FAST)
    if fast.against_one < PAYS_FROM:
        return f"{text} --quality fast does not change that ({times(fast.against_one)})."
    return f"{text} With --quality fast they are at a loss {times(fast.against_one)} as soon: {flags(fast)}."


def _by_flags(price: Price) -> str:
    typed = flags(price)
    return "" if typed == THE_DEFAULTS else f" at best, with {typed}"


def document(whatif: WhatIf, step: StepTrace, cells: Sequence[Cell], told: str) -> dict[str, Any]:
    """The JSON document."""
    return {
        "step": step.model_dump(mode="json", exclude={"ready"}),
        "alone_samples_s": step.samples_s,
        "quality": whatif.quality.value,
        "cells": [
            {
                "mbit": cell.bytes_s * 8e-6,
                "peers": cell.peers,
                "best": price_document(cell.best),
                "waits_for": cell.waits_for.value,
                "default": price_document(cell.default),
            }
            for cell in cells
        ],
        "verdict": told,
    }


def price_document(price: Price) -> dict[str, Any]:
    """A price in the JSON document: its settings, and what they cost, with units in the names."""
    settings = price.settings
    return {
        "sync": settings.sync.text(),
        "codec": str(settings.codec),
        "topology": str(settings.collective.topology),
        "quality": settings.quality.value,
        "step_s": price.step_s,
        "samples_s": price.samples_s,
        "sample_worth": settings.worth if settings.measured else None,
        "against_one": price.against_one,
        "sent_bytes": max(price.sent_bytes),
        "received_bytes": max(price.received_bytes),
        "burst_bytes": price.burst_bytes,
        "link_part": price.link_part,
        "processor_part": price.processor_part,
    }
