"""What a person is told of a job's members: who takes part and how, in a word; and what has happened to whom between
two looks at it, in a line each."""

import re
from collections.abc import Iterable, Sequence

from meshwire.checkpoints.manifest import CheckpointName
from meshwire.jobs.lifecycle import JobState
from meshwire.messages.job import GivenUp, JobSummary, Member, RankReport
from meshwire.sync_modes.settings_changes import told_of
from meshwire.text import printable

AFTER_FAILURE = {"computes": "started again", "forwards": "not started again"}
UNDER_WAY = (JobState.STARTING, JobState.RUNNING, JobState.FINISHING)


def part_of(job: JobSummary, rank: int) -> str:
    """How a member takes part: in; back (in, after it was lost); loading the state; forwards (what others send, with no
    learner of its own); hub (it never has one); rests (none for now, as its owner has set); lost; left (by a person's
    wish); refused (it broke the protocol); done, ended (its script). "-": not known."""
    report = _reports(job).get(rank)
    if report is not None and report.exit_code is not None:
        return "done" if report.exit_code == 0 else "ended"
    if not job.generation:
        return "-"
    if rank not in job.present:
        if rank in _refusals(job):
            return "refused"
        if report is not None and report.part == "leaves":
            return "left"
        gone = report is None or (report.state in UNDER_WAY and report.part in ("computes", "rests", "hub"))
        return "lost" if gone else "ended"
    if rank in job.learning:
        return "back" if rank in job.returned else "in"
    if job.members[rank].hub:
        return "hub"
    return report.part if report is not None and report.part in ("forwards", "rests") else "loading"


def absent(job: JobSummary, part: str) -> list[str]:
    """Names of the members that are `lost`, or have `left`."""
    return [name_of(job, rank) for rank in _absent_ranks(job, part)]


def _absent_ranks(job: JobSummary, part: str) -> list[int]:
    return [rank for rank in range(len(job.members)) if part_of(job, rank) == part]


def news(before: JobSummary, after: JobSummary) -> list[str]:
    """What has happened to the job's members and rounds. Of members nothing where the job had not begun, this device
    was not in it, or it is ending: how it ends is told when it has ended."""
    told = {(one.first, one.kept) for one in before.given_up}
    named = {(one.first, one.kept) for one in before.given_up if one.saved is not None}
    lost = [
        _given_up(after, one)
        for one in after.given_up
        if (one.first, one.kept) not in (told if one.saved is None else named)
    ]
    lost += [why for why in unlinkable(after) if why not in unlinkable(before)]
    if after.generation != before.generation:
        lost += provisional(after)
    lost += [
        printable(told_of(after.changes, one))
        + (", for the network is no more what it was planned for" if one.by == "plan" else "")
        for one in after.changes
        if one not in before.changes
    ]
    if not before.generation or not after.generation or after.state not in UNDER_WAY:
        return lost
    if after.restarted is not None:  # all scripts began anew, with whoever is there: one line says it all
        return [*(restarts(after) if after.restarted != before.restarted else []), *lost]
    return [*_departures(before, after), *_learners(before, after), *lost, *_arrivals(before, after)]


def losses(job: JobSummary) -> list[str]:
    """Which rounds are in no history any more, a line each: for all that show how a job stands or stood."""
    return [_given_up(job, one) for one in job.given_up]


def provisional(job: JobSummary) -> list[str]:
    """The line that says that those who go on may have to give it up; nothing where they are entitled to go on."""
    if not job.provisional or job.state not in UNDER_WAY:
        return []
    on, away = (_names(job, ranks) for ranks in (job.learning, sorted(set(range(len(job.members))) - set(job.present))))
    go, they = ("go", "they compute") if len(on) > 1 else ("goes", "it computes")
    return [
        f"{joined(on) or 'nobody'} {go} on provisionally, apart from {joined(away) or 'others'}: if those have gone on "
        f"too, what {they} meanwhile is given up, and kept as a checkpoint"
    ]


