"""How a job went, for `meshtrain report`, on the local endpoint."""

from typing import Annotated

from pydantic import Field

from meshwire import limits
from meshwire.jobs.lifecycle import JobId
from meshwire.message_base import Seconds, Wire
from meshwire.messages.envelope import message
from meshwire.messages.job import Count, JobSummary, LogName, Rank, Ranks, Text
from meshwire.messages.link import Software


@message("get.course")
class GetCourse(Wire):
    """Request: how a job that this device takes part in, or did, has gone so far. Reply: `JobCourse`."""

    job: JobId


class CoursePoint(Wire):
    """Where a job stood once. What is summed over ranks is of those that have told of themselves."""

    at_s: Seconds  # Unix time, by this device's clock
    round: Count
    # the script's own values, averaged over the ranks that have them; those that are no numbers are left out
    values: Annotated[tuple[tuple[LogName, float], ...], Field(max_length=limits.COURSE_VALUES_MAX)] = ()
    samples_s: Annotated[float, Field(ge=0, le=limits.SAMPLES_MAX * limits.MEMBERS_MAX)] | None = None  # of all
    sent_bytes: Count = 0  # by all, since the job began
    learning: Count = 0  # how many ranks computed


class CoursePresence(Wire):
    """Who takes part from this time on."""

    at_s: Seconds
    generation: Count
    present: Ranks
    learning: Ranks


@message("course")
class JobCourse(Wire):
    """Reply, and what DATA/jobs/ID/course.msgpack holds: how a job went as this device saw it."""

    summary: JobSummary  # with every rank's last report, which the history does not keep
    settings: Annotated[tuple[tuple[Text, Text], ...], Field(max_length=32)]  # as of `JobSpec`, in words
    software: Annotated[tuple[tuple[Rank, Software], ...], Field(max_length=limits.MEMBERS_MAX)]  # where known
    points: Annotated[tuple[CoursePoint, ...], Field(max_length=limits.COURSE_POINTS_MAX)]
    presence: Annotated[tuple[CoursePresence, ...], Field(max_length=limits.COURSE_PRESENCE_MAX)]
