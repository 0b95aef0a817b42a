"""Messages on a daemon's local endpoint: from the command line; those of learners are in `learner.py`.

The endpoint speaks the same frames as peers do. The first message is `Attach`; nothing else is answered before it.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from meshwire import limits
from meshwire.jobs.checkpoint_schedule import CHECKPOINT_EVERY
from meshwire.jobs.lifecycle import JobId
from meshwire.jobs.partition_wait import PartitionWait
from meshwire.message_base import DeviceId, Name, Wire
from meshwire.messages.envelope import message
from meshwire.messages.job import (
    CheckpointEvery,
    Count,
    Engine,
    GivenUpTag,
    JobSummary,
    Learners,
    Member,
    ModuleNames,
    PackagesWanted,
    Prediction,
    RelativePath,
    RestartsMax,
    Text,
    TopologyName,
)
from meshwire.messages.link import MachineState, Software, Version
from meshwire.planning.measured_link import MeasuredLink
from meshwire.sync_modes.settings_changes import CodecName, Period, SettingsInForce

Chosen = tuple[Annotated[str, Field(max_length=64)], ...]  # peers by name or id prefix
AnyPath = Annotated[str, Field(min_length=1, max_length=limits.PATH_CHARS_MAX)]  # on this machine


@message("attach")
class Attach(Wire):
    """Request: who asks, and a token: a client's is that of DATA/run, a learner's is good for its job alone; with it
    the learner's process group has a connection of its own.

    Reply: `Done` for a client, `LearnerWelcome` for a learner, `GroupWelcome` for a group.
    """

    token: Annotated[str, Field(max_length=128)]
    role: Literal["client", "learner", "group"]
    job: JobId | None = None
    pid: int = 0
    torch: Version | None = None


@message("get.status")
class GetStatus(Wire):
    """Request. Reply: `Status`."""


class LinkTraffic(Wire):
    """What one link to a peer has carried, since it was made."""

    name: Name
    bytes_per_s: float | None  # that it takes, measured while it held this side back; None: it never did
    sent_bytes: int  # of chunks' payloads, as they travelled
    spared_bytes: int  # of them, by the lossless stage (W5)


class IntroductionPolicy(StrEnum):
    """What this device does with the words of trusted devices about others (K3)."""

    ACCEPT = "accept"
    ASK = "ask"
    NEVER = "never"


class IntroducedDevice(Wire):
    """A device that came by another's word. `added_by`: the other's name, to be shown as it is, like `name`."""

    device: DeviceId
    name: Name
    added_by: Name
    added_at_s: float


@message("status")
class Status(Wire):
    """This daemon."""

    device: DeviceId
    name: Name
    software: Software
    pid: int
    listen: Text
    data_dir: AnyPath
    up_s: float
    peers_linked: int
    peers_paired: int
    jobs_running: int
    warnings: tuple[Text, ...]
    patience_s: float = 0.0
    rtt_s: float | None = None  # of the farthest linked peer
    timeouts: tuple[tuple[Text, float], ...] = ()  # in seconds: what follows from these two
    links: tuple[LinkTraffic, ...] = ()
    introductions: IntroductionPolicy = IntroductionPolicy.ACCEPT
    joined: tuple[IntroducedDevice, ...] = ()  # within the last day
    waiting: tuple[IntroducedDevice, ...] = ()  # for a person's word, once for each that introduces it
    hub: bool = False  # it runs no learner (H1)


@message("open.dashboard")
class OpenDashboard(Wire):
    """Request: serve the dashboard, and let one browser in. Reply: `DashboardOpened`."""


@message("dashboard.opened")
class DashboardOpened(Wire):
    """Reply: where the dashboard is. The token in the URL's fragment is good once, for so long."""

    url: Annotated[str, Field(max_length=256)]
    expires_s: float


@message("get.peers")
class GetPeers(Wire):
    """Request. Reply: `Peers`."""


class PeerSummary(Wire):
    """One line of `meshtrain peers`."""

    device: DeviceId
    name: Name
    # paired: pinned but not reachable now; waiting: introduced, for a person's word; seen: on mDNS, not paired
    state: Literal["linked", "paired", "waiting", "seen"]
    address: Text | None
    rtt_s: float | None
    software: Software | None
    cores: int | None
    memory_bytes: int | None
    refused: Text | None = None  # of a paired one that answers: why there is no link
    added_by: Name | None = None  # who has introduced it; None: a code was typed here, or it is not paired
    measured: MeasuredLink | None = None  # what the link carried, when that was asked for last (W7)
    hub: bool = False  # it runs no learner (H1)
    same_machine: bool = False  # it computes on this machine's cores


