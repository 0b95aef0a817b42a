"""What a person at a notebook meets: results by rank, errors with their traceback, the stop button, the display."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshtrain as mt
from meshtrain.errors import RequestError, UsageError
from meshtrain.notebook import mesh_session
from meshtrain.notebook.call import RESULT
from meshtrain.notebook.curves import POINTS_MAX, Curves
from meshtrain.notebook.mesh_session import MeshSession
from meshtrain.notebook.outcome import RunFailed
from meshtrain.notebook.run_view import LOG_LINES_MAX, RunView
from meshtrain.notebook.screens import CellScreen, TextScreen, screen_here
from meshtrain.pictures.curves_picture import curves_svg
from meshtrain.train.returned_values import pack_value
from meshwire.jobs.files import FileManifest
from meshwire.jobs.lifecycle import JobState
from meshwire.jobs.script_log import ERROR_BEGINS, ERROR_ENDS
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done, Failure
from meshwire.messages.job import Fetch, Fetched, JobSummary, ListOutputs, Metrics, OutputFile, Outputs, RankReport
from meshwire.messages.local import (
    Cancel,
    GetPeers,
    GetStatus,
    Peers,
    PeerSummary,
    Submit,
    SubmitProgress,
    Submitted,
    Watch,
    Watched,
)
from tests.daemon.fakedaemon import BERT, JOB, MEMBERS, SOFTWARE, STATUS, Emit, Endpoint, summary

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
FAILED = f"loading\n{ERROR_BEGINS}\nTraceback (most recent call last):\nValueError: boom\n{ERROR_ENDS}\n"
WHY = "rank 1 (bert): In[3], line 2, in f: ValueError: boom"


class Daemon:
    """A daemon with anna and bert, whose job runs as a test says."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.seen: list[JobSummary] = []  # before its end
        self.end = summary()
        self.results: dict[int, bytes] = {0: pack_value("of anna"), 1: pack_value("of bert")}
        self.logs = {0: "", 1: ""}
        self.files: set[str] = set()
        software = SOFTWARE.model_copy(update={"python": f"{HERE}.1"})
        self.peer = PeerSummary(
            device=BERT,
            name="bert",
            state="linked",
            address=None,
            rtt_s=None,
            software=software,
            cores=2,
            memory_bytes=1,
        )
        endpoint.answers |= {
            Submit: self._submit,
            GetStatus: STATUS.model_copy(update={"software": software}),
            GetPeers: lambda *_: Peers(peers=(self.peer,)),
            Watch: self._watch,
            Fetch: self._fetch,
            ListOutputs: lambda *_: Outputs(
                files=tuple(OutputFile(rank=k, path=RESULT, size_bytes=len(v)) for k, v in self.results.items())
            ),
            Cancel: Done(),
        }

    def submitted(self) -> list[Submit]:
        return [body for body in self.endpoint.of_type(Submit) if not body.dry_run]

    def _submit(self, body: Submit, emit: Emit) -> Wire:
        self.files = {entry.path for entry in FileManifest.unpack(Path(body.manifest).read_bytes()).entries}
        emit(SubmitProgress(text="sending files to bert", done_bytes=1, total_bytes=2))
        return Submitted(job=JOB, members=MEMBERS, notes=())

    def _watch(self, _: Watch, emit: Emit) -> Wire:
        for seen in self.seen:
            emit(Watched(summary=seen))
        return Watched(summary=self.end)

    def _fetch(self, body: Fetch, _: Emit) -> Wire:
        whole = self.logs[body.rank].encode() if body.what == "log" else self.results[body.rank]
        data = whole[body.offset_bytes :][: body.max_bytes]
        return Fetched(data=data, total_bytes=len(whole), end=body.offset_bytes + len(data) == len(whole))


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    endpoint = Endpoint(tmp_path / "daemon")
    yield Daemon(endpoint)
    endpoint.close()


def opened(daemon: Daemon, **options: Any) -> MeshSession:
    return mt.session(data_dir=daemon.endpoint.data_dir, **options)


def report(rank: int, **changes: Any) -> RankReport:
    return RankReport(job=JOB, rank=rank, state="running", **changes)


