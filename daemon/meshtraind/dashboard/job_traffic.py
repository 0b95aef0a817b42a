"""What the members of a job send each other, as far as their reports tell it: who sends to whom and how fast, what they
save, and what whoever waits is still owed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from meshtraind.dashboard.page_values import newest_round, waits_for_ranks
from meshwire import limits
from meshwire.codecs.registry import parse_codec
from meshwire.collectives.load import transfers_of
from meshwire.collectives.strategy import topology_after, topology_of
from meshwire.encoded_layout.projections import bits_per_value
from meshwire.messages.job import JobSummary
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.settings_changes import begun, local_steps

RATE_S_MIN = 2.0  # between two looks that give a rate
PLAIN_BITS = 32.0  # of a value in fp32


@dataclass(frozen=True, slots=True)
class _Sent:
    """What each rank had sent at one time, and which round was the newest."""

    at_s: float
    round: int
    by_rank: Mapping[int, int]


@dataclass
class JobTraffic:
    """Looks at a job about once a second. Rates are of the last two seconds or so, bytes a round of the newest rounds.

    Attributes:
        rates: bytes a second that each rank sends to all others together.
        round_bytes: that each rank sends in a round.
        saved_bytes: that fp32 in each step would have sent beyond what was sent; None: the codec is not known.
        since_round: the round that `saved_bytes` begins with.
    """

    rates: dict[int, float] = field(default_factory=dict)
    round_bytes: dict[int, float] = field(default_factory=dict)
    saved_bytes: float | None = None
    since_round: int = 1
    _timed: _Sent | None = None
    _counted: _Sent | None = None
    _payload: dict[int, int] | None = None

    def look(self, job: JobSummary, settings: Mapping[str, str], now_s: float) -> None:
        """Takes a look.

        Args:
            settings: by which the job was defined, as of `JobCourse`; empty: not known.
        """
        sent = {report.rank: report.metrics.sent_bytes for report in job.ranks}
        now = _Sent(now_s, newest_round(job), sent)
        self._take_rates(now)
        self._take_round_bytes(now)
        self._take_savings(job, settings)

    def _take_rates(self, now: _Sent) -> None:
        before = self._timed
        if before is None or _began_anew(before, now):
            self._timed, self.rates = now, {}
        elif (passed_s := now.at_s - before.at_s) >= RATE_S_MIN:
            self._timed, self.rates = now, {rank: sent / passed_s for rank, sent in _since(before, now).items()}

    def _take_round_bytes(self, now: _Sent) -> None:
        before = self._counted
        if before is None or _began_anew(before, now):
            self._counted, self.round_bytes = now, {}
        elif now.round > before.round and now.at_s - before.at_s >= RATE_S_MIN:
            rounds = now.round - before.round
            self._counted, self.round_bytes = now, {rank: sent / rounds for rank, sent in _since(before, now).items()}

    def _take_savings(self, job: JobSummary, settings: Mapping[str, str]) -> None:
        payload = {report.rank: report.metrics.payload_bytes for report in job.ranks}
        factor = _saved_by(job, settings)
        before, self._payload = self._payload, payload
        if factor is None:
            return
        if before is None or self.saved_bytes is None:
            changed = begun(job.changes, newest_round(job)) is not None
            self.saved_bytes = 0.0 if changed else factor * sum(payload.values())
            self.since_round = newest_round(job) + 1 if changed else 1
            return
        more = sum(max(0, sent - before.get(rank, 0)) for rank, sent in payload.items())
        self.saved_bytes += factor * more

    def links(self, job: JobSummary, settings: Mapping[str, str]) -> list[list[float | None]]:
        """[rank, rank, bytes a second both ways together] of each pair that sends to each other; none where these are
        more than a picture shows. None: the rate is not known yet."""
        edges = edges_of(job, settings)
        total = _sent_by(edges)
        pairs: dict[tuple[int, int], float | None] = {}
        for (sender, receiver), vectors in edges.items():
            pair = min(sender, receiver), max(sender, receiver)
            rate = self.rates.get(sender)
            known = pairs.get(pair, 0.0)
            pairs[pair] = None if rate is None or known is None else known + rate * vectors / total[sender]
        if len(pairs) > limits.DASHBOARD_LINKS_MAX:
            return []
        return [[*pair, rate] for pair, rate in sorted(pairs.items())]

    def owed(self, job: JobSummary, settings: Mapping[str, str]) -> list[list[float | None]]:
        """[who owes, to whom, bytes at most]: what those that wait lack of whom they wait for, in the round of now.
        None: nothing goes from one to the other without somebody between them, or how much is not known yet."""
        edges = edges_of(job, settings)
        total = _sent_by(edges)
        found: list[list[float | None]] = []
        for creditor in range(len(job.members)):
            for debtor in waits_for_ranks(job, creditor):
                vectors, of_round = edges.get((debtor, creditor)), self.round_bytes.get(debtor)
                known = None if vectors is None or of_round is None else of_round * vectors / total[debtor]
                found.append([debtor, creditor, known])
        return found[: limits.DASHBOARD_LINKS_MAX]


def codec_of_now(job: JobSummary) -> str | None:
    """In which the newest round travels; None: not known any more."""
    change = begun(job.changes, max(1, newest_round(job)))
    return job.codec if change is None or change.codec is None else change.codec


def edges_of(job: JobSummary, settings: Mapping[str, str]) -> Mapping[tuple[int, int], float]:
    """(sender, receiver): how many encoded vectors go that way in a round of now. Empty where rounds do not run, or go
    a way that is not known here."""
    topology, codec = settings.get("topology"), codec_of_now(job)
    if topology is None or codec is None or job.codec is None or not newest_round(job):
        return {}
    try:
        if codec != job.codec:
            topology = topology_after(topology, parse_codec(job.codec), parse_codec(codec))
        return _edges(topology, job.present)
    except ValueError:  # of a version that knows other ones
        return {}


@lru_cache(maxsize=8)
def _edges(topology: str, ranks: tuple[int, ...]) -> Mapping[tuple[int, int], float]:
    if len(ranks) < 2:
        return {}
    programs = topology_of(topology).programs(ranks)
    counts = Counter((ranks[one.sender], ranks[one.receiver]) for one in transfers_of(programs))
    return {pair: count / programs[0].shard_count for pair, count in counts.items()}


def _sent_by(edges: Mapping[tuple[int, int], float]) -> Mapping[int, float]:
    total: dict[int, float] = {}
    for (sender, _), vectors in edges.items():
        total[sender] = total.get(sender, 0.0) + vectors
    return total


def _saved_by(job: JobSummary, settings: Mapping[str, str]) -> float | None:
    """Bytes that fp32 on a ring in each step sends beyond each one that is sent; 0 where it would send no more. A codec
    whose sizes follow the values counts as large as it can be."""
    codec, members = codec_of_now(job), len(job.present)
    try:
        if codec is None or "sync" not in settings or members < 2:
            return None
        steps = local_steps(sync_settings(settings["sync"]), job.changes, max(1, newest_round(job)))
        bits = bits_per_value(parse_codec(codec))
    except ValueError:
        return None
    vectors = sum(edges_of(job, settings).values()) or 2.0 * (members - 1)
    return max(0.0, PLAIN_BITS * 2 * (members - 1) * steps / (bits * vectors) - 1)


def _began_anew(before: _Sent, now: _Sent) -> bool:
    """Rounds were given up, or a daemon that was started again counts anew."""
    return now.round < before.round or any(now.by_rank.get(rank, sent) < sent for rank, sent in before.by_rank.items())


def _since(before: _Sent, now: _Sent) -> dict[int, int]:
    return {rank: sent - before.by_rank[rank] for rank, sent in now.by_rank.items() if rank in before.by_rank}
