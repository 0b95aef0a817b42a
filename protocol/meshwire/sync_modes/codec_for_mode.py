"""The codec of a job, from --codec and --sync: a mode that is a codec too brings its own."""

import re
from dataclasses import replace
from typing import NamedTuple

from meshwire.codecs.registry import CodecSpec, parse_codec
from meshwire.codecs.spec import ITERATION
from meshwire.sync_modes.mode import SyncSettings

DEFAULT = "fp32"


class _Own(NamedTuple):
    """A mode's codec.

    Attributes:
        usual: as typed, when nothing is.
        family: that another one must be of; None: of any.
        why: it must be, after "--codec X with --sync Y: ".
    """

    usual: str
    family: str | None = None
    why: str = ""


# 32 coefficients of 4096, of a momentum in which a gradient counts for about 1000 steps, from everybody to everybody as
# the paper's. Chosen anew by an owner, whose share then has a momentum of its own, they train worse for their bytes.
_DEMO = _Own("dct:32,decay=0.999,gather", "dct", "its momentum is what the codec dct leaves out")

# The largest 64 of each 4096 values in 2 bits, and what stays behind is forgotten in about 20 rounds. The paper's
# indices take 12 bits, and here about 8. The mean of a value is over those that sent it, as theirs is.
_SPARSELOCO = _Own(
    "topk:0.015625,chunk=4096,senders,decay=0.95+2bit",
    "topk",
    "the largest changes of the local steps travel, by the codec topk",
)

# Four means of each 4096 values: 2 bits, with error feedback, as the paper's.
_MULOCO = _Own("twobit")

# SMA: a learner's own weights give up what they have sent, so what a codec keeps for later arrives when they have gone
# on, and has the base overshoot. These keep nothing, or so little that the difference shrinks as with fp32.
_OF_CENTRAL = ("fp32", "fp16", "bf16", "int8", "int4")


def codec_of(sync: SyncSettings, typed: str | None) -> CodecSpec:
    """The codec that gradients travel in.

    Args:
        typed: behind --codec; None: nothing.

    A codec of two phases is its variant of one where there is a bound above 0, whose name says so: "powersgd" is
    "powersgd:half" there.

    Raises ValueError, which names what is legal.
    """
    own = _own(sync)
    usual = DEFAULT if own is None else own.usual
    codec = parse_codec(usual if typed is None else typed)
    if not _of_family(own, codec):
        assert own is not None
        raise ValueError(
            f"--codec {typed} with --sync {sync.text()}: {own.why}: omit --codec, or use {own.family} with other "
            f"parameters, such as {own.usual}"
        )
    if sync.central and codec.name not in _OF_CENTRAL:
        raise ValueError(
            f"--codec {codec} with --sync {sync.text()}: a laptop's own weights have gone on when what it leaves for "
            "later is sent, and the model would go too far: use "
            f"{', '.join(_OF_CENTRAL[:-1])} or {_OF_CENTRAL[-1]}, or --sync local:{sync.period}"
        )
    if sync.period and codec.momentum:
        raise ValueError(
            f"--codec {codec} takes over the momentum of gradients, and with --sync {sync.text()} what travels are "
            "weights: use --codec topk, or another --sync"
        )
    if codec.of_momentum and not codec.warmup:
        raise ValueError(
            f"--codec {codec}: second moments stay as the warm-up leaves them, and there is none: say how long it is, "
            "as in --codec onebit:momentum,warmup=100"
        )
    if codec.of_momentum and (sync.staleness or sync.period):
        raise ValueError(
            f"--codec {codec} with --sync {sync.text()}: it sends what becomes of a momentum that all have in common, "
            "and there each is ahead with its own: use --sync bsp, or --codec onebit"
        )
    if sync.staleness and codec.two_phases:
        if typed is not None and "full" in re.split("[:,=+]", typed):
            raise ValueError(
                f"--codec {typed} with --sync {sync.text()}: what a laptop adds would follow from what all have "
                "added in the same round, and with a bound nobody waits for that: use half in place of full, or --sync "
                "bsp"
            )
        return _in_one_phase(codec)
    return codec


def suits(sync: SyncSettings, codec: CodecSpec) -> bool:
    """Whether a job in this mode can have this codec."""
    own = _own(sync)
    if sync.staleness and codec.two_phases:
        return False
    if sync.central and codec.name not in _OF_CENTRAL:
        return False
    if codec.of_momentum and (sync.staleness or sync.period or not codec.warmup):
        return False
    return _of_family(own, codec) and not (sync.period and codec.momentum)


def _of_family(own: _Own | None, codec: CodecSpec) -> bool:
    return own is None or own.family is None or codec.name == own.family


def _in_one_phase(codec: CodecSpec) -> CodecSpec:
    named = zip(codec.family.parameters, codec.values, strict=True)
    return replace(codec, values=tuple("half" if parameter is ITERATION else value for parameter, value in named))


def _own(sync: SyncSettings) -> _Own | None:
    if sync.signs:
        return _DEMO
    if sync.muon:
        return _MULOCO
    return _SPARSELOCO if sync.sparse else None
