"""Messages of torch.distributed's process groups: between a learner and its daemon, and among daemons for the store.

What learners send each other travels in relayed frames (`meshwire.frames`), of which daemons know whom they are for.
"""

from typing import Annotated, Literal

from pydantic import Field

from meshwire import limits
from meshwire.jobs.lifecycle import JobId
from meshwire.message_base import Wire
from meshwire.messages.envelope import message
from meshwire.messages.job import JobSpec, Member, Rank, Reason, Text

EITHER_OR = (  # P5
    "mt.prepare and torch.distributed in one script: mt.prepare exchanges the gradients itself, so take "
    "init_process_group and DistributedDataParallel out; or leave mt.prepare out"
)
GROUP_CODECS = ("fp32", "fp16", "bf16", "powersgd")
GROUP_SETTINGS = (  # P5
    "its collectives are exact, and all ranks are in step; of --codec it takes fp16, bf16 and powersgd, for the "
    "gradients of DistributedDataParallel. Other codecs, --sync, --masks, --scale-lr and --topology are for scripts "
    "with mt.prepare"
)

NOT_PREPARED = (  # P6
    "mt.prepare, and --restart is for scripts without it: a job with mt.prepare goes on by itself, from the memory of "
    "those that are left. Submit it without --restart"
)

UNENCRYPTED = (  # P9
    "--engine torchrun: gradients travel unencrypted, by gloo, on ports of its own: for a network that you trust. "
    "The first script that fails, and a device that is lost, end the job"
)

Instance = Annotated[int, Field(ge=1, lt=2**32)]
StoreKey = Annotated[str, Field(max_length=limits.STORE_KEY_CHARS_MAX)]
StoreValue = Annotated[bytes, Field(max_length=limits.STORE_VALUE_BYTES_MAX)]


class GroupWorld(Wire):
    """P6: whose scripts run together in a job that restarts them: torch's world.

    Attributes:
        number: of the generation in which it began.
        restarts: how many failures came before it.
        ranks: of the job, by rank of the world. Who was in the world before comes first.
        why: the one before has ended, for people; empty: of the first.
    """

    number: Annotated[int, Field(ge=1)]
    restarts: Annotated[int, Field(ge=0)]
    ranks: Annotated[tuple[Rank, ...], Field(max_length=limits.MEMBERS_MAX)]
    why: Reason = ""


class WorldHere(Wire):
    """P6: the newest world that a member was in, and what has become of its part.

    Attributes:
        broken: why it cannot go on, if it cannot.
        done: the script here has ended well.
    """

    world: GroupWorld
    broken: Reason | None = None
    done: bool = False


@message("group.welcome")
class GroupWelcome(Wire):
    """Reply to the `Attach` of a learner that makes a process group: its rank in the world, and who is in that."""

    spec: JobSpec
    rank: Rank
    members: tuple[Member, ...]


@message("group.begin")
class GroupBegin(Wire):
    """Notice to the daemon: all of this connection belongs to this instance of the world, which all ranks have agreed
    on; frames of others are of processes that have ended.

    With `survives_losses` the script goes on when it loses others, in instances that its ranks make by themselves; the
    number is then this process's own, by which its end is told.
    """

    instance: Instance
    survives_losses: bool = False


@message("group.end")
class GroupEnd(Wire):
    """Notice to the daemon: the process leaves the group in order. One that is lost does not say so."""


@message("group.alive")
class SignOfLife(Wire):
    """Notice to the learner, several times within a patience, which sends it back at once, whatever its script does."""


@message("group.lost")
class MemberLost(Wire):
    """Notice to the learner: what this rank sent or was sent may be lost, and nothing more follows."""

    rank: Rank
    reason: Text


@message("store.ask")
class StoreAsk(Wire):
    """Request to the daemon that keeps the job's store, or to the learner's own, which asks that one.

    `get` and `wait` are answered when all keys are there; `add` counts in decimal text, as torch's stores do.
    """

    job: JobId
    op: Literal["set", "get", "wait", "add", "append", "compare_set", "check", "delete", "count"]
    keys: Annotated[tuple[StoreKey, ...], Field(max_length=limits.STORE_KEYS_MAX)] = ()
    value: StoreValue = b""
    expected: StoreValue = b""
    amount: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    timeout_s: Annotated[float, Field(ge=0, le=limits.STORE_WAIT_S_MAX)] = 0.0
    world: Annotated[int, Field(ge=0)] = 0  # between daemons: number of the `GroupWorld`, 0 in a job that has but one


@message("store.answer")
class StoreAnswer(Wire):
    """Reply to `StoreAsk`."""

    values: tuple[StoreValue, ...] = ()
    number: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0  # a sum, or a count of keys; 0 or 1 of a check
