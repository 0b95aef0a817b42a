"""The blob store: nothing wrong gets in, nothing half gets out, every disk error says what to do."""

import errno
import hashlib
import os
import resource
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshtraind.storage import disk_space as diskspace
from meshtraind.storage.blob_writer import SEALED_NS
from meshtraind.storage.blobs import BlobBusyError, BlobDamagedError, BlobError, BlobStore
from meshwire import limits
from meshwire.jobs.files import FileEntry, FileManifest

CONTENT = b"0123456789" * 1000
SHA = hashlib.sha256(CONTENT).digest()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def receive(store: BlobStore, content: bytes) -> bytes:
    sha256 = hashlib.sha256(content).digest()
    with store.writer(sha256, len(content)) as writer:
        writer.write(memoryview(content))
        writer.finish()
    return sha256


def entry(path: str, content: bytes, *, executable: bool = False) -> FileEntry:
    sha256 = hashlib.sha256(content).digest()
    return FileEntry(path=path, size_bytes=len(content), sha256=sha256, executable=executable)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize("content", [b"", CONTENT])
def test_a_received_blob_is_there_under_its_hash(store: BlobStore, content: bytes) -> None:
    sha256 = receive(store, content)
    name = sha256.hex()
    assert store.has(sha256, len(content))
    assert files_below(store.path) == {f"{name[:2]}/{name}"}
    with store.open(sha256) as reader:
        assert reader.read() == content


@given(cuts=st.lists(st.integers(0, len(CONTENT)), max_size=5))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_receiving_resumes_where_it_broke_off(tmp_path: Path, cuts: list[int]) -> None:
    """Shipped files resume where they broke off, however often that happens."""
    store = BlobStore(tmp_path / "blobs")
    for cut in sorted(cuts):
        with store.writer(SHA, len(CONTENT)) as writer:
            writer.write(memoryview(CONTENT)[writer.offset : cut])
        assert not store.has(SHA, len(CONTENT))
        with store.writer(SHA, len(CONTENT)) as writer:
            assert writer.offset == cut
    with store.writer(SHA, len(CONTENT)) as writer:
        writer.write(memoryview(CONTENT)[writer.offset :])
        writer.finish()
    assert store.has(SHA, len(CONTENT))
    store.blob_path(SHA).unlink()


def test_a_wrong_hash_deletes_the_part_and_names_the_blob(store: BlobStore) -> None:
    writer = store.writer(SHA, len(CONTENT))
    writer.write(memoryview(bytes(len(CONTENT))))
    with pytest.raises(BlobDamagedError, match=SHA.hex()[:12]):
        writer.finish()
    assert files_below(store.path) == set()
    assert not store.has(SHA, len(CONTENT))
    receive(store, CONTENT)


def test_too_many_bytes_are_refused_before_they_are_written(store: BlobStore) -> None:
    writer = store.writer(SHA, len(CONTENT))
    with pytest.raises(BlobDamagedError, match="more have come"):
        writer.write(memoryview(CONTENT + b"x"))
    assert files_below(store.path) == set()


def test_an_early_end_keeps_the_part(store: BlobStore) -> None:
    writer = store.writer(SHA, len(CONTENT))
    writer.write(memoryview(CONTENT)[:10])
    with pytest.raises(BlobDamagedError, match="broke off after 10 of 10000 bytes"):
        writer.finish()
    with store.writer(SHA, len(CONTENT)) as again:
        assert again.offset == 10


def test_a_part_longer_than_the_blob_is_begun_anew(store: BlobStore) -> None:
    with store.writer(SHA, 2 * len(CONTENT)) as writer:
        writer.write(memoryview(CONTENT + b"x"))
    with store.writer(SHA, len(CONTENT)) as writer:
        assert writer.offset == 0


def test_one_blob_has_one_writer_at_a_time(store: BlobStore) -> None:
    """Two jobs at once may need the same data folder."""
    with store.writer(SHA, len(CONTENT)), pytest.raises(BlobBusyError, match=SHA.hex()[:12]):
        store.writer(SHA, len(CONTENT))
    store.writer(SHA, len(CONTENT)).close()


def test_a_closed_writer_refuses_more(store: BlobStore) -> None:
    writer = store.writer(SHA, len(CONTENT))
    writer.close()
    writer.close()
    with pytest.raises(BlobError, match="after close"):
        writer.write(memoryview(b"x"))
    with pytest.raises(BlobError, match="after close"):
        writer.finish()


