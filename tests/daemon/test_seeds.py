"""Seeds of codecs that draw follow from what is encoded, and from nothing else."""

from meshtraind.seeds import member_seed, segment_seed


def test_every_segment_of_every_round_and_member_draws_its_own() -> None:
    """C1: workers draw independently, or their errors would not cancel in the mean."""
    seeds = {
        segment_seed(member_seed(job, rank, owner=owner), number, start)
        for job in (0, 1, 2**62)
        for rank in range(4)
        for owner in (False, True)
        for number in (1, 2, 1000)
        for start in range(0, 4 * 65_536, 65_536)
    }
    assert len(seeds) == 3 * 4 * 2 * 3 * 4
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert 0.4 < sum(seed >> 63 for seed in seeds) / len(seeds) < 0.6


def test_seeds_are_the_same_on_every_machine() -> None:
    """R8: two runs of a job with the same seed draw the same."""
    assert segment_seed(member_seed(7, 1, owner=False), 3, 65_536) == 


