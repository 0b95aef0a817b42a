"""Messages of a running job's membership: from the proposal of a generation until all have entered it (G1 to G7).

All are notices between daemons but `Invite`, `CatchUp`, `AskModel`, `AskState`, `KeepState` and `FetchRound`. The first
generation of a job is made by its submitter (`meshwire.messages.job`): prepare, promise, commit.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from meshwire import limits
from meshwire.jobs.lifecycle import JobId
from meshwire.message_base import DeviceId, Digest, Int64, Wire
from meshwire.messages.envelope import message
from meshwire.messages.group import GroupWorld, WorldHere
from meshwire.messages.job import BlobRef, Generation, JobSpec, Member, Rank, Reason, Text
from meshwire.messages.learner import SampleSpace
from meshwire.messages.rounds import BatchSize, Bind, Bytes, Poison, Round, SampleBlock
from meshwire.model.manifest import ModelManifest
from meshwire.sync_modes.settings_changes import SettingsChanges, SettingsWish

GenerationHash = Annotated[int, Field(ge=0, lt=2**64)]
Chain = Annotated[bytes, Field(min_length=16, max_length=16)]
RoundCount = Annotated[int, Field(ge=0, lt=2**32)]


class Electorate(Wire):
    """As much of a generation as the judgement needs whether a part of its members is entitled to go on.

    Of a member that was never in the root of a provisional generation it is that of the provisional one.
    """

    generation: GenerationHash
    number: Annotated[int, Field(ge=1)]  # of the root
    entered: bool  # by the member that tells of it; else it has promised it, and somebody may have entered it
    counted: Annotated[tuple[tuple[Rank, Int64], ...], Field(max_length=limits.MEMBERS_MAX)]  # with their incarnations
    gone: Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)]  # who was counted and is known to be gone
    listed: Annotated[tuple[tuple[Rank, Int64], ...], Field(max_length=limits.MEMBERS_MAX)]  # all that had to promise


class Holding(Wire):
    """J3: what a member has, beside its rounds, from which learners can go on where none computes any more."""

    base: bool = False  # its learner holds the base, or the next one will find it in memory
    loads_after: RoundCount | None = None  # its learner can load a state of after this round or a later one; None: none
    # runs there, or will be started
    state: RoundCount | None = None  # the newest round of after which it has a state to give
    saved: tuple[RoundCount, Chain] | None = None  # of its newest checkpoint: round, and h of that round
    begins: bool = False  # `saved` is the job's beginning, which its learner could make
    # G9: whether its learner has the state that all start from; None of a member that has been in a generation in which
    # learners compute
    prepared: bool | None = None
    failed: bool = False  # the last process of its script has ended by an error of its own


class Standing(Wire):
    """G4: what a member has, when it promises."""

    generation: GenerationHash | None  # the newest that it has entered and not left; None: it brings no history
    number: Annotated[int, Field(ge=0)]  # of that generation
    complete: RoundCount  # c: all rounds up to it are held whole
    chains: Annotated[tuple[Chain, ...], Field(max_length=limits.CHAINS_MAX)]  # h_k of the newest rounds, the last: h_c
    samples: Annotated[int, Field(ge=0)]  # in the rounds up to c
    linked: tuple[Rank, ...]  # live links, by rank of the proposed generation
    counted: Annotated[int, Field(ge=0)] = 0  # number of the newest generation that the deal of samples follows (X3)
    learning: tuple[Rank, ...] = ()  # of that one
    history: Electorate | None = None  # of `generation`
    # Of the newest root that this incarnation was in, whether it kept that history or not, and of the entitled ones
    # that it has promised since and that may have been entered by others.
    votes: Annotated[tuple[Electorate, ...], Field(max_length=limits.ATTEMPTS_MAX + 1)] = ()
    forgot: Annotated[int, Field(ge=0)] = 0  # number of the newest of those that are too many to be told
    holding: Holding = Holding()
    world: WorldHere | None = None  # of a job that restarts its scripts (P6)
    changes: SettingsChanges = ()  # of settings, that this history has gone through (C3)
    ahead: Annotated[int, Field(ge=0, le=limits.STALENESS_MAX + 1)] = 0  # rounds past `complete` that it may have bound
    asks: SettingsWish | None = None  # what its owner has asked for, in place of those


@message("generation.propose")
class Propose(Wire):
    """First phase: promise to enter this generation and nothing older (G2)."""

    generation: Generation


@message("generation.promised")
class Promised(Wire):
    """To the proposer: from now on nothing older is sent, completed or applied (G2)."""

    job: JobId
    generation: GenerationHash
    standing: Standing


@message("generation.refused")
class Refused(Wire):
    """To the proposer: a generation of this number was promised to somebody else, or is entered already."""

    job: JobId
    generation: GenerationHash
    number: int
    reason: Text


@message("generation.enter")
class Enter(Wire):
    """Second phase: all have promised. Whoever lacks rounds up to `cut` gets them from `source` first."""

    job: JobId
    generation: GenerationHash
    cut: RoundCount
    chain: Chain  # of the cut
    source: Rank
    complete: Annotated[tuple[tuple[Rank, RoundCount], ...], Field(max_length=limits.MEMBERS_MAX)]  # as promised
    reload: Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)]  # these bring no history that is kept
    counted: Annotated[int, Field(ge=0)] = 0  # the newest one that the deal of any other of them follows
    learning: Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)] = ()
    # G9, where the job is at its beginning and no learner computes: those that are to begin together; whose state they
    # start from, the giver's; and whether that is given already, so that who has loaded it keeps it
    awaited: Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)] = ()
    giver: Rank = 0
    given: bool = False
    # J3, where no learner computes: the rounds go on; all go back to the state that the source has saved, which is that
    # of the cut; there is nothing here to go on from, but somebody else may have it; nobody has, and all begin again
    # from what lies on their disks (J5); or scripts have failed, and the job with them
    way: Literal["on", "back", "wait", "lost", "failed"] = "on"
    world: GroupWorld | None = None  # of a job that restarts its scripts (P6): that of now, or the next one
    changes: SettingsChanges = ()  # of the history that is kept, and what begins with this generation (C3)


@message("generation.entered")
class Entered(Wire):
    """Member to all: it holds all rounds up to the cut, and takes what belongs to this generation."""

    job: JobId
    generation: GenerationHash
    told: Digest  # of the `Enter` that it goes by: its proposer has told all the same (G10)


@message("generation.where")
class Where(Wire):
    """On a new link, and to whom an outdated generation shows: the generation that this member is in."""

    job: JobId
    generation: Generation
    ancestors: Annotated[tuple[GenerationHash, ...], Field(max_length=limits.ANCESTORS_MAX)]  # newest first
    samples: Annotated[int, Field(ge=0)]
    based: bool = True  # the base of this history is there, as far as the sender knows: nobody leaves another for none


@message("generation.ask")
class AskIn(Wire):
    """To a member: take this device in. It brings no history."""

    job: JobId
    member: Member
    linked: Annotated[tuple[DeviceId, ...], Field(max_length=limits.PEERS_MAX)]  # who cannot reach all is not taken in


@message("generation.wish")
class Wish(Wire):
    """Member to all: its learner is ready to compute (`learn`) or computes no more (`rest`), or it leaves the job; or
    what it told of its `Holding` is so no more, where nobody computes (`anew`)."""

    job: JobId
    kind: Literal["learn", "rest", "leave", "anew"]
    returns: bool = False  # it leaves this generation alone, and will ask in: it is not gone


@message("generation.accuse")
class Accuse(Wire):
    """Member to all: this device broke the protocol, and enters no generation with the sender (G10)."""

    job: JobId
    device: DeviceId
    reason: Reason
    violations: Annotated[int, Field(ge=1, le=limits.VIOLATIONS_MAX)]  # that the sender knows of, this one included


class DealState(Wire):
    """X1: what the ledger of samples holds between two rounds."""

    epoch: Annotated[int, Field(ge=0)]  # the pointer: the next sample that nobody was granted yet
    position: Annotated[int, Field(ge=0)]
    returned: tuple[SampleBlock, ...]  # granted to members that compute no more; they are granted again first
    held: tuple[tuple[Rank, tuple[SampleBlock, ...]], ...]  # granted and in no round
    sizes: tuple[tuple[Rank, BatchSize], ...]
    claim: Annotated[int, Field(ge=0, le=limits.CLAIM_BATCHES_MAX)] = 0  # the largest of the newest round with any


class PathStep(Wire):
    """Of a generation: up to which round the history of its members was common then, and the samples up to it."""

    generation: GenerationHash
    cut: RoundCount
    samples: Annotated[int, Field(ge=0)]


class ServedRound(Wire):
    """A complete round as its members hold it (`meshwire.rounds.effects.RoundComplete`), and where its bytes end."""

    round: Round
    void: bool
    reason: Text
    binds: tuple[tuple[Rank, Bind], ...]
    poisons: tuple[tuple[Rank, Poison], ...]
    used: Bytes
    integers: tuple[Int64, ...]
    squared_norm: float
    chain: Chain
    poisoned: Bytes  # bitmap over the buckets: these have no result
    size_bytes: Annotated[int, Field(ge=0)]  # encoded


@message("generation.invite")
class Invite(Wire):
    """Request to a device that was never in the job: will you join? `OfferReply` follows when it has the job's files,
    or will not; then it asks in."""

    spec: JobSpec
    generation: Generation  # that the asker is in


@message("generation.catchup")
class CatchUp(Wire):
    """Request to the source of a generation: the rounds after `complete` up to its cut. Reply: `CaughtUp`.

    Of a member that brings no history `complete` is None: then the reply holds the deal of the cut, and no rounds.
    """

    job: JobId
    generation: GenerationHash
    complete: RoundCount | None
    cut: RoundCount | None = None  # of the generation; None: the source's own


@message("generation.caughtup")
class CaughtUp(Wire):
    """Reply. The rounds' bytes are asked for with `FetchRound`."""

    rounds: tuple[ServedRound, ...]  # the next ones, as many as a message holds
    samples: SampleSpace | None = None  # what the prepared loaders read; None: there is none
    deal: DealState | None = None  # of the cut
    seen: Annotated[int, Field(ge=0)] = 0  # samples in the rounds up to the cut
    barrier: Annotated[int, Field(ge=0)] = 0  # the newest that all have passed
    # What the history of the cut has gone through: who takes it over can tell what is lost where it is given up.
    path: Annotated[tuple[PathStep, ...], Field(max_length=limits.ANCESTORS_MAX)] = ()


