"""Rounds that are played over a network take what a pencil says: for rings, stars, cells, latencies and overlap."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire.collectives.strategy import TOPOLOGIES, topology_of
from meshwire.planning.network import NO_WORK, DaemonWork, Network, PeerLink
from meshwire.planning.network import cables as real_cables
from meshwire.planning.network import cell as real_cell
from meshwire.planning.playback import BucketLoad, Playback, Played

VECTOR_BYTES = 1e6
EACH = [f"{name}:1" if each.named_min else name for name, each in TOPOLOGIES.items()]
RATE = 1e6  # bytes a second: a vector a second


def light(network: Network) -> Network:
    """The same with daemons that take no time."""
    return Network(network.links, NO_WORK)


def cables(peers: int, rtt_s: float = 0.0, rate: float = RATE) -> Network:
    return light(real_cables(peers, rate, rtt_s))


def cell(peers: int, wired: int = 0) -> Network:
    return light(real_cell(peers, RATE, 0.0, wired))


def loads(shards: int, buckets: int = 1, vector_bytes: float = VECTOR_BYTES) -> list[BucketLoad]:
    nothing = (0.0,) * shards
    size = vector_bytes / buckets / shards
    return [BucketLoad((size,) * shards, (1,) * shards, nothing, nothing)] * buckets


def played(
    name: str,
    network: Network,
    buckets: int = 1,
    ready_s: list[float] | None = None,
    vector_bytes: float = VECTOR_BYTES,
) -> Played:
    members = len(network.links)
    shards = topology_of(name).programs(tuple(range(members)))[0].shard_count
    ready = [ready_s or [0.0] * buckets] * members
    return playback(name, members).play(loads(shards, buckets, vector_bytes), ready, network)


def playback(name: str, members: int) -> Playback:
    topology = topology_of(name)
    return Playback(topology.programs(tuple(range(members))), next(iter(topology.ways)))


@pytest.mark.parametrize("members", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["ring", "sharded"])
def test_a_ring_takes_its_bytes_by_the_rate(name: str, members: int) -> None:
    """2 (m - 1)/m of a vector for each, and no link ever waits."""
    round_ = played(name, cables(members), buckets=4)
    vectors = 2 * (members - 1) / members
    assert max(round_.finished_s) == pytest.approx(vectors * VECTOR_BYTES / RATE)
    assert round_.sent_bytes == pytest.approx((vectors * VECTOR_BYTES,) * members)
    assert round_.received_bytes == pytest.approx((vectors * VECTOR_BYTES,) * members)


@pytest.mark.parametrize("members", [2, 3, 5, 8])
@pytest.mark.parametrize("name", EACH)
def test_the_busiest_member_sends_what_the_topology_says(name: str, members: int) -> None:
    round_ = played(name, cables(members))
    assert max(round_.sent_bytes) == pytest.approx(topology_of(name).sent_vectors(members) * VECTOR_BYTES, rel=1e-9)


def test_in_a_cell_a_byte_pays_twice_and_with_a_wired_peer_once() -> None:
    members = 4
    ring = max(played("ring", cell(members), 4).finished_s)
    assert ring == pytest.approx(4 * (members - 1) * VECTOR_BYTES / RATE)
    one_wired = max(played("ring", cell(members, wired=1), 4).finished_s)
    assert one_wired == pytest.approx(4 * (members - 1) ** 2 / members * VECTOR_BYTES / RATE)


def test_a_star_at_a_wired_hub_is_one_and_a_half_times_as_fast_as_a_ring() -> None:
    """With four members, in one cell; with eight 1.75 times."""
    for members, gain in ((4, 1.5), (8, 1.75)):
        network = cell(members, wired=1)
        ring = max(played("ring", network, 8).finished_s)
        star = max(played("star", network, 8).finished_s)
        assert star == pytest.approx(2 * (members - 1) * VECTOR_BYTES / RATE)
        assert ring / star == pytest.approx(gain)


@pytest.mark.parametrize(("name", "hops"), [("ring", 14), ("sharded", 2), ("tree", 6), ("gather", 1)])
def test_a_tiny_vector_takes_its_hops(name: str, hops: int) -> None:
    """Of eight members. The butterfly sends a block's shards one after the other, which takes no time here."""
    rtt_s = 0.01
    assert max(played(name, cables(8, rtt_s), vector_bytes=1e-3).finished_s) == pytest.approx(
        hops * rtt_s / 2, rel=1e-3
    )
    butterfly = max(played("butterfly", cables(8, rtt_s), vector_bytes=1e-3).finished_s)
    assert butterfly == pytest.approx(6 * rtt_s / 2, rel=1e-3)


