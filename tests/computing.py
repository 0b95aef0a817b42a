"""A job's first generation as most tests want it: in which learners compute already."""

from typing import TYPE_CHECKING

from meshwire.messages.generation import Enter
from meshwire.messages.job import Generation, Member

if TYPE_CHECKING:
    from meshtraind.rounds.driver import Rounds


def computing(job: str, proposer: str, members: tuple[Member, ...]) -> Generation:
    """As `Generation.first`, with the learners of all."""
    first = Generation.first(job, proposer, members)
    return first.model_copy(update={"learning": first.ranks})


def begin(rounds: "Rounds", generation: Generation) -> None:
    """Rounds that were made lead into this generation, in which their learner computes."""
    cut = rounds.complete
    chain = rounds.chain_after(cut)
    assert chain is not None
    rounds.crossing.enter(
        generation,
        Enter(
            job=generation.job,
            generation=generation.hash64(),
            cut=cut,
            chain=chain,
            source=generation.ranks[0],
            complete=tuple((rank, cut) for rank in generation.ranks),
            reload=(),
        ),
    )
    rounds.crossing.resume(generation)
    rounds.learner.loads()
    rounds.learner.loaded(cut)
    rounds.crossing.take_in()
