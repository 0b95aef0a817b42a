"""Seeds for codecs that draw: the same wherever a round is run again, others everywhere else."""

_MASK = (1 << 64) - 1


def member_seed(job: int, rank: int, *, owner: bool, shared: bool) -> int:
    """The seed of one member as worker, or as owner.

    Args:
        job: the job's seed.
        shared: all members draw alike.
    """
    return job if shared else segment_seed(job, rank, int(owner))


def segment_seed(seed: int, number: int, start: int) -> int:
    """The seed of one segment in round `number`: 64 bits.

    Args:
        start: its first value's place in the vector.
    """
    state = seed & _MASK
    for value in (number, start):
        state = _mixed((state ^ value) + 0x9E3779B97F4A7C15 & _MASK)
    return state


def _mixed(state: int) -> int:
    """The finalizer of SplitMix64 (Steele et al. 2014): every bit of the input moves every bit of the output."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return state ^ state >> 31
