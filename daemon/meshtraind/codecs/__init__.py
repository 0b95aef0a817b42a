"""How a segment of fp32 values becomes bytes on the wire and back. Exact sizes are in `meshwire.codec`."""

from typing import TYPE_CHECKING

from meshwire.codec import CODECS

if TYPE_CHECKING:
    from meshtraind.codecs.base import Codec


def codec_named(name: str) -> "Codec":
    """A new codec with its own scratch memory: use it from one thread. Raises ValueError for an unknown name."""
    # Imported here because an idle daemon does without numpy.
    match name:
        case "fp32":
            from meshtraind.codecs.fp32 import Fp32

            return Fp32()
        case "fp16":
            from meshtraind.codecs.fp16 import Fp16

            return Fp16()
        case "bf16":
            from meshtraind.codecs.bf16 import Bf16

            return Bf16()
        case _:
            raise ValueError(f"unknown codec {name!r}; there are {', '.join(CODECS)}")
