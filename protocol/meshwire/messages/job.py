"""Messages between the daemons of one job: offer, files, generation, progress, end."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from meshwire import limits
from meshwire.jobs.checkpoint_schedule import CHECKPOINT_EVERY, EVERY_PATTERN
from meshwire.jobs.lifecycle import JobId
from meshwire.jobs.partition_wait import PartitionWait
from meshwire.message_base import DeviceId, Digest, Int64, Name, Seconds, Wire
from meshwire.messages.envelope import message
from meshwire.model.masks import MaskSettings
from meshwire.planning.replan import StepForecast
from meshwire.sync_modes.mode import SyncSettings
from meshwire.sync_modes.rate_rule import RateRule
from meshwire.sync_modes.settings_changes import SettingsChangesKept

Rank = Annotated[int, Field(ge=0, lt=limits.MEMBERS_MAX)]
Text = Annotated[str, Field(max_length=limits.ERROR_CHARS_MAX)]
Reason = Annotated[str, Field(max_length=limits.REASON_CHARS_MAX)]
CheckpointEvery = Annotated[
    str, StringConstraints(pattern=EVERY_PATTERN)
]  # meshwire.jobs.checkpoint_schedule.schedule_of
Outcome = Literal["succeeded", "failed", "cancelled"]
Count = Annotated[int, Field(ge=0)]
RelativePath = Annotated[str, Field(min_length=1, max_length=limits.PATH_CHARS_MAX)]


# A package as of PEP 508, in a line of its own: begun like a name, so that no installer takes it for an option.
PackageWanted = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][^\x00-\x1f\x7f]*$", max_length=limits.REQUIREMENT_CHARS_MAX)
]
PackagesWanted = Annotated[tuple[PackageWanted, ...], Field(max_length=limits.REQUIREMENTS_MAX)]
ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=limits.MODULE_CHARS_MAX)]
ModuleNames = Annotated[tuple[ModuleName, ...], Field(max_length=limits.MODULES_MAX)]


Engine = Literal["mesh", "torchrun"]
"""Who carries what the scripts exchange: the daemons, or torch itself, by gloo (P9)."""

Port = Annotated[int, Field(ge=1, lt=2**16)]

Learners = Annotated[int, Field(ge=1, le=limits.LEARNERS_MAX)]
"""How many learners each device of a job has (R6)."""

RestartsMax = Annotated[int, Field(ge=1, le=limits.WORLD_RESTARTS_MAX)]


class BlobRef(Wire):
    """A content-addressed blob."""

    sha256: Digest
    size_bytes: Annotated[int, Field(ge=0, le=limits.DATA_BYTES_MAX)]


class ResumePoint(Wire):
    """The checkpoint that a job begins from."""

    job: JobId  # which has written it
    round: Annotated[int, Field(ge=0, lt=2**32)]
    files: BlobRef  # packed FileManifest of the checkpoint's folder


TopologyName = Annotated[str, Field(max_length=limits.TOPOLOGY_CHARS_MAX)]
"""The name of a topology, as `meshwire.collectives.strategy` lists them."""


SamplesPerSecond = Annotated[float, Field(gt=0, le=limits.SAMPLES_MAX)]


class Prediction(Wire):
    """What was expected of a job when its settings were chosen, in samples a second.

    Attributes:
        samples_s: of all members together.
        alone_samples_s: of the best one of them alone.
        speeds: of each device alone, as far as known: batches that follow speed begin in these proportions (X4a).
        step: by which the job goes over to another codec or period by itself; None: there is none that it could.
    """

    samples_s: SamplesPerSecond
    alone_samples_s: SamplesPerSecond
    step: StepForecast | None = None
    speeds: Annotated[tuple[tuple[DeviceId, SamplesPerSecond], ...], Field(max_length=limits.MEMBERS_MAX)] = ()

    def speeds_of(self, members: Sequence["Member"]) -> dict[Rank, float]:
        """Of those of these members of all times whose speed is known, by the first rank of each: who has come back is
        in no list of before (X1)."""
        known, first = dict(self.speeds), dict[str, Rank]()
        for rank, member in enumerate(members):
            first.setdefault(member.device, rank)
        return {rank: known[device] for device, rank in first.items() if device in known}


class JobSpec(Wire):
    """All that defines a job; equal on every member."""

    job: JobId
    name: Name
    submitter: DeviceId
    created_at_s: Seconds  # Unix time
    script: RelativePath
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    files: BlobRef  # packed FileManifest of the working directory
    data: BlobRef | None  # packed FileManifest of --data
    data_path: RelativePath | None = None  # below the working directory, where the script looks for it
    sync: SyncSettings
    codec: str
    topology: TopologyName | None = None  # None: the codec's usual one
    by_hubs: bool = False  # `topology` is the one at the hubs among its members, and follows them when it is resumed
    masks: MaskSettings | None = None  # None: all weights are kept
    scale_lr: RateRule | None = None  # O12; None: rates are the script's
    on_nan: Literal["stop", "skip"]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    bucket_bytes: Annotated[int, Field(ge=1024, le=limits.BUCKET_BYTES_MAX)]
    hash_every: Annotated[int, Field(ge=0)]  # rounds between comparisons of the replicas' bases; 0: at the end only
    trace: bool
    checkpoint_every: CheckpointEvery = CHECKPOINT_EVERY
    resume: ResumePoint | None = None
    peers_max: Annotated[int, Field(ge=1, le=limits.MEMBERS_MAX)] | None = None  # ever in it; None: nobody joins
    independent: bool = False  # each device may train by itself: a job without a round is none that has failed
    partition_wait: PartitionWait | None = None  # of a part that is not entitled to go on; None: follows from patience
    prediction: Prediction | None = None  # None: nothing was predicted
    requirements: PackagesWanted = ()  # packages for an environment of the script's own; none: the daemon's
    restarts_max: RestartsMax | None = None  # P6: how often all scripts are begun again; None: never, and no failure is
    # survived but by mt.prepare
    engine: Engine = "mesh"
    as_module: bool = False  # `script` is run as by python -m, by the dotted name that its path is
    learners: Learners = 1


class Member(Wire):
    """G1: a member is a device and the incarnation of its daemon."""

    device: DeviceId
    incarnation: Int64
    name: Name
    hub: bool = False  # it runs no learner: it sums, passes on and keeps the state (H1)


def hash64_of(digest: bytes) -> int:
    """Of a generation with this digest, what its frames carry."""
    return int.from_bytes(digest[:8], "little")


def without_hubs(members: Sequence[Member], ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    """Those of the ranks among these members of all times that could have a learner (H1)."""
    return tuple(rank for rank in ranks if not members[rank].hub)


class Generation(Wire):
    """G2: the numbered membership of a job.

    A device keeps its rank, the index in `members`, for the job's whole life: it comes back under it, with another
    incarnation. Newcomers are appended.

    It is entitled (`meshwire.membership.quorum`) if those that made it could not be outvoted by others elsewhere,
    else provisional: then it yields to an entitled one, and its electorate is that of its root.

    Attributes:
        root: number of the newest entitled generation of its history, itself included.
        counted: the electorate of what follows, in the incarnations of `members`: a part of it decides who goes on.
        gone: who was counted in the root, too, and is known to be gone for good; empty in an entitled one.
    """

    job: JobId
    number: Annotated[int, Field(ge=1)]
    proposer: DeviceId
    parent: Digest | None
    members: Annotated[tuple[Member, ...], Field(min_length=1, max_length=limits.MEMBERS_MAX)]  # of all times
    ranks: Annotated[tuple[Rank, ...], Field(min_length=1, max_length=limits.MEMBERS_MAX)]  # of now, in ring order
    learning: Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)]  # of them: whose learners compute
    root: Annotated[int, Field(ge=1)]
    counted: Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)]
    gone: Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)] = ()

    def hash64(self) -> int:
        """What every frame of this generation carries."""
        return hash64_of(self.digest())

    @classmethod
    def first(cls, job: str, proposer: str, members: tuple[Member, ...]) -> "Generation":
        """In which all members take part. Their learners prepare, and compute from the next one on (G9)."""
        ranks = tuple(range(len(members)))
        return cls(
            job=job,
            number=1,
            proposer=proposer,
            parent=None,
            members=members,
            ranks=ranks,
            learning=(),
            root=1,
            counted=without_hubs(members, ranks) or ranks,
        )

    @property
    def trainers(self) -> tuple[Rank, ...]:
        """Ranks of this generation that could have a learner: all of it but hubs (H1)."""
        return without_hubs(self.members, self.ranks)

    @property
    def provisional(self) -> bool:
        """It yields to an entitled one."""
        return self.root != self.number

    @property
    def live(self) -> Mapping[int, Member]:
        """The members of now by rank."""
        return {rank: self.members[rank] for rank in self.ranks}


@message("packages.ask")
class AskPackages(Wire):
    """Request: which of these top-level modules could a script there not import? Reply: `LackingPackages`."""

    modules: ModuleNames


@message("packages.lacking")
class LackingPackages(Wire):
    """Reply."""

    modules: ModuleNames


@message("job.offer")
class Offer(Wire):
    """Request: will you take part? The member starts to fetch the files and answers with `OfferReply`."""

    spec: JobSpec
    members: Annotated[tuple[Member, ...], Field(min_length=1, max_length=limits.MEMBERS_MAX)]


@message("job.offer.reply")
class OfferReply(Wire):
    """Willing unless `refusal` says why not."""

    refusal: Text | None


@message("job.files")
class FilesProgress(Wire):
    """Member to submitter: how far the files are. `error` ends the job; `ready` when all lie in place.

    `doing`: what is done when they are, for a person to read: packages are installed.
    """

    job: JobId
    done_bytes: Count
    total_bytes: Count
    ready: bool
    error: Text | None
    doing: Text | None = None


@message("fetch")
class Fetch(Wire):
    """Request: bytes of a blob (by hash) or of one rank's output or log file (by path)."""

    job: JobId
    what: Literal["blob", "output", "log"]
    sha256: Digest | None = None
    rank: Rank = 0
    path: RelativePath | None = None
    offset_bytes: Annotated[int, Field(ge=0, le=limits.DATA_BYTES_MAX)]
    max_bytes: Annotated[int, Field(gt=0, le=limits.FETCH_BYTES_MAX)]
    wait_s: Annotated[float, Field(ge=0, le=limits.FETCH_WAIT_S_MAX)] = 0.0  # logs: wait so long for new bytes
    times: bool = False  # logs: say when the bytes came, too