def test_results_come_back_by_rank_and_logs_are_shown(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.logs[1] = "hello\n"
    values = tuple(report(rank, metrics=Metrics(round=3, step=3, values=(("loss", rank + 1.0),))) for rank in (0, 1))
    daemon.seen = [summary(JobState.RUNNING, ranks=values)]
    with opened(daemon, peers=2) as mesh:
        run = mesh.run(lambda: 1)
    assert run.results == {0: "of anna", 1: "of bert"}
    assert (run.result, run.job, dict(run.missing)) == ("of anna", JOB, {})
    assert mesh.last is run
    assert run.curves == {"loss": [(3, 1.5)]}
    assert "<svg" in str(run.plot())
    assert 'src="data:image/svg+xml;base64,' in run.plot()._repr_html_()
    shown = capsys.readouterr()
    assert shown.out == "[1 bert] hello\n"
    told = ("2 devices: anna and bert", "sending files to bert (50%)", f"job {JOB} runs _lambda_ on anna and bert")
    assert all(line in shown.err for line in told)
    (body,) = daemon.submitted()
    assert (body.peers, body.sync, body.codec, body.name) == (2, "bsp", None, "_lambda_")
    assert daemon.files >= {"mesh_run.py", "mesh_run.call"}


def test_who_was_lost_has_no_result_and_the_others_have(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor has who sends what is no data: it is told, and not loaded."""
    del daemon.results[0]
    daemon.results[1] = b"\x80\x04cos\nsystem\n"
    run = opened(daemon).run(print)
    assert run.results == {}
    assert run.missing[0] == "its function has not ended"
    assert "note: no result of bert: " in capsys.readouterr().err
    with pytest.raises(UsageError, match="rank 0 has no result"):
        _ = run.result


def test_an_exception_there_is_raised_here(daemon: Daemon) -> None:
    daemon.logs[1] = FAILED
    daemon.end = summary(JobState.FAILED, error=WHY, ranks=(report(1, failure=WHY),))
    with pytest.raises(RunFailed) as raised:
        opened(daemon).run(lambda: 1)
    assert str(raised.value).startswith("_lambda_: error on bert: In[3], line 2, in f: ValueError: boom")
    assert raised.value.remote_traceback.endswith("Traceback (most recent call last):\nValueError: boom")
    assert (raised.value.rank, raised.value.device, raised.value.job) == (1, "bert", JOB)


def test_what_fails_on_one_device_for_good_ends_the_run(daemon: Daemon) -> None:
    """The job would go on without it, and its result; a script that is started again is waited for."""
    again = summary(JobState.RUNNING, ranks=(report(1, failure=WHY, restarts=1),))
    daemon.seen = [again]
    assert opened(daemon).run(print).results.keys() == {0, 1}
    daemon.seen = [again, summary(JobState.RUNNING, ranks=(report(1, failure=WHY, part="forwards"),))]
    with pytest.raises(RunFailed, match="error on bert: In"):
        opened(daemon).run(print)
    assert daemon.endpoint.of_type(Cancel) == [Cancel(job=JOB, now=True)]


def test_what_has_failed_when_the_others_are_through_is_raised_too(daemon: Daemon) -> None:
    """It was started again, and they did not wait. A process that was killed is a loss, and no error of it."""
    del daemon.results[1]
    daemon.logs[1] = FAILED + f"{ERROR_BEGINS}\nthe daemon ends this script\n{ERROR_ENDS}\n"
    daemon.end = summary(ranks=(report(0, exit_code=0), report(1, failure=WHY, restarts=1)))
    mesh = opened(daemon)
    with pytest.raises(RunFailed, match="error on bert: In") as raised:
        mesh.run(print)
    assert raised.value.remote_traceback.endswith("ValueError: boom")
    assert mesh.last is not None
    assert mesh.last.results == {0: "of anna"}
    daemon.logs[1] = f"{ERROR_BEGINS}\nthe daemon ends this script\n{ERROR_ENDS}\n"
    assert mesh.run(print).results == {0: "of anna"}


def test_a_run_that_somebody_cancels_elsewhere_has_failed(daemon: Daemon) -> None:
    daemon.end = summary(JobState.CANCELLED, error="cancelled by bert")
    with pytest.raises(RunFailed, match="cancelled after 35 s, by bert"):
        opened(daemon).run(print)


def test_the_stop_button_cancels_and_says_so(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pressed(TextScreen):
        def show(self, line: str, svg: str | None) -> None:
            if line.startswith("train "):
                raise KeyboardInterrupt

    monkeypatch.setattr(mesh_session, "screen_here", Pressed)
    daemon.seen = [summary(JobState.RUNNING)]
    with pytest.raises(KeyboardInterrupt):
        opened(daemon).run(print)
    assert daemon.endpoint.of_type(Cancel) == [Cancel(job=JOB, now=False)]
    assert f"cancelled on all devices. To go on with it: meshtrain submit --resume {JOB}" in capsys.readouterr().err
    daemon.endpoint.answers[Cancel] = Failure(error="bert does not answer")
    with pytest.raises(KeyboardInterrupt):
        opened(daemon).run(print)
    assert f"bert does not answer. Next: meshtrain cancel --now {JOB}" in capsys.readouterr().err


def test_nothing_is_sent_to_devices_that_could_not_load_it(daemon: Daemon) -> None:
    daemon.peer = daemon.peer.model_copy(update={"software": SOFTWARE.model_copy(update={"python": "3.7.1"})})
    with pytest.raises(UsageError, match=rf"bert has Python 3\.7, and this process Python {HERE}"):
        opened(daemon).run(print)
    assert not daemon.submitted()


def test_who_is_asked_for_and_not_there_is_said_when_the_session_opens(daemon: Daemon) -> None:
    daemon.endpoint.answers[Submit] = Failure(error="--peers 4: only 2 devices with torch are linked")
    with pytest.raises(RequestError, match="only 2 devices"):
        opened(daemon, peers=4)
    (asked,) = daemon.endpoint.of_type(Submit)
    assert (asked.peers, asked.dry_run) == (4, True)


def test_a_session_is_not_sent(daemon: Daemon) -> None:
    mesh = opened(daemon)
    with pytest.raises(UsageError, match="stays in its notebook"):
        mesh.run(lambda: mesh)


def test_a_cell_has_one_display_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, dict[str, str]]] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(("update", data))

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        shown.append(("display", data))
        return Handle()

    shell = SimpleNamespace(kernel=object())
    faked = {"IPython": SimpleNamespace(get_ipython=lambda: shell), "IPython.display": SimpleNamespace(display=display)}
    for name, module in faked.items():
        monkeypatch.setitem(sys.modules, name, module)
    screen = screen_here()
    assert isinstance(screen, CellScreen)
    screen.show("round 1 <b>", None)
    screen.show("round 2", "<svg/>")
    assert [what for what, _ in shown] == ["display", "update"]
    assert shown[0][1] == {"text/plain": "round 1 <b>", "text/html": '<pre style="margin:0">round 1 &lt;b&gt;</pre>'}
    assert "data:image/svg+xml;base64," in shown[1][1]["text/html"]
    shell.kernel = None
    assert type(screen_here()) is TextScreen, "IPython on a terminal would pile displays up"


def test_a_cell_shows_so_many_lines_of_log_and_says_where_the_rest_is(capsys: pytest.CaptureFixture[str]) -> None:
    view = RunView(TextScreen(), ["anna"])
    for _ in range(3):
        view.lines(0, ["line"] * (LOG_LINES_MAX // 2 + 1))
    shown = capsys.readouterr()
    assert shown.out.count("\n") == LOG_LINES_MAX
    assert shown.err.count("meshtrain logs") == 1


def looked_at(curves: Curves, round_: int, **values: float) -> None:
    metrics = Metrics(round=round_, values=tuple(values.items()))
    curves.look(summary(JobState.RUNNING, ranks=(report(0, metrics=metrics),)))


def test_curves_are_bounded_and_forget_rounds_that_were_given_up() -> None:
    curves = Curves()
    for round_ in range(1, 5 * POINTS_MAX):
        looked_at(curves, round_, loss=1.0)
    assert POINTS_MAX / 4 < len(curves.points["loss"]) <= POINTS_MAX
    looked_at(curves, 10, loss=2.0)
    rounds = [round_ for round_, _ in curves.points["loss"]]
    assert rounds == sorted(set(rounds))
    assert curves.points["loss"][-1][0] <= 10


def test_curves_are_drawn_whatever_was_logged() -> None:
    svg = curves_svg("t", {"<loss>": [(1, 2.0), (2, float("nan")), (3, 1.0), (4, 0.5)], "flat": [(1, 0.0), (9, 0.0)]})
    assert "&lt;loss&gt;" in svg
    assert svg.count("<polyline") == 2
    assert svg.count("<circle") == 1, "a point between gaps"
    assert "nan" not in svg
    assert "mt.log(loss=loss)" in curves_svg("t", {})
    assert "<polyline" not in curves_svg("t", {"x": [(1, float("inf"))], "one": [(1, 3.0)]})
