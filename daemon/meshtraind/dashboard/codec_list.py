"""What each codec costs: bytes, this processor's time, and loss, as far as each was measured."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshtraind.dashboard.page_values import shown_line
from meshwire import limits
from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.collectives.strategy import topologies_for
from meshwire.encoded_layout.projections import bits_per_value
from meshwire.memory_layout.footprint import residual_bytes
from meshwire.planning.kept_prices import NAME, KeptPrices
from meshwire.planning.quality import EVIDENCE, Quality, Tried

IN_STEP = "bsp"  # the mode in which losses of codecs were compared


def codec_list(kept: KeptPrices | None) -> dict[str, Any]:
    """A row for each codec as it is typed without parameters, and for those with some whose loss was measured.

    Args:
        kept: what was timed of this processor; None: nothing was yet.
    """
    tried = [codec for codec, sync in EVIDENCE if sync == IN_STEP]
    names = sorted({*FAMILIES, *tried}, key=lambda name: (list(FAMILIES).index(parse_codec(name).name), name))
    return {
        "processor": None if kept is None or not kept.prices else shown_line(kept.processor),
        "rows": [_row(name, kept) for name in names],
    }


def _row(name: str, kept: KeptPrices | None) -> dict[str, Any]:
    codec = parse_codec(name)
    family = codec.family
    price = None if kept is None else kept.prices.get(name)
    evidence = EVIDENCE.get(Tried(name, IN_STEP))
    return {
        "name": name,
        "bits": bits_per_value(codec),
        "fixed": family.fixed,
        "exchange": topologies_for(family, codec.reduction)[0].name,
        "state_bytes": residual_bytes(codec, 1, 0),
        "value_s": None if price is None else price.encode_s + price.add_s,
        "loss": "not measured" if evidence is None else _loss(evidence.quality, evidence.behind_nats),
        "about": family.about,
    }


def _loss(quality: Quality, behind_nats: float) -> str:
    if quality is Quality.EXACT:
        return "exact, but for rounding"
    return "within the noise of seeds" if quality is Quality.SAFE else f"{behind_nats:.2g} nats behind fp32"


def read_prices(data_dir: Path) -> KeptPrices | None:
    """What `submit` or `plan` has timed; None where neither has, or an earlier version wrote it. Blocks on the disk."""
    try:
        with (data_dir / NAME).open("rb") as file:
            return KeptPrices.model_validate_json(file.read(limits.DASHBOARD_PRICES_BYTES_MAX))
    except (OSError, ValidationError):  # they are measured again by the next command that needs them
        return None
