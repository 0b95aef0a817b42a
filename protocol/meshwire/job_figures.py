"""How a job goes in figures, taken together from what its ranks tell: for terminals, pages and what daemons keep."""

from collections.abc import Iterable

from meshwire.messages.job import JobSummary


def mean_values(of_ranks: Iterable[Iterable[tuple[str, float]]]) -> list[tuple[str, float]]:
    """The script's own values (`Metrics.values`), averaged over the ranks that have them, in order of appearance."""
    values: dict[str, list[float]] = {}
    for one in of_ranks:
        for name, value in one:
            values.setdefault(name, []).append(value)
    return [(name, sum(column) / len(column)) for name, column in values.items()]


def samples_s(job: JobSummary) -> float | None:
    """Samples a second of all ranks together, by their newest reports, waits included; None while one of those that
    compute has not told, or where samples are not dealt."""
    reports = {report.rank: report.metrics for report in job.ranks}
    counting = [reports.get(rank) for rank in job.learning] or list(reports.values())
    rates = [0.0 if each is None else each.throughput_samples_s for each in counting]
    return sum(rates) if rates and min(rates) > 0 else None