def restarts(job: JobSummary) -> list[str]:
    """Why all scripts were begun again last, in a line, while they run."""
    return [printable(job.restarted)] if job.restarted is not None and job.state in UNDER_WAY else []


def unlinkable(job: JobSummary) -> list[str]:
    """Which members answer and cannot be linked, and why, a line each."""
    return [printable(why) for _, why in job.unlinkable]


def script_failed(before: JobSummary, after: JobSummary) -> bool:
    """Whether this is of what `news` tells. If the script fails everywhere, the job's end tells it soon."""
    return bool(news(before, after) and _learners(before, after))


def outcome_notes(job: JobSummary) -> list[str]:
    """What somebody who looks at the result of a job that succeeded should know of its way."""
    notes = losses(job)
    notes += [f"it ended without {_was_refused(job, rank, 'which ')}" for rank in _absent_ranks(job, "refused")]
    for part, text in (("lost", "lost on the way"), ("left", "taken out of it")):
        if names := absent(job, part):
            notes.append(f"it ended without {joined(names)}, which {_were(names)} {text}")
    notes += [
        f"{name_of(job, report.rank)}: {cause(job, report)}; it was {AFTER_FAILURE[report.part]}"
        for report in job.ranks
        if report.failure and report.part in AFTER_FAILURE
    ]
    return notes


def cause(job: JobSummary, report: RankReport) -> str:
    """The first line about the newest learner that failed there, without saying where."""
    return printable(_of_whom(job, report.failure or "")[1].partition("\n")[0])


def failures(job: JobSummary) -> list[str]:
    """Why a job failed: each error once, with the devices that it was on, the one that ended the job first."""
    told = [job.error, *(text for report in job.ranks for text in (report.failure, report.error))]
    found: dict[str, set[int]] = {}
    for text in filter(None, told):
        rank, what = _of_whom(job, text.rstrip())
        found.setdefault(what, set()).update(() if rank is None else (rank,))
    shown = []
    for what, ranks in found.items():
        where = joined([name_of(job, rank) for rank in sorted(ranks)])
        if len(ranks) == len(job.members) > 1:
            where = "both devices" if len(ranks) == 2 else f"all {len(ranks)} devices"
        shown.append(f"error on {where}: {what}" if where else f"error: {what}")
    return shown


def rank_that_failed(job: JobSummary) -> int | None:
    """The rank whose error ended the job, else the first that has one of its own; None where nobody's script failed."""
    told = [job.error, *(text for report in job.ranks for text in (report.failure, report.error))]
    return next((rank for text in told if text and (rank := _of_whom(job, text)[0]) is not None), None)


def _of_whom(job: JobSummary, text: str) -> tuple[int | None, str]:
    """A rank's daemon puts the rank and its device's name in front of what it says of its script."""
    for rank, member in enumerate(job.members):
        if text.startswith(before := f"rank {rank} ({member.name}): "):
            return rank, text.removeprefix(before)
    return None, text


def name_of(job: JobSummary, rank: int) -> str:
    """A member's name, safe to show."""
    return printable(job.members[rank].name) if rank < len(job.members) else f"rank {rank}"


def joined(names: list[str]) -> str:
    """Names as a sentence lists them: `anna, bert and cleo`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def with_names(text: str, members: Sequence[Member]) -> str:
    """A daemon's text that knows ranks, for people, who know names."""

    def named(match: re.Match[str]) -> str:
        rank = int(match[1])
        return members[rank].name if rank < len(members) else match[0]

    return printable(re.sub(r"\brank (\d+)\b", named, text))


