"""How fast a job was predicted to be when its settings were chosen, beside how fast it is."""

from meshwire.messages.job import JobSummary


def measured_samples_s(job: JobSummary) -> float | None:
    """Samples a second of all ranks together, by their newest reports; None while one of those that compute has not
    told, or where batches are not dealt."""
    reports = {report.rank: report.metrics for report in job.ranks}
    counting = [reports.get(rank) for rank in job.learning] or list(reports.values())
    rates = [each.batch / each.step_s if each is not None and each.step_s else 0.0 for each in counting]
    return sum(rates) if rates and min(rates) > 0 else None


def prediction_text(job: JobSummary) -> str | None:
    """Both in a line; None where nothing was predicted, or nothing was measured."""
    measured_s = measured_samples_s(job)
    if job.prediction is None or measured_s is None:
        return None
    predicted_s, alone_s = job.prediction.samples_s, job.prediction.alone_samples_s
    return (
        f"predicted {predicted_s:,.3g} samples/s, measured {measured_s:,.3g}: {measured_s / predicted_s:.0%} of it, "
        f"{measured_s / alone_s:.2f}x one laptop alone"
    )
