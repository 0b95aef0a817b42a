"""What the members of a job agree on before round 1: the model, and the state that all start from (J1, G9)."""

from meshwire.jobs.lifecycle import JobId
from meshwire.message_base import Digest, Wire
from meshwire.messages.envelope import message
from meshwire.messages.job import BlobRef, Rank
from meshwire.model.manifest import ModelManifest


@message("job.model")
class Model(Wire):
    """Member to all: the model its learner has prepared, and the bucket plan it computed from it."""

    job: JobId
    rank: Rank
    manifest: ModelManifest
    plan: Digest


@message("job.state")
class StateIndex(Wire):
    """The giver, the lowest rank that computes, to all: digests of its start state by unit (J1), as in the manifest."""

    job: JobId
    units: tuple[Digest, ...]
    rank: Rank = 0


@message("job.state.want")
class StateWant(Wire):
    """Member to the giver: which units differ here (none: equal start)."""

    job: JobId
    rank: Rank
    units: tuple[int, ...]
    giver: Rank = 0


@message("job.state.offer")
class StateOffer(Wire):
    """The giver to the members that asked: the blobs that hold the wanted units."""

    job: JobId
    units: tuple[tuple[int, BlobRef], ...]
    rank: Rank = 0


@message("job.state.ready")
class StateReady(Wire):
    """Member to all: this rank starts from the giver's state; round 1 begins when all that compute have said so."""

    job: JobId
    rank: Rank
    giver: Rank = 0
