"""A call is sent whole, with the source of its code, and made there as it would be here, or refused early."""

import inspect
import json
import linecache
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import meshtrain as mt
from meshtrain.cli.commands.submit import submit
from meshtrain.errors import UsageError
from meshtrain.notebook import call as sent_call
from meshtrain.notebook.call import CALL, RESULT, SCRIPT, ShippedCall, make_call
from meshtrain.notebook.mesh_session import MeshSession
from meshtrain.notebook.on_device import run_call
from meshtrain.notebook.session_options import SessionOptions
from meshtrain.notebook.shipment import make_shipment, rehearsal
from meshtrain.notebook.versions import check_pythons
from meshtrain.packing.tree import scan
from meshtrain.train.returned_values import unpack_value
from meshtraind.learner.environment import calls_prepare
from meshtraind.learner.script_error import ScriptError
from meshwire.jobs.checkpoint_schedule import CHECKPOINT_EVERY
from meshwire.jobs.files import FileManifest
from meshwire.messages.job import Member
from meshwire.messages.link import Software

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def cell(text: str, number: int = 1, **variables: Any) -> Mapping[str, Any]:
    """What a notebook's cell with this text defines: in `__main__`, under a name that only its kernel knows."""
    filename = f"<ipython-input-{number}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    defined: dict[str, Any] = {"__name__": "__main__", **variables}
    exec(compile(text, filename, "exec"), defined)
    return defined


def sent(folder: Path, function: Any, *args: Any, **kwargs: Any) -> ShippedCall:
    folder.mkdir(exist_ok=True)
    return make_call(function, args, kwargs, scan(folder, may_be_empty=True))


def laid_out(folder: Path, call: ShippedCall) -> Path:
    folder.mkdir()
    for path, content in call.files.items():
        (folder / path).write_bytes(content)
    return folder


def test_a_call_is_made_there_and_its_result_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers, classes, variables and arguments of the notebook travel with it."""
    text = "FACTOR = 3\nclass Two:\n    n = 2\ndef helper(x):\n    return x * FACTOR * Two().n\n"
    text += "def work(x, *, add):\n    return {'value': (helper(x) + add,), 'state': [mt.rank(), mt.world_size()]}\n"
    call = sent(tmp_path / "beside", cell(text, mt=mt)["work"], 5, add=1)
    monkeypatch.chdir(laid_out(tmp_path / "there", call))
    run_call(CALL, RESULT, python=HERE, cloudpickle="3")
    assert unpack_value((tmp_path / "there/out" / RESULT).read_bytes()) == {"value": (31,), "state": [0, 1]}


def test_an_error_there_names_the_cell_and_shows_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = sent(tmp_path / "beside", cell("def broken():\n    raise ValueError('boom')\n", 7)["broken"])
    there = laid_out(tmp_path / "there", call)
    linecache.clearcache()
    monkeypatch.chdir(there)
    with pytest.raises(ValueError, match="boom") as raised:
        run_call(CALL, RESULT, python=HERE, cloudpickle="3")
    told = ScriptError.of(raised.value, there)
    assert told.place == "ipython-input-7, line 2, in broken"
    assert told.code == "raise ValueError('boom')"
    assert not (there / "out").exists(), "a call that has failed leaves no result"


def test_code_of_files_that_are_shipped_keeps_their_place(tmp_path: Path) -> None:
    own = tmp_path / "beside/lib/own.py"
    own.parent.mkdir(parents=True)
    own.write_text("def make():\n    return lambda: 1\n")
    inner = {"__name__": "own"}
    exec(compile(own.read_text(), str(own), "exec"), inner)
    call = sent(tmp_path / "beside", inner["make"]())  # type: ignore[operator]
    assert b"lib/own.py" in call.files[CALL]
    assert set(call.files) == {SCRIPT, CALL}, "and is not sent twice"
    assert str(tmp_path).encode() not in call.files[CALL]


PREPARES = [
    "def f():\n    return mt.prepare(1, 2)",
    "def f():\n    import meshtrain as em\n    em.prepare(1, 2)",
    "def f():\n    from meshtrain import log, prepare as p\n    p(1, 2)",
    "def f():\n    def inner():\n        return [mt.prepare(x, 1) for x in ()]\n    return inner",
    "def g():\n    mt.prepare(1, 2)\ndef f():\n    g()",
    "class T:\n    def go(self):\n        mt.prepare(1, 2)\ndef f():\n    T().go()",
    "from meshtrain import prepare\ndef f():\n    prepare(1, 2)",
    "import meshtrain as em\ndef f():\n    em.prepare(1, 2)",
    "def f():\n    import torch.distributed\n    mt.prepare(1, 2)",
]
GROUPS = [
    "def f():\n    import torch.distributed as dist\n    dist.init_process_group()",
    "def f():\n    from accelerate import Accelerator\n    a = Accelerator()\n    return a.prepare(1), mt.rank()",
    "import torch\ndef f():\n    torch.distributed.init_process_group('gloo')",
    "import torch.distributed as dist\ndef f():\n    return dist",
]
NEITHER = ["def f():\n    return mt.rank()", "import torch\ndef f():\n    return torch.ones(1)", "f = print"]


@pytest.mark.parametrize(
    ("text", "exchange"),
    [
        *((text, "mt.prepare") for text in PREPARES),
        *((text, "torch.distributed") for text in GROUPS),
        *((text, None) for text in NEITHER),
    ],
)
def test_the_script_states_how_the_function_exchanges(tmp_path: Path, text: str, exchange: str | None) -> None:
    """And the daemon, which looks at its text, sets torchrun's variables where it is not by mt.prepare."""
    call = sent(tmp_path / "beside", cell(text, mt=mt)["f"])
    assert call.exchange == exchange
    script = tmp_path / SCRIPT
    script.write_bytes(call.files[SCRIPT])
    assert calls_prepare(script) == (exchange == "mt.prepare")


