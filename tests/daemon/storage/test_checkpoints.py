"""Checkpoints on a disk: whole or not at all, whatever is killed, cut off, swapped or flipped (J1, V)."""

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest

from meshtraind.jobs.admission import Admission
from meshtraind.jobs.queries import JobQueries
from meshtraind.jobs.registry import JobRegistry
from meshtraind.peers.node import Node
from meshtraind.runtime.threads import Stopped
from meshtraind.storage.background_pacing import Pacer
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.checkpoint_store import Checkpoint, CheckpointError, CheckpointStore, Rejected, list_checkpoints
from meshtraind.storage.cleanup import clean_up
from meshtraind.storage.fetch import serve
from meshtraind.storage.state_transfer import fetch_state, offer, store_state
from meshtraind.transport.connection import Connection, ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.checkpoints.manifest import MANIFEST_FILE, CheckpointFacts, CheckpointName, GenerationRecord, unit_file
from meshwire.jobs.lifecycle import JobState
from meshwire.message_base import Wire
from meshwire.messages.generation import DealState
from meshwire.messages.job import Checkpoints, CheckpointSummary, Fetch, ListCheckpoints, Member
from meshwire.messages.learner import SampleSpace, Waiting
from meshwire.messages.link import Software
from meshwire.messages.rounds import SampleBlock
from tests.computing import computing

JOB = "1kx3m9q2v7bd"
UNITS = (b"a weight and its momentum", b"a running mean", b"options")
MEMBERS = tuple(Member(device=f"{n:064x}", incarnation=n, name=name) for n, name in enumerate(("anna", "bert", "ä")))
SOFTWARE = Software(meshtrain="0.1.0", python="3.11.7", torch="2.13.0", system="Linux x86_64")


class Usable(NamedTuple):
    checkpoint: Checkpoint | None
    rejected: list[Rejected]


def usable(store: CheckpointStore, check: Callable[[], None] = lambda: None) -> Usable:
    """The newest one that is whole, and why newer ones are not."""
    rejected: list[Rejected] = []
    for found in store.listed():
        wrong = found.reason if isinstance(found, Rejected) else store.verify(found, check)
        if wrong is None:
            assert isinstance(found, Checkpoint)
            return Usable(found, rejected)
        rejected.append(Rejected(found.round, wrong))
    return Usable(None, rejected)


def facts(round_: int, **changes: Any) -> CheckpointFacts:
    first = computing(JOB, MEMBERS[0].device, MEMBERS)
    generation = first.model_copy(update={"number": 2, "parent": first.digest(), "learning": (0, 2)})
    fields: dict[str, Any] = {
        "job": JOB,
        "spec": "1" * 64,
        "round": round_,
        "generation": GenerationRecord.of(generation),
        "chain": f"{round_:032x}",
        "model": "2" * 64,
        "plan": "3" * 64,
        "samples": 64 * round_,
        "space": SampleSpace(total=1000, batch=32, whole_batches=False, drop_last=False),
        "deal": DealState(
            epoch=0,
            position=200,
            returned=(SampleBlock(epoch=0, first=3, end=7),),
            held=((0, (SampleBlock(epoch=0, first=7, end=9),)), (2, ())),
            sizes=((0, 32),),
        ),
        "created_at_s": 1_790_000_000.25,
        "software": SOFTWARE,
    }
    return CheckpointFacts(**(fields | changes))


def written(
    store: CheckpointStore, round_: int, units: tuple[bytes, ...] = UNITS, *, given_up: bool = False, **changes: Any
) -> Checkpoint:
    folder = store.begin(round_)
    for unit, content in enumerate(units):
        (folder / unit_file(unit)).write_bytes(content + bytes([round_ % 256]))
    return store.finish(round_, facts(round_, **changes), len(units), given_up=given_up)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "job", JOB, keep=2)


def rounds(store: CheckpointStore) -> list[int]:
    return [one.round for one in store.listed() if isinstance(one, Checkpoint)]


