"""What a run ships, laid out in a folder of its own: links to the files of the working directory, and beside them the
call. Nothing is written into the person's folder."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.errors import UsageError
from meshtrain.notebook.call import SCRIPT, ShippedCall, make_call
from meshtrain.notebook.session_options import NEVER_SHIPPED, SessionOptions
from meshtrain.packing.shipped_folders import data_place, lay_out, pack_folders, write_manifest
from meshtrain.packing.tree import PackError, PackProgress
from meshwire.jobs.files import FileEntry, FileManifest
from meshwire.messages.local import Submit

STUB = b"raise SystemExit('this only asks who would take part')\n"


@dataclass(frozen=True, slots=True)
class Shipment:
    """A run, ready to be submitted.

    Attributes:
        notes: on files that were left out.
    """

    call: ShippedCall
    body: Submit
    notes: tuple[str, ...]


def rehearsal(options: SessionOptions, folder: Path) -> Submit:
    """The question who would take part in a job with these options, and whether they go together."""
    root = folder / "question"
    root.mkdir()
    manifest = _with_files(FileManifest(entries=()), {SCRIPT: STUB}, root)
    return options.submission("run", root, write_manifest(manifest, folder / "asked"), SCRIPT, None, (), dry_run=True)


def make_shipment(
    options: SessionOptions,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    folder: Path,
    show: Callable[[str], None],
) -> Shipment:
    """Reads the working directory and lays out what is shipped below `folder`, which is this run's.

    Args:
        show: is told what takes long.

    Raises UsageError.
    """

    def on_progress(what: str, at: PackProgress) -> None:
        show(f"reading {what}: {at.files_done} of {at.files_found} files")

    root = options.root()
    data = options.data_folder(root)
    try:
        exclude = (*options.exclude, *NEVER_SHIPPED)
        source, packed_data = pack_folders(root, data, options.include, exclude, on_progress, may_be_empty=True)
    except PackError as error:
        raise UsageError(str(error)) from error
    call = make_call(function, args, kwargs, source)
    if call.exchange == "torch.distributed" and not options.independent:
        options.check_group(call.name)
    files = folder / "files"
    files.mkdir()
    lay_out(source, files, link=True)
    manifest = _with_files(source.manifest, call.files, files)
    shipped_data = None
    if packed_data is not None and data is not None:
        place = data_place(root, data, source.manifest)
        shipped_data = (packed_data.root, write_manifest(packed_data.manifest, folder / "data"), place)
    written = write_manifest(manifest, folder / "source")
    body = options.submission(call.name, files, written, SCRIPT, shipped_data, call.modules, dry_run=False)
    return Shipment(call, body, (*source.notes, *(packed_data.notes if packed_data is not None else ())))


def _with_files(manifest: FileManifest, files: Mapping[str, bytes], root: Path) -> FileManifest:
    """Writes files below `root`. Returns the manifest with them. Raises UsageError for names that are taken."""
    taken = {entry.path.casefold() for entry in manifest.entries}
    added = []
    for path, content in files.items():
        if path.casefold() in taken:
            raise UsageError(
                f"the working directory has a file {path}, which mesh.run ships: rename it, or exclude=[...]"
            )
        (root / path).write_bytes(content)
        sha256 = hashlib.sha256(content).digest()
        added.append(FileEntry(path=path, size_bytes=len(content), sha256=sha256, executable=False))
    return FileManifest(entries=tuple(sorted((*manifest.entries, *added), key=lambda entry: entry.path)))
