"""Another codec for a job that runs: from which round on, and between which codecs that goes (C3).

The codec of a round is a function of the job's first codec, what its history has changed, and the round's number. So
all members agree on it without a word, whenever they came in, and a round that runs again keeps it (C1).
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from meshwire import limits
from meshwire.codecs.spec import CodecSpec
from meshwire.message_base import Wire
from meshwire.sync_modes.codec_for_mode import suits
from meshwire.sync_modes.mode import SyncSettings

CodecName = Annotated[str, Field(min_length=1, max_length=limits.CODEC_CHARS_MAX)]
"""As typed behind `--codec`."""


class CodecWish(Wire):
    """A codec that a member asks for: because a person has typed it, or because the plan of the job says so, whose
    links have become slower or faster."""

    codec: CodecName
    by: Literal["person", "plan"] = "person"


class CodecChange(CodecWish):
    """The rounds from `first` on, until the next change, travel in this codec."""

    first: Annotated[int, Field(ge=1, lt=2**32)]


CodecChanges = Annotated[tuple[CodecChange, ...], Field(max_length=limits.CODEC_CHANGES_MAX)]
"""What a history has changed, in the order of its rounds."""


def newest_codec(codec: str, changes: Sequence[CodecChange]) -> str:
    """The one that is in force, or will be soon; `codec` is the job's first."""
    return changes[-1].codec if changes else codec


def changed(changes: Sequence[CodecChange], cut: int, ahead: int, wish: CodecWish | None) -> tuple[CodecChange, ...]:
    """What a history has changed that is gone on from after round `cut`.

    A change begins above every round that a member may have bound before it enters: those run again as they were.
    Changes that came before the last one up to the cut are forgotten, for no round runs in them any more.

    Args:
        ahead: how many rounds past the cut may be bound (R1).
        wish: that is asked for; None: nothing is.
    """
    kept = [change for change in changes if change.first > cut + 1]
    begun = [change for change in changes if change.first <= cut + 1][-1:]
    if wish is not None and wish.codec != newest_codec("", (*begun, *kept)):
        first = cut + ahead + 1
        kept = [
            *(change for change in kept if change.first < first),
            CodecChange(first=first, codec=wish.codec, by=wish.by),
        ]
    return (*begun, *kept)


def refusal_of_change(sync: SyncSettings, before: CodecSpec, after: CodecSpec) -> str | None:
    """Why the rounds of a job in this mode cannot go over from one codec to the other while it runs; None if they can.

    Both keep no more than what they have left out, in units of w*g and by value: it stays where it is, and is sent by
    whichever comes.
    """
    for codec in (before, after):
        if codec.family.transforms or codec.momentum or codec.of_momentum or codec.decay != 1.0:
            of_job = "the job's codec " if codec is before else "--codec "
            return (
                f"{of_job}{codec}: it builds on what its own earlier rounds have sent, and would begin without: "
                "a job that runs changes between codecs such as fp32, fp16, int8, int4, qsgd, onebit and topk; any "
                "other one takes a new job (`meshtrain submit --resume JOB --codec ...`)"
            )
    if not suits(sync, after):
        return f"--codec {after} does not go with --sync {sync.text()}"
    return None