def test_what_was_written_is_read(store: CheckpointStore) -> None:
    """The manifest holds what a resume needs, and gives it back as it was."""
    made = written(store, 5)
    assert made.folder == store.path / "5"
    (read,) = store.listed()
    assert read == made
    assert made.manifest.generation.generation(JOB).parent == computing(JOB, "0" * 64, MEMBERS).digest()
    assert made.manifest.size_bytes == sum(map(len, UNITS)) + len(UNITS)
    assert json.loads((made.folder / MANIFEST_FILE).read_bytes())["checkpoint"]["deal"]["position"] == 200
    assert sorted(path.name for path in store.path.iterdir()) == ["5"]


def test_the_newest_are_kept(store: CheckpointStore) -> None:
    for round_ in (5, 10, 300):
        written(store, round_)
    assert rounds(store) == [300, 10]


def test_a_later_round_of_a_dropped_history_goes_when_the_job_is_saved_behind_it(tmp_path: Path) -> None:
    """With one to keep, it would be the wrong one that stays."""
    store = CheckpointStore(tmp_path, JOB, keep=1)
    written(store, 50)
    written(store, 40)
    assert rounds(store) == [40]


def test_those_of_histories_that_were_given_up_are_kept_apart(store: CheckpointStore, tmp_path: Path) -> None:
    """G4: they are neither the newest nor pruned for newer ones, and there are never many."""
    first, second, third = (f"{tag}{0:024x}" for tag in ("aaaaaaaa", "bbbbbbbb", "cccccccc"))
    lost = written(store, 50, given_up=True, chain=first, created_at_s=1.0)
    assert lost.folder == store.path / "50-aaaaaaaa"
    assert str(lost.name) == "50-aaaaaaaa"
    for round_ in (5, 6, 7, 50):
        written(store, round_)
    assert rounds(store) == [50, 7], "it is none of those that are counted"
    assert store.given_up() == (lost,)
    assert store.at(50, "aaaaaaaa") == lost
    assert written(store, 50, given_up=True, chain=first, created_at_s=1.5).manifest == lost.manifest, "there already"
    written(store, 3, given_up=True, chain=second, created_at_s=2.0)
    written(store, 9, given_up=True, chain=third, created_at_s=3.0)
    assert [str(one.name) for one in store.given_up()] == ["9-cccccccc", "3-bbbbbbbb"], "the latest, by when it was"
    assert rounds(store) == [50, 7]
    (store.path / "9-cccccccc").rename(store.path / "9-dddddddd")
    summaries = list_checkpoints(tmp_path / "job", JOB, 0, lambda: None)
    assert [(one.round, one.given_up, one.wrong) for one in summaries] == [
        (50, None, None),
        (7, None, None),
        (9, "dddddddd", "its manifest is of the history cccccccc"),
        (3, "bbbbbbbb", None),
    ]