@message("fetched")
class Fetched(Wire):
    """Reply. `end` when nothing will follow the bytes of this reply.

    `times`, where they were asked for: from this byte of the log on, what follows was there at this Unix time, by the
    clock of the device that ran the rank; 0: nobody has noted it.
    """

    data: Annotated[bytes, Field(max_length=limits.FETCH_BYTES_MAX)]
    total_bytes: Count
    end: bool
    times: Annotated[tuple[tuple[Count, Seconds], ...], Field(max_length=limits.LOG_TIMES_MAX)] = ()


@message("job.prepare")
class Prepare(Wire):
    """Request, first phase: promise to enter this generation and nothing older (G2). Reply: `Promise`.

    `port`: as rank 0, which is asked first, has promised. Not told with the commit, for a member may hear sooner from
    another one that the job has begun.
    """

    generation: Generation
    port: Port | None = None


@message("job.promise")
class Promise(Wire):
    """Promised unless `refusal` says why not, e.g. which pair of members has no link (G7).

    `port`: on which the script of rank 0 can listen; of rank 0, in a job with --engine torchrun (P9).
    """

    refusal: Text | None
    port: Port | None = None


@message("job.commit")
class Commit(Wire):
    """Second phase: the generation is entered; learners start."""

    job: JobId
    generation: Annotated[int, Field(ge=0, lt=2**64)]


