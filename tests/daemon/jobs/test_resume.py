"""`submit --resume`: which checkpoint is taken, what is said of the others, and what a script must have in common."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.job_start.resume import Resuming
from meshtraind.jobs.checkpoint_search import CheckpointSearch, Resumed, ship
from meshtraind.jobs.file_intake import Intake
from meshtraind.jobs.spec import make_spec, spec_again
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.checkpoint_store import Checkpoint, CheckpointStore, list_checkpoints
from meshtraind.storage.cleanup import RESUME
from meshtraind.storage.fetch import serve
from meshtraind.transport.connection import ConnectionEnded, RequestFailed
from meshwire.checkpoints.manifest import (
    CheckpointFacts,
    CheckpointManifest,
    CheckpointName,
    GenerationRecord,
    unit_file,
)
from meshwire.jobs.files import FileEntry, FileManifest
from meshwire.message_base import Wire
from meshwire.messages.job import (
    AskCheckpoint,
    BlobRef,
    CheckpointFiles,
    Checkpoints,
    Fetch,
    JobSpec,
    ListCheckpoints,
)
from meshwire.messages.learner import LearnerModel, LearnerState, SampleSpace
from meshwire.messages.local import ResumeFrom
from meshwire.model.manifest import Momentum
from meshwire.sync_modes.mode import sync_settings
from meshwire.sync_modes.rate_rule import RateRule
from meshwire.sync_modes.settings_changes import SettingsChange
from tests.computing import computing
from tests.daemon import realjobs as jobs
from tests.daemon.job_start.test_checkpointing import JOB, MEMBERS, MODEL, SOFTWARE, SPACE, UNITS, deal, spec


def written(
    folder: Path,
    round_: int,
    job_spec: JobSpec,
    *,
    given_up: bool = False,
    created_at_s: float = 1.0,
    changes: tuple[SettingsChange, ...] = (),
) -> Checkpoint:
    store = CheckpointStore(folder, JOB, keep=5)
    saving = store.begin(round_)
    for unit, content in enumerate(UNITS):
        (saving / unit_file(unit)).write_bytes(content + bytes([round_]))
    tag = "ab12cd34" if given_up else ""
    facts = CheckpointFacts(
        job=JOB, spec=job_spec.pack().hex(), round=round_,
        generation=GenerationRecord.of(computing(JOB, MEMBERS[0].device, MEMBERS)),
        chain=f"{tag}{round_:032x}"[:32], model=MODEL.manifest.state_digest().hex(), plan=MODEL.plan.hex(),
        samples=32 * round_, space=SPACE, deal=deal(round_), created_at_s=created_at_s, software=SOFTWARE,
        changes=changes,
    )  # fmt: skip
    return store.finish(round_, facts, len(UNITS), given_up=given_up)


class Device:
    """One with a data folder; as a link, it answers as its daemon would."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.blobs = BlobStore(folder / "blobs")
        self.folder = folder / "jobs" / JOB
        self.links: dict[str, Any] = {}
        self.gone = False

    def job_folder(self, job: str) -> Path:
        assert job == JOB
        return self.folder

    def link(self, other: "Device") -> None:
        self.links[other.name] = SimpleNamespace(connection=other)

    async def request(self, body: Wire, *, timeout_s: float, name: str) -> Wire:
        await asyncio.sleep(0)
        if self.gone:
            raise ConnectionEnded(f"{self.name} is gone")
        match body:
            case ListCheckpoints():
                return Checkpoints(checkpoints=list_checkpoints(self.folder, JOB, 1, lambda: None))
            case AskCheckpoint():
                with self.blobs.holding() as owner:
                    wanted = CheckpointName(body.round, body.given_up or "")
                    return CheckpointFiles(files=ship(self.folder, JOB, wanted, self.blobs, owner))
        assert isinstance(body, Fetch)
        return await serve(body, self.blobs, self.folder, ended=lambda: True)


@pytest.fixture
def anna(tmp_path: Path) -> Device:
    return Device(tmp_path / "anna", "anna")