@message("peers")
class Peers(Wire):
    """Reply to `GetPeers`, without this device."""

    peers: tuple[PeerSummary, ...]


@message("get.machines")
class GetMachines(Wire):
    """Request: how this machine is now, and those of linked devices. Reply: `Machines`."""


@message("machines")
class Machines(Wire):
    """Reply: this one first, and those that have answered."""

    machines: Annotated[tuple[tuple[DeviceId, MachineState], ...], Field(max_length=limits.PEERS_MAX + 1)]


@message("ask.together")
class AskTogether(Wire):
    """Request: which devices a job would run on now, in ring order, hubs last. Reply:
    `meshwire.messages.link.LinkedDevices`."""


@message("measure.links")
class MeasureLinks(Wire):
    """Request: measure the links to these devices; empty: to all that are linked. Events: `MeasureProgress`. Reply:
    `LinksMeasured`; the figures are in `Peers`.
    """

    devices: Annotated[tuple[DeviceId, ...], Field(max_length=limits.PEERS_MAX)] = ()


@message("measure.progress")
class MeasureProgress(Wire):
    """Event: the link to this device is next."""

    name: Name
    done: int
    total: int


@message("links.measured")
class LinksMeasured(Wire):
    """Reply: whose links could not be measured, by name, and why."""

    failed: tuple[tuple[Name, Text], ...]


@message("pair.host")
class PairHost(Wire):
    """Request: show a code and wait. Events: `PairCode`. Reply: `Paired`."""


@message("pair.code")
class PairCode(Wire):
    """Event: the code to type on the other device, and where that finds this one without mDNS."""

    code: str
    port: int
    expires_s: float
    addresses: tuple[Text, ...]  # the likeliest first


@message("pair.join")
class PairJoin(Wire):
    """Request: pair with the device that shows this code. Events: `PairProgress`. Reply: `Paired`."""

    code: Annotated[str, Field(max_length=32)]
    at: Annotated[str, Field(max_length=300)] | None  # HOST[:PORT]; else every device that mDNS shows as pairing


@message("pair.progress")
class PairProgress(Wire):
    """Event: what takes so long, or what else was noticed, for the person who typed the code."""

    text: Text


@message("paired")
class Paired(Wire):
    """Reply: the new peer."""

    device: DeviceId
    name: Name


@message("pair.accept")
class PairAccept(Wire):
    """Request: trust a device that waits (name or id prefix). Reply: `Paired`."""

    peer: Annotated[str, Field(min_length=1, max_length=64)]


@message("set.introductions")
class SetIntroductions(Wire):
    """Request: what to do with introductions from now on, kept until another is said (K3). Reply: `Done`."""

    policy: IntroductionPolicy


@message("unpair")
class Unpair(Wire):
    """Request: remove a device that is paired or waits (name or id prefix), and drop its link; with `introduced` also
    all that joined by its word, or by theirs. Reply: `Unpaired`."""

    peer: Annotated[str, Field(min_length=1, max_length=64)]
    introduced: bool = False


@message("unpaired")
class Unpaired(Wire):
    """Reply: what was removed.

    `stay`: those that joined by the word of the device and are still trusted. `others`: the paired ones, where it may
    be trusted, too.
    """

    removed: tuple[Paired, ...]
    stay: tuple[Paired, ...] = ()
    others: tuple[Name, ...] = ()


@message("shutdown")
class Shutdown(Wire):
    """Request: stop the daemon. Jobs go on on their other devices; those that cannot end. Reply: `Done`."""


class ResumeFrom(Wire):
    """A checkpoint of a job: after this round, else the newest that can be used. Only with `given_up` one whose history
    was."""

    job: JobId
    round: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    given_up: GivenUpTag | None = None