LogName = Annotated[str, Field(max_length=limits.LOG_NAME_CHARS_MAX)]
LogValues = Annotated[tuple[tuple[LogName, float], ...], Field(max_length=limits.LOG_VALUES_MAX)]  # from mt.log


Stage = Literal["starting", "script", "preparing", "loading", "first step", "process group"]
"""Where a learner is before its first step has ended: its process has not called yet; it has, and has not come to
`mt.prepare`; there it compares its model with the others'; it takes over a state; it computes; it exchanges what it
wants to by torch.distributed, so that its steps are not known here."""


class Metrics(Wire):
    """What one rank shows in live tables."""

    step: int = 0
    round: int = 0
    samples: int = 0
    values: LogValues = ()  # the script's own
    step_s: Seconds = 0.0  # median of recent steps
    exposed_s: Seconds = 0.0  # summed time the learner waited for exchanges
    exchange_s: Seconds = 0.0  # summed time from a round's first bucket to its completion
    sent_bytes: int = 0  # on the sockets to the other members since the job began, as counted by `counter`
    payload_bytes: int = 0  # of chunk frames sent
    counter: Literal["kernel", "link"] = "kernel"
    waiting_for: Text | None = None
    finished: bool = False  # this learner takes no further step
    ahead: int = 0  # rounds decided and not applied (R0: d - a)
    ages: Annotated[tuple[int, ...], Field(max_length=limits.STALENESS_MAX + 1)] = ()  # contributions by age
    age: int | None = None  # of the newest contribution
    nulls: int = 0  # rounds passed over
    void_rounds: int = 0
    steps_lost: int = 0  # cut off or too old (V2, R5)
    samples_per_s: Annotated[float, Field(ge=0, le=limits.SAMPLES_MAX)] = 0.0  # while computing; 0: not known yet
    batch: int = 0  # samples a step, as granted now (X4a); 0: not dealt
    throughput_samples_s: Annotated[float, Field(ge=0, le=limits.SAMPLES_MAX)] = 0.0  # waits included; 0: not known yet
    stage: Stage | None = None  # None: it has taken steps, or there is no learner
    epochs: Annotated[float, Field(ge=0, le=limits.SAMPLES_MAX)] = 0.0  # of samples in complete rounds; 0: not dealt
    rounds_planned: Count = 0  # by the script, with `mt.steps`; 0: it has not said
    # the oldest round that is not complete there, and how many steps of its program are over (`meshwire.rounds.stall`)
    receipts: tuple[Count, Count] = (0, 0)