@pytest.fixture
def bert(tmp_path: Path, anna: Device) -> Device:
    device = Device(tmp_path / "bert", "bert")
    anna.link(device)
    return device


@pytest.fixture
def search(anna: Device) -> Iterator[CheckpointSearch]:
    with anna.blobs.holding() as owner:
        yield CheckpointSearch(cast(Any, anna), owner, lambda _: None)


def damage(checkpoint: Checkpoint) -> None:
    path = checkpoint.unit_path(1)
    path.write_bytes(bytes(path.stat().st_size))


async def laid_out(anna: Device, resumed: Resumed, folder: Path, *, begins: bool = True) -> Path:
    """As a member does when it takes the job in."""
    (folder / "job").mkdir(parents=True)
    script = folder / "train.py"
    script.write_text("pass")
    files = FileManifest(entries=(entry_of(script),))
    packed = folder / "files"
    packed.write_bytes(files.pack())
    for path in (script, packed):
        entry = entry_of(path)
        anna.blobs.ingest(path, entry.sha256, entry.size_bytes)
    source = BlobRef(sha256=files.digest(), size_bytes=packed.stat().st_size)
    new = spec_again(resumed.spec, resumed.point, "0" * 64).model_copy(update={"files": source})
    await Intake(new, folder / "job", anna.blobs, None, lambda *_: None, begins=begins).run()
    return folder / "job"


def entry_of(path: Path) -> FileEntry:
    data = path.read_bytes()
    return FileEntry(path=path.name, size_bytes=len(data), sha256=hashlib.sha256(data).digest(), executable=False)


@pytest.mark.asyncio
async def test_the_newest_is_taken_wherever_it_lies(
    anna: Device, bert: Device, search: CheckpointSearch, tmp_path: Path
) -> None:
    """All of it comes here, and to each member, with the bytes that were written."""
    written(anna.folder, 20, spec())
    newest = written(bert.folder, 40, spec())
    resumed = await search.bring(ResumeFrom(job=JOB))
    assert (resumed.point.job, resumed.point.round, resumed.notes) == (JOB, 40, ())
    assert resumed.spec == spec()
    job = await laid_out(anna, resumed, tmp_path / "member")
    for unit in range(len(UNITS)):
        assert (job / RESUME / unit_file(unit)).read_bytes() == newest.unit_path(unit).read_bytes()
    point = Resuming(job, resumed.point)
    entry = point.entry(LearnerModel(manifest=MODEL.manifest, memory_bytes=1, samples=SPACE))
    assert (entry.complete, entry.samples, entry.deal) == (40, 40 * 32, deal(40))
    task = point.task(LearnerState(units=(bytes(32), bytes(32))))
    assert (task.units, task.round) == ((0, 1), 40)


@pytest.mark.asyncio
async def test_who_returns_to_the_job_later_needs_no_checkpoint(
    anna: Device, search: CheckpointSearch, tmp_path: Path
) -> None:
    written(anna.folder, 20, spec())
    resumed = await search.bring(ResumeFrom(job=JOB))
    job = await laid_out(anna, resumed, tmp_path / "member", begins=False)
    assert not (job / RESUME).exists()


@pytest.mark.asyncio
async def test_a_damaged_one_is_named_and_the_one_before_it_taken(
    anna: Device, bert: Device, search: CheckpointSearch
) -> None:
    for device in (anna, bert):
        written(device.folder, 20, spec())
        damage(written(device.folder, 40, spec()))
    resumed = await search.bring(ResumeFrom(job=JOB))
    assert (resumed.point.round, resumed.source) == (20, None), "the one that lies here"
    assert [note.partition(":")[0] for note in resumed.notes] == [
        "the checkpoint after round 40 on anna is not used",
        "the checkpoint after round 40 on bert is not used",
    ]


@pytest.mark.asyncio
async def test_a_whole_copy_elsewhere_is_better_than_an_older_one(
    anna: Device, bert: Device, search: CheckpointSearch
) -> None:
    written(anna.folder, 20, spec())
    damage(written(anna.folder, 40, spec()))
    written(bert.folder, 40, spec())
    resumed = await search.bring(ResumeFrom(job=JOB))
    assert resumed.point.round == 40
    assert resumed.source is cast(Any, bert)


