"""A job's first generation as most tests want it: in which learners compute already."""

from meshwire.messages.job import Generation, Member


def computing(job: str, proposer: str, members: tuple[Member, ...]) -> Generation:
    """As `Generation.first`, with the learners of all."""
    first = Generation.first(job, proposer, members)
    return first.model_copy(update={"learning": first.ranks})