@pytest.mark.parametrize("backward_s", [0.2, 1.0, 3.0])
def test_a_backward_pass_hides_all_but_the_last_bucket_or_is_hidden(backward_s: float) -> None:
    """Ten buckets, evenly: the round ends a tenth of the shorter one after the longer one."""
    buckets, exchange_s = 10, 1.0
    ready_s = [backward_s * (at + 1) / buckets for at in range(buckets)]
    round_ = played("ring", cables(2), buckets, ready_s)
    longer, shorter = max(backward_s, exchange_s), min(backward_s, exchange_s)
    # Two hops of the last bucket follow the last gradient.
    assert max(round_.finished_s) == pytest.approx(longer + shorter / buckets, rel=1e-6)


@pytest.mark.parametrize("name", EACH)
def test_nobody_has_a_sum_before_the_last_part_was_there(name: str) -> None:
    """Whichever member is late."""
    members, late_s = 4, 5.0
    ranks = tuple(range(members))
    shards = topology_of(name).programs(ranks)[0].shard_count
    for late in ranks:
        ready = [[late_s if rank == late else 0.0] for rank in ranks]
        round_ = playback(name, members).play(loads(shards), ready, cables(members))
        assert min(round_.finished_s) >= late_s
        assert max(round_.finished_s) <= late_s + 4


def test_processors_take_their_turn() -> None:
    """Codecs that are slower than the link: two members encode and add half a vector twice each."""
    part = (0.5, 0.5)
    load = BucketLoad((1.0, 1.0), (1, 1), encode_s=part, add_s=part)
    round_ = playback("ring", 2).play([load], [[0.0], [0.0]], cables(2, rate=1e9))
    # encode the first half, add the other's to the second, encode the mean, decode the first half's
    assert max(round_.finished_s) == pytest.approx(4 * 0.5, rel=1e-6)
    assert round_.processor_s == pytest.approx((2.0, 2.0))


def test_a_hub_has_nothing_of_its_own_to_prepare() -> None:
    """H1: from the first part that comes it computes with others' parts alone."""
    network = cables(3)
    (load,) = loads(1)
    heavy = [replace(load, prepare_s=5.0)]
    with_hub = playback("star:2", 3).play(heavy, [[0.0], [0.0], None], network)
    assert with_hub.processor_s == (5.0, 5.0, 0.0)
    assert playback("star:2", 3).play(heavy, [[0.0]] * 3, network).processor_s[2] == 5.0


@pytest.mark.parametrize("part", [0.25, 4.0])
def test_at_another_rate_links_and_air_carry_another_part(part: float) -> None:
    for network in (cables(4), cell(4), cell(4, wired=1)):
        usual, other = played("ring", network), played("ring", network.at_rate(part))
        assert other.finished_s == pytest.approx([each / part for each in usual.finished_s])
        for link, faster in zip(network.links, network.at_rate(part).links, strict=True):
            assert faster.air_bytes_s == (None if link.air_bytes_s is None else RATE * part)


def test_a_slow_station_takes_the_air_for_longer_and_leaves_it_to_others_as_it_was() -> None:
    """A byte pays on each side of the access point what that side's rate says, whoever sends."""
    air = [RATE, RATE / 4, None]
    network = Network(tuple(PeerLink(math.inf, math.inf, 0.0, each) for each in air), NO_WORK)
    took_s = {(a, b): network.air_s(a, b, RATE) for a in range(3) for b in range(3) if a != b}
    assert took_s == {(0, 1): 5.0, (1, 0): 5.0, (0, 2): 1.0, (2, 0): 1.0, (1, 2): 4.0, (2, 1): 4.0}
    round_ = played("ring", network)
    assert round_.air_s == pytest.approx(sum(took_s[at, (at + 1) % 3] for at in range(3)) * 4 / 3)
    assert round_.finished_s[0] == pytest.approx(round_.air_s, rel=0.3), "it is what the round waits for"


