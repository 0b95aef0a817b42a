"""One job of the table of codecs: which it is, how it ended, and the file in which it is remembered.

A result file holds one JSON object a line, so that a run that is interrupted is gone on with where it stopped.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalDaemon, LocalMeshError
from meshwire.messages.job import JobSummary
from meshwire.messages.local import Watch, Watched
from meshwire.sync_modes.mode import sync_settings
from tests.bench import codecjob
from tests.bench.codeckills import lose_and_return
from tests.bench.kept_lines import KeptLines
from tests.daemon import realjobs as jobs

JOB_TIMEOUT_S = 1200.0  # many of them may run on a machine that does other things too
HASH_EVERY = 10  # rounds between comparisons of the replicas


@dataclass(frozen=True)
class Run:
    """Which job it is.

    Attributes:
        way: CODEC[@SYNC] as typed; bsp without a SYNC, and without a CODEC that of the mode.
        steps: optimizer steps of each learner.
        mbit: what each member can send, and receive; None: loopback without a limit.
        kill: the last member is killed in the middle, and comes back.
        cosine: the learning rate rises in the first twentieth of the steps, and falls to 0 by a cosine.
    """

    model: str
    members: int
    way: str
    seed: int
    steps: int
    mbit: float | None = None
    kill: bool = False
    cosine: bool = False

    @property
    def sync(self) -> str:
        """As typed behind --sync."""
        return self.way.partition("%")[0].partition("@")[2] or "bsp"

    @property
    def masks(self) -> str | None:
        """As typed behind --masks."""
        return self.way.partition("%")[2] or None

    @property
    def codec(self) -> str | None:
        """As typed behind --codec; None: nothing."""
        return self.way.partition("%")[0].partition("@")[0] or None

    def __str__(self) -> str:
        network = "" if self.mbit is None else f", {self.mbit:g} Mbit/s"
        network += ", one killed" * self.kill + ", cosine" * self.cosine
        return f"{self.model}, {self.members} members, {self.way}, seed {self.seed}{network}"


@dataclass(frozen=True)
class Outcome:
    """How it ended.

    Attributes:
        error: why there is nothing else; None if the job has succeeded.
        loss: held-out, of the final base, in nats.
        accuracy: the part of what is held out that was predicted right.
        payload_bytes: of encoded vectors, all members together, a step.
        sent_bytes: on the sockets as the kernel counts them, all members together, a step, after the start.
        step_s: median of the steps after the first ones, of the main learner.
        replicas_equal: every comparison found all bases bit-equal.
    """

    error: str | None = None
    loss: float = float("nan")
    accuracy: float = float("nan")
    payload_bytes: float = float("nan")
    sent_bytes: float = float("nan")
    step_s: float = float("nan")
    replicas_equal: bool | None = None
    hashes_compared: int = 0
    parameters: int = 0


@dataclass(frozen=True)
class _RunLine:
    run: Run
    outcome: Outcome


class ResultFile(KeptLines[_RunLine]):
    """The outcomes there are; of two lines of one run the later one counts. Failures are tried again when the file is
    gone on with.

    Raises:
        KeptLinesError: when it is made.
        OSError.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, lambda parts: _RunLine(Run(**parts["run"]), Outcome(**parts["outcome"])))
        self.outcomes = {line.run: line.outcome for line in self.lines}

    def missing(self, runs: Iterable[Run]) -> list[Run]:
        """Those of these that have not succeeded yet."""
        return [run for run in runs if run not in self.outcomes or self.outcomes[run].error is not None]

    def keep(self, run: Run, outcome: Outcome) -> None:
        """Also behind the last line of the file."""
        self.outcomes[run] = outcome
        self.add(_RunLine(run, outcome))


