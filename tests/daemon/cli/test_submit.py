"""`submit`: how the devices keep in step, and the dry run with the memory of every device (M1)."""

import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from meshtrain.cli.commands import submit as submit_command
from meshtrain.cli.planning.learner_count import TimedLearners
from meshtrain.cli.submission import measuring
from meshtrain.cli.submission.dry_run import PARTS, MemoryNeeds, show_dry_run
from meshtrain.cli.submission.measuring import NotMeasured, measure, trace
from meshtrain.cli.submission.shipping import pack
from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages
from meshtrain.packing.shipped_folders import data_place
from meshtraind.jobs.spec import make_spec, spec_again
from meshtraind.jobs.submission import Submission
from meshtraind.transport.requests import RequestFailed
from meshwire.codecs.registry import FAMILIES, FP32, parse_codec
from meshwire.jobs.files import FileManifest
from meshwire.jobs.lifecycle import JobState
from meshwire.memory_layout.footprint import Measurement, ModelSize
from meshwire.message_base import Wire
from meshwire.messages.config import NotifyOfJob
from meshwire.messages.envelope import Done, Failure
from meshwire.messages.job import BlobRef, Member
from meshwire.messages.link import AskLinked, LinkedDevices
from meshwire.messages.local import (
    GetJobs,
    GetPeers,
    GetStatus,
    Peers,
    PeerSummary,
    Resubmit,
    ResumeFrom,
    Submit,
    Submitted,
)
from meshwire.model.fragments import manifest_under
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.model.masks import parse_masks
from meshwire.sync_modes.mode import sync_settings
from tests.daemon.fakedaemon import BERT, JOB, MEMBERS, SOFTWARE, STATUS, Endpoint, accepting, known_jobs, run, summary
from tests.daemon.realjobs import submission

pytestmark = pytest.mark.usefixtures("plain_environment")

MIB = 2**20
WAIT_S = 10.0
SCRIPT = """
import sys
import torch
import meshtrain as mt

print("reads", (mt.data_dir() / "a.bin").stat().st_size, sys.argv[1:])
model = torch.nn.Linear(1000, 1000, bias=False)
mt.prepare(model, torch.optim.AdamW(model.parameters()))
print("trains")
"""
VALUES = 1_000_000


def sent(endpoint: Endpoint, *options: str) -> Submit:
    endpoint.answers[Submit] = accepting({})
    assert run("submit", *options, "-d", "train.py").exit_code == 0
    body: Submit = endpoint.of_type(Submit)[-1]
    return body


