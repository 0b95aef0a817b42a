"""Whose weights a learner mixes with its own within a period, turn by turn (R9, `--sync local:H,gossip=G`).

Each turn has a mixing matrix W that is symmetric and whose rows add up to 1, so it keeps the mean of all weights:

    pairs   In turn n of m learners the one at place p is paired with p xor 2^k, where k = n mod ceil(log2 m): a
            one-peer exponential graph with symmetric pairs (Assran et al. 2019, arXiv 1811.10792, section 3; Ying et
            al. 2021, arXiv 2110.13363). Both have 1/2. Who has no partner mixes nothing. Where m is a power of two, any
            log2 m turns that follow each other give everybody the exact mean.
    ring    Everybody has 1/3 of its own weights and of each neighbour's (Lian et al. 2017, arXiv 1705.09056). A turn
            multiplies what is apart along the eigenvectors of a ring by (1 + 2 cos(2 pi j / m)) / 3. Two are a pair.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from meshwire.codecs.registry import FP32, CodecSpec

Over = Literal["pairs", "ring"]

NEIGHBOURS_MAX = {"pairs": 1, "ring": 2}
"""How many neighbours a learner has in a turn, at most."""


class Turn(NamedTuple):
    """One mixing within a period.

    Attributes:
        round: that the period ends in.
        number: within the period, from 1.
    """

    round: int
    number: int


class Partner(NamedTuple):
    """Somebody whose weights are mixed in.

    Attributes:
        rank: whose they are.
        weight: W_ij, of them in the mixture. What is left of 1 is of the own ones.
    """

    rank: int
    weight: float


def neighbours(over: Over, turn: Turn, rank: int, learning: Sequence[int]) -> tuple[Partner, ...]:
    """Whose weights the learner of this rank mixes with its own in a turn; none where it has no partner, or does not
    compute.

    Periods follow each other in the turns' numbers, so that short ones get to every distance, too.

    Args:
        learning: ranks whose learners compute, in order; equal on all members of a generation.
    """
    if rank not in learning or len(learning) < 2:
        return ()
    place, members = learning.index(rank), len(learning)
    if over == "pairs" or members == 2:
        levels = (members - 1).bit_length()
        other = place ^ (1 << (turn.round + turn.number) % levels)
        return (Partner(learning[other], 1 / 2),) if other < members else ()
    return tuple(Partner(learning[(place + step) % members], 1 / 3) for step in (-1, 1))


def turns_in(local_steps: int, every: int) -> int:
    """How many turns a period has: one behind each `every` local steps, but not where its round follows."""
    return (local_steps - 1) // every if every else 0


def value_bytes(codec: CodecSpec) -> int:
    """How many bytes a value takes on its way to a neighbour: with fp32 it travels as it is, else as bf16."""
    return 4 if codec == FP32 else 2
