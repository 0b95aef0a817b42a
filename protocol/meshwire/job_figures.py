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


def rate_text(samples_s: float) -> str:
    """A number of samples a second, for people."""
    return f"{samples_s:,.0f}" if samples_s >= 100 else f"{samples_s:.3g}"


def speed_text(job: JobSummary) -> str | None:
    """How many samples a second, and how many times those of the fastest laptop alone; None while that is not known.

    Alone is what was predicted for it, else what the fastest does while it computes: alone it would do a little less.
    """
    measured = samples_s(job)
    if measured is None:
        return None
    alone = max((report.metrics.samples_per_s for report in job.ranks), default=0.0)
    alone = job.prediction.alone_samples_s if job.prediction is not None else alone
    together = len(job.learning) > 1 and alone > 0
    return f"{rate_text(measured)} samples/s" + (f", {measured / alone:.2g}x one laptop" if together else "")


def prediction_text(job: JobSummary) -> str | None:
    """Both in a line; None where nothing was predicted, or nothing was measured."""
    measured_s = samples_s(job)
    if job.prediction is None or measured_s is None:
        return None
    predicted_s, alone_s = job.prediction.samples_s, job.prediction.alone_samples_s
    return (
        f"predicted {rate_text(predicted_s)} samples/s, measured {rate_text(measured_s)}: "
        f"{measured_s / predicted_s:.0%} of it, {measured_s / alone_s:.2f}x one laptop alone"
    )
