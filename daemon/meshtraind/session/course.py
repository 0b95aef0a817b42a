"""How a job goes, looked at once a second and kept with its logs: for `meshtrain report`, also after its end."""

import itertools
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgpack
from pydantic import ValidationError

from meshtraind.peers.node import Node
from meshtraind.runtime.open_below import open_below, read_below
from meshtraind.storage.job_record import Job
from meshwire import limits
from meshwire.job_figures import mean_values, samples_s
from meshwire.messages.course import CoursePoint, CoursePresence, JobCourse
from meshwire.messages.job import JobSpec, JobSummary, Metrics, Rank
from meshwire.messages.link import Software
from meshwire.sync_modes.settings_changes import SettingsChange, told_of

log = logging.getLogger(__name__)

NAME = "course.msgpack"
SAVE_EVERY_S = 30.0
_PART = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class CourseKeeper:
    """The course of one job, bounded however long that takes: when there are too many points every second one goes, and
    from then on every second one is taken."""

    def __init__(self, node: Node, job: Job) -> None:
        self._node = node
        self._job = job
        self._stride = 1  # rounds between points, at least
        self._points: list[CoursePoint] = []
        self._presence: list[CoursePresence] = []
        self._software: dict[Rank, Software] = {}
        self._saved_s = float("-inf")

    def go_on(self) -> None:
        """Goes on with what an earlier daemon here has kept. Blocks on the disk."""
        kept = load_course(self._job.folder)
        if kept is None:
            return
        self._points, self._presence = list(kept.points), list(kept.presence)
        self._software = dict(kept.software)
        rounds = [point.round for point in self._points]
        self._stride = max(1, min((after - before for before, after in itertools.pairwise(rounds)), default=1))

    def look(self, summary: JobSummary, now_s: float) -> None:
        """Takes a look at the job. `now_s`: Unix time."""
        for rank, member in enumerate(summary.members):
            link = self._node.links.get(member.device)
            if member.device == self._node.device:
                self._software[rank] = self._node.software
            elif link is not None:
                self._software[rank] = link.hello.software
        if summary.generation:
            self._look_who_is_there(summary, now_s)
        reports = {report.rank: report.metrics for report in summary.ranks}
        self._take_point(summary, reports, now_s)

    def _look_who_is_there(self, summary: JobSummary, now_s: float) -> None:
        last = self._presence[-1] if self._presence else None
        if last is not None and (last.present, last.learning) == (summary.present, summary.learning):
            return
        self._presence.append(
            CoursePresence(
                at_s=now_s, generation=summary.generation, present=summary.present, learning=summary.learning
            )
        )
        if len(self._presence) > limits.COURSE_PRESENCE_MAX:
            del self._presence[1]  # the beginning stays

    def _take_point(self, summary: JobSummary, reports: Mapping[Rank, Metrics], now_s: float) -> None:
        last = max([summary.rounds, *(metrics.round for metrics in reports.values())])
        while self._points and self._points[-1].round > last:  # rounds that are given up come again
            self._points.pop()
        if last < 1 or (self._points and last < self._points[-1].round + self._stride):
            return
        self._points.append(
            CoursePoint(
                at_s=now_s,
                round=last,
                values=_finite_means(reports),
                samples_s=samples_s(summary),
                sent_bytes=sum(metrics.sent_bytes for metrics in reports.values()),
                learning=len(summary.learning),
            )
        )
        if len(self._points) > limits.COURSE_POINTS_MAX:
            self._points = self._points[::2]
            self._stride *= 2

    def course(self) -> JobCourse:
        """How it went so far."""
        summary = self._job.summary()
        return JobCourse(
            summary=summary,
            settings=described(self._job.spec, summary.changes),
            software=tuple(sorted(self._software.items())),
            points=tuple(self._points),
            presence=tuple(self._presence),
        )

    def to_save(self, now_s: float, every_s: float) -> bytes | None:
        """What `save_course` is to write; None: that was done less than `every_s` ago."""
        if now_s - self._saved_s < every_s:
            return None
        self._saved_s = now_s
        return self.course().pack()


def _finite_means(reports: Mapping[Rank, Metrics]) -> tuple[tuple[str, float], ...]:
    finite = (
        [(name, value) for name, value in reports[rank].values if math.isfinite(value)] for rank in sorted(reports)
    )
    return tuple(mean_values(finite))[: limits.COURSE_VALUES_MAX]


def described(spec: JobSpec, changes: Sequence[SettingsChange] = ()) -> tuple[tuple[str, str], ...]:
    """All by which a job was defined, in words. Of its environment variables the names, for values may be secrets."""
    told = {
        "script": spec.script + (", as a module" if spec.as_module else ""),
        "arguments": " ".join(spec.args),
        "environment variables": ", ".join(key for key, _ in spec.env),
        "learners on each device": "" if spec.learners == 1 else str(spec.learners),
        "sync": spec.sync.text(),
        "codec": spec.codec,
        "changed": "; ".join(told_of(changes, one) for one in changes),
        "topology": spec.topology or "",
        "masks": "" if spec.masks is None else spec.masks.text(),
        "scale-lr": "" if spec.scale_lr is None else spec.scale_lr.text(),
        "engine": spec.engine,
        "a gradient that is not finite": spec.on_nan,
        "seed": str(spec.seed),
        "checkpoints every": spec.checkpoint_every,
        "goes on from": "" if spec.resume is None else f"job {spec.resume.job}, round {spec.resume.round}",
        "packages": ", ".join(spec.requirements),
        "restarts at most": "" if spec.restarts_max is None else str(spec.restarts_max),
    }
    return tuple((what, value[: limits.REASON_CHARS_MAX]) for what, value in told.items() if value)


def save_course(folder: Path, packed: bytes) -> None:
    """Writes it into the job's folder, whole or not at all. Blocks on the disk."""
    try:
        with os.fdopen(open_below(folder.parent, (folder.name, f"{NAME}.part"), _PART), "wb") as file:
            file.write(packed)
        (folder / f"{NAME}.part").replace(folder / NAME)
    except OSError as error:
        log.warning("how the job in %s went is not kept: %s", folder, error)


def load_course(folder: Path) -> JobCourse | None:
    """What is kept; None where there is nothing, or what a script has put in its place. Blocks on the disk."""
    try:
        with read_below(folder.parent, (folder.name, NAME)) as file:
            packed = file.read(limits.COURSE_BYTES_MAX + 1)
        if len(packed) > limits.COURSE_BYTES_MAX:
            raise ValueError("it is too large")
        return JobCourse.load(msgpack.unpackb(packed, strict_map_key=True))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        log.warning("how the job in %s went cannot be read: %s", folder, error)
        return None