@pytest.mark.usefixtures("project")
def test_who_is_told_of_this_job_is_said_once_it_has_begun(endpoint: Endpoint) -> None:
    endpoint.answers[NotifyOfJob] = Done()
    sent(endpoint, "--notify", "say done")
    assert endpoint.of_type(NotifyOfJob) == [NotifyOfJob(job=JOB, command="say done")]
    endpoint.answers[NotifyOfJob] = Failure(error=f"this device is not in job {JOB}")
    shown = run("submit", "--notify", "say done", "-d", "train.py")
    assert shown.exit_code == 0, "the job has begun"
    assert f"note: --notify: this device is not in job {JOB}" in shown.stderr


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_secrets_stay_here_are_named_and_can_be_included(
    endpoint: Endpoint, project: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (".env", "keys/id_ed25519", "data/.netrc", "data/a.csv"):
        (project / path).parent.mkdir(exist_ok=True)
        (project / path).write_text("hunter2")
    seen: dict[str, FileManifest] = {}
    endpoint.answers[Submit] = accepting(seen)
    monkeypatch.setattr("meshtrain.cli.commands.submit.measure", not_measured)

    def submitted(*more: str) -> tuple[str, set[str]]:
        seen.clear()
        shown = run("submit", "--detach", *options, *more, "train.py")
        assert shown.exit_code == 0, shown.stderr
        return shown.stderr, {entry.path for manifest in seen.values() for entry in manifest.entries}

    said, files = submitted()
    assert "note: left out, they look like secrets: .env, keys/id_ed25519; --include PATTERN ships them\n" in said
    assert "note: left out of the data folder, it looks like a secret: .netrc; --include PATTERN ships it\n" in said
    assert not files & {".env", "keys/id_ed25519", ".netrc"}
    said, files = submitted("--include", ".env", "--include", ".netrc")
    assert files >= {".env", ".netrc"}
    assert "left out, it looks like a secret: keys/id_ed25519;" in said


def not_measured(*_: object, **_options: object) -> None:
    raise NotMeasured("not in this test", failed=False)


@pytest.mark.usefixtures("project")
def test_what_is_not_asked_for_is_left_to_the_daemon(endpoint: Endpoint) -> None:
    body = sent(endpoint)
    assert (body.sync, body.straggler, body.visibility, body.own, body.shares) == ("bsp", None, None, None, None)
    assert body.hash_every == 0
    assert body.scale_lr is None


@pytest.mark.usefixtures("project")
def test_every_option_of_keeping_in_step_reaches_the_daemon(endpoint: Endpoint) -> None:
    options = ["--straggler", "wait", "--visibility", "fixed", "--own", "1/m", "--shares", "equal"]
    body = sent(endpoint, "--sync", "ssp:3", *options, "--hash-every", "5")
    assert (body.sync, body.straggler, body.visibility, body.own, body.shares) == (
        "ssp:3",
        "wait",
        "fixed",
        "1/m",
        "equal",
    )
    assert body.hash_every == 5
    assert sent(endpoint, "--scale-lr", "sqrt,warmup=9").scale_lr == "sqrt,warmup=9"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sync", "ssp:x"], "use bsp; demo; ssp:S"),
        (["--sync", "ssp:65"], "from 0 to 64"),
        (["--straggler", "carry"], "--straggler carry needs a bound above 0"),
        (["--sync", "ssp:2", "--straggler", "carry", "--visibility", "fixed"], "--visibility fixed needs"),
        (["--sync", "ssp:2", "--visibility", "fixed", "--shares", "speed"], "needs --shares equal"),
        (["--own", "2"], "--own 2: use"),
        (["--masks", "1.5"], "'sparsity' is not possible: use SPARSITY[,every=ROUNDS"),
        (["--masks", "0.8", "--sync", "ssp:2"], "--masks with --sync ssp:2: "),
        (["--masks", "0.8", "--sync", "demo"], "--masks with --sync demo: "),
        (["--masks", "0.8", "--codec", "powersgd"], "--masks with --codec powersgd: "),
        (["--scale-lr", "cubic"], "--scale-lr cubic: use linear or sqrt"),
        (["--scale-lr", "linear", "--sync", "local:8"], "--scale-lr linear with --sync local:8: "),
        (["--codec", "fp8"], "there is no codec 'fp8'"),
        (["--topology", "moon"], "--topology moon: there is no such topology; there are ring, tree, butterfly"),
        (["--topology", "star:64"], "--topology star:64: behind star: stand ranks, 0 to 63: the rank in the middle"),
        (["--topology", "tree", "--codec", "topk"], "--topology tree is not for --codec topk"),
        (["--codec", "topk:2"], "codec topk: ratio is '2'; it must be a number from"),
        (["--codec", "int8:up"], "codec int8: 'up' is none of its parameters. It takes: rounding is one of"),
    ],
)
@pytest.mark.usefixtures("project")
def test_what_does_not_go_together_is_refused_before_files_are_read(
    endpoint: Endpoint, options: list[str], said: str
) -> None:
    """R7, R8, X4a: in words, with exit code 2, and the daemon never hears of it."""
    shown = run("submit", *options, "--data", "no such folder", "train.py")
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert endpoint.asked == []


def test_help_shows_the_bound_first_and_the_rest_below() -> None:
    """A beginner sees --sync; what goes with it has a section of its own after everything else."""
    text = run("submit", "--help").stdout
    common, _, rest = text.partition("Keeping in step")
    assert "--sync MODE" in common
    for option in ("--straggler carry|wait", "--visibility eager|fixed", "--own 0|1/m|1", "--shares equal|speed"):
        assert option not in common
        assert option in rest
    assert "--sync ssp:2" in rest.partition("Examples:")[2]


# --- where the script finds its data ---


@pytest.mark.parametrize(
    ("typed", "links", "place"),
    [
        ("data", {}, "data"),
        ("./sets/a b/", {}, "sets/a b"),
        ("../elsewhere", {}, "data"),
        ("data", {"data": "../elsewhere"}, "data"),  # as one has a large data set on another disk
        ("sets/link", {"sets/link": "../sets/a b"}, "sets/link"),
        ("..", {}, "data"),
        (".", {}, None),
        ("a:b", {}, None),  # no name on other systems: mt.data_dir() finds it
    ],
)
def test_the_data_folder_is_in_a_job_where_the_script_looks_for_it(
    tmp_path: Path, typed: str, links: dict[str, str], place: str | None
) -> None:
    """Once it was shipped, and then nowhere below the working directory."""
    root = tmp_path / "project"
    for folder in ("data", "sets/a b", "a:b", "../elsewhere"):
        (root / folder).mkdir(parents=True)
        (root / folder / "input.txt").write_text("once")
    (root / "train.py").write_text("pass")
    for name, target in links.items():
        if (root / name).is_dir():
            shutil.rmtree(root / name)
        (root / name).symlink_to(target)
    data = root / typed
    wanted = None if typed == "../elsewhere" else place  # the working directory has a ./data of its own
    with Stages() as stages:
        exclude = ["a:b"]
        if typed in (".", ".."):
            source = FileManifest(entries=())
        else:
            packed, shipped = pack(root, "train.py", data, (), exclude, stages)
            assert shipped is not None
            assert [entry.path for entry in shipped.manifest.entries] == ["input.txt"]
            source = packed.manifest
            assert wanted is None or not any(entry.path.startswith(f"{wanted}/") for entry in source.entries)
    assert data_place(root, data, source) == wanted
    assert data_place(root, data, FileManifest(entries=())) == place