@pytest.mark.asyncio
async def test_what_was_given_up_is_taken_by_its_name_alone(
    anna: Device, bert: Device, search: CheckpointSearch, tmp_path: Path
) -> None:
    """G4: newer as it is, no job goes on from it unless a person says so."""
    written(anna.folder, 20, spec())
    lost = written(bert.folder, 40, spec(), given_up=True)
    assert (await search.bring(ResumeFrom(job=JOB))).point.round == 20
    with pytest.raises(RequestFailed, match=r"after round 40 can be used: there are those after round 40-ab12cd34, 20"):
        await search.bring(ResumeFrom(job=JOB, round=40))
    with pytest.raises(RequestFailed, match="after round 40-00000000 can be used"):
        await search.bring(ResumeFrom(job=JOB, round=40, given_up="00000000"))
    resumed = await search.bring(ResumeFrom(job=JOB, round=40, given_up="ab12cd34"))
    assert resumed.point.round == 40
    job = await laid_out(anna, resumed, tmp_path / "member")
    for unit in range(len(UNITS)):
        assert (job / RESUME / unit_file(unit)).read_bytes() == lost.unit_path(unit).read_bytes()


@pytest.mark.asyncio
async def test_what_cannot_be_had_is_said(anna: Device, bert: Device, search: CheckpointSearch) -> None:
    with pytest.raises(RequestFailed, match="none lies here or on a linked device"):
        await search.bring(ResumeFrom(job=JOB))
    written(anna.folder, 20, spec())
    bert.gone = True
    with pytest.raises(RequestFailed, match=r"after round 30 can be used: bert does not answer; .* after round 20"):
        await search.bring(ResumeFrom(job=JOB, round=30))
    assert (await search.bring(ResumeFrom(job=JOB, round=20))).point.round == 20


@pytest.mark.asyncio
async def test_the_files_of_the_job_come_from_who_has_them(
    anna: Device, bert: Device, search: CheckpointSearch, tmp_path: Path
) -> None:
    """Also to a device that was not in the job; where they are gone, the way out is named."""
    script = tmp_path / "train.py"
    script.write_text("pass")
    files = FileManifest(entries=(entry_of(script),))
    packed = tmp_path / "files"
    packed.write_bytes(files.pack())
    ref = BlobRef(sha256=files.digest(), size_bytes=packed.stat().st_size)
    source = spec(files=ref, partition_wait=90.0)
    written(bert.folder, 20, source)
    resumed = await search.bring(ResumeFrom(job=JOB))
    with pytest.raises(RequestFailed, match=f"meshtrain submit --resume {JOB} train.py"):
        await search.bring_files(resumed.spec, resumed.source)
    for path in (script, packed):
        bert.blobs.ingest(path, entry_of(path).sha256, path.stat().st_size)
    await search.bring_files(resumed.spec, resumed.source)
    assert not anna.blobs.missing(files)
    again = spec_again(resumed.spec, resumed.point, "1" * 64)
    assert again.job != JOB
    assert again.resume == resumed.point
    same = ("script", "args", "sync", "codec", "seed", "files", "bucket_bytes", "checkpoint_every", "partition_wait")
    assert all(getattr(again, name) == getattr(source, name) for name in same)


@pytest.mark.asyncio
async def test_a_script_given_anew_keeps_the_order_of_the_samples(
    anna: Device, search: CheckpointSearch, tmp_path: Path
) -> None:
    """X1: which sample a block means follows from the seed; all else is as it is asked for."""
    written(anna.folder, 20, spec(seed=77))
    resumed = await search.bring(ResumeFrom(job=JOB))
    body = jobs.submission(tmp_path, "pass", seed=None, codec="fp16", partition_wait="never")
    new = make_spec(body, sync_settings("bsp"), "0" * 64, spec().files, None, resumed)
    assert (new.seed, new.codec, new.resume) == (77, "fp16", resumed.point)
    assert new.partition_wait == "never"
    assert new.scale_lr is None
    typed = body.model_copy(update={"scale_lr": "linear,warmup=9"})
    scaled = make_spec(typed, sync_settings("bsp"), "0" * 64, spec().files, None)
    assert scaled.scale_lr == RateRule(kind="linear", warmup=9)
    assert spec_again(scaled, None, "1" * 64).scale_lr == scaled.scale_lr