def test_a_bucket_that_follows_from_another_waits_for_it() -> None:
    first, *_ = loads(2)
    second = BucketLoad(first.sizes_bytes, first.frames, first.encode_s, first.add_s, after=0)
    round_ = playback("ring", 2).play([first, second], [[0.0, 0.0]] * 2, cables(2))
    assert max(round_.finished_s) == pytest.approx(2.0)


def test_an_empty_shard_is_not_sent() -> None:
    """A bucket of fewer segments than members."""
    load = BucketLoad((5.0, 0.0, 0.0), (1, 0, 0), (0.0,) * 3, (0.0,) * 3)
    round_ = playback("ring", 3).play([load], [[0.0]] * 3, cables(3))
    assert sum(round_.sent_bytes) == 5.0 * 4


@settings(max_examples=25)
@given(
    name=st.sampled_from(EACH),
    members=st.integers(2, 5),
    slow=st.floats(1e4, 1e7),
    factor=st.floats(1.0, 100.0),
    rtt_s=st.floats(0.0, 0.1),
    shared=st.booleans(),
)
def test_a_faster_network_never_takes_longer(
    name: str, members: int, slow: float, factor: float, rtt_s: float, shared: bool
) -> None:
    """Nor does one with less latency; and none is faster than its bytes."""
    made = real_cell if shared else real_cables

    def round_s(rate: float, rtt_s: float) -> float:
        return max(played(name, light(made(members, rate, rtt_s)), 3).finished_s)

    taken_s = round_s(slow, rtt_s)
    assert round_s(slow * factor, rtt_s) <= taken_s * (1 + 1e-9)
    assert round_s(slow, rtt_s / 2) <= taken_s * (1 + 1e-9)
    vectors = topology_of(name).sent_vectors(members)
    assert taken_s >= vectors * VECTOR_BYTES / slow * (1 - 1e-9)


def test_a_slow_way_up_is_one_members_own() -> None:
    """Rates are each member's, and each direction's: the ring goes at the slowest one's."""
    links = [PeerLink(RATE, RATE, 0.0)] * 4
    links[2] = PeerLink(RATE / 10, RATE, 0.0)
    round_ = played("ring", Network(tuple(links), work=NO_WORK), 4)
    assert max(round_.finished_s) == pytest.approx(10 * 1.5, rel=0.2)
    assert round_.up_s[2] == pytest.approx(15.0)
    assert round_.down_s[2] == pytest.approx(1.5)
    assert math.isclose(round_.busiest_link_s, 15.0)


def test_a_slow_processor_is_one_members_own_and_holds_the_ring_up() -> None:
    """What its daemon computes takes so much longer, and the others wait for it: the ring goes through all."""
    work = DaemonWork(byte_s=1e-6, message_s=0.0, round_s=0.0)
    links = [PeerLink(RATE, RATE, 0.0)] * 4
    equal = played("ring", Network(tuple(links), work=work), 4)
    links[2] = PeerLink(RATE, RATE, 0.0, speed=1 / 3)
    slow = played("ring", Network(tuple(links), work=work), 4)
    assert slow.processor_s[2] == pytest.approx(3 * equal.processor_s[2])
    assert [slow.processor_s[at] for at in (0, 1, 3)] == [equal.processor_s[at] for at in (0, 1, 3)]
    assert max(slow.finished_s) > max(equal.finished_s)


def test_what_each_round_takes_is_the_slowest_daemons() -> None:
    """Rounds follow each other no faster than it can."""
    links = [PeerLink(RATE, RATE, 0.0), PeerLink(RATE, RATE, 0.0, speed=0.25)]
    assert Network(tuple(links), work=DaemonWork(round_s=1e-3)).round_s == pytest.approx(4e-3)
