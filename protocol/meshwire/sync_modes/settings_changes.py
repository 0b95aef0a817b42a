"""Other settings for a job that runs: codec and period, from which round on, and between which that goes (C3).

What a round goes by is a function of the job's first settings, what its history has changed, and the round's number. So
all members agree on it without a word, whenever they came in, and a round that runs again keeps it (C1).
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from meshwire import limits
from meshwire.codecs.spec import CodecSpec
from meshwire.message_base import Wire
from meshwire.sync_modes.codec_for_mode import codec_of, suits
from meshwire.sync_modes.mode import SyncSettings

CodecName = Annotated[str, Field(min_length=1, max_length=limits.CODEC_CHARS_MAX)]
"""As typed behind `--codec`."""
Period = Annotated[int, Field(ge=1, le=limits.PERIOD_MAX)]
"""Local steps in a round."""


class SettingsWish(Wire):
    """Settings that a member asks for: because a person has typed them, or because the plan of the job says so, whose
    links have become slower or faster.

    Attributes:
        codec, period: None: as it is.
    """

    codec: CodecName | None = None
    period: Period | None = None
    by: Literal["person", "plan"] = "person"

    def text(self) -> str:
        """As typed."""
        return options_text(self.codec, self.period)

    def is_met(self, changes: "Sequence[SettingsChange]") -> bool:
        """Whether the newest settings of a history are those that are asked for."""
        newest = changes[-1] if changes else None
        return newest is not None and self.codec in (None, newest.codec) and self.period in (None, newest.period)


class SettingsChange(SettingsWish):
    """The rounds from `first` on, until the next change, go by these settings; None: as the job began."""

    first: Annotated[int, Field(ge=1, lt=2**32)]


SettingsChanges = Annotated[tuple[SettingsChange, ...], Field(max_length=limits.SETTINGS_CHANGES_MAX)]
"""What a history has changed, in the order of its rounds."""

SettingsChangesKept = Annotated[SettingsChanges, Field(validation_alias=AliasChoices("changes", "codecs"))]
"""The same where it is read from disks: what changed codecs alone was written under their name."""


class SettingsInForce(Wire):
    """What a round goes by. `period`: 0 where each step is a round."""

    codec: CodecName
    period: Annotated[int, Field(ge=0, le=limits.PERIOD_MAX)]


def options_text(codec: str | None, period: int | None) -> str:
    """As typed; None: it is not said."""
    said = [] if codec is None else [f"--codec {codec}"]
    return " ".join([*said, *([] if period is None else [f"--period {period}"])])


def newest_codec(codec: str, changes: Sequence[SettingsChange]) -> str:
    """The one that is in force, or will be soon; `codec` is the job's first."""
    return (changes[-1].codec if changes else None) or codec


def newest_sync(sync: SyncSettings, changes: Sequence[SettingsChange]) -> SyncSettings:
    """With the period that is in force, or will be soon; `sync` is the job's first."""
    return sync.with_period(changes[-1].period if changes else None)


def begun(changes: Sequence[SettingsChange], round_: int) -> SettingsChange | None:
    """The change that a round goes by; None: it goes by the job's first settings."""
    return next((change for change in reversed(changes) if change.first <= round_), None)


def local_steps(sync: SyncSettings, changes: Sequence[SettingsChange], round_: int) -> int:
    """How many steps a learner takes for a round, from 1; more than one with a period. `sync` is the job's first."""
    change = begun(changes, round_)
    return max(1, sync.with_period(None if change is None else change.period).steps_in(round_))


def codecs_by_round(codec: str, changes: Sequence[SettingsChange]) -> tuple[tuple[int, str], ...]:
    """From which rounds on which codec holds, without those that say the same again; `codec` is the job's first."""
    found = [(0, codec)]
    for change in changes:
        if (after := change.codec or codec) != found[-1][1]:
            found.append((change.first, after))
    return tuple(found)


