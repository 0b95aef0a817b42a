"""A job in figures and plain words: what was chosen and expected, what is measured, and what compression and overlap
bring."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from meshtraind.dashboard.chart import Chart
from meshtraind.dashboard.job_traffic import JobTraffic, codec_of_now
from meshtraind.dashboard.page_values import has_ended, newest_round, shown_line
from meshwire.job_figures import rate_text, samples_s, speed_text
from meshwire.jobs.files import human_bytes
from meshwire.messages.course import JobCourse
from meshwire.messages.job import JobSummary, Metrics
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from meshwire.sync_modes.settings_changes import local_steps, told_of

TYPED = ("sync", "codec", "topology", "masks", "scale-lr")
"""Settings of a course that are shown as they are typed."""


@dataclass
class WatchedJob:
    """What is kept of a job between two looks.

    Attributes:
        settings: by which it was defined, as of `JobCourse`; empty: not known here.
        asked_s: when they were asked for last.
    """

    chart: Chart = field(default_factory=Chart)
    traffic: JobTraffic = field(default_factory=JobTraffic)
    settings: dict[str, str] = field(default_factory=dict)
    asked_s: float | None = None

    def take(self, course: JobCourse) -> None:
        """What the daemon has kept of it: settings, and curves from its beginning on."""
        self.settings = dict(course.settings)
        self.chart.begin(course.points)


def job_facts(job: JobSummary, watched: WatchedJob) -> list[tuple[str, str]]:
    """Names and texts for people; nothing of what is not known."""
    facts = {
        "Plan": _plan(job, watched.settings),
        "Predicted": _predicted(job),
        "Measured": _measured(job),
        "Overlap": _overlap(job),
        "Bytes": _bytes(job, watched.traffic),
        "Staleness": _staleness(job, watched.settings),
    }
    return [(name, shown_line(text)) for name, text in facts.items() if text]


def overlap_of(ranks: Iterable[Metrics]) -> float | None:
    """The part of the time of exchanges in which learners computed; None: there was no exchange."""
    told = list(ranks)
    exchange_s = sum(metrics.exchange_s for metrics in told)
    return max(0.0, 1.0 - sum(metrics.exposed_s for metrics in told) / exchange_s) if exchange_s > 0 else None


def _plan(job: JobSummary, settings: dict[str, str]) -> str:
    if job.codec is None:
        return ""
    known = settings | {"codec": job.codec}
    begun = " ".join(f"--{name} {known[name]}" for name in TYPED if name in known)
    by = {"plan": " (by itself, for the network was no more what it was planned for)"}
    changes = [f"{told_of(job.changes, one)}{by.get(one.by, '')}" for one in job.changes]
    return ", ".join([begun, *changes])


def _predicted(job: JobSummary) -> str:
    if job.prediction is None:
        alone = job.codec is None or len(job.members) < 2
        return "" if alone else "nothing: settings were typed, or it goes on from another job"
    together_s, alone_s = job.prediction.samples_s, job.prediction.alone_samples_s
    return (
        f"{rate_text(together_s)} samples/s, {together_s / alone_s:.2g}x the fastest laptop alone, which makes "
        f"{rate_text(alone_s)}"
    )


def _measured(job: JobSummary) -> str:
    text, measured_s = speed_text(job), samples_s(job)
    if text is None or measured_s is None:
        return ""
    if job.prediction is None:
        return text
    return f"{text}; {measured_s / job.prediction.samples_s:.0%} of what was predicted"


def _overlap(job: JobSummary) -> str:
    hidden = overlap_of(report.metrics for report in job.ranks)
    return "" if hidden is None else f"{hidden:.0%} of the time of exchanges was hidden behind computing"


def _bytes(job: JobSummary, traffic: JobTraffic) -> str:
    sent = sum(report.metrics.sent_bytes for report in job.ranks)
    if not sent:
        return ""
    parts = [f"{human_bytes(sent)} sent by all"]
    if of_round := round(sum(traffic.round_bytes.values())):
        parts.append(f"{human_bytes(of_round)} a round")
    if traffic.saved_bytes:
        since = "" if traffic.since_round == 1 else f" since round {traffic.since_round}"
        saved = human_bytes(round(traffic.saved_bytes))
        parts.append(f"{codec_of_now(job)} saved about {saved}{since}, beside fp32 in each step")
    return "; ".join(parts)


def _staleness(job: JobSummary, settings: Mapping[str, str]) -> str:
    if not newest_round(job):
        return ""
    parts = []
    try:
        mode = sync_settings(settings["sync"]) if "sync" in settings else None
    except ValueError:  # of a version that knows other ones
        mode = None
    if mode is not None and not mode.staleness:
        steps = local_steps(mode, job.changes, newest_round(job))
        each = "each step" if steps < 2 else f"each {steps} steps"
        mixes = f", and mix weights with neighbours after each {mode.gossip}" if mode.gossip else ""
        parts.append(f"none: all wait for each other after {each}{_in_turns(mode)}{mixes}")
    elif mode is not None and mode.overlaps:
        parts.append(f"all take a round in behind step {mode.delay} of the next period{_in_turns(mode)}")
    elif mode is not None:
        parts.append(f"the bound is {mode.staleness}")
    ages = [sum(of_age) for of_age in zip_longest(*(report.metrics.ages for report in job.ranks), fillvalue=0)]
    if sum(ages) and (mode is None or mode.staleness):
        oldest = max(age for age, count in enumerate(ages) if count)
        behind = f"the oldest {oldest} behind" if oldest else "none was behind"
        parts.append(f"{ages[0] / sum(ages):.0%} of the contributions were of the newest model, {behind}")
    counted = {
        "passed over": sum(report.metrics.nulls for report in job.ranks),
        "void": max((report.metrics.void_rounds for report in job.ranks), default=0),
        "steps lost": sum(report.metrics.steps_lost for report in job.ranks),
    }
    parts += [f"{what}: {count}" for what, count in counted.items() if count]
    return "; ".join(parts)


def _in_turns(mode: SyncSettings) -> str:
    return f", for one of {mode.fragments} parts of the model in turns" if mode.fragments > 1 else ""


def still_runs(job: JobSummary) -> bool:
    """Whether its rounds can go over to another codec now."""
    return not has_ended(job) and bool(job.generation) and bool(job.learning)
