"""The codec of a job, from --codec and --sync: a mode that is an optimizer too brings its own."""

from meshwire.codec import CodecSpec, parse_codec
from meshwire.syncmode import SyncSettings

DEFAULT = "fp32"
DEMO = "dct:32,decay=0.999"
"""DeMo's: 32 coefficients of 4096, of a momentum in which a gradient counts for about 1000 steps."""


def codec_of(sync: SyncSettings, typed: str | None) -> CodecSpec:
    """The codec that gradients travel in.

    Args:
        typed: behind --codec; None: nothing.

    Raises ValueError, which names what is legal.
    """
    if not sync.signs:
        codec = parse_codec(DEFAULT if typed is None else typed)
        if sync.period and codec.momentum:
            raise ValueError(
                f"--codec {codec} takes over the momentum of gradients, and with --sync {sync.text()} what travels are "
                "weights: use --codec topk, or another --sync"
            )
        return codec
    codec = parse_codec(DEMO if typed is None else typed)
    if codec.name != "dct":
        raise ValueError(
            f"--codec {typed} with --sync demo: its momentum is what the codec dct leaves out: omit --codec, or use "
            f"dct with other parameters, such as {DEMO}"
        )
    return codec
