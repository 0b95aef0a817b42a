"""A job between its first generation and its first round, on one daemon: generations change as learners prepare (G9).

There are no rounds yet that could be led from one generation into the next: what they will have to go through is noted,
and they are led through it when they are made. So it makes no difference when a member's learner has prepared.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshtraind.startup.agreement import Agreement
from meshtraind.startup.resume import begins_after
from meshtraind.storage.job_record import Job
from meshwire.messages.generation import Enter, Standing
from meshwire.messages.job import Generation

if TYPE_CHECKING:
    from meshtraind.rounds.driver import Rounds
    from meshtraind.rounds.generation_change import GenerationChange


class Founding:
    """Takes part in changes of generation while there are no rounds yet; its methods are those of `GenerationChange`.

    Attributes:
        first: the generation in which the job begins, and in which rounds are made.
    """

    def __init__(self, job: Job, agreement: Agreement) -> None:
        assert job.generation is not None
        self.first = job.generation
        self._agreement = agreement
        self._complete, self._chain = begins_after(job.spec.resume)
        self._counted, self._learning = self.first.number, self.first.learning
        self._passed: list[Callable[[GenerationChange], None]] = []
        self._crossing: GenerationChange | None = None

    def made(self, rounds: "Rounds") -> None:
        """Leads the rounds, which there are now, through all that was passed without them; until round 1 or until
        another learner begins."""
        self._crossing = rounds.crossing
        for step in self._passed:
            step(rounds.crossing)

    def dropped(self) -> None:
        """Leads nothing any more: the rounds are gone."""
        self._crossing = None

    def fence(self) -> None:
        """Takes part in no more rounds of the old generation (G2, fence)."""
        self._agreement.fence()
        self._lead(lambda crossing: crossing.fence())

    def standing(self) -> Standing:
        """What this member brings into the next generation (G4, cut): nothing but the beginning, unless others are in
        round 1."""
        if self._crossing is not None:
            held = self._crossing.standing()
        else:
            held = Standing(
                generation=self.first.hash64(),
                number=self.first.number,
                complete=self._complete,
                chains=(self._chain,),
                samples=0,
                linked=(),
                counted=self._counted,
                learning=self._learning,
            )
        return held.model_copy(update={"founded": self._agreement.founded})

    def enter(self, generation: Generation, enter: Enter) -> None:
        """Enters a generation. If one of its members has seen that all are ready, that stands: it may have begun."""
        if enter.founded:
            self._agreement.found()
        self._count(enter.counted, enter.learning)
        self._lead(lambda crossing: crossing.enter(generation, enter))

    def resume(self, generation: Generation) -> None:
        """Goes on: all members have entered."""
        self._count(generation.number, generation.learning)
        self._lead(lambda crossing: crossing.resume(generation))

    def _count(self, number: int, learning: tuple[int, ...]) -> None:
        if number > self._counted:
            self._counted, self._learning = number, learning

    def _lead(self, step: "Callable[[GenerationChange], None]") -> None:
        self._passed.append(step)
        if self._crossing is not None:
            step(self._crossing)
