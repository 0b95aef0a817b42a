from meshtraind.contributions.seeds import member_seed, segment_seed


def test_members_draw_apart_unless_the_codec_shares_its_draws() -> None:
    """Rounding is to be independent, or errors add up; random places are to be the same, or nothing adds up."""
    apart = {member_seed(7, rank, owner=owner, shared=False) for rank in range(4) for owner in (False, True)}
    assert len(apart) == 8
    assert {member_seed(7, rank, owner=owner, shared=True) for rank in range(4) for owner in (False, True)} == {7}


def test_every_segment_of_every_round_has_a_seed_of_its_own() -> None:
    seeds = {segment_seed(7, number, start) for number in range(50) for start in range(0, 640, 64)}
    assert len(seeds) == 50 * 10
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert segment_seed(7, 1, 64) == segment_seed(7, 1, 64)


def test_seeds_are_the_same_on_every_machine() -> None:
    """R8: two runs of a job with the same seed draw the same."""
    assert segment_seed(member_seed(7, 1, owner=False, shared=False), 3, 65_536) == 14753601731816531898
