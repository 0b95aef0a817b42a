"""What a topology costs beside a ring, told before a job begins (C2).

In a gather each member sends its part m - 1 times, and by way of owners 2 (m - 1)/m times: m/2 times less. So more
devices make a gather worse and nothing else. It is told and not refused: a part's size follows from the values, and
from a rate that may change over the rounds. Only its upper limit is known, which is that of all values: no segment
takes more (sparse codecs then send them all). The root of a tree, too, sends more than a ring's members, and the member
in the middle of a star: that pays on one WiFi cell if it has a cable, so it is told how long that takes the air.
"""

from meshwire import limits
from meshwire.codecs.registry import FP16
from meshwire.collectives.load import load_of
from meshwire.collectives.strategy import TOPOLOGIES, Collective, collective_for


def sent_bits_max(collective: Collective, members: int) -> float:
    """Upper limit of what a member sends in a round, in bits for each value of the model."""
    codec = collective.codec
    bits = 8 * codec.segment_bytes_max(limits.SEGMENT_VALUES_MAX) / limits.SEGMENT_VALUES_MAX
    return bits * collective.topology.sent_vectors(members)


def cost_note(collective: Collective, members: int) -> str | None:
    """For the person who submits; None where no member sends more than on a ring."""
    name = str(collective.topology)
    times = collective.topology.sent_vectors(members) / TOPOLOGIES["ring"].sent_vectors(members) if members > 1 else 1.0
    if times <= 1.0:
        return None
    if not collective.reduction.gathered:
        note = f"--topology {name} with {members} devices: one sends {times:.3g} times what each does on a ring"
        return note + _air_note(collective, members)
    most, dense = sent_bits_max(collective, members), sent_bits_max(collective_for(FP16), members)
    note = (
        f"codec {collective.codec} with {members} devices: each sends {times:g} times what it would without gather, at "
        f"most {most:.3g} bits for each value of the model in a round"
    )
    if most <= dense:
        return note
    return f"{note}. That can be more than --codec fp16 takes, which leaves nothing out ({dense:.3g} bits)"


def _air_note(collective: Collective, members: int) -> str:
    """What a cable is good for, where some own all."""
    ranks = tuple(range(members))
    programs, ring = collective.topology.programs(ranks), TOPOLOGIES["ring"].programs(ranks)
    owners = [program.rank for program in programs if program.owned]
    with_cable, of_ring = load_of(programs, owners).air, load_of(ring, owners).air
    if len(owners) == members or with_cable >= of_ring:
        return ""
    cables = f"rank {owners[0]} has" if len(owners) == 1 else f"ranks {', '.join(map(str, owners))} have"
    return (
        f"; if {cables} a cable, the air of one WiFi cell is taken {with_cable / of_ring:.2g} times as long as by that"
    )
