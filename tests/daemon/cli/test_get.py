"""Results of a job: what can be reached is fetched, what is missing is named, and a later run completes it."""

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import pytest

from meshtraind.jobs.admission import Admission
from meshtraind.jobs.queries import JobQueries
from meshtraind.jobs.registry import JobRegistry
from meshtraind.peers.node import Node
from meshtraind.storage.fetch import list_outputs
from meshtraind.transport.connection import ConnectionEnded
from meshwire import limits
from meshwire.jobs.lifecycle import JobState
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope, Failure, Role, decode, encode
from meshwire.messages.job import Fetch, Fetched, ListOutputs, OutputFile, Outputs
from meshwire.messages.local import GetJobs
from tests.daemon.fakedaemon import JOB, MEMBERS, Emit, Endpoint, known_jobs, member, run, summary

pytestmark = pytest.mark.usefixtures("plain_environment")

CLEO = member("ef" * 32, "cleo")
THREE = (*MEMBERS, CLEO)
CHANGED_NS = 1_790_000_000_123_456_789
AWAY = "cleo is not linked now"
BIG = bytes(range(256)) * 4000  # several pieces


class Mesh:
    """What three members have, as the daemon here tells it; `away` are not linked, `vanish` stop in the middle."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.files = {(0, "a"): b"anna", (1, "big"): BIG, (1, "c"): b"bert", (2, "e"): b"cleo", (2, "f"): b"more"}
        self.changed_ns = dict.fromkeys(self.files, CHANGED_NS)
        self.away: set[int] = set()
        self.vanish: set[int] = set()
        self.before_piece: Callable[[Fetch], None] = lambda _: None
        self.endpoint = endpoint
        endpoint.answers[GetJobs] = known_jobs(summary(members=THREE))
        endpoint.answers[ListOutputs] = self._list
        endpoint.answers[Fetch] = self._fetch

    @property
    def asked(self) -> list[tuple[int, str]]:
        """Of which files pieces were asked for since the last look, in order."""
        pieces = dict.fromkeys((body.rank, body.path) for body in self.endpoint.of_type(Fetch))
        self.endpoint.asked.clear()
        return list(pieces)

    def _list(self, _: ListOutputs, __: Emit) -> Wire:
        files = tuple(
            OutputFile(rank=rank, path=path, size_bytes=len(data), changed_ns=self.changed_ns[rank, path])
            for (rank, path), data in self.files.items()
            if rank not in self.away
        )
        unreached = tuple((rank, f"{THREE[rank].name} is not linked now") for rank in sorted(self.away))
        return Outputs(files=files, unreached=unreached)

    def _fetch(self, body: Fetch, _: Emit) -> Wire:
        self.before_piece(body)
        if body.rank in self.vanish and (body.offset_bytes or len(self.files[body.rank, body.path or ""]) < 9):
            return Failure(error=f"{THREE[body.rank].name} does not answer: closed")
        data = self.files[body.rank, body.path or ""]
        piece = data[body.offset_bytes : body.offset_bytes + body.max_bytes]
        return Fetched(data=piece, total_bytes=len(data), end=body.offset_bytes + len(piece) >= len(data))


@pytest.fixture
def mesh(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mesh:
    monkeypatch.chdir(tmp_path)
    return Mesh(endpoint)


def lying(folder: str = JOB) -> dict[str, bytes]:
    root = Path(folder)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def whole(mesh: Mesh, *ranks: int) -> dict[str, bytes]:
    return {f"rank{rank}/{path}": data for (rank, path), data in mesh.files.items() if rank in ranks}


def test_one_member_that_is_away_hides_nothing_and_a_later_run_completes_it(mesh: Mesh) -> None:
    mesh.away = {2}
    shown = run("get")
    assert shown.exit_code == 4
    assert lying() == whole(mesh, 0, 1)
    assert shown.stdout.splitlines() == [f"{JOB}/rank0/a", f"{JOB}/rank1/big", f"{JOB}/rank1/c"]
    assert shown.stderr.splitlines()[-4:] == [
        "error: not everything is here:",
        f"  rank2 (cleo): its files are not known; {AWAY}",
        f"try: meshtrain get {JOB}    (once `meshtrain peers` shows cleo as linked; what is here is not fetched again)",
        f"  or meshtrain get {JOB} --partial    (if cleo will not come back: what is here is all)",
    ]
    assert mesh.asked == [(0, "a"), (1, "big"), (1, "c")]
    mesh.away = set()
    again = run("get")
    assert (again.exit_code, lying()) == (0, whole(mesh, 0, 1, 2))
    assert mesh.asked == [(2, "e"), (2, "f")]  # nothing that was here
    assert "2 files fetched, 8 B, below" in again.stderr
    assert "3 were here already" in again.stderr
    assert len(again.stdout.splitlines()) == 5
    assert (run("get").exit_code, mesh.asked) == (0, [])


def test_who_never_comes_back_does_not_make_every_get_fail(mesh: Mesh) -> None:
    """A person says so, and a script that fetches results goes on. What is missing is still named."""
    mesh.away = {2}
    assert run("get").exit_code == 4
    shown = run("get", "--partial")
    assert shown.exit_code == 0
    assert lying() == whole(mesh, 0, 1)
    assert f"note: not everything is here:\n  rank2 (cleo): its files are not known; {AWAY}\n" in shown.stderr
    assert "try:" not in shown.stderr
    mesh.away = {0, 1, 2}
    nothing = run("get", "--partial", "-o", "none")
    assert nothing.exit_code == 4  # nothing is not all
    assert "--partial " not in nothing.stderr


def test_a_member_that_vanishes_in_the_middle_leaves_no_half_file(mesh: Mesh) -> None:
    mesh.vanish = {1}
    shown = run("get", JOB, "-o", "my results")
    assert shown.exit_code == 4
    assert lying("my results") == whole(mesh, 0, 2)
    assert "  rank1 (bert): 2 files, 1000.0 KiB; bert does not answer: closed" in shown.stderr
    assert f"try: meshtrain get {JOB} -o 'my results'    (once" in shown.stderr
    mesh.vanish = set()
    assert run("get", JOB, "-o", "my results").exit_code == 0
    assert lying("my results") == whole(mesh, 0, 1, 2)


def test_who_does_not_answer_is_not_asked_for_each_of_its_files(mesh: Mesh) -> None:
    """Each question to a device that is silent takes ten seconds; one file that is gone hides no other."""
    for number in range(20):
        mesh.files[1, f"x{number:02d}"] = b"small"
        mesh.changed_ns[1, f"x{number:02d}"] = CHANGED_NS
    mesh.vanish = {1}
    assert run("get").exit_code == 4
    assert [rank for rank, _ in mesh.asked].count(1) == 2
    gone = mesh.files.pop((1, "c"))
    mesh.vanish, listed = set(), Outputs(files=cast(Outputs, mesh._list(ListOutputs(job=JOB), print)).files)
    missing = OutputFile(rank=1, path="c", size_bytes=len(gone), changed_ns=CHANGED_NS)
    mesh.endpoint.answers[ListOutputs] = Outputs(files=(listed.files[0], missing, *listed.files[1:]))
    mesh.endpoint.answers[Fetch] = lambda body, emit: (
        Failure(error="cannot read the output: No such file") if body.path == "c" else mesh._fetch(body, emit)
    )
    shown = run("get")
    assert shown.exit_code == 4
    assert "  rank1 (bert): 1 file, 4 B; cannot read the output: No such file" in shown.stderr
    assert lying() == whole(mesh, 0, 1, 2)


def test_only_what_is_wanted_is_missed(mesh: Mesh) -> None:
    """Whoever wants a file of this device does not hear of others."""
    mesh.away = {1, 2}
    assert run("get", JOB, "rank0").exit_code == 0
    shown = run("get", JOB, "rank2/e", "-o", "out")
    assert (shown.exit_code, shown.stdout) == (4, "")
    assert "rank2 (cleo): its files are not known" in shown.stderr
    assert "bert" not in shown.stderr
    assert f"try: meshtrain get {JOB} rank2/e -o out" in shown.stderr
    anywhere = run("get", JOB, "model.pt")  # of any rank
    assert anywhere.exit_code == 4
    assert "shows bert and cleo as linked" in anywhere.stderr
    mesh.away = set()
    none = run("get", JOB, "rank2/x")
    assert none.exit_code == 1
    assert f"job {JOB} has no result 'rank2/x'" in none.stderr


def test_with_all_away_nothing_is_made(mesh: Mesh) -> None:
    mesh.away = {0, 1, 2}
    assert run("get").exit_code == 4
    assert not Path(JOB).exists()


@pytest.mark.parametrize("here", ["changed", "grown", "there"])
def test_what_has_changed_on_either_side_is_not_taken_for_what_is_there(mesh: Mesh, here: str) -> None:
    """Equal size is not enough; and nobody's file is overwritten unless told."""
    run("get")
    mine = Path(JOB) / "rank2" / "e"
    match here:
        case "changed":
            mine.write_bytes(b"MINE")
        case "grown":
            mine.write_bytes(b"cleo and more")
        case "there":
            mesh.files[2, "e"], mesh.changed_ns[2, "e"] = b"CLEO", CHANGED_NS + 10**9
    before = mine.read_bytes()
    mesh.asked  # noqa: B018
    refused = run("get")
    assert refused.exit_code == 1
    assert f"not overwritten: {JOB}/rank2/e" in refused.stderr
    assert (mine.read_bytes(), mesh.asked) == (before, [])
    assert run("get", "--force").exit_code == 0
    assert (mine.read_bytes(), mesh.asked) == (mesh.files[2, "e"], [(2, "e")])