# --- the dry run ---


def peers_with(memory_bytes: int | None) -> Peers:
    bert = PeerSummary(
        device=BERT,
        name="bert",
        state="linked",
        address=None,
        rtt_s=None,
        software=SOFTWARE,
        cores=4,
        memory_bytes=memory_bytes,
    )
    return Peers(peers=(bert,))


@pytest.fixture
def measured(endpoint: Endpoint, project: Path) -> Endpoint:
    (project / "train.py").write_text(SCRIPT)
    endpoint.answers[Submit] = accepting({})
    endpoint.answers[GetStatus] = STATUS
    endpoint.answers[GetPeers] = peers_with(16 * 1024 * MIB)
    return endpoint


def dry_run(*options: str) -> Any:
    return run("submit", "--dry-run", "--data", "sets [1]", *options, "train.py", "--lr", "1")


def test_the_dry_run_measures_the_script_and_sums_up_every_devices_memory(measured: Endpoint) -> None:
    """M1: bsp with AdamW: parameters, gradients, two of the optimizer, raw and result slot, two encoded rounds."""
    shown = dry_run("--json")
    assert shown.exit_code == 0, shown.stderr
    memory = json.loads(shown.stdout)["memory"]
    assert memory["optimizer"] == "AdamW"
    assert memory["parts"]["optimizer"] == 8 * VALUES
    assert memory["needed_bytes"] == pytest.approx(8 * 4 * VALUES, rel=0.01)
    here, there = memory["members"]
    assert (here["name"], here["memory_bytes"]) == ("anna", psutil.virtual_memory().total)
    assert (there["name"], there["memory_bytes"], there["fits"]) == ("bert", 16 * 1024 * MIB, True)
    assert [body.dry_run for body in measured.of_type(Submit)] == [True]


@pytest.mark.long
def test_a_device_that_is_too_small_is_named_with_what_would_fit(measured: Endpoint) -> None:
    measured.answers[GetPeers] = peers_with(31 * MIB)
    shown = dry_run("--sync", "ssp:2")
    assert shown.exit_code == 1
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert next(row for row in rows if row[:1] == ["bert"])[1:3] == ["31.0", "MiB"]
    assert next(row for row in rows if row[:1] == ["bert"])[-1] == "NO"
    assert next(row for row in rows if row[:1] == ["anna"])[-1] == "yes"
    assert ["raw", "slots"] in [row[:2] for row in rows]
    assert "error: bert has 31.0 MiB of memory, and the job takes" in shown.stderr
    assert "try: --sync bsp or --on anna" in shown.stderr


@pytest.mark.long
def test_memory_that_is_not_known_is_no_reason_to_refuse(measured: Endpoint) -> None:
    measured.answers[GetPeers] = peers_with(None)
    shown = dry_run()
    assert shown.exit_code == 0
    assert next(line.split() for line in shown.stdout.splitlines() if line.startswith("bert"))[-1] == "-"


def test_a_script_that_fails_shows_its_last_lines_and_the_rest_goes_on(measured: Endpoint, project: Path) -> None:
    (project / "train.py").write_text(
        "import os\nprint('begins with', os.environ['MESHTRAIN_MEASURE_SCALE_LR'])\nraise ValueError('no such thing')\n"
    )
    shown = dry_run("--scale-lr", "linear,warmup=9")
    assert shown.exit_code == 0
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == [".gitignore", "train.py", "a.bin"]
    assert (
        "train.py ended with exit code 1 before it called mt.prepare:\n  begins with linear,warmup=9\n" in shown.stderr
    )
    assert "  ValueError: no such thing\n" in shown.stderr
    assert measured.of_type(GetPeers) == []


