"""W2: the control messages of a round, from each member to all others."""

from typing import Annotated

from pydantic import Field

from meshwire import limits
from meshwire.message_base import Int64, Wire
from meshwire.messages.envelope import message
from meshwire.messages.job import Text

Round = Annotated[int, Field(ge=1, lt=2**32)]
Bytes = Annotated[bytes, Field(max_length=limits.CONTROL_BYTES_MAX // 2)]


BatchSize = Annotated[int, Field(ge=1, lt=2**31)]


class SampleBlock(Wire):
    """X1: positions [first, end) of the permutation of one epoch, in samples or, if these are dealt whole, batches."""

    epoch: int
    first: int
    end: int


@message("bind")
class Bind(Wire):
    """R2: this member's step is bound to `round` with this weight."""

    round: Round
    step: int
    base: Annotated[int, Field(ge=0)]  # rounds applied when the step began (R0)
    weight: Annotated[float, Field(ge=limits.WEIGHT_MIN, le=limits.WEIGHT_MAX)]  # samples
    samples: tuple[SampleBlock, ...] = ()
    hyperparameters: Bytes = b""  # packed param-group values (O3)
    claim: Annotated[int, Field(ge=0, le=limits.CLAIM_BATCHES_MAX)] = 0  # batches it is to hold after this round (X2)
    sizes: Annotated[tuple[BatchSize, ...], Field(max_length=limits.MEMBERS_MAX)] = ()  # X4a; empty: as before


@message("null")
class Null(Wire):
    """R4, R5: this member adds nothing to `round` and forwards."""

    round: Round


@message("call")
class Call(Wire):
    """R3: whoever is late may null `round`."""

    round: Round


class Poison(Wire):
    """V1: why a bucket was replaced."""

    bucket: int
    parameter: Text
    reason: Text
    overflow: bool = False  # of a GradScaler: the round is skipped, never an error (O6)


@message("seal")
class Seal(Wire):
    """End of the backward pass: nothing more follows for this round."""

    round: Round
    used: Bytes  # bitmap over the manifest's tensors that had a gradient (O5)
    integers: tuple[Int64, ...] = ()  # values of the integer buffers, whose maximum is taken (O5)
    poison: Poison | None = None
