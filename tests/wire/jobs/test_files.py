"""Paths and manifests: what one device may ask another to write."""

import hashlib
import tracemalloc
import unicodedata
from collections.abc import Iterable

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwire import limits
from meshwire.jobs.files import FileEntry, FileManifest, check_manifest, check_path, human_bytes


def entry(path: str, *, size_bytes: int = 1, content: int = 0) -> FileEntry:
    return FileEntry(path=path, size_bytes=size_bytes, sha256=bytes([content]) * 32, executable=False)


def manifest(*paths: str) -> FileManifest:
    return FileManifest(entries=tuple(entry(path) for path in paths))


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("", "empty"),
        ("/etc/passwd", "absolute"),
        ("//server/share", "absolute"),
        ("../train.py", "'..'"),
        ("a/../../b", "'..'"),
        ("a/..", "'..'"),
        ("./a", "'.'"),
        ("a/./b", "'.'"),
        ("a//b", "empty part"),
        ("a/", "empty part"),
        ("a\\..\\b", "backslash"),
        ("C:/x", "colon"),
        ("C:x", "colon"),
        ("file.txt:stream", "colon"),
        ("a\nb", "control"),
        ("a\x00b", "control"),
        ("a\x7fb", "control"),
        ("a\x9bb", "control"),
        ("CON", "device"),
        ("con.txt", "device"),
        ("a/Nul.tar.gz", "device"),
        ("com1", "device"),
        ("LPT\u00b2", "device"),
        ("aux .c", "device"),
        ("conout$", "device"),
        ("a./b", "dot or a space"),
        ("a /b", "dot or a space"),
        ("...", "dot or a space"),
        ("e\u0301.txt", "NFC"),
        ("a\udcffb", "Unicode"),
        ("x" * (limits.FILE_NAME_BYTES_MAX + 1), "part longer"),
        ("x/" * (limits.FILE_PATH_BYTES_MAX // 2) + "x", "longer than"),
        ("x/" * limits.FOLDER_DEPTH_MAX + "x", "deeper"),
    ],
)
def test_path_tricks_are_refused_by_name(path: str, word: str) -> None:
    """ECOSYSTEM 2.4: refuse abs, `..`, drive letters, `:`, reserved Windows names."""
    reason = check_path(path)
    assert reason is not None
    assert word in reason
    assert check_manifest(manifest(path)) == f"the path {path!r} {reason}"


@pytest.mark.parametrize(
    "path",
    [
        "train.py",
        "a/b/c.txt",
        ".env",
        "..a",
        "a..b",
        "console.py",
        "com10",
        "données/é.txt",
        "with space.txt",
        "数据/1.bin",
    ],
)
def test_ordinary_paths_pass(path: str) -> None:
    assert check_path(path) is None
    assert check_manifest(manifest(path)) is None


@given(st.text(max_size=40))
@settings(max_examples=300)
def test_an_accepted_path_stays_inside_its_folder(path: str) -> None:
    """Whatever is accepted splits into plain names on POSIX and on Windows alike."""
    if check_path(path) is None:
        assert not set(path) & set("\\:\x00")
        assert all(part.strip(". ") and part == part.rstrip(". ") for part in path.split("/"))


@pytest.mark.parametrize(
    ("paths", "word"),
    [
        (("a", "a"), "twice"),
        (("Model.py", "model.py"), "case only"),
        (("straße", "STRASSE"), "case only"),
        (("Data/a", "data/b"), "folders 'Data' and 'data'"),
        (("a", "a/b"), "'a' is a file"),
        (("a/b", "a"), "'a' is a file"),
        (("A", "a/b"), "'A' is a file"),
        (("x/y/z", "x/y"), "'x/y' is a file"),
    ],
)
def test_names_that_are_one_on_some_device_are_refused(paths: tuple[str, ...], word: str) -> None:
    """ECOSYSTEM 2.4: refuse case collisions; a file cannot be another's folder."""
    reason = check_manifest(manifest(*paths))
    assert reason is not None
    assert word in reason