@pytest.mark.asyncio
async def test_a_job_goes_on_in_the_codec_that_it_had_gone_over_to(anna: Device, search: CheckpointSearch) -> None:
    """C3: also one that was about to. Its topology is that codec's where it was the usual one."""
    changes = (SettingsChange(first=11, codec="topk"), SettingsChange(first=23, codec="int8"))
    written(anna.folder, 20, spec().model_copy(update={"topology": "ring"}), changes=changes)
    resumed = await search.bring(ResumeFrom(job=JOB))
    assert (resumed.spec.codec, resumed.spec.topology) == ("int8", "sharded")


@pytest.mark.asyncio
async def test_a_job_goes_on_with_the_period_that_it_had_gone_over_to(anna: Device, search: CheckpointSearch) -> None:
    """C3: alone, or with a codec."""
    begun = spec().model_copy(update={"sync": sync_settings("diloco:8,rate=0.5"), "topology": "ring"})
    written(anna.folder, 20, begun, changes=(SettingsChange(first=11, period=16),))
    resumed = await search.bring(ResumeFrom(job=JOB))
    assert (resumed.spec.codec, resumed.spec.sync.text()) == (begun.codec, "diloco:16,rate=0.5")
    written(anna.folder, 30, begun, changes=(SettingsChange(first=28, codec="int8", period=32),))
    resumed = await search.bring(ResumeFrom(job=JOB))
    assert (resumed.spec.codec, resumed.spec.sync.text()) == ("int8", "diloco:32,rate=0.5")


def test_a_manifest_of_before_periods_changed_is_read(tmp_path: Path) -> None:
    """It has no period in its changes, which it calls codecs."""
    manifest = written(tmp_path, 20, spec(), changes=(SettingsChange(first=11, codec="topk"),)).manifest
    body = manifest.model_dump_json().replace('"changes":[', '"codecs":[').replace('"period":null,', "")
    assert '"codecs":[{"codec":"topk","by":"person","first":11}]' in body
    assert CheckpointManifest.model_validate_json(body, strict=True) == manifest


@pytest.mark.asyncio
async def test_a_script_that_prepares_something_else_is_refused(
    anna: Device, search: CheckpointSearch, tmp_path: Path
) -> None:
    """X1: another batch would deal other samples; another model has no such state."""
    written(anna.folder, 20, spec())
    resumed = await search.bring(ResumeFrom(job=JOB))
    resuming = Resuming(await laid_out(anna, resumed, tmp_path / "member"), resumed.point)
    name = f"the checkpoint of job {JOB} after round 20"
    other = SampleSpace(total=1000, batch=16, whole_batches=False, drop_last=False)
    with pytest.raises(RequestFailed, match=f"loader reads .*{name}"):
        resuming.entry(LearnerModel(manifest=MODEL.manifest, memory_bytes=1, samples=other))
    dgc = MODEL.manifest.model_copy(update={"momentum": Momentum(factor=0.9, nesterov=False)})
    assert resuming.entry(LearnerModel(manifest=dgc, memory_bytes=1, samples=SPACE)).complete == 20  # only a codec
    adam = MODEL.manifest.model_copy(update={"optimizer": "Adam"})
    with pytest.raises(RequestFailed, match=f"another model or optimizer than that of {name}"):
        resuming.entry(LearnerModel(manifest=adam, memory_bytes=1, samples=SPACE))
    with pytest.raises(RequestFailed, match="2 units of state, the script 3"):
        resuming.task(LearnerState(units=(bytes(32),) * 3))
    (resuming.folder / "manifest.json").write_text("{}")
    with pytest.raises(RequestFailed, match=f"{name} cannot be read"):
        Resuming(resuming.folder.parent, resumed.point)