@pytest.mark.usefixtures("mesh")
def test_a_file_system_with_coarse_times_completes_too() -> None:
    run("get")
    coarse = Path(JOB) / "rank0" / "a"
    os.utime(coarse, ns=(0, CHANGED_NS // (2 * 10**9) * 2 * 10**9))
    assert run("get").exit_code == 0
    os.utime(coarse, ns=(0, CHANGED_NS - 1))
    assert run("get").exit_code == 1


class FullFile:
    """A file on a disk that takes so many bytes, and no more."""

    def __init__(self, file: IO[bytes], room: list[int]) -> None:
        self._file, self._room = file, room

    def __enter__(self) -> "FullFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        self._room[0] -= len(data)
        if self._room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(data)


def test_a_disk_that_is_full_is_named_and_what_was_fetched_stays(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    room, opened = [300_000], Path.open

    def full(path: Path, *args: Any, **named: Any) -> Any:
        file = opened(path, *args, **named)
        return FullFile(file, room) if path.suffix == ".part" else file

    monkeypatch.setattr(Path, "open", full)
    shown = run("get")
    monkeypatch.setattr(Path, "open", opened)
    assert shown.exit_code == 1
    assert f"error: cannot write {JOB}/rank1/big: No space left on device" in shown.stderr
    assert "try: the same command again, which fetches only what is missing" in shown.stderr
    assert lying() == whole(mesh, 0)
    mesh.asked  # noqa: B018
    assert run("get").exit_code == 0
    assert (0, "a") not in mesh.asked
    assert lying() == whole(mesh, 0, 1, 2)


def test_what_does_not_fit_on_the_disk_is_said_before_anything_is_fetched(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    shown = run("get", "-o", "a/b/c")
    assert shown.exit_code == 1
    assert "1000.0 KiB are to be fetched, and 1000 B are free in" in shown.stderr
    assert (mesh.asked, Path("a").exists()) == ([], False)
    assert run("get", JOB, "rank2").exit_code == 0


def test_a_member_that_sends_without_end_fills_no_disk(mesh: Mesh) -> None:
    """What was listed is taken; of a file that grows meanwhile its beginning."""
    mesh.endpoint.answers[Fetch] = lambda _, __: Fetched(data=b"x" * 100, total_bytes=2**40, end=False)
    shown = run("get", JOB, "rank2")
    assert shown.exit_code == 4
    assert lying() == {}
    mesh.endpoint.answers[Fetch] = mesh._fetch
    listed = cast(Outputs, mesh._list(ListOutputs(job=JOB), print))
    mesh.endpoint.answers[ListOutputs] = listed
    mesh.files[2, "e"] = b"cleo writes on"
    assert run("get", JOB, "rank2").exit_code == 0
    assert lying() == {"rank2/e": b"cleo", "rank2/f": b"more"}


# --- the daemon's part ---


def questions(tmp_path: Path, replies: dict[str, Callable[[Wire], Wire] | Exception]) -> JobQueries:
    """Of anna's daemon, whose own rank is the middle one, with links to those that have replies."""

    def link(answer: Callable[[Wire], Wire] | Exception) -> Any:
        async def request(body: Wire, **_: object) -> Wire:
            await asyncio.sleep(0)
            if isinstance(answer, Exception):
                raise answer
            return answer(body)

        return SimpleNamespace(connection=SimpleNamespace(request=request))

    members = (MEMBERS[1], MEMBERS[0], CLEO, member("99" * 32, "dora"))
    node = SimpleNamespace(
        device=MEMBERS[0].device,
        links={one.device: link(replies[one.name]) for one in members if one.name in replies},
        job_folder=lambda _: tmp_path,
    )
    job = SimpleNamespace(state=JobState.RUNNING, summary=lambda: SimpleNamespace(members=members))
    board = SimpleNamespace(jobs={JOB: job})
    return JobQueries(cast(Node, node), cast(JobRegistry, board), cast(Admission, None))


@pytest.mark.asyncio
async def test_the_list_begins_with_this_disk_and_says_who_did_not_answer(tmp_path: Path) -> None:
    (tmp_path / "out" / "1").mkdir(parents=True)
    (tmp_path / "out" / "1" / "own").write_bytes(b"abc")
    os.utime(tmp_path / "out" / "1" / "own", ns=(0, CHANGED_NS))
    theirs = OutputFile(rank=0, path="m", size_bytes=1)
    asked = questions(
        tmp_path, {"bert": lambda _: Outputs(files=(theirs,), omitted=3), "cleo": ConnectionEnded("silent for 5 s")}
    )
    listed = await asked.outputs(ListOutputs(job=JOB), forward=True)
    assert listed.files == (OutputFile(rank=1, path="own", size_bytes=3, changed_ns=CHANGED_NS), theirs)
    assert listed.unreached == ((2, "cleo does not answer: silent for 5 s"), (3, "dora is not linked now"))
    assert listed.omitted == 3
    assert (await asked.outputs(ListOutputs(job=JOB), forward=False)).unreached == ()


@pytest.mark.asyncio
async def test_a_liar_cannot_speak_for_others_nor_fill_the_answer(tmp_path: Path) -> None:
    """Its list is left out; those of the others stand."""
    good = OutputFile(rank=0, path="m", size_bytes=1)
    liar = OutputFile(rank=0, path="m", size_bytes=2)
    asked = questions(
        tmp_path,
        {
            "bert": lambda _: Outputs(files=(good,)),
            "cleo": lambda _: Outputs(files=(liar,)),
            "dora": ConnectionEnded("ü" * limits.CONTROL_BYTES_MAX),
        },
    )
    listed = await asked.outputs(ListOutputs(job=JOB), forward=True)
    assert listed.files == (good,)
    assert listed.unreached[0] == (2, "cleo lists files of other ranks")
    assert len(listed.unreached[1][1]) == limits.REASON_CHARS_MAX
    most = Outputs(files=(), unreached=tuple((rank, "ü" * limits.REASON_CHARS_MAX) for rank in range(64)))
    assert len(encode(Envelope(Role.REPLY, 1, most))) < limits.CONTROL_BYTES_MAX - limits.OUTPUT_LIST_BYTES_MAX
    assert isinstance(decode(encode(Envelope(Role.REPLY, 1, listed))), Envelope)


@pytest.mark.asyncio
async def test_times_of_files_before_1970_travel(tmp_path: Path) -> None:
    (tmp_path / "out" / "0").mkdir(parents=True)
    (tmp_path / "out" / "0" / "old").write_bytes(b"")
    os.utime(tmp_path / "out" / "0" / "old", (-10, -10))
    assert [file.changed_ns for file in await list_outputs(tmp_path, 0)] == [0]