def test_limits_on_count_bytes_and_consistency(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size has a limit, and one content has one size."""
    monkeypatch.setattr(limits, "FOLDERS_MAX", 4)
    assert check_manifest(manifest("a/b/1", "a/b/2", "a/c/1", "d/1", "2")) is None
    assert "5 folders, at most 4" in (check_manifest(manifest("a/b/1", "a/b/2", "a/c/1", "d/e/1", "2")) or "")
    monkeypatch.undo()
    many = FileManifest.model_construct(entries=(entry("a"),) * (limits.FILES_MAX + 1))
    assert "files, at most" in (check_manifest(many) or "")
    two = FileManifest(entries=(entry("a", size_bytes=600), entry("b", size_bytes=600)))
    assert two.total_bytes == 1200
    assert check_manifest(two) is None
    assert "1.2 KiB in all" in (check_manifest(two, bytes_max=1199) or "")
    lying = FileManifest(entries=(entry("a", size_bytes=1), entry("b", size_bytes=2)))
    assert "different sizes" in (check_manifest(lying) or "")


@given(
    st.lists(
        st.builds(
            FileEntry,
            path=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
            size_bytes=st.integers(0, limits.DATA_BYTES_MAX),
            sha256=st.binary(min_size=32, max_size=32),
            executable=st.booleans(),
        ),
        max_size=5,
    )
)
@settings(max_examples=50)
def test_a_packed_manifest_reads_back_equal(entries: list[FileEntry]) -> None:
    before = FileManifest(entries=tuple(entries))
    after = FileManifest.unpack(before.pack())
    assert after == before
    assert after.digest() == before.digest()


@given(st.binary(max_size=60))
@settings(max_examples=200)
def test_any_bytes_are_a_manifest_or_a_value_error(packed: bytes) -> None:
    try:
        FileManifest.unpack(packed)
    except ValueError:
        return


def test_an_oversized_manifest_is_not_even_decoded() -> None:
    with pytest.raises(ValueError, match="at most"):
        FileManifest.unpack(bytes(limits.MANIFEST_BYTES_MAX + 1))


def test_sizes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1_500_000, 2**31, 2**41)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.4 MiB",
        "2.0 GiB",
        "2.0 TiB",
    ]


def naive_collisions(paths: list[str]) -> bool:
    """What `check_manifest` finds, as one would say it: every name of a file and of a folder is one thing."""
    names: dict[str, tuple[str, bool]] = {}
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            name, is_file = "/".join(parts[:depth]), depth == len(parts)
            folded = unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())
            known = names.setdefault(folded, (name, is_file))
            if known != (name, is_file) or (is_file and paths.count(name) > 1):
                return True
    return False


names = st.sampled_from(["a", "A", "b", "B b", "a!", "ß", "ss", "a0"])


@given(st.lists(st.lists(names, min_size=1, max_size=4).map("/".join), min_size=1, max_size=6))
@settings(max_examples=300)
def test_neighbours_in_order_are_enough_to_find_every_collision(paths: list[str]) -> None:
    assert (check_manifest(manifest(*paths)) is not None) == naive_collisions(paths)


def packed(paths: Iterable[str]) -> bytes:
    entries = [
        {"path": path, "size_bytes": 1, "sha256": hashlib.sha256(path.encode()).digest(), "executable": False}
        for path in paths
    ]
    content: bytes = msgpack.packb({"entries": entries})
    return content


@pytest.mark.parametrize(
    ("count", "path"),
    [
        (2_000, "{0:06x}/" + "{0:015x}/" * 30 + "x"),  # each folder of its own: as many as files, times the depth
        (12_000, "{0:x}"),
        (3_000, "\U00010348" + "x" * 240 + "/{0:x}"),  # one wide letter makes all letters of a str wide
    ],
    ids=["deep", "tiny", "wide"],
)
def test_a_manifest_costs_a_small_multiple_of_its_bytes(count: int, path: str) -> None:
    """55 MB of names once took 1.9 GB: every folder of every path was remembered."""
    content = packed(path.format(number) for number in range(count))
    tracemalloc.start()
    try:
        assert check_manifest(FileManifest.unpack(content)) is None
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes <= 6 * len(content)