@pytest.mark.parametrize("name", ["1-ABCDEF01", "01", "-1", "5-", "5-1234567", "x", "5 ", "12345678901", "5-12345678-"])
def test_a_name_is_read_in_one_spelling(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a checkpoint"):
        CheckpointName.parse(name)
    for right in (CheckpointName(0), CheckpointName(500, "0a1b2c3d")):
        assert CheckpointName.parse(str(right)) == right


def test_of_a_job_that_succeeded_what_was_given_up_stays(store: CheckpointStore, tmp_path: Path) -> None:
    """A person was told its name, and it is nowhere else. Results expire later, with this."""
    blobs = BlobStore(tmp_path / "blobs")
    written(store, 7)
    clean_up(JOB, tmp_path / "job", blobs, succeeded=True)
    assert not store.path.exists()
    written(store, 7)
    lost = written(store, 6, given_up=True)
    clean_up(JOB, tmp_path / "job", blobs, succeeded=True)
    assert list(store.path.iterdir()) == [lost.folder]
    assert store.verify(lost) is None


def test_a_damaged_one_does_not_count_among_those_kept(store: CheckpointStore) -> None:
    written(store, 1)
    second = written(store, 2)
    second.unit_path(0).write_bytes(b"short")
    written(store, 3)
    assert rounds(store) == [3, 1]


def test_the_same_round_is_saved_once(store: CheckpointStore) -> None:
    """A whole one of the same history stays; a damaged one, or one of another history, gives way."""
    first = written(store, 5)
    inode = first.unit_path(0).stat().st_ino
    assert written(store, 5).unit_path(0).stat().st_ino == inode
    first.unit_path(0).write_bytes(b"other " + UNITS[0][5:])
    assert written(store, 5).unit_path(0).stat().st_ino != inode
    assert usable(store).checkpoint is not None
    other = written(store, 5, chain="f" * 32)
    assert store.listed() == (other,)
    assert [path.name for path in store.path.iterdir()] == ["5"]


# What is found


def test_every_flipped_byte_is_found(store: CheckpointStore) -> None:
    """One byte of any file, the manifest's too, in any of its bits."""
    good, made = written(store, 4), written(store, 5)
    for path in [made.unit_path(unit) for unit in range(len(UNITS))] + [made.folder / MANIFEST_FILE]:
        content = path.read_bytes()
        every = (
            1 if path.name != MANIFEST_FILE else 23
        )  # all of the manifest's: tests/wire/checkpoints/test_checkpoint.py
        for place in range(0, len(content), every):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            path.write_bytes(changed)
            found = usable(store)
            assert found.checkpoint == good, f"byte {place} of {path.name}"
            assert [one.round for one in found.rejected] == [5]
            assert path.name in found.rejected[0].reason or path.name == MANIFEST_FILE
        path.write_bytes(content)
    assert usable(store).checkpoint == made


def test_every_cut_and_every_addition_is_found(store: CheckpointStore) -> None:
    written(store, 4)
    made = written(store, 5)
    for path in [made.unit_path(0), made.folder / MANIFEST_FILE]:
        content = path.read_bytes()
        sizes = [*range(0, len(content), 1 + len(content) // 50), len(content) - 1]
        for other in [content[:size] for size in sizes] + [content + b"\0", content + content]:
            path.write_bytes(other)
            found = usable(store)
            assert found.checkpoint is not None
            assert found.checkpoint.round == 4
        path.write_bytes(content)


def test_missing_and_swapped_files_are_found(store: CheckpointStore, tmp_path: Path) -> None:
    made = written(store, 5, (b"equally", b"as long", b"options"))

    def wrong() -> str:
        found = usable(store)
        assert found.checkpoint is None
        return found.rejected[0].reason

    a, b = made.unit_path(0), made.unit_path(1)
    a.rename(tmp_path / "a")
    assert wrong() == "0.safetensors: No such file or directory"
    b.rename(a)
    (tmp_path / "a").rename(b)
    assert wrong() == "0.safetensors holds other bytes than were written"
    a.rename(tmp_path / "b")
    a.symlink_to(tmp_path / "b")
    assert wrong() == "0.safetensors is no file"
    a.unlink()
    os.mkfifo(a)
    assert wrong() == "0.safetensors is no file"
    (made.folder / MANIFEST_FILE).unlink()
    assert wrong() == "manifest.json: No such file or directory"


def test_those_of_another_job_or_round_are_found(store: CheckpointStore, tmp_path: Path) -> None:
    made = written(store, 5)
    other = CheckpointStore(tmp_path / "job", "1kx3m9q2v7bc", keep=1)
    assert other.listed() == (Rejected(5, f"it is of job {JOB}"),)
    made.folder.rename(store.path / "6")
    assert store.listed() == (Rejected(6, "its manifest is of round 5"),)
    (store.path / "06").mkdir()
    (store.path / "notes").mkdir()
    assert len(store.listed()) == 1


def test_reading_can_be_stopped(store: CheckpointStore) -> None:
    written(store, 5)

    def stop() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        usable(store, stop)


def test_a_listing_says_what_is_wrong(store: CheckpointStore, tmp_path: Path) -> None:
    written(store, 4)
    written(store, 5).unit_path(0).write_bytes(b"other " + UNITS[0][5:])
    new, old = list_checkpoints(tmp_path / "job", JOB, 1, lambda: None)
    assert (new.round, new.wrong, new.rank) == (5, "0.safetensors holds other bytes than were written", 1)
    assert (old.round, old.wrong, old.created_at_s) == (4, None, 1_790_000_000.25)


# Kills, and full disks


class Killed(BaseException):
    """Stands for kill -9: nothing is done after it."""


CALLS = ((os, ("open", "fsync", "write", "rename", "mkdir", "unlink", "close")), (shutil, ("rmtree",)))


@contextmanager
def dying(
    monkeypatch: pytest.MonkeyPatch, calls: int, error: Callable[[], BaseException], after: bool
) -> Iterator[list[str]]:
    """From call number `calls` on, all calls of the file system raise (`after`), or only that one does."""
    made: list[str] = []

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            made.append(name)
            result = real(*args, **options) if name == "close" else None  # which the system does for the dead, too
            if len(made) == calls or (after and len(made) > calls):
                raise error()
            return result if name == "close" else real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for module, names in CALLS:
            for name in names:
                patch.setattr(module, name, wrapped(name, getattr(module, name)))
        yield made


def prepared(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path, JOB, keep=1)
    written(store, 4)
    folder = store.begin(5)
    for unit, content in enumerate(UNITS):
        (folder / unit_file(unit)).write_bytes(content)
    return store


def test_a_kill_at_any_step_leaves_a_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older one until the new one has its name; what was half done goes at the next start."""
    seen = set()
    for calls in range(1, 200):
        store = prepared(tmp_path / str(calls))
        with dying(monkeypatch, calls, Killed, after=True) as made:
            try:
                store.finish(5, facts(5), len(UNITS))
            except Killed:
                killed = True
            else:
                killed = False
        again = CheckpointStore(tmp_path / str(calls), JOB, keep=1)
        again.clean_up()
        found = usable(again)
        assert found.checkpoint is not None, f"after {made}"
        assert not found.rejected, f"after {made}"
        seen.add(found.checkpoint.round)
        assert all(path.name in ("4", "5") for path in again.path.iterdir()), f"after {made}"
        if not killed:
            assert rounds(again) == [5]
            assert {"fsync", "rename", "open", "write", "rmtree"} <= set(made)
            break
    assert seen == {4, 5}


def test_a_checkpoint_has_its_name_only_when_a_power_cut_cannot_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is on the disk, then the names of the files, then the folder's; the older ones go last."""
    store = prepared(tmp_path)
    happened: list[str] = []
    fsync, rename = os.fsync, os.rename
    names = {path.stat().st_ino: path.name for path in store.path.rglob("*")} | {store.path.stat().st_ino: "names"}

    def synced(handle: int) -> None:
        happened.append(names.get(os.fstat(handle).st_ino, MANIFEST_FILE))
        fsync(handle)

    def renamed(old: Path, new: Path) -> None:
        happened.append(f"{Path(old).name} -> {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    store.finish(5, facts(5), len(UNITS))
    files = {unit_file(unit) for unit in range(len(UNITS))} | {MANIFEST_FILE}
    assert set(happened[: len(files)]) == files
    assert happened[len(files) :] == [".saving-5", ".saving-5 -> 5", "names", "4 -> .deleting-4"]


def test_a_disk_that_is_full_at_any_step_costs_that_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the folder, what was written is removed at once, the older one stays."""
    for calls in range(1, 200):
        store = prepared(tmp_path / str(calls))
        full = OSError(errno.ENOSPC, "No space left on device", str(store.path / "x"))
        failure = None
        with dying(monkeypatch, calls, lambda full=full: full, after=False) as made:  # type: ignore[misc]
            try:
                store.finish(5, facts(5), len(UNITS))
            except CheckpointError as error:
                failure = str(error)
        assert usable(store).checkpoint is not None, f"after {made}"
        if failure is not None:
            assert "No space left on device" in failure
            assert "free some space" in failure
        store.clean_up()
        assert all(path.name in ("4", "5") for path in store.path.iterdir()), f"after {made}"
        if len(made) < calls:
            break
    assert calls > 10


def test_a_file_that_the_learner_did_not_write_is_named(store: CheckpointStore) -> None:
    store.begin(5)
    with pytest.raises(CheckpointError, match=r"0\.safetensors"):
        store.finish(5, facts(5), 1)
    folder = store.begin(6)
    (folder / unit_file(0)).touch()
    with pytest.raises(CheckpointError, match=r"0\.safetensors is empty"):
        store.finish(6, facts(6), 1)
    assert not list(store.path.iterdir())


def test_a_save_that_was_given_up_leaves_nothing(store: CheckpointStore) -> None:
    (store.begin(1) / "0.safetensors").write_bytes(b"half")
    store.abandon(1)
    assert not list(store.path.iterdir())
    store.abandon(2)
    written(store, 5)
    store.begin(6)
    store.clean_up()
    assert [path.name for path in store.path.iterdir()] == ["5"]
    CheckpointStore(store.path / "never", JOB, keep=1).clean_up()


# From one device to another


class Peer:
    """A donor without a network: answers `Fetch` from its store."""

    name = "anna"

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.asked_bytes = 0
        self.breaks_after: int | None = None
        self.answering = self.answering_most = 0
        self.sizes: list[int] = []

    async def request(self, body: Wire, *, timeout_s: float, name: str) -> Wire:
        assert isinstance(body, Fetch)
        if self.breaks_after is not None and self.asked_bytes >= self.breaks_after:
            raise ConnectionEnded("anna is gone")
        self.asked_bytes += body.max_bytes
        self.sizes.append(body.max_bytes)
        self.answering += 1
        self.answering_most = max(self.answering_most, self.answering)
        await asyncio.sleep(0)
        reply = await serve(body, self.store, Path("unused"), ended=lambda: True)
        self.answering -= 1
        return reply

    @property
    def connection(self) -> Connection:
        return cast(Connection, self)


@pytest.fixture
def donor(tmp_path: Path) -> Peer:
    return Peer(BlobStore(tmp_path / "donor"))


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def content(folder: Path, units: int = len(UNITS)) -> list[bytes]:
    return [(folder / unit_file(unit)).read_bytes() for unit in range(units)]


@pytest.mark.asyncio
async def test_a_checkpoint_is_offered_and_fetched(
    store: CheckpointStore, donor: Peer, blobs: BlobStore, tmp_path: Path
) -> None:
    """J1: equal files on the joiner; no second copy stays on either side."""
    made = written(store, 5)
    saved = offer("a state", made, donor.store)
    assert saved.round == 5
    assert donor.store.blob_path(saved.units[0].sha256).samefile(made.unit_path(0))
    told: list[Wire] = []
    await fetch_state(saved.by_number, donor.connection, JOB, blobs, tmp_path / "state", told.append)
    assert content(tmp_path / "state") == content(made.folder)
    assert isinstance(told[0], Waiting)
    assert told[0].reason.startswith("the state of anna: ")
    assert not [path for path in blobs.path.rglob("*") if path.is_file()]
    donor.store.release("a state")
    assert not [path for path in donor.store.path.rglob("*") if path.is_file()]
    assert store.verify(made) is None


@pytest.mark.asyncio
async def test_a_state_is_fetched_piece_by_piece_while_rounds_go_on(
    donor: Peer, blobs: BlobStore, tmp_path: Path
) -> None:
    """A chunk waits for one small piece at most; the sizes change on the way, and the files are what they were."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / unit_file(0)).write_bytes(os.urandom(300_001))
    before = content(tmp_path / "saved", 1)
    refs = store_state(JOB, tmp_path / "saved", (0,), donor.store)
    pace = Pacer()
    await fetch_state(dict(enumerate(refs)), donor.connection, JOB, blobs, tmp_path / "state", lambda _: None, pace)
    assert content(tmp_path / "state", 1) == before
    assert donor.answering_most == 1
    assert max(donor.sizes) < limits.FETCH_BYTES_MAX
    assert len(set(donor.sizes)) > 1


@pytest.mark.asyncio
async def test_links_that_the_disk_does_not_have(
    donor: Peer, blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    (tmp_path / "saved").mkdir()
    for unit, data in enumerate(UNITS):
        (tmp_path / "saved" / unit_file(unit)).write_bytes(data)
    refs = store_state(JOB, tmp_path / "saved", range(len(UNITS)), donor.store)
    assert not list((tmp_path / "saved").iterdir())
    await fetch_state(dict(enumerate(refs)), donor.connection, JOB, blobs, tmp_path / "state", lambda _: None)
    assert content(tmp_path / "state") == list(UNITS)


@pytest.mark.asyncio
async def test_a_transfer_that_broke_off_goes_on(
    store: CheckpointStore, donor: Peer, blobs: BlobStore, tmp_path: Path
) -> None:
    """What has come is not fetched again."""
    made = written(store, 5)
    saved = offer("a state", made, donor.store)
    donor.breaks_after = saved.units[0].size_bytes
    with pytest.raises(ConnectionEnded):
        await fetch_state(saved.by_number, donor.connection, JOB, blobs, tmp_path / "state", lambda _: None)
    donor.breaks_after = None
    await fetch_state(saved.by_number, donor.connection, JOB, blobs, tmp_path / "state", lambda _: None)
    assert donor.asked_bytes == made.manifest.size_bytes
    assert content(tmp_path / "state") == content(made.folder)


@pytest.mark.asyncio
async def test_a_donor_whose_disk_has_rotted_is_named(
    store: CheckpointStore, donor: Peer, blobs: BlobStore, tmp_path: Path
) -> None:
    saved = offer("a state", written(store, 5), donor.store)
    path = donor.store.blob_path(saved.units[1].sha256)
    path.write_bytes(bytes(saved.units[1].size_bytes))
    with pytest.raises(RequestFailed, match="unit 1 of the state from anna: blob"):
        await fetch_state(saved.by_number, donor.connection, JOB, blobs, tmp_path / "state", lambda _: None)
    assert not (tmp_path / "state").exists()


# Who asks


@pytest.mark.asyncio
async def test_all_members_are_asked_and_who_is_away_is_named(store: CheckpointStore, tmp_path: Path) -> None:
    """What lies on one device that is off may be the newest: that is said."""
    written(store, 5)
    elsewhere = CheckpointSummary(round=6, rank=1, created_at_s=1.0, size_bytes=7, wrong=None)
    asked: list[Wire] = []

    async def request(body: Wire, **_: object) -> Wire:
        asked.append(body)
        return Checkpoints(checkpoints=(elsewhere,))

    links = {MEMBERS[1].device: SimpleNamespace(connection=SimpleNamespace(request=request))}
    node = SimpleNamespace(device=MEMBERS[0].device, links=links, job_folder=lambda _: tmp_path / "job")
    job = SimpleNamespace(state=JobState.RUNNING, summary=lambda: SimpleNamespace(members=MEMBERS))
    board = SimpleNamespace(jobs={JOB: job})
    questions = JobQueries(cast(Node, node), cast(JobRegistry, board), cast(Admission, None))
    all_ = await questions.checkpoints(ListCheckpoints(job=JOB), forward=True)
    assert [(one.round, one.rank, one.wrong) for one in all_.checkpoints] == [(6, 1, None), (5, 0, None)]
    assert all_.unasked == (MEMBERS[2].name,)
    assert asked == [ListCheckpoints(job=JOB)]
    own = await questions.checkpoints(ListCheckpoints(job=JOB), forward=False)
    assert [one.round for one in own.checkpoints] == [5]
    assert own.unasked == ()