Ranks = Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)]
RoundNumber = Annotated[int, Field(ge=1, lt=2**32)]


GivenUpTag = Annotated[
    str, StringConstraints(pattern=r"^[0-9a-f]{8}$")
]  # of `meshwire.checkpoints.manifest.CheckpointName`


class GivenUp(Wire):
    """G4: rounds of one side of a partition, which are in no history any more: that of another side is kept. Or of all,
    who have gone back to a saved state (J3): then those that have made them are those whose history is kept.

    The base after those of a partition is kept as a checkpoint; or `unsaved` says why a member could not.
    """

    first: RoundNumber
    last: RoundNumber
    samples: Annotated[int, Field(ge=0, lt=2**63)]  # in these rounds
    made_by: Ranks
    kept: Ranks  # whose history it is that is kept
    saved: tuple[RoundNumber, GivenUpTag] | None = None  # name of the checkpoint
    unsaved: Annotated[str, Field(max_length=limits.GIVEN_UP_REASON_CHARS_MAX)] | None = None


class RefusedRank(Wire):
    """G10: a member broke the protocol, and was left out for that."""

    rank: Rank
    reason: Reason
    violations: Annotated[int, Field(ge=1)]


GivenUps = Annotated[tuple[GivenUp, ...], Field(max_length=limits.GIVEN_UP_MAX)]
Part = Literal["computes", "forwards", "rests", "leaves", "hub"]


@message("job.rank")
class RankReport(Wire):
    """Member to all, on change and about once a second while running.

    `error`: why this rank's part has failed. `failure`: of the newest learner here that failed and was started again,
    or was not, and the rank forwards; the job goes on.
    """

    job: JobId
    rank: Rank
    state: Annotated[str, Field(max_length=32)]  # meshwire.jobs.lifecycle.JobState value of that daemon
    exit_code: int | None = None
    error: Text | None = None
    failure: Text | None = None
    restarts: Annotated[int, Field(ge=0)] = 0  # of the script here
    # forwards: no further learner is started; rests: none is for now, as its machine's owner has set; leaves: by a
    # person's wish; hub: it has no learner, and never will (H1)
    part: Part = "computes"
    metrics: Metrics = Metrics()
    given_up: GivenUps = ()  # as far as that daemon knows, whoever made them


@message("job.hash")
class BaseHash(Wire):
    """Member to all: digest of the base after `round` (O9)."""

    job: JobId
    rank: Rank
    round: int
    sha256: Digest


@message("job.barrier")
class BarrierReached(Wire):
    """Member to all: this rank's learner entered its `number`-th barrier (0: has ended its part)."""

    job: JobId
    rank: Rank
    number: int
    round: Annotated[int, Field(ge=0)] = 0  # the last one it has contributed to


@message("job.end")
class End(Wire):
    """Any member to all: the job ends with this outcome. `now`: learners are killed, not asked."""

    job: JobId
    outcome: Outcome
    reason: Text
    now: bool


@message("job.remains")
class Remains(Wire):
    """On a new link, to a device that was in the job: it ran here when this daemon ended, and nobody has told that it
    goes on (J5)."""

    job: JobId
    generation: Generation  # the newest that the sender was in