def test_writers_of_different_blobs_do_not_disturb_each_other(store: BlobStore) -> None:
    contents = [bytes([number]) * 50_000 for number in range(8)]
    threads = [threading.Thread(target=receive, args=(store, content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert all(store.has(hashlib.sha256(content).digest(), len(content)) for content in contents)


def test_a_part_that_is_a_link_is_not_followed(store: BlobStore, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    part = store.blob_path(SHA).with_name(SHA.hex() + ".part")
    part.parent.mkdir()
    part.symlink_to(victim)
    with pytest.raises(BlobError, match="part"):
        store.writer(SHA, len(CONTENT))
    assert victim.read_bytes() == b"precious"


def test_ingest_copies_and_checks(store: BlobStore, tmp_path: Path) -> None:
    source = tmp_path / "train.py"
    source.write_bytes(CONTENT)
    with store.writer(SHA, len(CONTENT)) as writer:
        writer.write(memoryview(b"a part from elsewhere"))
    store.ingest(source, SHA, len(CONTENT))
    source.write_bytes(b"changed")
    with store.open(SHA) as reader:
        assert reader.read() == CONTENT


@pytest.mark.parametrize("now", [b"", CONTENT[:-1], CONTENT + b"x", bytes(len(CONTENT))])
def test_a_file_that_changed_after_the_scan_is_named(store: BlobStore, tmp_path: Path, now: bytes) -> None:
    source = tmp_path / "train.py"
    source.write_bytes(now)
    with pytest.raises(BlobDamagedError, match=r"train\.py changed while it was being submitted"):
        store.ingest(source, SHA, len(CONTENT))
    assert files_below(store.path) == set()


def test_ingest_names_a_missing_file(store: BlobStore, tmp_path: Path) -> None:
    with pytest.raises(BlobError, match=r"cannot read .*gone\.py"):
        store.ingest(tmp_path / "gone.py", SHA, len(CONTENT))


def test_missing_names_each_content_once(store: BlobStore) -> None:
    receive(store, b"here")
    manifest = FileManifest(entries=(entry("a", b"here"), entry("b", b"absent"), entry("c", b"absent")))
    assert [wanted.path for wanted in store.missing(manifest)] == ["b"]
    with pytest.raises(BlobError, match="is not in"):
        store.open(manifest.entries[1].sha256)


def test_a_tree_is_written_with_its_modes(store: BlobStore, tmp_path: Path) -> None:
    receive(store, b"print()")
    receive(store, b"")
    manifest = FileManifest(
        entries=(
            entry("train.py", b"print()"),
            entry("tools/run.sh", b"print()", executable=True),
            entry("tools/a/b/__init__.py", b""),
        )
    )
    target = tmp_path / "jobs" / "1" / "src"
    umask = os.umask(0o022)
    try:
        store.materialise(manifest, target)
    finally:
        os.umask(umask)
    assert files_below(target) == {"train.py", "tools/run.sh", "tools/a/b/__init__.py"}
    assert (target / "train.py").read_bytes() == b"print()"
    assert (target / "train.py").stat().st_mode & 0o777 == 0o644
    assert (target / "tools/run.sh").stat().st_mode & 0o777 == 0o755
    (target / "train.py").write_bytes(b"changed")
    with store.open(manifest.entries[0].sha256) as reader:
        assert reader.read() == b"print()", "a job that changes its files must not change the store"


@pytest.mark.parametrize("path", ["../evil", "/tmp/evil", "a/../../evil", "C:/evil"])
def test_path_tricks_write_nothing(store: BlobStore, tmp_path: Path, path: str) -> None:
    """ECOSYSTEM 2.4: path tricks in a manifest are refused."""
    receive(store, b"x")
    manifest = FileManifest(entries=(entry("good", b"x"), entry(path, b"x")))
    before = files_below(tmp_path)
    with pytest.raises(BlobError, match="refused"):
        store.materialise(manifest, tmp_path / "src")
    assert files_below(tmp_path) == before
    assert not (tmp_path / "src").exists()


def test_nothing_is_left_of_a_tree_that_fails(store: BlobStore, tmp_path: Path) -> None:
    receive(store, b"x")
    jobs = tmp_path / "jobs"
    with pytest.raises(BlobError, match="is not in"):
        store.materialise(FileManifest(entries=(entry("a/b", b"x"), entry("c", b"absent"))), jobs / "src")
    assert list(jobs.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link", "link to a folder"])
def test_a_tree_is_written_into_a_new_folder_only(store: BlobStore, tmp_path: Path, kind: str) -> None:
    """ECOSYSTEM 2.4: never through a link that lies in wait."""
    receive(store, b"x")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = tmp_path / "src"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_bytes(b"mine")
    else:
        target.symlink_to(elsewhere if kind == "link to a folder" else tmp_path / "nowhere")
    with pytest.raises(BlobError, match="already there"):
        store.materialise(FileManifest(entries=(entry("a", b"x"),)), target)
    assert list(elsewhere.iterdir()) == []


def test_what_a_killed_daemon_left_half_written_is_replaced(store: BlobStore, tmp_path: Path) -> None:
    receive(store, b"x")
    (tmp_path / ".src.building").mkdir()
    (tmp_path / ".src.building" / "old").write_bytes(b"old")
    store.materialise(FileManifest(entries=(entry("a", b"x"),)), tmp_path / "src")
    assert files_below(tmp_path / "src") == {"a"}
    assert not (tmp_path / ".src.building").exists()


@pytest.mark.parametrize("link", [False, True])
def test_a_rotten_blob_is_found_and_removed(store: BlobStore, tmp_path: Path, link: bool) -> None:
    receive(store, b"good")
    wanted = entry("model/a.py", b"good")
    damage(store, wanted.sha256, b"evil")
    with pytest.raises(BlobDamagedError, match=r"model/a\.py.*rotted"):
        store.materialise(FileManifest(entries=(wanted,)), tmp_path / "src", link=link)
    assert not store.has(wanted.sha256, wanted.size_bytes)
    assert files_below(store.path) == set()
    assert not (tmp_path / "src").exists()


def damage(store: BlobStore, sha256: bytes, content: bytes) -> None:
    """As a script does that runs as root, or changes the mode of its data first."""
    store.blob_path(sha256).chmod(0o600)
    store.blob_path(sha256).write_bytes(content)


def test_free_space_is_asked_up_front(store: BlobStore) -> None:
    store.ensure_space(1)
    with pytest.raises(BlobError, match=r"1048576\.0 TiB needed.*free.*--data-dir") as caught:
        store.ensure_space(2**60)
    assert str(store.path) in str(caught.value)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root on Linux")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True, timeout=10)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=10)


def test_a_full_disk_is_named_and_receiving_resumes_after_it(tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk full while receiving a job: a clear error, and nothing lost."""
    store = BlobStore(tiny_disk / "blobs", reserve=lambda _disk_bytes: 0)
    content = os.urandom(200_000)
    sha256 = hashlib.sha256(content).digest()
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(150_000))
    writer = store.writer(sha256, len(content))
    with pytest.raises(BlobError, match=r"not enough space.*195\.3 KiB needed.*free.*--data-dir") as caught:
        writer.write(memoryview(content))
    assert str(tiny_disk) in str(caught.value)
    # Others fill the disk between looking and writing.
    monkeypatch.setattr("meshtraind.storage.blobs.require", lambda *_: None)
    with pytest.raises(BlobError, match=r"No space left on device.*195\.3 KiB needed.*free.*--data-dir"):
        store.writer(sha256, len(content)).write(memoryview(content))
    monkeypatch.undo()
    ballast.unlink()
    with store.writer(sha256, len(content)) as again:
        assert 0 < again.offset < len(content)
        again.write(memoryview(content)[again.offset :])
        again.finish()
    assert store.has(sha256, len(content))


def test_a_disk_that_fills_up_while_a_tree_is_written_leaves_nothing(tiny_disk: Path) -> None:
    store = BlobStore(tiny_disk / "blobs")
    content = os.urandom(100_000)
    receive(store, content)
    manifest = FileManifest(entries=(entry("a", content), entry("b", content), entry("c", content)))
    with pytest.raises(BlobError, match=r"not enough space.*free"):
        store.materialise(manifest, tiny_disk / "src")
    assert [path.name for path in tiny_disk.iterdir()] == ["blobs"]


def test_a_file_size_limit_is_an_error_like_any_other(store: BlobStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = store.writer(SHA, len(CONTENT))
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(BlobError, match="File too large"):
            writer.write(memoryview(CONTENT))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with store.writer(SHA, len(CONTENT)) as again:
        assert again.offset == 5000


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """Data folder unwritable: named. A file in the way refuses root as well."""
    (tmp_path / "DATA").write_bytes(b"")
    with pytest.raises(BlobError, match=r"cannot make the folder .*DATA.blobs"):
        BlobStore(tmp_path / "DATA" / "blobs")


def test_a_read_only_folder_is_named(store: BlobStore) -> None:
    store.path.chmod(0o500)
    try:
        if os.access(store.path, os.W_OK):
            pytest.skip("this user (root) may write anywhere")
        with pytest.raises(BlobError, match=r"Permission denied; make it accessible"):
            store.writer(SHA, len(CONTENT))
    finally:
        store.path.chmod(0o700)


def test_the_cache_is_bounded_by_deleting_what_was_not_used_for_longest(store: BlobStore) -> None:
    """Shipped once and cached by content, but not for ever."""
    digests = [receive(store, bytes([number]) * 1000) for number in range(5)]
    for age, sha256 in enumerate(reversed(digests)):
        os.utime(store.blob_path(sha256), ns=((2 * 10**9 - age) * 10**9, SEALED_NS))
    store.hold("job", [digests[0]])
    assert store.trim(5000) == 0
    assert store.trim(2500) == 3000
    assert [store.has(sha256, 1000) for sha256 in digests] == [True, False, False, False, True]
    store.hold("job", [digests[4]])
    assert store.trim(0) == 0
    store.release("job")
    assert store.trim(1500) == 1000
    assert store.has(digests[0], 1000) != store.has(digests[4], 1000)


def test_of_blobs_that_never_come_nothing_stays(store: BlobStore) -> None:
    """Whoever offers jobs in a loop leaves no files behind, not even empty ones."""
    store.writer(SHA, len(CONTENT)).close()
    assert files_below(store.path) == set()
    with store.writer(SHA, len(CONTENT)) as writer:
        writer.write(memoryview(CONTENT)[:10])
    assert store.trim() == 0
    part = store.path / files_below(store.path).pop()
    os.utime(part, (0.0, time.time() - limits.BLOB_PART_S_MAX - 1))
    assert store.trim() == 10


def test_trimming_spares_what_is_being_received(store: BlobStore) -> None:
    with store.writer(SHA, len(CONTENT)) as writer:
        writer.write(memoryview(CONTENT)[:10])
        assert store.trim(0) == 0
    assert store.trim(0) == 10
    assert files_below(store.path) == set()


def test_a_blob_that_passes_through_goes_with_the_last_job_that_holds_it(store: BlobStore) -> None:
    """A unit of a start state may be the same in two jobs, or lie in a job's data."""
    shared, own = receive(store, b"shared"), receive(store, b"own")
    store.hold("a", [shared, own], passing=True)
    store.hold("b", [shared], passing=True)
    store.release("a")
    assert (store.has(shared, 6), store.has(own, 3)) == (True, False)
    store.release("b")
    assert files_below(store.path) == set()


# Data are links


def data_tree(store: BlobStore) -> FileManifest:
    for content in (CONTENT, b"run", b""):
        receive(store, content)
    return FileManifest(
        entries=(
            entry("a/x.bin", CONTENT),
            entry("y", CONTENT),
            entry("run.sh", b"run", executable=True),
            entry("e", b""),
        )
    )


def test_data_take_no_place_beside_their_blobs_and_nobody_writes_to_them(store: BlobStore, tmp_path: Path) -> None:
    """200 MB of data once took 400 on each device."""
    store.materialise(data_tree(store), tmp_path / "data", link=True)
    for name in ("a/x.bin", "y"):
        assert os.path.samefile(tmp_path / "data" / name, store.blob_path(SHA))
        assert stat.S_IMODE((tmp_path / "data" / name).stat().st_mode) == 0o444
    run = tmp_path / "data" / "run.sh"
    assert os.access(run, os.X_OK), "a mode of its own needs a copy"
    assert run.stat().st_nlink == 1


def test_where_there_are_no_links_data_are_copies(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: object, **_options: object) -> None:
        raise OSError(errno.EMLINK, "Too many links")

    monkeypatch.setattr(os, "link", refused)
    store.materialise(data_tree(store), tmp_path / "data", link=True)
    assert (tmp_path / "data" / "y").read_bytes() == CONTENT
    assert not os.path.samefile(tmp_path / "data" / "y", store.blob_path(SHA))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_script_that_overwrites_its_data_does_not_change_what_others_get(
    store: BlobStore, tmp_path: Path, restarted: bool
) -> None:
    """As root it may. What it has written to is not served, not counted as here, and fetched anew."""
    manifest = data_tree(store)
    store.materialise(manifest, tmp_path / "1", link=True)
    assert store.may_serve(SHA)
    damage(store, SHA, b"x" * len(CONTENT))  # of equal size
    if restarted:
        store = BlobStore(store.path)
    assert not store.has(SHA, len(CONTENT))
    assert not store.may_serve(SHA)
    assert [wanted.path for wanted in store.missing(manifest)] == ["a/x.bin"]
    receive(store, CONTENT)
    store.materialise(manifest, tmp_path / "2", link=True)
    assert (tmp_path / "2" / "y").read_bytes() == CONTENT
    assert (tmp_path / "1" / "y").read_bytes() == b"x" * len(CONTENT), "the first job has its own"


def test_what_was_only_touched_or_stored_by_an_older_version_is_hashed_and_kept(store: BlobStore) -> None:
    manifest = data_tree(store)
    store.blob_path(SHA).touch()
    assert not store.has(SHA, len(CONTENT))
    assert store.missing(manifest) == ()
    assert store.has(SHA, len(CONTENT))
    store.hold("job", [SHA])
    assert store.has(SHA, len(CONTENT)), "use is noted elsewhere than writing"


def test_what_was_received_just_now_is_not_read_again_to_link_it(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = FileManifest(entries=(entry("a", CONTENT),))
    receive(store, CONTENT)
    opened: list[bytes] = []
    made = BlobStore.open

    def watched(self: BlobStore, sha256: bytes) -> object:
        opened.append(sha256)
        return made(self, sha256)

    monkeypatch.setattr(BlobStore, "open", watched)
    store.materialise(manifest, tmp_path / "1", link=True)
    assert opened == []
    BlobStore(store.path).materialise(manifest, tmp_path / "2", link=True)
    assert opened == [SHA], "a power cut may have left other bytes under the name"


# Space


@pytest.mark.parametrize(
    ("disk_bytes", "reserve_bytes"),
    [
        (24 * limits.MIB, 6 * limits.MIB),
        (2 * 1024 * limits.MIB, 512 * limits.MIB),
        (8 * 1024 * limits.MIB, 1024 * limits.MIB),
        (100 * 1024 * limits.MIB, 5 * 1024 * limits.MIB),
        (4096 * 1024 * limits.MIB, 20 * 1024 * limits.MIB),
    ],
)
def test_the_reserve_is_a_share_of_the_disk(disk_bytes: int, reserve_bytes: int) -> None:
    """64 MiB once: the last ones that a laptop had. On a small disk most of it can still be used."""
    assert diskspace.reserve_bytes(disk_bytes) == reserve_bytes


def disk(monkeypatch: pytest.MonkeyPatch, store: BlobStore, total_bytes: int) -> None:
    """A disk that holds nothing but the store."""

    def usage(_path: Path) -> SimpleNamespace:
        used_bytes = sum((store.path / name).stat().st_size for name in files_below(store.path))
        return SimpleNamespace(total=total_bytes, used=used_bytes, free=total_bytes - used_bytes)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_what_nobody_holds_makes_room_before_a_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is there to save time, and no reason to refuse anything."""
    store = BlobStore(tmp_path / "blobs", reserve=lambda disk_bytes: disk_bytes // 10)
    held, old, new = (receive(store, bytes([number]) * 2000) for number in range(3))
    store.hold("job", [held])
    os.utime(store.blob_path(old), ns=(10**18, SEALED_NS))
    disk(monkeypatch, store, 10_000)
    store.ensure_space(3000)
    assert [store.has(sha256, 2000) for sha256 in (held, old, new)] == [True, True, True]
    store.ensure_space(4000)
    assert [store.has(sha256, 2000) for sha256 in (held, old, new)] == [True, False, True]
    wanted = r"7\.8 KiB needed and 1000 B kept in reserve, 7\.8 KiB free; free at least 1000 B there .*jobs"
    with pytest.raises(BlobError, match=wanted):
        store.ensure_space(8000)


def test_jobs_that_come_at_once_leave_the_reserve_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone would fit, and was told so. A sender may also have lied about its sizes."""
    store = BlobStore(tmp_path / "blobs", reserve=lambda disk_bytes: disk_bytes // 10)
    disk(monkeypatch, store, 10_000)
    contents = [bytes([number]) * 6000 for number in range(2)]
    for content in contents:
        store.ensure_space(len(content))
    receive(store, contents[0])
    with pytest.raises(BlobError, match="not enough space"):
        receive(store, contents[1])
