"""Makes a job's specification, which all members know, of what a person typed, and its files into blobs."""

import asyncio
import hashlib
import secrets
import time
from pathlib import Path

from meshtraind.jobs.checkpoint_search import Resumed
from meshtraind.peers.node import Node
from meshtraind.runtime.threads import Check, in_thread
from meshtraind.storage.blobs import BlobStore
from meshtraind.transport.connection import Emit, RequestFailed
from meshwire import limits
from meshwire.collectives.strategy import collective_for
from meshwire.jobs.checkpoint_schedule import CHECKPOINT_EVERY
from meshwire.jobs.files import FileManifest, check_manifest, human_bytes
from meshwire.jobs.lifecycle import new_job_id
from meshwire.message_base import Wire
from meshwire.messages.job import BlobRef, JobSpec, ResumePoint
from meshwire.messages.local import Submit, SubmitProgress
from meshwire.model.fragments import check_fragments
from meshwire.model.masks import masks_of
from meshwire.model.plan import BUCKET_BYTES
from meshwire.peer_news import joined
from meshwire.sync_modes.codec_for_mode import codec_of
from meshwire.sync_modes.mode import SyncSettings, sync_settings
from meshwire.sync_modes.rate_rule import rate_rule_of
from meshwire.sync_modes.several_learners import refusal_of_learners


def check_settings(body: Submit) -> SyncSettings:
    """Reads the settings by which members keep in step. Raises RequestFailed for some that do not exist or do not go
    together."""
    try:
        sync = sync_settings(body.sync, body.straggler, body.visibility, body.own, body.shares)
        codec = codec_of(sync, body.codec)
        collective_for(codec, body.topology)
        rate_rule_of(body.scale_lr, sync)
        check_fragments(sync, codec, partial=body.masks is not None)
        masks_of(body.masks, sync, codec)
    except ValueError as error:
        raise RequestFailed(str(error)) from error
    reason = refusal_of_learners(
        sync,
        masks=body.masks is not None,
        by_torchrun=body.engine == "torchrun",
        independent=body.independent,
        restarts=body.restarts_max is not None,
    )
    if body.learners > 1 and reason is not None:
        raise RequestFailed(reason)
    return sync


NOT_BY_TORCHRUN = (
    "--engine torchrun starts the scripts as torchrun does, and gloo carries what they exchange: exactly, in step, on "
    "the devices that begin, without anything that is saved or begun again by the daemons"
)


def check_engine(body: Submit) -> None:
    """Refuses with `--engine torchrun` what is the daemons' part of an exchange (P9). Raises RequestFailed, which names
    it and what to do."""
    asked = {
        f"--sync {body.sync}": body.sync != "bsp",
        f"--codec {body.codec}": body.codec not in (None, "fp32"),
        "--topology": body.topology is not None,
        "--masks": body.masks is not None,
        "--scale-lr": body.scale_lr is not None,
        "--straggler": body.straggler is not None,
        "--visibility": body.visibility is not None,
        "--own": body.own is not None,
        f"--shares {body.shares}": body.shares not in (None, "equal"),
        f"--on-nan {body.on_nan}": body.on_nan != "stop",
        f"--checkpoint-every {body.checkpoint_every}": body.checkpoint_every not in (CHECKPOINT_EVERY, "off"),
        "--partition-wait": body.partition_wait is not None,
        "--resume": body.resume is not None,
        "--independent": body.independent,
        "--peers N:MAX": body.peers_max is not None,
        "--restart": body.restarts_max is not None,
    }
    refused = [option for option, is_asked in asked.items() if is_asked]
    if not refused:
        return
    if refused == ["--restart"]:
        raise RequestFailed(
            "--restart is not for --engine torchrun: no daemon knows how far gloo's groups are, nor can it end them in "
            "order. Take --restart without --engine, and the daemons carry what the scripts exchange; or submit again "
            "when it has failed, and let the script go on from its own checkpoint"
        )
    raise RequestFailed(f"{NOT_BY_TORCHRUN}. Leave out {joined(refused)}, or --engine torchrun")