@message("model.ask")
class AskModel(Wire):
    """Request of a member that has not seen the job's model, or compares its own. Reply: `Model`."""

    job: JobId


@message("job.model")
class Model(Wire):
    """Reply: the model that a learner there has prepared, and the digest of the bucket plan that follows from it."""

    job: JobId
    rank: Rank
    manifest: ModelManifest
    plan: Digest


@message("state.ask")
class AskState(Wire):
    """Request of a loading member to one that computes, or to the giver (G9): its base after `after_round` or a later
    one (J1). Reply: `SavedState`."""

    job: JobId
    after_round: RoundCount
    digests: Annotated[tuple[Digest, ...], Field(max_length=limits.TENSORS_MAX + 2)] = ()  # of the asker's, by unit


@message("state.saved")
class SavedState(Wire):
    """Reply: the blobs of all units but those that the asker has, in their order."""

    round: RoundCount
    chain: Chain  # h_k of that round, by which the asker knows whether it is on the history that is kept (G4)
    units: tuple[BlobRef, ...]
    left_out: tuple[Annotated[int, Field(ge=0)], ...] = ()  # these are equal to the asker's

    @property
    def count(self) -> int:
        """Of all units of the state."""
        return len(self.units) + len(self.left_out)

    @property
    def by_number(self) -> Mapping[int, BlobRef]:
        """The blobs by unit."""
        return dict(zip((unit for unit in range(self.count) if unit not in {*self.left_out}), self.units, strict=False))


@message("state.keep")
class KeepState(Wire):
    """Request of the last laptop to a hub, before it goes: save the state of now (H3). Reply: `KeptByHub`."""

    job: JobId


@message("state.kept")
class KeptByHub(Wire):
    """Reply: after which round the newest state is that lies on the hub's disk."""

    round: RoundCount


@message("round.fetch")
class FetchRound(Wire):
    """Request: encoded bytes of a complete round. Reply: `meshwire.messages.job.Fetched`."""

    job: JobId
    round: Round
    offset_bytes: Annotated[int, Field(ge=0, le=limits.DATA_BYTES_MAX)]
    max_bytes: Annotated[int, Field(gt=0, le=limits.FETCH_BYTES_MAX)]