def changed(
    changes: Sequence[SettingsChange], cut: int, ahead: int, wish: SettingsWish | None, furthest_back: int | None = None
) -> tuple[SettingsChange, ...]:
    """What a history has changed that is gone on from after round `cut`.

    A change begins above every round that a member may have bound before it enters: those run again as they were.
    Changes are forgotten by which goes no round that a member is still to get. Each says all that is not as the job
    began.

    Args:
        ahead: how many rounds past the cut may be bound (R1).
        wish: that is asked for; None: nothing is.
        furthest_back: the round up to which all members hold the history; None: the cut.
    """
    held = cut if furthest_back is None else furthest_back
    kept = [change for change in changes if change.first > held + 1]
    before = [change for change in changes if change.first <= held + 1][-1:]
    if wish is not None and not wish.is_met([*before, *kept]):
        newest = [*before, *kept][-1:]
        codec = wish.codec or (newest[0].codec if newest else None)
        period = wish.period or (newest[0].period if newest else None)
        first = cut + ahead + 1
        kept = [
            *(change for change in kept if change.first < first),
            SettingsChange(first=first, codec=codec, period=period, by=wish.by),
        ]
    return (*before, *kept)


def differs_below(one: Sequence[SettingsChange], other: Sequence[SettingsChange], rounds: range) -> int | None:
    """The first of these rounds that does not go by the same settings in both histories; None: all do."""
    for round_ in rounds:
        changes = begun(one, round_), begun(other, round_)
        settings = [(None, None) if change is None else (change.codec, change.period) for change in changes]
        if settings[0] != settings[1]:
            return round_
    return None


def told_of(changes: Sequence[SettingsChange], change: SettingsChange) -> str:
    """What one of a history's changes alters, for people: from which round on, and what is otherwise than before it."""
    before = next((one for one in reversed(changes) if one.first < change.first), None)
    said = []
    if change.codec is not None and (before is None or before.codec != change.codec):
        said.append(f"gradients travel in {change.codec}")
    if change.period is not None and (before is None or before.period != change.period):
        said.append(f"a period has {change.period} local step{'s' if change.period > 1 else ''}")
    return f"from round {change.first} on {' and '.join(said) or 'all is as before'}"


def refusal_of_codec(sync: SyncSettings, before: CodecSpec, after: CodecSpec) -> str | None:
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
    if suits(sync, after):
        return None
    try:
        codec_of(sync, str(after))
    except ValueError as error:  # which names what does
        return str(error)
    return f"--codec {after} does not go with --sync {sync.text()}"


def refusal_of_period(sync: SyncSettings, period: int) -> str | None:
    """Why the rounds of a job in this mode cannot take so many local steps from now on; None if they can.

    Args:
        sync: with which the job has begun.
    """
    if not sync.period:
        return (
            f"--period {period}: with --sync {sync.text()} each step is a round, and local weights take a new job "
            f"(`meshtrain submit --resume JOB --sync local:{period}`): a job that runs changes the period of local:H, "
            "diloco:H, sparseloco:H, muloco:H and sma:H"
        )
    if sync.fragments and (period % sync.fragments or period // sync.fragments < max(1, sync.delay)):
        least = max(1, sync.delay) * sync.fragments
        return (
            f"--period {period}: with --sync {sync.text()} {sync.fragments} parts of the model take turns within a "
            f"period: use a multiple of {sync.fragments} from {least} on"
        )
    if period <= sync.gossip:
        return (
            f"--period {period}: with --sync {sync.text()} weights are mixed after each {sync.gossip} steps of a "
            f"period: use one from {sync.gossip + 1} on"
        )
    if sync.staleness and sync.straggler == "carry" and (sync.period > 1) != (period > 1):
        legal = f"from 2 to {limits.PERIOD_MAX}" if sync.period > 1 else "of 1 alone"
        return (
            f"--period {period}: with --sync {sync.text()} who is slower takes fewer local steps of a longer period, "
            f"and of a period of 1 none, so a job that runs does not go from one to the other: it can have periods "
            f"{legal}; any other one takes a new job (`meshtrain submit --resume JOB --sync ...`)"
        )
    return None
