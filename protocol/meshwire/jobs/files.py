"""Files of a job as they are named on the wire: a manifest of relative paths, never an archive.

A path is used on a receiving device only after `check_manifest` has found nothing wrong, whatever system it
came from: the same manifest must mean the same tree on Linux, macOS and Windows, and must not reach outside
its folder on any.
"""

import re
import unicodedata
from typing import Annotated, Any, Self

import msgpack
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from meshwire import limits
from meshwire.message_base import Digest, Wire, what_is_wrong

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")  # Unicode category Cc
# Windows opens a device for these, with any extension; superscript digits count as digits there.
_RESERVED_NAME = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class FileEntry:
    """One regular file. `path` is relative, POSIX, to the root of the folder that the manifest describes.

    No `Wire`, whose instances take three times as much memory: there may be 100,000.
    """

    path: str
    size_bytes: Annotated[int, Field(ge=0, le=limits.DATA_BYTES_MAX)]
    sha256: Digest
    executable: bool


class FileManifest(Wire):
    """A folder's files. Folders exist because files lie in them, so an empty one is not carried.

    `digest()` is the SHA-256 of `pack()`, so a packed manifest can itself be stored and sent as a blob.
    """

    entries: tuple[FileEntry, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together; equal contents count as often as they are named."""
        return sum(entry.size_bytes for entry in self.entries)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Reads `pack()`'s bytes, entry by entry: what is nested in them instead could take a hundred times their
        memory. Raises ValueError (pydantic's and msgpack's errors are such) otherwise."""
        if len(packed) > limits.MANIFEST_BYTES_MAX:
            raise ValueError(f"a manifest of {len(packed)} bytes, at most {limits.MANIFEST_BYTES_MAX} are read")
        unpacker = msgpack.Unpacker(_Slices(packed), read_size=_READ_BYTES, max_buffer_size=4 * _READ_BYTES)
        try:
            if not packed.startswith(_MANIFEST_BEGINS) or unpacker.read_map_header() != 1:
                raise ValueError("not a manifest of files")
            unpacker.skip()
            count = unpacker.read_array_header()
            if count > limits.FILES_MAX:
                raise ValueError(f"{count} files, at most {limits.FILES_MAX} are allowed")
            entries = tuple(_ENTRY.validate_python(_next_entry(unpacker, packed)) for _ in range(count))
        except ValidationError as error:
            raise ValueError(f"an entry is wrong: {what_is_wrong(error)}") from None
        except msgpack.OutOfData:
            raise ValueError("the manifest breaks off") from None
        except msgpack.BufferFull:
            raise ValueError(f"an entry of more than {limits.FILE_ENTRY_BYTES_MAX} bytes") from None
        if unpacker.tell() != len(packed):
            raise ValueError("something follows the manifest")
        return cls(entries=entries)


_ENTRY = TypeAdapter(FileEntry)
_READ_BYTES = 4 * limits.FILE_ENTRY_BYTES_MAX  # of a packed manifest that msgpack holds at once, instead of a copy
_MANIFEST_BEGINS = msgpack.packb({"entries": None})[:-1]


class _Slices:
    """Hands out bytes a few at a time, for msgpack would copy them all at once."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self._offset = 0

    def read(self, size_bytes: int) -> bytes:
        """As a file does."""
        self._offset += size_bytes
        return self._packed[self._offset - size_bytes : self._offset]


def _next_entry(unpacker: msgpack.Unpacker, packed: bytes) -> Any:
    """Finds an entry's end before anything is made of it."""
    start = unpacker.tell()
    unpacker.skip()
    size_bytes = unpacker.tell() - start
    if size_bytes > limits.FILE_ENTRY_BYTES_MAX:
        raise ValueError(f"an entry of {size_bytes} bytes, at most {limits.FILE_ENTRY_BYTES_MAX} are allowed")
    return msgpack.unpackb(packed[start : unpacker.tell()])


def check_path(path: str) -> str | None:
    """Why `path` may not be written on a device, or None (ECOSYSTEM 2.4, "archive extraction")."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if len(encoded) > limits.FILE_PATH_BYTES_MAX:
        return f"is longer than {limits.FILE_PATH_BYTES_MAX} bytes"
    if not path:
        return "is empty"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path:
        return "contains a backslash"
    if ":" in path:
        return "contains a colon (a drive letter or a stream on Windows)"
    if _CONTROL.search(path):
        return "contains a control character"
    if not unicodedata.is_normalized("NFC", path):
        return "is not in Unicode normal form NFC"
    parts = path.split("/")
    if len(parts) > limits.FOLDER_DEPTH_MAX:
        return f"is nested deeper than {limits.FOLDER_DEPTH_MAX} folders"
    for part in parts:
        reason = _check_part(part)
        if reason is not None:
            return reason
    return None


def _check_part(part: str) -> str | None:
    if part == "":
        return "has an empty part"
    if part in (".", ".."):
        return f"has a part {part!r}"
    if len(part.encode()) > limits.FILE_NAME_BYTES_MAX:
        return f"has a part longer than {limits.FILE_NAME_BYTES_MAX} bytes"
    if part[-1] in ". ":
        return "has a part that ends in a dot or a space (Windows drops it)"
    stem = part.split(".", 1)[0].rstrip(" ")
    if _RESERVED_NAME.fullmatch(stem):
        return f"has a part {part!r}, which is a device on Windows"
    return None


def check_manifest(manifest: FileManifest, bytes_max: int = limits.DATA_BYTES_MAX) -> str | None:
    """Why the tree may not be written on a device, or None. Names the paths.

    Args:
        bytes_max: the most that all files may hold together, e.g. `limits.SOURCE_BYTES_MAX`.
    """
    if len(manifest.entries) > limits.FILES_MAX:
        return f"{len(manifest.entries)} files, at most {limits.FILES_MAX} are allowed"
    if manifest.total_bytes > bytes_max:
        return f"{human_bytes(manifest.total_bytes)} in all, at most {human_bytes(bytes_max)} are allowed"
    sizes: dict[bytes, FileEntry] = {}
    for entry in manifest.entries:
        reason = check_path(entry.path)
        if reason is not None:
            return f"the path {entry.path!r} {reason}"
        same = sizes.setdefault(entry.sha256, entry)
        if same.size_bytes != entry.size_bytes:
            return f"{same.path!r} and {entry.path!r} claim equal content but different sizes"
    return _check_collisions(manifest)


def _check_collisions(manifest: FileManifest) -> str | None:
    """Names that are one on some device: equal, differing in case only, or a file that must be a folder."""
    order = [_sort_key(entry.path) for entry in manifest.entries]
    before: FileEntry | None = None
    folders = 0
    for at in sorted(range(len(order)), key=order.__getitem__):
        entry = manifest.entries[at]
        if before is not None and (reason := _collision(before.path, entry.path)) is not None:
            return reason
        folders += _new_folders("" if before is None else before.path, entry.path)
        before = entry
    if folders > limits.FOLDERS_MAX:
        return f"{folders} folders, at most {limits.FOLDERS_MAX} are allowed"
    return None


def _new_folders(before: str, path: str) -> int:
    """How many folders the second of two neighbours has that the first has not."""
    here, there = path.split("/")[:-1], before.split("/")[:-1]
    shared = 0
    while shared < min(len(here), len(there)) and here[shared] == there[shared]:
        shared += 1
    return len(here) - shared


def _sort_key(path: str) -> bytes:
    """Sorts the files of a folder, as a case-insensitive file system sees it, next to each other: what collides
    collides with its neighbour, and nothing has to be remembered of each folder. UTF-8, whose order is that of Unicode,
    for one letter of another script would make a str four times as long."""
    return _fold(path).replace("/", "\0").encode()


def _collision(first: str, second: str) -> str | None:
    """Why neighbours in the order of `_sort_key` cannot be together, or None."""
    if first == second:
        return f"the path {first!r} is there twice"
    here, there = first.split("/"), second.split("/")
    for depth, (one, other) in enumerate(zip(here, there, strict=False), start=1):
        if one != other:
            if _fold(one) != _fold(other):
                return None
            if depth == len(here) == len(there):
                return f"{first!r} and {second!r} differ in upper and lower case only"
            if depth < min(len(here), len(there)):
                folders = "/".join(here[:depth]), "/".join(there[:depth])
                return f"the folders {folders[0]!r} and {folders[1]!r} differ in upper and lower case only"
    return f"{first!r} is a file, and {second!r} needs it as a folder"  # the shorter one sorts first


def _fold(path: str) -> str:
    """Equal for names that a case-insensitive file system takes for one (Unicode 3.13, D145)."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())


def human_bytes(size_bytes: int) -> str:
    """A size for people, e.g. "1.4 MiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
