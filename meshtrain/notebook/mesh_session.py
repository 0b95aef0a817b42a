"""`mt.session`: the paired devices as a place to run functions of this notebook, in step."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshtrain.client import Client, ask
from meshtrain.datadir import data_folder
from meshtrain.errors import DaemonNotRunning, MeshtrainError, UsageError
from meshtrain.following.follower import Follower, LostSight
from meshtrain.following.shown_text import printable_lines, script_text
from meshtrain.following.watching import outcome_lines
from meshtrain.notebook.call import name_of_function, require_cloudpickle
from meshtrain.notebook.outcome import MeshRun, RunFailed
from meshtrain.notebook.results import fetch_results
from meshtrain.notebook.run_view import RankGaveUp, RunView
from meshtrain.notebook.screens import RunScreen, screen_here
from meshtrain.notebook.session_options import SessionOptions
from meshtrain.notebook.shipment import Shipment, make_shipment, rehearsal
from meshtrain.notebook.versions import check_pythons
from meshwire.jobs.lifecycle import JobState
from meshwire.memory_layout.shared_slots import JOB_VARIABLE
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.job import JobSummary, Member
from meshwire.messages.local import Cancel, GetPeers, GetStatus, Peers, Status, Submit, SubmitProgress, Submitted
from meshwire.peer_news import failures, joined, name_of, rank_that_failed
from meshwire.text import printable

ASK_TIMEOUT_S = 60.0  # a question about who would take part: other devices are asked
SUBMIT_TIMEOUT_S = 7 * 86400.0  # as of `meshtrain submit`: the daemon ends a transfer that stands still
CANCEL_TIMEOUT_S = 120.0  # every learner gets its grace


class MeshSession:
    """Runs functions on the devices that are linked with this one. Made by `mt.session`; holds nothing open.

    Attributes:
        last: the newest run whose job has ended well, with the results there are; None before.
    """

    def __init__(self, options: SessionOptions) -> None:
        self.last: MeshRun | None = None
        self._options = options

    @classmethod
    def opened(cls, options: SessionOptions) -> "MeshSession":
        """A session, once it is known who would take part. Raises UsageError, DaemonNotRunning, RequestError."""
        if JOB_VARIABLE in os.environ:
            raise UsageError(
                "mt.session is for notebooks and programs that start jobs; this is a script in a job already"
            )
        require_cloudpickle()
        session = cls(options)
        with session._connected() as client:
            members = session._members(client)
        names = joined([printable(member.name) for member in members])
        screen_here().say(f"{len(members)} {'device' if len(members) == 1 else 'devices'}: {names}")
        return session

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held."""

    def __reduce__(self) -> str:
        raise UsageError("a session stays in its notebook: the function uses it, or gets it as an argument")

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> MeshRun:
        """Calls `function(*args, **kwargs)` on every device, and waits for all of them.

        Inside it `mt.prepare`, `mt.log`, `mt.rank()` and the rest of the API are those of a job's script, or it uses
        torch.distributed. Its code, arguments and the notebook's variables that it uses are sent by cloudpickle: your
        own code, which runs on the paired devices as their user. Modules that lie in the working directory are sent,
        too. What it returns comes back as data, never as code: numbers, texts, lists, dicts, numpy arrays, tensors.

        An exception on any device that comes again when the function is started once more ends the run. Devices that
        are lost or sleep do not, with `mt.prepare`. An interruption (the stop button) cancels the job.

        Raises:
            RunFailed: the function has raised, with the traceback from there; or the job was lost or cancelled.
            UsageError: the function cannot be sent, or the devices have another version of Python.
            RequestError: as `meshtrain submit` fails.
        """
        screen = screen_here()
        name = name_of_function(function)
        with self._connected() as client, tempfile.TemporaryDirectory(prefix="meshtrain-") as folder:
            check_pythons(self._members(client), _software(client))
            at = Path(folder)
            shipment = make_shipment(self._options, function, args, kwargs, at, lambda text: screen.show(text, None))
            submitted = self._submitted(client, shipment, screen)
        for note in (*shipment.notes, *submitted.notes):
            screen.say(f"note: {printable_lines(note)}")
        names = [printable(member.name) for member in submitted.members]
        screen.say(f"job {submitted.job} runs {name} on {joined(names)}")
        return self._followed(name, submitted, screen)

    def _followed(self, name: str, submitted: Submitted, screen: RunScreen) -> MeshRun:
        job, members = submitted.job, submitted.members
        view = RunView(screen, [member.name for member in members])
        folder = data_folder(self._options.data_dir)
        follower = Follower(lambda: Client.connect(folder), job, range(len(members)), newcomers=True)
        try:
            ended = follower.run(view)
        except RankGaveUp as given_up:
            self._cancel(job, now=True)
            raise self._failure(name, given_up.job, given_up.rank, follower) from None
        except LostSight as error:
            raise LostSight(f"{error}. Next: meshtrain up, then meshtrain logs -f {job}") from error
        except KeyboardInterrupt:
            self._interrupted(job, screen)
            raise
        if ended.state != JobState.SUCCEEDED:
            raise self._failure(name, ended, rank_that_failed(ended), follower)
        with self._connected() as client:
            results, missing = fetch_results(client, ended)
        lines = outcome_lines(ended)
        self.last = MeshRun(job, results, missing, view.curves.points, lines[0])
        for report in ended.ranks:  # it was to be started again when the others were through
            if report.failure is not None and report.rank in missing and follower.error_of(report.rank):
                raise self._failure(name, ended, report.rank, follower)
        for line in lines:
            screen.say(line)
        for rank, why in missing.items():
            screen.say(f"note: no result of {name_of(ended, rank)}: {printable(why)}")
        return self.last

    @staticmethod
    def _failure(name: str, job: JobSummary, rank: int | None, follower: Follower) -> RunFailed:
        """What is raised here for how the job has ended."""
        of_scripts = job.state not in (JobState.CANCELLED, JobState.LOST)
        told = [script_text(text) for text in failures(job)] if of_scripts else outcome_lines(job)
        told.sort(key=lambda text: text.startswith("error: "))  # what is of no device may follow from what is
        trace = "" if rank is None else follower.error_of(rank)
        where = "" if rank is None or not trace else f"On {name_of(job, rank)}, rank {rank}:\n{trace}"
        return RunFailed(f"{name}: " + "\n".join(told), job, rank, where)

    def _interrupted(self, job: str, screen: RunScreen) -> None:
        screen.say(f"interrupted: job {job} is being cancelled; a second interruption leaves it to go on")
        try:
            self._cancel(job, now=False)
        except (MeshtrainError, TimeoutError, OSError) as error:
            screen.say(f"job {job} could not be cancelled: {error}. Next: meshtrain cancel --now {job}")
            return
        except KeyboardInterrupt:
            screen.say(f"job {job} may go on. See meshtrain jobs, meshtrain cancel {job}")
            return
        screen.say(f"job {job} is cancelled on all devices. To go on with it: meshtrain submit --resume {job}")

    def _cancel(self, job: str, *, now: bool) -> None:
        with self._connected() as client:
            ask(client, Cancel(job=job, now=now), Done, name=f"cancelling {job}", timeout_s=CANCEL_TIMEOUT_S)

    @contextmanager
    def _connected(self) -> Iterator[Client]:
        """A connection to the daemon of this machine."""
        try:
            client = Client.connect(data_folder(self._options.data_dir))
        except DaemonNotRunning as error:
            raise DaemonNotRunning(f"{error}. Start it: meshtrain up") from error
        try:
            yield client
        finally:
            client.close()

    def _members(self, client: Client) -> tuple[Member, ...]:
        """Who would take part now. Raises RequestError, as `meshtrain submit` does, where that is not who was asked
        for."""
        with tempfile.TemporaryDirectory(prefix="meshtrain-") as folder:
            body = rehearsal(self._options, Path(folder))
            return ask(client, body, Submitted, name="who takes part", timeout_s=ASK_TIMEOUT_S).members

    @staticmethod
    def _submitted(client: Client, shipment: Shipment, screen: RunScreen) -> Submitted:
        def show(event: Wire) -> None:
            if isinstance(event, SubmitProgress):
                part = f" ({event.done_bytes / event.total_bytes:.0%})" if event.total_bytes else ""
                screen.show(f"{printable(event.text)}{part}", None)

        body: Submit = shipment.body
        try:
            return ask(client, body, Submitted, name="submit", timeout_s=SUBMIT_TIMEOUT_S, on_event=show)
        except KeyboardInterrupt:
            screen.say("interrupted while submitting. See whether the job was started: meshtrain jobs")
            raise


def _software(client: Client) -> dict[str, Any]:
    """What each device runs, this one's daemon included."""
    status = ask(client, GetStatus(), Status, name="status")
    peers = ask(client, GetPeers(), Peers, name="list of peers").peers
    return {status.device: status.software} | {
        peer.device: peer.software for peer in peers if peer.software is not None
    }
