"""What a round's work computes on this member: the arithmetic of each form, the result slot, and who is told."""

from meshtraind.codecs.base import Values
from meshtraind.contributions.results import Final, RoundResults
from meshtraind.contributions.segments import RoundForms
from meshtraind.executor.host import RoundHost
from meshtraind.executor.projections import Projections
from meshtraind.executor.reducers import Reducer
from meshtraind.executor.result_slot import ResultSlot
from meshtraind.executor.round_buffers import RoundMemory
from meshtraind.executor.second_phase import SecondPhases
from meshwire.collectives.exchange import Work


class Calculation:
    """Computes what the exchanges of a job's rounds ask for, through all generations of the job.

    Args:
        result: slot for the means, `plan.total_values` long.
        reducer: sums.
        host: hears what becomes of rounds.
        second_phases: hears of precursors in its place.

    Attributes:
        slot: where the learner finds a round's means.
    """

    def __init__(
        self,
        forms: RoundForms,
        memory: RoundMemory,
        result: Values,
        projections: Projections,
        reducer: Reducer,
        host: RoundHost,
        second_phases: SecondPhases,
    ) -> None:
        self._forms = forms
        self._memory = memory
        self._host = host
        self._second_phases = second_phases
        self._arithmetic = {form: reducer.arithmetic(form) for form in forms}
        self.slot = ResultSlot(result, forms, projections, self._decode, host)

    def compute(self, round_: RoundResults, bucket: int, work: Work) -> Work:
        """Does the arithmetic of a piece of work. Returns what is to be sent of it. May raise CodecError."""
        slot = self.slot if self.slot.round == round_.number else None
        own = self._memory.own.get(round_.number)
        return self._arithmetic[round_.form].compute(round_.number, bucket, work, round_.area, own, slot)

    def report(self, round_: RoundResults, bucket: int, work: Work) -> None:
        """Work is done: its final segments are in the area, and in the result slot if that is the round's."""
        if not work.deliver:
            return
        own = self._memory.own.get(round_.number)
        round_.finals.append(self._arithmetic[round_.form].final(bucket, work, round_.area, own))
        lies_in_slot = self.slot.round == round_.number and self.slot.took(round_.finals[-1])
        exchange = round_.exchanges[bucket]
        delivered, follower = exchange.delivered(work), round_.form.layout.followers.get(bucket)
        if delivered and follower is not None:
            self._second_phases.summed(round_, follower)
        elif delivered:
            self._host.bucket_complete(
                round_.number, bucket, exchange.poisoned, exchange.contributors, exchange.weight, exchange.squared_norm
            )
        kept = round_.number in self._memory.rounds  # not forgotten, nor everything closed, by that
        if lies_in_slot and kept:
            self._host.result_decoded(round_.number)

    def served(self, round_: RoundResults) -> None:
        """All of a round has come from a member that holds it. Raises CodecError."""
        own = self._memory.own.get(round_.number)
        for final in round_.finals:
            self._arithmetic[round_.form].served(final, own)

    def _decode(self, final: Final, slot: ResultSlot) -> None:
        self._arithmetic[self._forms.of(slot.round)].decode(final, slot)