@message("submit")
class Submit(Wire):
    """Request: start a job. Events: `SubmitProgress`. Reply: `Submitted`.

    `root` and `data_root` are folders of this machine; their manifests were made by the client.
    """

    name: Name
    root: AnyPath
    manifest: AnyPath  # file that holds the packed FileManifest of `root`
    data_root: AnyPath | None
    data_manifest: AnyPath | None
    data_path: RelativePath | None = None  # as of `JobSpec`
    script: RelativePath
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    on: Chosen  # empty: all linked
    peers: Annotated[int, Field(ge=1, le=limits.MEMBERS_MAX)] | None  # how many (at least), this device included
    sync: str
    straggler: str | None = None  # None, here and below: not asked for
    visibility: str | None = None
    own: str | None = None
    shares: str | None = None
    codec: str | None = None  # that of `sync`
    topology: TopologyName | None = None  # that of the codec
    masks: str | None = None
    scale_lr: str | None = None
    on_nan: Literal["stop", "skip"]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None
    bucket_bytes: int | None
    hash_every: Annotated[int, Field(ge=0)]
    trace: bool
    dry_run: bool
    checkpoint_every: CheckpointEvery = CHECKPOINT_EVERY
    resume: ResumeFrom | None = None  # its seed is that of the job which goes on
    peers_max: Annotated[int, Field(ge=1, le=limits.MEMBERS_MAX)] | None = None  # as of `JobSpec`
    independent: bool = False  # as of `JobSpec`
    partition_wait: PartitionWait | None = None  # as of `JobSpec`
    prediction: Prediction | None = None  # as of `JobSpec`
    requirements: PackagesWanted = ()  # as of `JobSpec`
    modules: ModuleNames = ()  # that the script imports, and are to be there
    restarts_max: RestartsMax | None = None  # as of `JobSpec`
    engine: Engine = "mesh"  # as of `JobSpec`
    as_module: bool = False  # as of `JobSpec`
    learners: Learners = 1  # as of `JobSpec`
    hubs: bool = True  # take linked hubs in, where the job can use them; those that `on` names are anyhow


@message("environment")
class MakeEnvironment(Wire):
    """Request: have an environment with these packages here. Events: `SubmitProgress`. Reply: `EnvironmentMade`."""

    requirements: PackagesWanted


@message("environment.made")
class EnvironmentMade(Wire):
    """Reply: the interpreter in it."""

    python: AnyPath


@message("resubmit")
class Resubmit(Wire):
    """Request: start a job that goes on as another one was, from its checkpoint. Events and reply as of `Submit`."""

    resume: ResumeFrom
    on: Chosen = ()
    peers: Annotated[int, Field(ge=1, le=limits.MEMBERS_MAX)] | None = None
    peers_max: Annotated[int, Field(ge=1, le=limits.MEMBERS_MAX)] | None = None


@message("submit.progress")
class SubmitProgress(Wire):
    """Event: what is being done, for a person to read."""

    text: Text
    done_bytes: int = 0
    total_bytes: int = 0


@message("submitted")
class Submitted(Wire):
    """Reply: the job runs (or, with dry_run, would run) on these members."""

    job: JobId
    members: tuple[Member, ...]
    notes: tuple[Text, ...]  # differences and warnings


@message("get.jobs")
class GetJobs(Wire):
    """Request: jobs with this id prefix ("" for all), from this daemon, or from any linked one when none is known here.

    Reply: `meshwire.messages.job.Found`.
    """

    prefix: Annotated[str, Field(max_length=32)] = ""


@message("watch")
class Watch(Wire):
    """Request: follow a job. Events: `Watched`, about once a second. Reply: `Watched` when it has ended."""

    job: JobId


@message("watched")
class Watched(Wire):
    """Where a job stands, and who has joined this person's devices since the last such message."""

    summary: JobSummary
    joined: tuple[IntroducedDevice, ...] = ()


@message("cancel")
class Cancel(Wire):
    """Request: end a job, also of a daemon to a member of it. `now` kills the learners and saves nothing. Reply: `Done`
    when it has ended there."""

    job: JobId
    now: bool


@message("leave")
class Leave(Wire):
    """Request: this device takes no part in a job any more, the others go on. Reply: `Done` when it has left."""

    job: JobId


@message("results.remove")
class RemoveResults(Wire):
    """Request: delete what a job that has ended has left on this device. Reply: `ResultsRemoved`."""

    job: JobId


@message("results.removed")
class ResultsRemoved(Wire):
    """Reply: how much it took on the disk."""

    size_bytes: Count


@message("settings.change")
class ChangeSettings(Wire):
    """Request: the job's rounds go over to another codec, or another period, while it runs (C3); None: that stays. This
    device takes part in it. Reply: `SettingsTaken` when all have agreed."""

    job: JobId
    codec: CodecName | None = None
    period: Period | None = None


@message("settings.taken")
class SettingsTaken(Wire):
    """Reply to `ChangeSettings`: what rounds go by from `first` on, and what they went by before."""

    first: Annotated[int, Field(ge=1, lt=2**32)]
    now: SettingsInForce
    before: SettingsInForce


# Log and output pieces are asked for with `meshwire.messages.job.Fetch` and `ListOutputs`, whichever daemon has them.