def test_modules_beside_the_notebook_are_sent_and_packages_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "beside_the_notebook.py").write_text(
        "import hypothesis\nimport meshtrain as mt\ndef train():\n    mt.prepare(1, 2)\n"
    )
    monkeypatch.syspath_prepend(beside)
    import beside_the_notebook  # type: ignore[import-not-found]

    text = "def f():\n    return train, pytest, json\n"
    try:
        call = sent(beside, cell(text, train=beside_the_notebook.train, pytest=pytest, json=json)["f"])
    finally:
        del sys.modules["beside_the_notebook"]
    assert call.modules == ("cloudpickle", "hypothesis", "pytest")
    assert call.exchange == "mt.prepare", "which the module's text says"


def test_what_cannot_be_sent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="takes a function and its arguments, not a int"):
        sent(tmp_path, 3)
    with (
        (tmp_path / "open").open("wb") as file,
        pytest.raises(UsageError, match="print and its arguments"),
    ):
        sent(tmp_path, print, file)
    monkeypatch.setattr(sent_call, "CALL_BYTES_MAX", 10)
    with pytest.raises(UsageError, match="put data into files"):
        sent(tmp_path, print, "x" * 100)


def test_without_cloudpickle_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match="pip install cloudpickle, here and on each laptop"):
        mt.session()


def test_in_a_job_there_is_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHTRAIN_JOB_ID", "1kx3000000aa")
    with pytest.raises(UsageError, match="in a job already"):
        mt.session()


