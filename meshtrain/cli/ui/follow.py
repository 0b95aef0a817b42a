"""Follows a job on a terminal or in a pipe until its end; ctrl-C detaches."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.follow_view import View
from meshtrain.cli.ui.terminal import say
from meshtrain.client import Client
from meshtrain.datadir import data_folder
from meshtrain.following.follower import WHOLE, Follower, LogPart, LostSight
from meshtrain.following.shown_text import printable_lines
from meshtrain.following.watching import outcome_lines
from meshwire.jobs.lifecycle import EXIT_CODES, JobState
from meshwire.messages.job import JobSummary, Member


def follow_job(
    data_dir: Path | None,
    job: str,
    members: Sequence[Member],
    *,
    ranks: Sequence[int] | None = None,  # all, if none are named
    part: LogPart = WHOLE,
    logs: TextIO | None = None,
) -> int:
    """Shows a job until it ends or ctrl-C detaches. Returns the exit code: the outcome's, 0 when detached."""
    shown = list(range(len(members))) if ranks is None else list(ranks)
    folder = data_folder(data_dir)
    follower = Follower(lambda: Client.connect(folder), job, shown, part, newcomers=ranks is None)
    try:
        with View(
            [member.name for member in members], shown, logs or sys.stdout, raw=part.raw, times=part.times
        ) as view:
            summary = follower.run(view)
    except KeyboardInterrupt:
        say(f"\nDetached: job {job} is still running. Follow it: meshtrain logs -f {job}")
        return 0
    except LostSight as error:
        raise CliError(str(error), f"meshtrain up && meshtrain logs -f {job}") from error
    for line in outcome_lines(summary):
        say(line)
    if summary.state == JobState.SUCCEEDED:
        say(f"Results: meshtrain get {job}")
    return exit_code(summary)


def exit_code(summary: JobSummary) -> int:
    """What a shell learns of a job that has ended. Raises CliError for a state that is no end."""
    try:
        return EXIT_CODES[JobState(summary.state)]
    except (ValueError, KeyError):
        raise CliError(
            f"the daemon ended the report on job {summary.job}, which is {printable_lines(summary.state)}",
            f"meshtrain logs -f {summary.job}",
        ) from None
