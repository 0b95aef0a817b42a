"""The two folders that a job ships, the working directory and its data, which are not shipped twice."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwire.jobs.files import FileManifest, check_path

if TYPE_CHECKING:  # reading folders is imported when a folder is read: a command starts without
    from meshtrain.packing.tree import Packed, PackProgress

DATA_FOLDER = "data"  # below the working directory

OnFolderProgress = Callable[[str, "PackProgress"], None]
"""Is told which folder is being read, and how far that is."""


def pack_folders(
    root: Path,
    data: Path | None,
    include: Sequence[str],
    exclude: Sequence[str],
    on_progress: OnFolderProgress,
    *,
    may_be_empty: bool = False,
) -> "tuple[Packed, Packed | None]":
    """Reads the working directory `root`, and the data folder.

    Args:
        may_be_empty: the working directory.

    Raises PackError.
    """
    from meshtrain.packing.tree import PackError, scan, scan_data

    packed_data = None
    if data is not None:
        if not data.is_dir():
            raise PackError(f"--data {data} is not a folder")
        packed_data = scan_data(data, lambda at: on_progress("the data folder", at), include)
        exclude = (*exclude, *(_anchored(root, at) for at in _places(root, data)))
    source = scan(
        root, include, exclude, lambda at: on_progress("the working directory", at), may_be_empty=may_be_empty
    )
    return source, packed_data


def data_place(root: Path, data: Path, source: FileManifest) -> str | None:
    """The place where the script finds the data folder below its working directory: where it is here, else ./data,
    unless something else is there, or the folder is the working directory itself."""
    if data.resolve() == root.resolve():
        return None
    places = _places(root, data)
    if places:  # other systems may not take the name; then only mt.data_dir() finds it
        return places[0] if check_path(places[0]) is None else None
    first_parts = {entry.path.partition("/")[0].casefold() for entry in source.entries}
    return None if DATA_FOLDER in first_parts else DATA_FOLDER


def _places(root: Path, data: Path) -> tuple[str, ...]:
    """The data folder's names below `root`: as it was typed, and where links lead; none where it lies elsewhere."""
    named = Path(os.path.abspath(data)), data.resolve()
    roots = Path(os.path.abspath(root)), root.resolve()
    below = (path.relative_to(at).as_posix() for path in named for at in roots if path.is_relative_to(at))
    return tuple(dict.fromkeys(path for path in below if path != "."))


def _anchored(root: Path, place: str) -> str:
    """The pattern that names a folder below `root`, so that data is not shipped a second time as source."""
    escaped = "".join(f"\\{char}" if char in "\\*?[]!# " else char for char in place)
    return f"/{escaped}" if (root / place).is_symlink() else f"/{escaped}/"


def write_manifest(manifest: FileManifest, file: Path) -> str:
    """Puts a manifest where the daemon reads it. Returns that path."""
    file.write_bytes(manifest.pack())
    return str(file)


def lay_out(packed: "Packed", root: Path, *, link: bool = False) -> None:
    """What is shipped, as files below `root` that are nobody else's.

    Args:
        link: they are only read, so links to the same files do where the disk has them.
    """
    for entry in packed.manifest.entries:
        place = root / entry.path
        place.parent.mkdir(parents=True, exist_ok=True)
        if not (link and _linked(packed.root / entry.path, place)):
            shutil.copy2(packed.root / entry.path, place)


def _linked(file: Path, place: Path) -> bool:
    try:
        os.link(file, place)
    except OSError:  # another disk, or one that has no links
        return False
    return True
