"""Makes the executors of a job on this device: one for each history of rounds that it takes part in."""

from collections.abc import Mapping

import numpy as np

from meshtraind.executor.by_codec import ExecutorsByCodec
from meshtraind.executor.host import BindsOfRounds, ChunkTrace, ExchangeMembers, ExchangeSettings, RoundHost
from meshtraind.transport.round_link import RoundLink
from meshwire.messages.job import Generation


class ExecutorFactory:
    """Knows what executors stand on: the job, the members' links, the learner's memory.

    Args:
        links: the way to each other member, by rank; live.
        result: the slot where the learner reads the means, as bytes.
        trace: None: nobody notes chunks.
    """

    def __init__(
        self, settings: ExchangeSettings, links: Mapping[int, RoundLink], result: memoryview, trace: ChunkTrace | None
    ) -> None:
        self._settings = settings
        self._links = links
        self._result = result
        self._trace = trace

    def make(
        self, rank: int, generation: Generation, first: int | None, host: RoundHost, binds: BindsOfRounds
    ) -> ExecutorsByCodec:
        """In this generation, beginning with the round `first`; None: where this member comes in later."""
        members = ExchangeMembers(
            generation=generation.hash64(),
            ranks=generation.ranks,
            links=self._links,
            learning=generation.learning,
        )
        return ExecutorsByCodec(
            self._settings,
            rank,
            members,
            first=first,
            result=np.frombuffer(self._result, np.float32),
            host=host,
            binds=binds,
            trace=self._trace,
        )
