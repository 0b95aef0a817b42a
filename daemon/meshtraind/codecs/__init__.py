"""How a segment of fp32 values becomes bytes on the wire and back.

Names, parameters and sizes: `meshwire.codecs.registry`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from meshwire.codecs.registry import parse_codec

if TYPE_CHECKING:
    from meshtraind.codecs.base import Codec

# Imported when one is chosen, because an idle daemon does without numpy.
_CLASSES = {
    "fp32": ("fp32", "Fp32"),
    "fp16": ("fp16", "Fp16"),
    "bf16": ("bf16", "Bf16"),
    "int8": ("int8", "Int8"),
    "int4": ("int4", "Int4"),
    "nf4": ("normalfloat", "NormalFloat4"),
    "qsgd": ("qsgd", "Qsgd"),
    "onebit": ("onebit", "OneBit"),
    "twobit": ("twobit", "TwoBit"),
    "terngrad": ("terngrad", "TernGrad"),
    "topk": ("topk", "TopK"),
    "dgc": ("topk", "TopK"),
    "threshold": ("threshold", "Threshold"),
    "sidco": ("sidco", "Sidco"),
    "randomk": ("randomk", "RandomK"),
    "cocktail": ("cocktail", "Cocktail"),
    "dct": ("dct", "Dct"),
    "homomorphic": ("homomorphic", "Homomorphic"),
}


def codec_named(text: str) -> "Codec":
    """A new codec, as `parse_codec` takes it. Use it from one thread. Raises ValueError."""
    spec = parse_codec(text)
    module, name = _CLASSES[spec.name]
    codec: Codec = getattr(import_module(f"meshtraind.codecs.{module}"), name)(spec)
    return codec
