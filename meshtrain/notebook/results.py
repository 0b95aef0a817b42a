"""What the function has returned on each device, fetched from there and read as data."""

from typing import Any

from meshtrain.client import Client, ask
from meshtrain.following.outputs import OutputBroken, output_pieces
from meshtrain.notebook.call import RESULT
from meshtrain.train.returned_values import BYTES_MAX, NotAResult, unpack_value
from meshwire.messages.job import JobSummary, ListOutputs, OutputFile, Outputs

LIST_TIMEOUT_S = 60.0


def fetch_results(client: Client, job: JobSummary) -> tuple[dict[int, Any], dict[int, str]]:
    """The results by rank, and why the others' are missing. Raises what `ask` raises."""
    listed = ask(client, ListOutputs(job=job.job), Outputs, name="list of results", timeout_s=LIST_TIMEOUT_S)
    files = {file.rank: file for file in listed.files if file.path == RESULT}
    away = dict(listed.unreached)
    results: dict[int, Any] = {}
    missing: dict[int, str] = {}
    for rank in range(len(job.members)):
        if rank not in files:
            missing[rank] = away.get(rank, "its function has not ended")
            continue
        try:
            results[rank] = _fetched(client, job.job, files[rank])
        except (OutputBroken, NotAResult) as error:
            missing[rank] = str(error)
    return results, missing


def _fetched(client: Client, job: str, file: OutputFile) -> Any:
    if file.size_bytes > BYTES_MAX:
        raise OutputBroken(f"rank {file.rank} offers a result of {file.size_bytes} bytes, at most {BYTES_MAX} are read")
    return unpack_value(b"".join(output_pieces(client, job, file)))