class Sent:
    """Bytes a round on the sockets, from what the ranks report about once a second.

    A rank's first report with a round is behind the state that all start from, which is not to be counted.
    """

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}
        self._last: dict[int, tuple[int, int]] = {}

    def see(self, event: Any) -> None:
        """For `LocalDaemon.request`."""
        if isinstance(event, Watched):
            self.add(event.summary)

    def add(self, summary: JobSummary) -> None:
        """What all ranks report now."""
        for report in summary.ranks:
            metrics = report.metrics
            if metrics.round and not metrics.finished:
                self._first.setdefault(report.rank, (metrics.round, metrics.sent_bytes))
                self._last[report.rank] = (metrics.round, metrics.sent_bytes)

    def bytes_a_round(self) -> float:
        """Of all ranks; NaN when one of them has reported only once."""
        total = 0.0
        for rank, (first_round, first_bytes) in self._first.items():
            last_round, last_bytes = self._last[rank]
            if last_round == first_round:
                return float("nan")
            total += (last_bytes - first_bytes) / (last_round - first_round)
        return total


def rounds(run: Run) -> int:
    """That a job has, but for a last one that is shorter."""
    return rounds_of(run.sync, run.steps)


def rounds_of(sync: str, steps: int) -> int:
    """How many whole rounds so many steps of each learner make; behind them a job may have a shorter one."""
    mode = sync_settings(sync)
    first = min(steps, mode.after)
    return first + (steps - first) // mode.round_steps


def arguments(run: Run, curve_every: int) -> tuple[str, ...]:
    """The script's."""
    counted = run.kill or sync_settings(run.sync).ends_early  # else the last ones would be one member's alone
    batch = codecjob.MODELS[run.model].batch // run.members
    return (
        *(run.model, run.sync, str(run.steps), str(batch), str(run.seed)),
        *(str(run.steps) if counted else "0", str(codecjob.PACED_S if run.kill else 0), str(curve_every)),
        *(("cosine",) if run.cosine else ()),
    )


class Trained(NamedTuple):
    """What became of a job.

    Attributes:
        curve: (steps of the main learner, held-out loss of the base then), where one was asked for.
    """

    outcome: Outcome
    curve: list[tuple[int, float]]


def train(daemons: Sequence[LocalDaemon], folder: Path, run: Run, curve_every: int = 0) -> Trained:
    """Runs one job. What goes wrong is in the outcome.

    Args:
        daemons: `run.members`, linked to each other. The first one is asked; that which may be killed is the last.
        folder: with the data folders of `codecjob.write_data` in `data`.
        curve_every: steps between two points of the curve; 0: there is none.
    """
    model = codecjob.MODELS[run.model]
    daemon, sent = daemons[0], Sent()
    try:
        submitted = jobs.submit(
            daemon,
            folder,
            codecjob.SCRIPT,
            args=arguments(run, curve_every),
            data=folder / "data" / model.data,
            seed=run.seed,
            sync=run.sync,
            codec=run.codec,
            masks=run.masks,
            hash_every=HASH_EVERY,
        )
        if run.kill:
            lose_and_return(daemons, submitted.job, rounds(run))
        reply = daemon.request(Watch(job=submitted.job), JOB_TIMEOUT_S, "end of the job", sent.see)
        assert isinstance(reply, Watched)
        if reply.summary.state != "succeeded":
            return Trained(Outcome(error=reply.summary.error or f"the job is {reply.summary.state}"), [])
        result = json.loads(jobs.read(daemon, submitted.job, "output", 0, "result.json"))
    except (RequestError, ConnectionLost, LocalMeshError, TimeoutError, OSError) as error:
        return Trained(Outcome(error=str(error)), [])
    summary = reply.summary
    outcome = Outcome(
        loss=result["loss"],
        accuracy=result["accuracy"],
        payload_bytes=sum(report.metrics.payload_bytes for report in summary.ranks) / run.steps,
        sent_bytes=sent.bytes_a_round() * summary.rounds / run.steps,
        step_s=statistics.median(result["steps_s"][codecjob.WARM_STEPS :]),
        replicas_equal=summary.replicas_equal,
        hashes_compared=summary.hashes_compared,
        parameters=result["parameters"],
    )
    return Trained(outcome, [(step, loss) for step, loss in result["curve"]])
