"""`submit --resume JOB[@CHECKPOINT]`: which checkpoint is meant, and what may be said beside it."""

import typer

from meshtrain.cli.ui.errors import BadCommandLine
from meshtrain.cli.ui.job import find_job
from meshtrain.client import Client
from meshwire.checkpoints.manifest import CheckpointName
from meshwire.messages.local import ResumeFrom

ROUND_MAX = 10**9
AS_BEFORE = frozenset(("resume", "on", "peers", "detach", "json", "notify", "data_dir"))  # may be said all the same


def resume_from(client: Client, text: str) -> ResumeFrom:
    """Reads what was typed as JOB[@CHECKPOINT]. Raises CliError."""
    prefix, at, typed = text.partition("@")
    if not at:
        return ResumeFrom(job=find_job(client, prefix).job)
    try:
        name = CheckpointName.parse(typed)
    except ValueError:
        name = None
    if name is None or name.round > ROUND_MAX:
        raise BadCommandLine(
            f"--resume {text}: a round is a number, as in {prefix}@500; what was given up is named as it is listed",
            f"meshtrain checkpoints {prefix}",
        )
    return ResumeFrom(job=find_job(client, prefix).job, round=name.round, given_up=name.given_up or None)


def check_alone(context: typer.Context, resume: str) -> None:
    """Refuses options beside `--resume` without a script, for then all is as it was. Raises BadCommandLine."""
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in AS_BEFORE and _typed(context, name):
            raise BadCommandLine(
                f"{parameter.opts[-1]} changes the job, which without SCRIPT goes on as it was",
                f"meshtrain submit --resume {resume} {parameter.opts[-1]} … SCRIPT",
            )


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