def _given_up(job: JobSummary, rounds: GivenUp) -> str:
    made_by, kept = (joined(_names(job, ranks)) for ranks in (rounds.made_by, rounds.kept))
    if rounds.last > rounds.first:
        which, were, they = f"rounds {rounds.first} to {rounds.last}", "were", "they were"
    else:
        which, were, they = f"round {rounds.first}", "was", "it was"
    if rounds.made_by == rounds.kept:
        if rounds.first == 1:
            return f"{which} of {made_by} {were} lost, for none was saved yet: the job began once more"
        return (
            f"{which} of {made_by} ({rounds.samples} samples) {were} given up: every script was lost, and the newest "
            f"checkpoint is that after round {rounds.first - 1}"
        )
    lost = f"{which} of {made_by} ({rounds.samples} samples) {were} given up"
    text = f"{lost}: {they} apart from {kept}, whose history is kept"
    if rounds.saved is not None:
        name = CheckpointName(*rounds.saved)
        return f"{text}. To go on from what was given up: meshtrain submit --resume {job.job}@{name}"
    return text if rounds.unsaved is None else f"{text}; their base was not saved: {printable(rounds.unsaved)}"


def _refusals(job: JobSummary) -> dict[int, str]:
    return {one.rank: one.reason for one in job.refused}


def _was_refused(job: JobSummary, rank: int, which: str = "") -> str:
    comma = ", " if which else " "
    return f"{name_of(job, rank)}{comma}{which}was refused: {printable(_refusals(job)[rank])}"


def _departures(before: JobSummary, after: JobSummary) -> list[str]:
    gone = [rank for rank in before.present if rank not in after.present]
    on = _names(after, after.learning)
    rest = f"{joined(on)} {'go' if len(on) > 1 else 'goes'} on" if on else "nobody computes"
    lines = []
    for rank in gone:
        if part_of(after, rank) == "refused":
            lines.append(f"{_was_refused(after, rank)}; {rest} (generation {after.generation})")
    for part, text in (("lost", "lost"), ("left", "taken out")):
        if names := [name_of(after, rank) for rank in gone if part_of(after, rank) == part]:
            lines.append(f"{joined(names)} {_were(names)} {text}; {rest} (generation {after.generation})")
    return lines


def _learners(before: JobSummary, after: JobSummary) -> list[str]:
    """News of scripts that have failed."""
    lines = []
    earlier = _reports(before)
    for report in after.ranks:
        past = earlier.get(report.rank)
        if past is None or report.failure is None:
            continue
        told = f"{name_of(after, report.rank)}: {cause(after, report)}"
        if report.part != past.part:
            if report.part == "forwards":
                lines.append(f"{told}; it is not started again: this peer forwards what the others send")
        elif report.restarts > past.restarts:
            lines.append(f"{told}; it is started again (restart {report.restarts})")
    return lines


def _arrivals(before: JobSummary, after: JobSummary) -> list[str]:
    lines = []
    came = [rank for rank in after.present if rank not in before.present and rank not in after.learning]
    if names := _names(after, (rank for rank in came if rank < len(before.members))):
        lines.append(
            f"{joined(names)} {'are' if len(names) > 1 else 'is'} back, loading (generation {after.generation})"
        )
    if names := _names(after, (rank for rank in came if rank >= len(before.members))):
        lines.append(f"{joined(names)} joined, loading (generation {after.generation})")
    ready = [rank for rank in after.learning if rank not in before.learning]
    first = [rank for rank in ready if rank not in after.returned and not _restarts(after, rank)]
    for ranks, when in (((rank for rank in ready if rank not in first), "again"), (first, "now, too")):
        if names := _names(after, ranks):
            compute = "compute" if len(names) > 1 else "computes"
            lines.append(f"{joined(names)} {compute} {when} (generation {after.generation})")
    return lines


def _restarts(job: JobSummary, rank: int) -> int:
    report = _reports(job).get(rank)
    return 0 if report is None else report.restarts


def _names(job: JobSummary, ranks: Iterable[int]) -> list[str]:
    return [name_of(job, rank) for rank in ranks]


def _were(names: list[str]) -> str:
    return "were" if len(names) > 1 else "was"


def _reports(job: JobSummary) -> dict[int, RankReport]:
    return {report.rank: report for report in job.ranks}