def test_a_session_needs_no_torch() -> None:
    code = "import sys, meshtrain as mt\ntry:\n    mt.session(data_dir='/no')\nexcept mt.DaemonNotRunning as error:\n"
    code += "    print(error, *sorted({'torch', 'IPython'} & set(sys.modules)))"
    roots = os.pathsep.join(str(Path(mt.__file__).parents[1] / part) for part in (".", "protocol"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": roots},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip().endswith("Start it: meshtrain up"), done.stderr + done.stdout


MEMBERS = tuple(Member(device=each * 64, incarnation=1, name=name) for each, name in (("a", "anna"), ("b", "bert")))


def software(python: str) -> Software:
    return Software(meshtrain="0.1.0", python=python, torch="2.13.0", system="Linux x86_64")


def test_a_device_with_another_python_is_named_with_both_versions() -> None:
    there = {"a" * 64: software("3.12.4"), "b" * 64: software("3.11.9")}
    with pytest.raises(UsageError, match=r"^bert has Python 3\.11, and this process Python 3\.12: .*mt\.session\(on="):
        check_pythons(MEMBERS, there, "3.12.1")
    check_pythons(MEMBERS, there | {"b" * 64: software("3.12.0")}, "3.12.1")


def test_there_the_versions_are_compared_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may have come later. What cannot be loaded tells of packages; what is missing is told as by Python."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=rf"with Python 3\.7 cannot run here, where it is {HERE}"):
        run_call(CALL, RESULT, python="3.7", cloudpickle="3")
    (tmp_path / CALL).write_bytes(b"no pickle")
    with pytest.raises(UsageError, match=r"cannot be loaded here .* made by cloudpickle 9\.9"):
        run_call(CALL, RESULT, python=HERE, cloudpickle="9.9")
    (tmp_path / CALL).write_bytes(b"cno_such_module\nname\n.")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        run_call(CALL, RESULT, python=HERE, cloudpickle="3")


def test_the_persons_folder_is_shipped_and_not_written_to(tmp_path: Path) -> None:
    """Notebooks stay, data are sent once and lie where they did."""
    root, folder = tmp_path / "project", tmp_path / "run"
    folder.mkdir()
    for path in ("lib/own.py", "data/input.txt", "a.ipynb", ".ipynb_checkpoints/a-checkpoint.py", ".env"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    shipment = make_shipment(SessionOptions(folder=root), cell("def f(): pass", mt=mt)["f"], (), {}, folder, print)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    body = shipment.body
    manifest = FileManifest.unpack(Path(body.manifest).read_bytes())
    assert [entry.path for entry in manifest.entries] == ["ipython-input-1", "lib/own.py", CALL, SCRIPT]
    for entry in manifest.entries:
        assert (Path(body.root) / entry.path).stat().st_size == entry.size_bytes
    assert body.data_root == str(root / "data")
    assert body.data_path == "data"
    assert "left out, it looks like a secret: .env" in shipment.notes[0]


def test_a_file_of_the_name_that_a_run_needs_is_refused(tmp_path: Path) -> None:
    (tmp_path / SCRIPT).write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(UsageError, match=f"has a file {SCRIPT}"):
        make_shipment(SessionOptions(folder=tmp_path), print, (), {}, folder, print)
    assert (tmp_path / SCRIPT).read_text() == "mine"


def test_nobody_ships_a_home_folder_by_starting_jupyter_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="all of which would be shipped"):
        SessionOptions().root()
    inside = tmp_path / "notebooks"
    inside.mkdir()
    assert SessionOptions(folder=inside).root() == inside


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"mt\.session\(peers=\.\.\.\)"):
        rehearsal(SessionOptions(peers=0), tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(UsageError, match="collectives are exact"):
        make_shipment(SessionOptions(codec="int8", folder=folder), cell(GROUPS[0])["f"], (), {}, folder, print)


def test_a_function_of_process_groups_has_none_of_what_rounds_have(tmp_path: Path) -> None:
    options = SessionOptions(scale_lr="linear", learners=2, folder=tmp_path)
    with pytest.raises(UsageError, match=r"one rank a device: learners=, scale_lr= are for functions with mt\.prepare"):
        options.check_group("train")


# Of `submit`, but not of a session: what is a script's, a terminal's, or chosen by measuring a script
NOT_OF_A_SESSION = {
    *("context", "script", "args", "module", "name", "resume"),
    *("json", "detach", "dry_run", "notify", "trace", "hash_every"),
    *("quality", "no_plan", "restart", "engine", "partition_wait"),
}


def test_a_session_has_the_options_of_submit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under the same names, and each reaches the job."""
    of_submit, of_session = (set(inspect.signature(each).parameters) for each in (submit, mt.session))
    assert of_submit - of_session == NOT_OF_A_SESSION
    assert of_session - of_submit == {"folder"}
    kept: list[SessionOptions] = []
    monkeypatch.setattr(MeshSession, "opened", kept.append)
    said: dict[str, Any] = {
        "peers": 3,
        "sync": "ssp:2",
        "codec": "fp16",
        "topology": "ring",
        "learners": 2,
        "masks": "0.5",
        "scale_lr": "sqrt",
        "straggler": "wait",
        "visibility": "fixed",
        "own": "1/m",
        "shares": "equal",
        "on_nan": "skip",
        "seed": 5,
        "checkpoint_every": "7r",
        "independent": True,
    }
    mt.session(**said)
    body = rehearsal(kept[0], tmp_path)
    assert {name: getattr(body, name) for name in said} == said
    mt.session()
    (usual := tmp_path / "usual").mkdir()
    assert rehearsal(kept[1], usual).checkpoint_every == CHECKPOINT_EVERY


def test_packages_that_are_installed_for_a_run_include_what_loads_it(tmp_path: Path) -> None:
    body = rehearsal(SessionOptions(requirements=["einops>=0.8"]), tmp_path)
    assert body.requirements == ("einops>=0.8", "cloudpickle>=3")