def test_a_script_that_takes_too_long_is_ended_with_all_it_started(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock strikes once the script has started another process."""
    note = project / "child"
    (project / "train.py").write_text(
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "open('note', 'w').write(str(child.pid))\n"
        "os.rename('note', 'child')\n"
        "child.wait()\n"
    )
    monkeypatch.setattr(measuring, "POLL_S", 0.05)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(monotonic=lambda: 1000.0 * note.exists()))
    with pytest.raises(CliError, match=r"has not come to mt\.prepare in 120 s"), Stages() as stages:
        measure(project, "train.py", (), {}, None, sync_settings("bsp"), FP32, stages)
    deadline_s = time.monotonic() + WAIT_S
    while runs(int(note.read_text())):
        assert time.monotonic() < deadline_s, "what the script has started outlives it"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_measured_script_gets_arguments_environment_and_data(project: Path) -> None:
    (project / "train.py").write_text(
        "import os, sys\nprint(sys.argv[1:], os.environ['A'], os.environ['MESHTRAIN_DATA'])\n"
    )
    with pytest.raises(NotMeasured) as caught, Stages() as stages:
        measure(project, "train.py", ("--x", "1"), {"A": "b"}, Path("sets [1]"), sync_settings("bsp"), FP32, stages)
    said = f"train.py ended before it called mt.prepare:\n  ['--x', '1'] b {project / 'sets [1]'}"
    assert str(caught.value) == said


# --- what would fit ---


def memory_of(*available: int | None, sync: str = "ssp:8", codec: str = "fp32") -> MemoryNeeds:
    manifest = ModelManifest(
        tensors=(TensorSpec(name="w", shape=(VALUES,), dtype="float32", kind="parameter"),), optimizer=""
    )
    size = ModelSize(
        parameters=4 * VALUES,
        frozen=0,
        buffers=0,
        optimizer="SGD",
        optimizer_state=0,
        optimizer_known=True,
    )
    members = MEMBERS[: len(available)]
    return MemoryNeeds(Measurement(manifest=manifest, size=size), codec, sync_settings(sync), members, tuple(available))


def test_where_several_learners_do_not_fit_one_is_proposed() -> None:
    two = replace(memory_of(sys.maxsize, sync="bsp"), learners=2)
    assert two.needed() == memory_of(sys.maxsize, sync="bsp").needed().of_learners(2)
    few = replace(two, available=(two.needed().total_bytes - 1,))
    assert few.remedies()[0] == "--learners 1"


def test_what_keeps_the_largest_bound_is_proposed_first() -> None:
    """fp16 if that allows more than the chosen codec; the largest bound with that one; without the small device."""
    needed = memory_of(sys.maxsize, sys.maxsize)
    full, half = needed.needed().total_bytes, needed.needed("fp16").total_bytes
    smaller = needed.needed(staleness=5).total_bytes
    assert memory_of(full, full).too_small() == []
    assert [at for at, _ in memory_of(full, full - 1).too_small()] == [1]
    assert memory_of(full, half).remedies()[0] == "--codec fp16"
    assert memory_of(full, smaller).remedies()[-2:] == ["--sync ssp:5", "--on anna"]
    assert memory_of(full, needed.needed(staleness=0).total_bytes).remedies() == ["--sync bsp", "--on anna"]
    assert memory_of(full, half, codec="fp16", sync="ssp:8").too_small() == []
    assert memory_of(full, 0).remedies() == ["--on anna"]
    assert memory_of(0, 0).remedies() == []


def in_parts(sync: str, masks: str | None = None, codec: str = "fp32") -> MemoryNeeds:
    shapes = ((3000, 64), (1000, 64), (1000, 64))
    tensors = tuple(
        TensorSpec(name=f"w{at}", shape=shape, dtype="float32", kind="parameter") for at, shape in enumerate(shapes)
    )
    needed = memory_of(sys.maxsize, sys.maxsize, sync=sync, codec=codec)
    manifest = manifest_under(ModelManifest(tensors=tensors, optimizer=""), sync_settings(sync))  # as it was measured
    settings = None if masks is None else parse_masks(masks)
    return replace(needed, measurement=Measurement(manifest=manifest, size=needed.measurement.size), masks=settings)


def test_a_dry_run_says_how_large_parts_are_that_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """R9: of about equal size, but no tensor is cut."""
    found = in_parts("diloco:8,stream=2")
    assert found.sent_in_turns() == (4 * 64 * 3000, 4 * 64 * 5000)
    assert in_parts("diloco:8,stream=2", codec="int8").sent_in_turns() != found.sent_in_turns()
    assert in_parts("diloco:8").sent_in_turns() is None
    show_dry_run(Submitted(job=JOB, members=MEMBERS, notes=()), (), {}, found, json=False)
    told = capsys.readouterr()
    said = "Of 1.2 MiB that travel, a round carries one of 2 parts, at most 750.0 KiB; the next one's is 4 steps later."
    assert said in " ".join((told.out + told.err).split())
    show_dry_run(Submitted(job=JOB, members=MEMBERS, notes=()), (), {}, found, json=True)
    assert json.loads(capsys.readouterr().out)["rounds"] == {"bytes_max": 768000, "bytes_of_all": 1280000, "steps": 4}


def test_parts_that_take_turns_are_refused_where_something_else_says_what_travels() -> None:
    with pytest.raises(CliError, match=r"does not go with --masks or mt\.Progressive"):
        in_parts("diloco:8,stream=2", masks="0.5").check_suits()
    with pytest.raises(CliError, match="use another, such as int8 or topk"):
        in_parts("diloco:8,stream=2", codec="powersgd").check_suits()
    with pytest.raises(CliError, match="use stream=1, 2"):
        replace(in_parts("diloco:8,stream=2"), sync=sync_settings("diloco:8,stream=4")).check_suits()
    in_parts("diloco:8,stream=2,tau=4", codec="int8").check_suits()


def test_less_memory_than_a_delay_takes_is_enough_without_it() -> None:
    late = in_parts("diloco:8,stream=2,tau=1")
    without = in_parts("diloco:8,stream=2").needed().total_bytes
    assert without < late.needed().total_bytes
    assert replace(late, available=(without, sys.maxsize)).remedies() == ["--sync diloco:8,stream=2", "--on bert"]


@pytest.mark.usefixtures("project")
def test_parts_that_take_turns_are_sent_or_refused(endpoint: Endpoint) -> None:
    assert sent(endpoint, "--sync", "diloco:8,stream=4,tau=2").sync == "diloco:8,stream=4,tau=2"
    for options, said in (
        (("--masks", "0.5"), "does not go with --masks or mt.Progressive"),
        (("--codec", "powersgd"), "use another, such as int8 or topk"),
    ):
        wrong = run("submit", "--sync", "diloco:8,stream=4", *options, "train.py")
        assert wrong.exit_code == 2
        assert said in wrong.stderr


def test_every_part_of_the_memory_is_explained() -> None:
    """M1: for all codecs; error feedback keeps vectors of fp32, so a smaller codec may need more."""
    for codec in FAMILIES:
        needed = memory_of(sys.maxsize, codec=codec).needed()
        assert {name for name, _ in needed.parts()} == set(PARTS)
        assert (needed.residuals > 0) == parse_codec(codec).error_feedback
    assert memory_of(1, sys.maxsize, codec="int8").remedies()[-1] == "--on bert"


# Checkpoints, and going on from them


@pytest.mark.usefixtures("project")
def test_checkpoints_are_asked_for(endpoint: Endpoint) -> None:
    assert sent(endpoint).checkpoint_every == "5"
    assert sent(endpoint, "--checkpoint-every", "500r").checkpoint_every == "500r"
    wrong = run("submit", "--checkpoint-every", "never", "train.py")
    assert wrong.exit_code == 2
    assert "minutes (5), rounds (500r), or off" in wrong.stderr


@pytest.mark.usefixtures("project")
def test_how_long_a_part_waits_for_the_others_is_asked_for(endpoint: Endpoint) -> None:
    """G7."""
    assert sent(endpoint).partition_wait is None
    assert sent(endpoint, "--partition-wait", "90").partition_wait == 90.0
    assert sent(endpoint, "--partition-wait", "never").partition_wait == "never"
    for nonsense in ("-1", "nan", "soon"):
        wrong = run("submit", f"--partition-wait={nonsense}", "train.py")
        assert wrong.exit_code == 2
        assert f"--partition-wait {nonsense}: use seconds (from 0 to 604800), or never" in wrong.stderr
    assert "--partition-wait SECONDS|never" in run("submit", "--help").stdout
    endpoint.answers[GetJobs] = known_jobs(summary())
    changed = run("submit", "--resume", "1KX3", "--partition-wait", "90")
    assert "--partition-wait changes the job, which without SCRIPT goes on as it was" in changed.stderr


def test_without_a_script_a_job_goes_on_as_it_was(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary())
    endpoint.answers[Resubmit] = Submitted(job=JOB, members=MEMBERS, notes=("round 40 is damaged",))
    shown = run("submit", "--resume", "1KX3@40", "--on", "anna,bert", "-d")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.strip() == JOB
    assert "note: round 40 is damaged" in shown.stderr
    assert endpoint.of_type(Resubmit) == [Resubmit(resume=ResumeFrom(job=JOB, round=40), on=("anna", "bert"))]
    run("submit", "--resume", "1KX3@40-ab12cd34", "-d")
    assert endpoint.of_type(Resubmit)[1:] == [Resubmit(resume=ResumeFrom(job=JOB, round=40, given_up="ab12cd34"))]


@pytest.mark.usefixtures("project")
def test_with_a_script_all_but_the_state_is_given_anew(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary())
    body = sent(endpoint, "--resume", "1kx3", "--codec", "fp16")
    assert (body.resume, body.codec) == (ResumeFrom(job=JOB), "fp16")


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "which script?"),
        (["--resume", "1kx3", "--codec", "fp16"], "--codec changes the job"),
        (["--resume", "1kx3", "--dry-run"], "--dry-run changes the job"),
        (["--resume", "1kx3@x", "train.py"], "a round is a number"),
        (["--resume", "1kx3@"], "a round is a number"),
        (["--resume", "1kx3", "--seed", "7", "train.py"], "keeps the seed"),
    ],
)
def test_what_does_not_go_with_resume_is_refused(endpoint: Endpoint, options: list[str], said: str) -> None:
    """Nothing that was typed is left aside in silence."""
    endpoint.answers[GetJobs] = known_jobs(summary())
    shown = run("submit", *options)
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert not endpoint.of_type(Submit)
    assert not endpoint.of_type(Resubmit)


def test_a_lost_job_is_listed_with_the_way_on(endpoint: Endpoint) -> None:
    endpoint.answers[GetJobs] = known_jobs(summary(JobState.LOST))
    assert f"meshtrain submit --resume {JOB}" in run("jobs").stderr


@pytest.mark.asyncio
async def test_a_dry_run_tells_what_a_submission_would(tmp_path: Path) -> None:
    """C2: that a gather costs more with three devices is known before anything is started."""

    everybody = "a" * 64, "b" * 64, "c" * 64

    async def request(body: Wire, **_: object) -> Wire:
        assert body == AskLinked()
        return LinkedDevices(devices=everybody)

    def link(device: str, name: str) -> Any:
        hello = SimpleNamespace(name=name, incarnation=1, software=SOFTWARE)
        member = Member(device=device, incarnation=1, name=name)
        return SimpleNamespace(device=device, member=member, hello=hello, connection=SimpleNamespace(request=request))

    member = Member(device="a" * 64, incarnation=1, name="anna")
    links = {device: link(device, name) for device, name in (("b" * 64, "bert"), ("c" * 64, "cleo"))}
    node: Any = SimpleNamespace(device=member.device, member=member, software=SOFTWARE, links=links)
    board: Any = None
    body = submission(tmp_path, "pass", codec="topk:0.01,gather", dry_run=True)
    told = await Submission(node, board, body, lambda _: None).run("test")
    assert len(told.members) == 3
    assert any(note.startswith("codec topk:gather with 3 devices") for note in told.notes)


@pytest.mark.usefixtures("project")
def test_a_job_whose_devices_train_by_themselves_is_asked_for(endpoint: Endpoint) -> None:
    """J4."""
    assert not sent(endpoint).independent
    assert sent(endpoint, "--independent").independent


@pytest.mark.usefixtures("project")
def test_restarts_are_asked_for_by_either_name(endpoint: Endpoint) -> None:
    """P6."""
    assert sent(endpoint).restarts_max is None
    assert sent(endpoint, "--restart", "3").restarts_max == 3
    assert sent(endpoint, "--max-restarts", "2").restarts_max == 2
    assert run("submit", "--restart", "0", "train.py").exit_code == 2


def test_an_engine_is_asked_for_and_is_legal_for_any_script(endpoint: Endpoint, project: Path) -> None:
    """P9: nothing is chosen for it, and what daemons carry of process groups is no matter."""
    assert sent(endpoint).engine == "mesh"
    (project / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    typed = sent(endpoint, "--engine", "torchrun", "--masks", "0.8")  # which the daemon refuses
    assert (typed.engine, typed.sync, typed.codec, typed.prediction) == ("torchrun", "bsp", None, None)
    assert run("submit", "--engine", "nccl", "train.py").exit_code == 2


@pytest.mark.asyncio
async def test_restarts_are_for_scripts_that_train_together_without_prepare(tmp_path: Path) -> None:
    """P6: whatever else is refused comes later."""
    member = Member(device="a" * 64, incarnation=1, name="anna")
    node: Any = SimpleNamespace(device=member.device, member=member, software=SOFTWARE, links={})
    board: Any = None
    for text, options, why in (
        (
            "import meshtrain as mt\nmt.prepare(model)",
            {},
            r"train.py uses mt\.prepare, and --restart is for scripts without",
        ),
        ("import torch", {"independent": True}, "--independent for others: take one"),
    ):
        body = submission(tmp_path, text, dry_run=True, restarts_max=3, **options)
        with pytest.raises(RequestFailed, match=why):
            await Submission(node, board, body, lambda _: None).run("test")


@pytest.mark.usefixtures("project")
def test_several_learners_are_for_jobs_whose_rounds_are_waited_for(endpoint: Endpoint) -> None:
    """R6: what cannot have them is refused before anything is sent, with what can. Nothing is chosen then."""
    assert sent(endpoint).learners == 1
    typed = sent(endpoint, "--learners", "2", "--sync", "local:8", "--codec", "int8")
    assert (typed.learners, typed.sync, typed.prediction) == (2, "local:8", None)
    before = len(endpoint.of_type(Submit))
    for options, why in (
        (["--sync", "ssp:2"], "--learners with --sync ssp:2: the learners of a device add up"),
        (["--sync", "local:8,stream=4"], "use bsp, local:H, diloco:H, muloco:H, sparseloco:H, sma:H or demo, without"),
        (["--masks", "0.8"], "--learners does not go with --masks"),
        (["--independent"], "omit it, or --independent"),
        (["--restart", "2"], "omit it, or --restart"),
        (["--engine", "torchrun"], "omit it, or --engine torchrun"),
    ):
        shown = run("submit", "--learners", "2", *options, "-d", "train.py")
        assert shown.exit_code == 2
        assert why in " ".join(shown.stderr.split())
    assert run("submit", "--learners", "17", "train.py").exit_code == 2
    assert len(endpoint.of_type(Submit)) == before


def test_several_learners_and_process_groups_are_refused(endpoint: Endpoint, project: Path) -> None:
    (project / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    shown = run("submit", "--learners", "2", "-d", "train.py")
    assert shown.exit_code == 2
    assert "it has one rank on each laptop, and --learners is for scripts that call mt.prepare" in shown.stderr
    assert not endpoint.of_type(Submit)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("count", [1, 2])
def test_as_many_learners_as_pay(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """--learners auto: what was found is said, and what follows for the rate; where it is one the job is planned."""
    found = {1: 100.0, 2: 100.0 + 20.0 * (count == 2)}
    monkeypatch.setattr(submit_command, "time_learners", lambda *_: TimedLearners(found))
    planned: list[object] = []
    endpoint.answers[Submit] = accepting({})

    def choose(_: object, typed: object, *__: object, **___: object) -> object:
        planned.append(typed)
        return typed

    monkeypatch.setattr(submit_command, "choose", choose)
    monkeypatch.delenv("MESHTRAIN_NO_PLAN", raising=False)
    shown = run("submit", "--learners", "auto", "-d", "train.py")
    assert shown.exit_code == 0, shown.stderr
    assert endpoint.of_type(Submit)[-1].learners == count
    assert len(planned) == (count == 1)
    assert ("note: a round's batch is 2 times as large, and --scale-lr follows that" in shown.stderr) == (count == 2)
    assert f"learners: {count} on each laptop, for 2 beside each other train 1." in shown.stderr


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--learners", "many"], "--learners 'many' is neither auto nor a number from 1 to 16"),
        (["--learners", "0"], "--learners '0' is neither auto nor a number"),
        (["--learners", "auto", "--sync", "ssp:2"], "--learners with --sync ssp:2: the learners of a device add up"),
        (["--learners", "auto", "--quality", "fast"], "--quality is for what is chosen"),
    ],
)
def test_learners_that_cannot_be_are_refused(endpoint: Endpoint, options: list[str], why: str) -> None:
    shown = run("submit", *options, "-d", "train.py")
    assert shown.exit_code == 2
    assert why in " ".join(shown.stderr.split())
    assert not endpoint.of_type(Submit)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"learners": 2, "sync": "ssp:1"}, "--learners with --sync ssp:1"),
        ({"sync": "local:4,stream=4,random", "codec": "topk:0.1"}, "other values travel in every round: use fp32"),
        ({"sync": "local:4,stream=4", "masks": "0.5"}, "does not go with --masks"),
    ],
)
async def test_a_daemon_refuses_what_does_not_go_together(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    """Whoever asks it, a notebook's session for one, and in a dry run too."""
    member = Member(device="a" * 64, incarnation=1, name="anna")
    node: Any = SimpleNamespace(device=member.device, member=member, software=SOFTWARE, links={})
    body = submission(tmp_path, "import torch", dry_run=True, **settings)
    board: Any = None
    with pytest.raises(RequestFailed, match=why):
        await Submission(node, board, body, lambda _: None).run("test")


def test_a_notebook_is_refused_with_the_way_to_a_script(endpoint: Endpoint, project: Path) -> None:
    """Python would stop at its first line, or at `null`."""
    (project / "train.ipynb").write_text('{"cells": []}')
    shown = run("submit", "train.ipynb")
    assert shown.exit_code == 1
    assert "error: train.ipynb is a notebook, and a job runs a Python script" in shown.stderr
    assert "try: jupyter nbconvert --to script train.ipynb && meshtrain submit train.py" in shown.stderr
    assert not endpoint.of_type(Submit)


def test_a_script_with_process_groups_may_compress_the_gradients_of_ddp(endpoint: Endpoint, project: Path) -> None:
    """P5: by what torch has hooks for. Everything else of rounds is refused with what is legal."""
    (project / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    assert sent(endpoint, "--codec", "powersgd:2").codec == "powersgd:2"
    refused = (
        *(["--codec", "topk"], ["--sync", "ssp:1"], ["--masks", "0.8"], ["--topology", "tree"]),
        ["--scale-lr", "linear"],
    )
    for typed in refused:
        shown = run("submit", *typed, "-d", "train.py")
        assert shown.exit_code == 2
        assert "train.py uses torch.distributed: its collectives are exact" in shown.stderr
        assert "of --codec it takes fp16, bf16 and powersgd" in shown.stderr


# --- submit -m ---


@pytest.fixture
def package(project: Path) -> Path:
    """A package with a module that imports what lies beside it, and one that is run by its own name."""
    (project / "shop" / "deep").mkdir(parents=True)
    (project / "shop" / "__init__.py").write_text("import einops\n")
    (project / "shop" / "train.py").write_text("import shop.parts\nfrom . import parts\nimport wandb\n")
    (project / "shop" / "parts.py").write_text("import yaml\n")
    (project / "shop" / "__main__.py").write_text("import meshtrain as mt\n")
    (project / "src" / "inner").mkdir(parents=True)
    (project / "src" / "inner" / "train.py").touch()
    return project


@pytest.mark.usefixtures("package")
def test_a_module_is_submitted_as_the_file_that_it_is(endpoint: Endpoint) -> None:
    """As with python -m and torchrun -m, all behind it is its own."""
    endpoint.answers[Submit] = accepting({})
    shown = run("submit", "-d", "-m", "shop.train", "--epochs", "3", "-m", "--peers", "2")
    assert shown.exit_code == 0, shown.stderr
    [body] = endpoint.of_type(Submit)
    assert (body.script, body.as_module, body.name) == ("shop/train.py", True, "train")
    assert body.args == ("--epochs", "3", "-m", "--peers", "2")
    assert "--peers stands behind shop.train, so it is the script's" in shown.stderr
    assert body.modules == ("einops", "wandb", "yaml"), "what its packages import is looked for, too"
    body = sent_module(endpoint, "shop")
    assert (body.script, body.as_module, body.name) == ("shop/__main__.py", True, "shop")
    assert not sent(endpoint).as_module


def sent_module(endpoint: Endpoint, module: str) -> Submit:
    shown = run("submit", "-d", "-m", module)
    assert shown.exit_code == 0, shown.stderr
    body: Submit = endpoint.of_type(Submit)[-1]
    return body


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("command", ["submit", "plan", "whatif"])
@pytest.mark.parametrize(
    ("module", "code", "said", "hint"),
    [
        ("shop.trian", 1, "looked for shop/trian.py and shop/trian/__main__.py there", "try: cd into the folder that"),
        ("shop.deep", 1, "shop.deep is a package without a __main__.py", "try: meshtrain submit -m shop.deep.train"),
        ("inner.train", 1, "which is what is shipped", "try: cd src && meshtrain submit -m inner.train"),
        ("shop/train.py", 2, "stands a module's name, with dots", "try: meshtrain submit -m shop.train\n"),
        ("shop.train.py", 2, "stands a module's name, with dots", "try: meshtrain submit -m shop.train\n"),
        ("../x", 2, "stands a module's name, with dots", "try: meshtrain submit -m package.module"),
        ("", 2, "stands a module's name, with dots", "try: meshtrain submit -m package.module"),
    ],
)
def test_a_module_that_is_not_there_is_refused_before_the_daemon_hears_of_it(
    endpoint: Endpoint, command: str, module: str, code: int, said: str, hint: str
) -> None:
    shown = run(command, "-m", module)
    assert shown.exit_code == code, shown.stderr
    assert f"error: -m {module}: " in shown.stderr
    assert said in shown.stderr
    assert hint in shown.stderr
    assert endpoint.asked == []


@pytest.mark.usefixtures("package")
def test_m_without_a_module_asks_for_one() -> None:
    shown = run("submit", "-m")
    assert shown.exit_code == 2
    assert "error: which module?\ntry: meshtrain submit -m package.train\n" in shown.stderr
    shown = run("submit", "-m", "shop.train", "--no-plan", "--", "--epochs", "3")
    assert "try: meshtrain submit --no-plan -m shop.train --epochs 3\n" in shown.stderr


def test_a_module_is_measured_as_python_m_runs_it(package: Path, tmp_path: Path) -> None:
    """From the working directory, with its packages: what it imports by a dot is found."""
    (package / "shop" / "__init__.py").write_text("")
    (package / "shop" / "parts.py").write_text("HERE = 1\n")
    seen = tmp_path / "seen"
    (package / "shop" / "train.py").write_text(
        "import sys\nfrom . import parts\nimport train\n"
        f"open({str(seen)!r}, 'w').write(f'{{__package__}} {{sys.argv[1:]}}')\n"
    )
    with pytest.raises(NotMeasured, match=r"^shop/train\.py ended before"), Stages() as stages:
        trace(package, "shop/train.py", ("--x",), {}, None, stages, module="shop.train")
    assert seen.read_text() == "shop ['--x']"


def test_a_job_that_goes_on_runs_its_module_again(tmp_path: Path) -> None:
    body = submission(tmp_path, "pass", as_module=True)
    files = BlobRef(sha256=bytes(32), size_bytes=1)
    spec = make_spec(body, sync_settings("bsp"), "a" * 64, files, None)
    assert spec.as_module
    assert spec_again(spec, None, "b" * 64).as_module
