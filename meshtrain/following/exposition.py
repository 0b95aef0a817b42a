"""What this device and its jobs do, in the text that Prometheus reads: for those who watch their machines with it."""

from collections.abc import Iterable, Iterator
from operator import attrgetter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshwire.messages.job import JobSummary, RankReport
from meshwire.messages.local import Peers, Status

RANK = ("job", "name", "rank", "device")
GAUGES = (
    ("step_seconds", "Median time of a device's recent steps.", attrgetter("metrics.step_s")),
    ("samples_per_second", "Samples a second, waits included.", attrgetter("metrics.throughput_samples_s")),
    ("epochs", "Epochs whose samples are in complete rounds.", attrgetter("metrics.epochs")),
)
COUNTERS = (
    ("steps", "Steps of a device's script.", attrgetter("metrics.step")),
    ("samples", "Samples that a device has trained on.", attrgetter("metrics.samples")),
    ("waited_seconds", "Time that a device's script waited for exchanges.", attrgetter("metrics.exposed_s")),
    ("sent_bytes", "Bytes that a device has sent to the others of a job.", attrgetter("metrics.sent_bytes")),
    ("restarts", "How often a device's script was started again.", attrgetter("restarts")),
)


def exposition(status: Status, peers: Peers, jobs: Iterable[JobSummary]) -> str:
    """The page, in Prometheus' text format 0.0.4.

    Args:
        jobs: that run.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Seen([*_of_device(status, peers), *_of_jobs(list(jobs))]))
    return generate_latest(registry).decode()


class _Seen(Collector):
    """What was seen once."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _of_device(status: Status, peers: Peers) -> Iterator[Metric]:
    yield GaugeMetricFamily("meshtrain_up_seconds", "For how long the daemon runs.", status.up_s)
    yield GaugeMetricFamily("meshtrain_peers_linked", "Devices that are linked.", status.peers_linked)
    yield GaugeMetricFamily("meshtrain_peers_paired", "Devices that are paired, linked or not.", status.peers_paired)
    yield GaugeMetricFamily("meshtrain_jobs_running", "Jobs that run here.", status.jobs_running)
    rtt = GaugeMetricFamily("meshtrain_peer_rtt_seconds", "Round trip to a linked device.", labels=("peer",))
    for peer in peers.peers:
        if peer.state == "linked" and peer.rtt_s is not None:
            rtt.add_metric((peer.name,), peer.rtt_s)
    sent = CounterMetricFamily(
        "meshtrain_link_sent_bytes", "Payloads of chunks sent on a link since it was made.", labels=("peer",)
    )
    for link in status.links:
        sent.add_metric((link.name,), link.sent_bytes)
    yield rtt
    yield sent


def _of_jobs(jobs: list[JobSummary]) -> Iterator[Metric]:
    rounds = GaugeMetricFamily("meshtrain_job_rounds", "The newest round of a job.", labels=("job", "name"))
    present = GaugeMetricFamily("meshtrain_job_devices", "Devices that take part in a job.", labels=("job", "name"))
    for job in jobs:
        rounds.add_metric((job.job, job.name), job.rounds)
        present.add_metric((job.job, job.name), len(job.present))
    yield rounds
    yield present
    reports = [(job, report) for job in jobs for report in job.ranks]
    for family, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for name, about, value in table:
            of_ranks = family(f"meshtrain_rank_{name}", about, labels=RANK)
            for job, report in reports:
                of_ranks.add_metric(_labels(job, report), value(report))
            yield of_ranks
    logged = GaugeMetricFamily("meshtrain_rank_value", "What a script has logged last.", labels=(*RANK, "value"))
    for job, report in reports:
        for logged_name, number in report.metrics.values:
            logged.add_metric((*_labels(job, report), logged_name), number)
    yield logged


def _labels(job: JobSummary, report: RankReport) -> tuple[str, ...]:
    return job.job, job.name, str(report.rank), job.members[report.rank].name