def make_spec(
    body: Submit,
    sync: SyncSettings,
    device: str,
    files: BlobRef,
    data: BlobRef | None,
    resumed: Resumed | None = None,
) -> JobSpec:
    """Makes the job's specification. `resumed`: the checkpoint that it begins from."""
    now_s = time.time()
    codec = codec_of(sync, body.codec)
    seed = body.seed if resumed is None else resumed.spec.seed  # the order of the samples goes on
    return JobSpec(
        job=new_job_id(secrets.token_bytes(8)),
        name=body.name,
        submitter=device,
        created_at_s=now_s,
        script=body.script,
        args=body.args,
        env=body.env,
        files=files,
        data=data,
        data_path=body.data_path,
        sync=sync,
        codec=str(codec),
        topology=str(collective_for(codec, body.topology).topology),
        masks=masks_of(body.masks, sync, codec),
        scale_lr=rate_rule_of(body.scale_lr, sync),
        on_nan=body.on_nan,
        seed=secrets.randbits(62) if seed is None else seed,
        bucket_bytes=body.bucket_bytes or BUCKET_BYTES,
        hash_every=body.hash_every,
        trace=body.trace,
        checkpoint_every=body.checkpoint_every,
        resume=None if resumed is None else resumed.point,
        peers_max=body.peers_max,
        independent=body.independent,
        partition_wait=body.partition_wait,
        prediction=body.prediction,
        requirements=body.requirements,
        restarts_max=body.restarts_max,
        engine=body.engine,
        as_module=body.as_module,
        learners=body.learners,
    )


def spec_again(spec: JobSpec, begins: ResumePoint | None, device: str) -> JobSpec:
    """The specification of another job like this one, that this device submits. `begins`: the checkpoint that it goes
    on from."""
    now_s = time.time()
    changes = {
        "job": new_job_id(secrets.token_bytes(8)),
        "submitter": device,
        "created_at_s": now_s,
        "resume": begins,
        "prediction": None,  # others may be in it
    }
    return spec.model_copy(update=changes)


def ingest(
    root: Path, packed_manifest: Path, store: BlobStore, bytes_max: int, *, owner: str, emit: Emit, check: Check
) -> BlobRef:
    """Copies a folder's files, and its manifest, into the blob store. Blocking; `emit` must be thread-safe.

    Args:
        owner: the blobs are held in this name, and released by it.
        check: called before each block; raises to stop.

    Raises:
        RequestFailed: the manifest cannot be read or is refused.
        BlobError: a file cannot be read, or the disk refuses.
    """
    try:
        packed = packed_manifest.read_bytes()
        manifest = FileManifest.unpack(packed)
    except (OSError, ValueError) as error:
        raise RequestFailed(f"cannot read the list of files {packed_manifest}: {error}") from error
    reason = check_manifest(manifest, bytes_max)
    if reason is not None:
        raise RequestFailed(f"{root}: {reason}")
    sha256 = hashlib.sha256(packed).digest()
    store.hold(owner, [sha256, *(entry.sha256 for entry in manifest.entries)])
    missing = store.missing(manifest)
    total_bytes = sum(entry.size_bytes for entry in missing)
    store.ensure_space(total_bytes)
    done_bytes, told_s = 0, time.monotonic()

    def copied(size_bytes: int) -> None:
        nonlocal done_bytes, told_s
        check()
        done_bytes += size_bytes
        if time.monotonic() - told_s > 1.0:
            told_s = time.monotonic()
            emit(SubmitProgress(text=f"copying {root.name}", done_bytes=done_bytes, total_bytes=total_bytes))

    for entry in missing:
        store.ingest(root.joinpath(*entry.path.split("/")), entry.sha256, entry.size_bytes, copied)
    store.ingest(packed_manifest, sha256, len(packed))
    return BlobRef(sha256=sha256, size_bytes=len(packed))


async def ingest_all(body: Submit, node: Node, owner: str, emit: Emit) -> tuple[BlobRef, BlobRef | None]:
    """The working directory and the data folder as blobs. Raises as `ingest`, of which it has `owner`."""
    loop = asyncio.get_running_loop()

    def emit_from_thread(event: Wire) -> None:
        loop.call_soon_threadsafe(emit, event)

    async def ingest_in_thread(root: str, packed_manifest: str, bytes_max: int) -> BlobRef:
        return await in_thread(
            lambda check: ingest(
                Path(root),
                Path(packed_manifest),
                node.blobs,
                bytes_max,
                owner=owner,
                emit=emit_from_thread,
                check=check,
            )
        )

    files = await ingest_in_thread(body.root, body.manifest, limits.SOURCE_BYTES_MAX)
    if body.data_root is None or body.data_manifest is None:
        return files, None
    return files, await ingest_in_thread(body.data_root, body.data_manifest, limits.DATA_BYTES_MAX)


def describe_size(body: Submit) -> list[str]:
    """What would be sent to each member, for --dry-run."""
    notes = []
    for what, manifest_path in (("working directory", body.manifest), ("data", body.data_manifest)):
        if manifest_path is not None:
            manifest = FileManifest.unpack(Path(manifest_path).read_bytes())
            notes.append(f"{what}: {len(manifest.entries)} files, {human_bytes(manifest.total_bytes)}")
    return notes
