"""What a gather costs beside the other ways, told before a job begins (C2).

Each member sends its part m - 1 times, and by way of owners 2 (m - 1)/m times: m/2 times less. So more devices make a
gather worse and nothing else. It is told and not refused: a part's size follows from the values, and from a rate that
may change over the rounds. Only its upper limit is known, which is that of all values: no segment takes more (sparse
codecs then send them all).
"""

from meshwire import limits
from meshwire.codecs.registry import FP16, CodecSpec, Reduction


def sent_bits_max(spec: CodecSpec, members: int) -> float:
    """Upper limit of what a member sends in a round, in bits for each value of the model."""
    bits = 8 * spec.segment_bytes_max(limits.SEGMENT_VALUES_MAX) / limits.SEGMENT_VALUES_MAX
    times = members - 1 if spec.reduction is Reduction.GATHER else 2 * (members - 1) / members
    return bits * times


def gather_note(spec: CodecSpec, members: int) -> str | None:
    """For the person who submits; None for other codecs, and where a gather costs no more than the other ways."""
    if spec.reduction is not Reduction.GATHER or members < 3:
        return None
    most, dense = sent_bits_max(spec, members), sent_bits_max(FP16, members)
    note = (
        f"codec {spec} with {members} devices: each sends {members / 2:g} times what it would without gather, at most "
        f"{most:.3g} bits for each value of the model in a round"
    )
    if most <= dense:
        return note
    return f"{note}. That can be more than --codec fp16 takes, which leaves nothing out ({dense:.3g} bits)"
