"""What codecs and rounds were timed to cost a processor, as it is kept in a data folder (`NAME`): `submit` and `plan`
measure it once, and the dashboard shows it."""

from typing import Annotated

from pydantic import Field

from meshwire.message_base import Wire

NAME = "codec_prices.json"

PositiveSeconds = Annotated[float, Field(ge=0, le=1)]


class KeptPrice(Wire):
    """Of one codec: a value, and what a segment takes besides its values."""

    encode_s: PositiveSeconds
    add_s: PositiveSeconds
    encode_segment_s: PositiveSeconds
    add_segment_s: PositiveSeconds
    filled: Annotated[float, Field(gt=0, le=1)]


class KeptRounds(Wire):
    """Of one codec: what a whole round takes whose vector has few values, and one that has many."""

    few_s: PositiveSeconds
    many_s: PositiveSeconds


class KeptPrices(Wire):
    """The file. What was measured elsewhere, or by another version, counts for nothing."""

    processor: str
    software: str
    prices: dict[str, KeptPrice]
    rounds: dict[str, KeptRounds]