@message("job.find")
class Find(Wire):
    """Request: what do you know of jobs with this id prefix? Reply: `Found`."""

    prefix: Annotated[str, Field(max_length=32)]


class JobSummary(Wire):
    """One line of `meshtrain jobs`. `present` and `learning` are of the generation that was entered last."""

    job: JobId
    name: Name
    state: str
    members: tuple[Member, ...]
    submitter: DeviceId
    created_at_s: Seconds
    started_at_s: Seconds | None
    ended_at_s: Seconds | None
    exit_code: int | None
    error: Text | None
    script: str
    ranks: tuple[RankReport, ...] = ()
    rounds: int = 0
    hashes_compared: int = 0
    replicas_equal: bool | None = None  # None: no hash was compared yet
    generation: Annotated[int, Field(ge=0)] = 0  # 0: the job has not begun here, or this device returns to it
    present: Ranks = ()  # who takes part
    learning: Ranks = ()  # of them: whose learners compute
    returned: Ranks = ()  # of those present: who was lost before
    waiting_for: Text | None = None  # what a change of the generation waits for
    not_joining: tuple[tuple[Name, Text], ...] = ()  # linked devices that could join, and why they do not
    expired_at_s: Seconds | None = None  # when the device that answers has deleted its part of the results
    given_up: GivenUps = ()
    unlinkable: tuple[tuple[Rank, Text], ...] = ()  # members that answer and cannot be linked, and why
    partition_wait: PartitionWait | None = None  # as of `JobSpec`
    refused: Annotated[tuple[RefusedRank, ...], Field(max_length=limits.MEMBERS_MAX)] = ()  # as this device knows
    provisional: bool = False  # the generation is: its rounds are given up if others are entitled to go on
    prediction: Prediction | None = None  # as of `JobSpec`
    restarted: Text | None = None  # P6: why all scripts were begun again last, and where
    codec: str | None = None  # that the job has begun with; None: not known any more
    changes: SettingsChangesKept = ()  # that its rounds have gone over to since (C3)


@message("job.found")
class Found(Wire):
    """Reply to `Find`."""

    jobs: tuple[JobSummary, ...]


class OutputFile(Wire):
    """One file that a rank wrote into its output folder. Size and time of change tell whether a copy is still its."""

    rank: Rank
    path: RelativePath
    size_bytes: Count
    changed_ns: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # Unix time


class CheckpointSummary(Wire):
    """One line of `meshtrain checkpoints`."""

    round: Annotated[int, Field(ge=0)]
    rank: Rank
    created_at_s: Seconds | None  # Unix time; None: it cannot be read
    size_bytes: Annotated[int, Field(ge=0)] | None
    wrong: Text | None  # why it cannot be used
    given_up: GivenUpTag | None = None  # its history was: no job goes on from it unless a person names it
    root: Annotated[int, Field(ge=0)] = 0  # of the generation in which it was made: of two histories the newer one's


@message("job.checkpoints")
class ListCheckpoints(Wire):
    """Request: which checkpoints lie here, and are they whole? All of them are read. Reply: `Checkpoints`."""

    job: JobId


@message("job.checkpoints.reply")
class Checkpoints(Wire):
    """Reply to `ListCheckpoints`, the newest first."""

    checkpoints: tuple[CheckpointSummary, ...]
    unasked: tuple[Name, ...] = ()  # members that do not answer: what they have is not known


@message("job.checkpoint")
class AskCheckpoint(Wire):
    """Request: one that lies here, so that another job can begin from it. Reply: `CheckpointFiles`."""

    job: JobId
    round: Annotated[int, Field(ge=0, lt=2**32)]
    given_up: GivenUpTag | None = None


@message("job.checkpoint.reply")
class CheckpointFiles(Wire):
    """Reply to `AskCheckpoint`: the packed FileManifest of its folder. All of its files can be fetched as blobs."""

    files: BlobRef


@message("job.outputs")
class ListOutputs(Wire):
    """Request: which output files lie here? Reply: `Outputs`."""

    job: JobId


@message("job.outputs.reply")
class Outputs(Wire):
    """Reply to `ListOutputs`: as many as one message holds, without those of the ranks that are `unreached`."""

    files: tuple[OutputFile, ...]
    omitted: Annotated[int, Field(ge=0)] = 0
    unreached: Annotated[tuple[tuple[Rank, Reason], ...], Field(max_length=limits.MEMBERS_MAX)] = ()  # and why
