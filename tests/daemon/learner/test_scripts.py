"""A job's script in its process, without a daemon: it runs as by Python, and its end is told in few words."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import meshtrain.errors
from meshtrain.following.log_pieces import ScriptErrors
from meshtraind.learner import process as learner
from meshtraind.learner.environment import ScriptPlace, calls_prepare, learner_environment
from meshtraind.learner.process import INHERITED, LearnerProcess
from meshtraind.learner.script_error import CHARS_MAX, HOPELESS, ScriptError, explain_end
from meshtraind.learner.script_error import OF_THE_MESH as OF_THE_MESH_KINDS
from meshtraind.learner.supervisor import RESTARTS_MAX, Ending, LearnerSupervisor, pause_s
from meshwire.jobs.script_log import ERROR_BEGINS, ERROR_ENDS

TIMEOUT_S = 30.0

# A package that looks like torch to who imports it: the real one takes seconds.
FAKE_TORCH = {
    "torch/__init__.py": "",
    "torch/distributed/__init__.py": "from torch.distributed.distributed_c10d import *\n",
    "torch/distributed/distributed_c10d.py": (
        "def init_process_group(backend):\n    return f'a group of {backend}'\n"
        "def new_group():\n    pass\ndef get_backend():\n    pass\n"
        "class Backend:\n    default_device_backend_map = {}\n"
    ),
}


class Ended:
    """A script that was run: its exit code, its log, what a follower sees of it, and what the daemon is told."""

    def __init__(self, folder: Path, text: str, *args: str, alone: bool = False, module: str = "") -> None:
        source = folder / "src"
        script = source / (module or "train.py")
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(textwrap.dedent(text))
        record = folder / "record"
        if record.is_file():
            record.unlink()
        how = ["alone" if alone else "", "module" if module else ""]
        command = [sys.executable, "-u", str(learner.SCRIPT_RUN), str(record), *how, module or "train.py"]
        done = subprocess.run(
            [*command, *args], cwd=source, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        self.code = done.returncode
        self.out = done.stdout
        self.log = done.stderr
        self.shown = ScriptErrors().left_out(done.stderr.splitlines())
        self.error = ScriptError.unpack(record.read_bytes()) if record.is_file() else None

    @property
    def told(self) -> str:
        return explain_end(self.code, self.error)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_script_runs_as_by_python(tmp_path: Path) -> None:
    """It is `__main__`, with its folder first on the path, its arguments, and what it defines can be pickled."""
    write(tmp_path, {"helper.py": "NAME = __name__\n", "json.py": "raise SystemExit('the wrong json')\n"})
    seen = Ended(
        tmp_path,
        """
        import __main__, helper, os, pickle, sys, trace
        assert "meshtraind" not in trace.__file__
        class Sample:
            pass
        if __name__ == "__main__":
            assert type(pickle.loads(pickle.dumps(Sample()))) is __main__.Sample
            print(sys.argv, helper.NAME, os.path.relpath(__file__), sys.path[0] == os.path.dirname(__file__))
        """,
        "--epochs",
        "3",
    )
    assert (seen.code, seen.out) == (0, "['train.py', '--epochs', '3'] helper train.py True\n"), seen.log
    assert seen.error is None
    assert not seen.log


AS_MODULE = """
    import multiprocessing, os, sys
    from . import parts
    import helper
    class Sample:
        pass
    def double(number):
        return 2 * number
    if __name__ == "__main__":
        print(__package__, __spec__.name, __spec__.parent, Sample.__module__, parts.NAME, helper.NAME)
        print(os.path.relpath(__file__), os.path.relpath(sys.argv[0]), sys.argv[1:], os.path.relpath(sys.path[0]))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(double, [1, 2]))
            pool.close()
            pool.join()
"""


def test_a_module_runs_as_by_python_m(tmp_path: Path) -> None:
    """What Python itself makes of it is what the job prints."""
    write(
        tmp_path,
        {
            "shop/__init__.py": "print('the package first')\n",
            "shop/parts.py": "NAME = __name__\n",
            "helper.py": "NAME = __name__\n",
        },
    )
    seen = Ended(tmp_path, AS_MODULE, "--epochs", "3", module="shop/train.py")
    assert (seen.code, seen.log) == (0, "")
    source = tmp_path / "src"
    by_python = [sys.executable, "-u", "-m", "shop.train", "--epochs", "3"]
    expected = subprocess.run(by_python, cwd=source, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert seen.out == expected.stdout
    assert "shop shop.train shop __main__ shop.parts helper" in seen.out
    whole = Ended(tmp_path, "print(__package__, __spec__.name)\n", module="shop/__main__.py")
    assert whole.out == "the package first\nshop shop.__main__\n"
    top = Ended(tmp_path, "import helper\nprint(repr(__package__), __spec__.name, helper.NAME)\n", module="train.py")
    assert top.out == "'' train helper\n"


def test_an_error_in_a_module_names_its_file_and_so_does_one_of_its_package(tmp_path: Path) -> None:
    write(tmp_path, {"shop/__init__.py": ""})
    seen = Ended(tmp_path, "x = 1\nraise ValueError('no')\n", module="shop/train.py")
    assert (seen.code, seen.told) == (1, "shop/train.py, line 2: ValueError: no\n    raise ValueError('no')")
    write(tmp_path, {"shop/__init__.py": "raise KeyError('a')\n"})
    seen = Ended(tmp_path, "print('never')\n", module="shop/train.py")
    assert (seen.code, seen.out) == (1, "")
    assert seen.told.startswith("shop/__init__.py, line 1: KeyError: 'a'")


def test_what_it_spawns_finds_what_it_has_defined(tmp_path: Path) -> None:
    """A DataLoader's workers, where they are not forked."""
    seen = Ended(
        tmp_path,
        """
        import multiprocessing
        def double(number):
            return 2 * number
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
                pool.close()
                pool.join()
        """,
    )
    assert (seen.code, seen.out) == (0, "[2, 4]\n"), seen.log


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full, the disk that is always full")
def test_a_full_disk_costs_what_is_printed_and_not_the_training(tmp_path: Path) -> None:
    """Whoever says its loss would end by the first line that has no room. Once there is room, the log says so."""
    script = """
        import os, sys
        print("loss 0.7")
        print("warning", file=sys.stderr)
        sys.stdout.buffer.write(b"raw")
        log = os.open("log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        print("loss 0.6")
        print("loss 0.5")
    """
    source = tmp_path / "src"
    source.mkdir()
    (source / "train.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-u", str(learner.SCRIPT_RUN), str(tmp_path / "record"), "", "", "train.py"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, cwd=source, stdout=full, stderr=full, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0
    lost = len("loss 0.7\n") + len("raw")
    assert (source / "log").read_text() == (f"[{lost} bytes are missing here: the disk was full]\nloss 0.6\nloss 0.5\n")


def test_an_error_is_told_in_the_log_where_the_daemon_cannot_be_told(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()  # nothing can be written there
    seen = Ended(tmp_path, "raise ValueError('no')")
    assert seen.code == 1
    assert "the daemon is not told of this error: [Errno 21] Is a directory" in seen.log
    assert "ValueError: no" in seen.log


IN_A_HELPER = """
import sys
sys.path.insert(0, "parts")
from loss import total
try:
    {}["a"]
except KeyError:
    pass
print("begins", file=sys.stderr)
total({"x": 1})
"""


def test_an_error_is_the_persons_file_and_line_and_the_whole_traceback_is_in_the_log_alone(tmp_path: Path) -> None:
    """Innermost of theirs, under the path that they know; Python's own frames and the job's copy are not shown."""
    write(tmp_path, {"parts/loss.py": "import json\ndef total(row):\n    return json.loads(row['loss'])\n"})
    seen = Ended(tmp_path, IN_A_HELPER)
    assert seen.told == "parts/loss.py, line 3, in total: KeyError: 'loss'\n    return json.loads(row['loss'])"
    assert seen.shown == ["begins"]
    assert "script_run" not in seen.log
    lines = seen.log.splitlines()
    assert lines[1:3] == [ERROR_BEGINS, "Traceback (most recent call last):"]
    assert lines[-2:] == ["KeyError: 'loss'", ERROR_ENDS]
    assert f'"{tmp_path}/src/parts/loss.py", line 3, in total' in seen.log
    assert seen.code == 1


INSIDE_PYTHON = "import json\n\n\ndef read():\n    return json.loads('{')\n\n\nread()\n"

ENDS = {
    "a library": (INSIDE_PYTHON, 1, "train.py, line 5, in read: json.decoder.JSONDecodeError: Expecting property name"),
    "syntax": ("import os\ndef f(:\n    pass\n", 1, "train.py, line 2: SyntaxError: invalid syntax\n    def f(:"),
    "no such package": (
        "import os\nimport nosuchthing.parts\n",
        1,
        "train.py, line 2: ModuleNotFoundError: No module named 'nosuchthing'\n    import nosuchthing.parts\nInstall "
        "nosuchthing into the Python environment of meshtraind there",
    ),
    "a chain": (
        "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('no a') from error\n",
        1,
        "train.py, line 4: ValueError: no a\n    raise ValueError",
    ),
    "a code": ("import sys\nsys.exit(3)\n", 3, "train.py, line 2: the script ended with exit code 3\n    sys.exit(3)"),
    "words": ("import sys\nsys.exit('no data')\n", 1, "train.py, line 2: no data\n    sys.exit('no data')"),
    "no words": ("import os\nos._exit(7)\n", 7, "the script ended with exit code 7"),
    "a signal": (
        "import os\nos.kill(os.getpid(), 9)\n",
        -9,
        "the script was killed by signal 9 (SIGKILL); Linux does that when memory runs out",
    ),
    "ours": (
        "import meshtrain as mt\ntry:\n    1 / 0\nfinally:\n    raise mt.UsageError('call it: once')\n",
        1,
        "train.py, line 5: call it: once\n    raise mt.UsageError('call it: once')",
    ),
    "a hook of its own": (
        "import sys\nsys.excepthook = lambda *_: print('mine')\n{}['a']\n",
        1,
        "train.py, line 3: KeyError: 'a'\n    {}['a']",
    ),
    "a very long message": ("raise ValueError('x' * 100_000 + '\\n' * 99)\n", 1, "train.py, line 1: ValueError: xxx"),
    "a message that cannot be encoded": ("raise ValueError('\\udcff')\n", 1, "train.py, line 1: ValueError: "),
}


@pytest.mark.parametrize("how", ENDS)
def test_each_end_is_told_in_few_words_and_leaves_no_traceback_on_the_screen(tmp_path: Path, how: str) -> None:
    script, code, told = ENDS[how]
    seen = Ended(tmp_path, script)
    assert seen.code == code
    assert seen.told.startswith(told), seen.told
    assert len(seen.told) < 2 * CHARS_MAX
    assert seen.shown == []


def test_a_script_that_the_daemon_stops_leaves_one_line(tmp_path: Path) -> None:
    """Wherever it was, 45 frames deep in torch."""
    seen = Ended(tmp_path, "import meshtrain as mt\nraise mt.JobStopped('the job ends: cancelled on anna')\n")
    assert seen.log.splitlines() == [ERROR_BEGINS, "the job ends: cancelled on anna", ERROR_ENDS]
    assert seen.error is None
    assert seen.code == 1


def test_only_the_scripts_own_process_tells(tmp_path: Path) -> None:
    """What it forks may fail without it."""
    seen = Ended(tmp_path, "import os\nif not os.fork():\n    raise ValueError('a child')\nos.wait()\n")
    assert "ValueError: a child" in seen.log
    assert (seen.code, seen.error) == (0, None)


def test_a_process_group_is_the_meshs_wherever_it_is_made(tmp_path: Path) -> None:
    """Each name that torch gives it. Where each device trains by itself torch's own is left."""
    write(tmp_path, FAKE_TORCH)
    for made in (
        "import torch.distributed as dist\nmade = dist.init_process_group\n",
        "from torch.distributed import init_process_group as made\n",
        "from torch.distributed.distributed_c10d import new_group as made\n",
    ):
        seen = Ended(tmp_path, f"{made}print(made.__globals__['__name__'])\n")
        assert seen.out == "meshtrain.masquerade\n", seen.log
    alone = Ended(tmp_path, "import torch.distributed as dist\nprint(dist.init_process_group('gloo'))\n", alone=True)
    assert alone.out == "a group of gloo\n"


IN_A_WORKER = """KeyError: Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
  File "{root}/sets/images.py", line 12, in __getitem__
    return self.rows[index]["label"]
           ~~~~~~~~~~~~~~~~^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/pandas/core.py", line 9, in __getitem__
    raise KeyError(key)
KeyError: 'label'
"""


def test_an_error_in_a_loaders_worker_is_that_of_the_data_set(tmp_path: Path) -> None:
    """torch hands on the worker's traceback as the message of another exception."""
    error = ScriptError.of(RuntimeError(IN_A_WORKER.format(root=tmp_path)), tmp_path)
    assert (
        error.text()
        == "sets/images.py, line 12, in __getitem__: KeyError: 'label'\n    return self.rows[index][\"label\"]"
    )


@pytest.mark.parametrize("record", [b"", b"[]", b"{}", b'{"kind": 1}', b"\xff", b"[" * 10_000])
def test_a_record_that_is_none_is_not_believed(record: bytes) -> None:
    assert ScriptError.unpack(record) is None


def test_a_signal_without_a_name_is_a_number() -> None:
    assert explain_end(-250, None) == "the script was killed by signal 250"


def test_whoever_follows_sees_the_log_without_the_errors_that_end_scripts() -> None:
    """Whole lines, in pieces as they come; what the script wrote of its last line is its own."""
    errors = ScriptErrors()
    assert errors.left_out(["step 1", f"loss {ERROR_BEGINS}", "Traceback"]) == ["step 1", "loss "]
    assert errors.left_out(["KeyError: 'loss'", ERROR_ENDS, "again"]) == ["again"]
    assert errors.left_out([ERROR_BEGINS]) == []
    assert errors.left_out([ERROR_ENDS, f"said {ERROR_ENDS}"]) == [f"said {ERROR_ENDS}"]


# What they find in the environment


def test_scripts_find_torchruns_variables_where_they_are_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this job, also where the daemon itself was started with others. What their owner asks for they get."""
    torchruns = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR")
    for name in (*torchruns, "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_CPU", "PMI_RANK"):
        monkeypatch.setenv(name, "1")
    inherited = {**{name: os.environ[name] for name in INHERITED if name in os.environ}}
    for independent, prepares in ((True, False), (False, True)):
        spec = SimpleNamespace(job="1kx3000000aa", env=(("EPOCHS", "3"),), independent=independent)
        found = inherited | learner_environment(cast(Any, spec), ScriptPlace(2, 3), prepares=prepares, threads=2)
        ranks = [name for name in found if "RANK" in name or "WORLD" in name]
        assert not [*ranks, *(name for name in found if name.startswith(("MASTER", "TORCHEL", "ACCELERATE")))]
        assert found["EPOCHS"] == "3"
    spec = SimpleNamespace(job="1kx3000000aa", env=(("LOCAL_RANK", "7"),), independent=False)
    found = inherited | learner_environment(cast(Any, spec), ScriptPlace(2, 3), prepares=False, threads=2)
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")} == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "7",
        "TORCHELASTIC_RUN_ID": "1kx3000000aa",
    }


def test_who_calls_prepare_is_seen_in_the_text(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for text, expected in (
        ("import meshtrain as mt\nmodel, opt = mt.prepare(model, opt)\n", True),
        ("from meshtrain import log, prepare\n", True),
        ("import meshtrain as mt\nmt.log(loss=1)\naccelerator.prepare(model)\n", False),
        ("\xff", False),
    ):
        script.write_text(text, encoding="latin-1")
        assert calls_prepare(script) is expected
    assert not calls_prepare(tmp_path / "none.py")


@pytest.mark.parametrize("kind", [*OF_THE_MESH_KINDS, *HOPELESS])
def test_errors_that_are_known_by_their_names_are_there(kind: str) -> None:
    """The daemon imports no class of the learner's: a name that nobody has would be looked for in vain."""
    found = getattr(meshtrain.errors, kind)
    assert issubclass(found, meshtrain.errors.MeshtrainError)
    assert found.__module__ == "meshtrain.errors"


RAISES = "from meshtrain.errors import {0}\nraise {0}('why')\n"


def test_the_mesh_is_to_blame_for_its_own_losses_and_for_nothing_else(tmp_path: Path) -> None:
    """J3: a script that has lost its daemon is started again without end; one that was refused is not."""
    lost = Ended(tmp_path, RAISES.format("ConnectionLost"))
    assert lost.error is not None
    assert lost.error.of_mesh
    assert lost.told == "train.py, line 2: why\n    raise ConnectionLost('why')"
    for kind in ("RequestError", "UnexpectedReply", "DaemonNotRunning"):
        text = RAISES.format(kind) if kind != "UnexpectedReply" else RAISES.format(kind).replace("'why'", "'call', 1")
        refused = Ended(tmp_path, text)
        assert refused.error is not None
        assert not refused.error.of_mesh, kind
    their_own = Ended(tmp_path, "class ConnectionLost(Exception): pass\nraise ConnectionLost('why')\n")
    assert their_own.error is not None
    assert not their_own.error.of_mesh


def test_a_refusal_ends_the_restarts_and_a_loss_of_the_daemon_does_not(life: LearnerSupervisor) -> None:
    """J3."""
    refused = ScriptError("RequestError", "no", "train.py, line 6", "", False)
    assert [ends(life, 1, refused), ends(life, 1, refused)] == [Ending.RESTART, Ending.FORWARD]


def test_a_world_is_not_over_for_what_the_mesh_has_lost(life: LearnerSupervisor) -> None:
    """P6: twice the same error at the same line ends a job, if it is the script's own."""
    for error, again in ((OF_THE_MESH, False), (KEY_ERROR, True)):
        life.error, life._began_s = error, time.monotonic()
        life.fails_again(1)
        assert life.fails_again(1) is again


# Whether they are started again

KEY_ERROR = ScriptError("KeyError", "KeyError: 'a'", "train.py, line 6", "", hopeless=False)
OTHER_LINE = ScriptError("KeyError", "KeyError: 'a'", "train.py, line 7", "", hopeless=False)
OF_THE_MESH = ScriptError("ConnectionLost", "the daemon went away", "train.py, line 6", "", False, of_mesh=True)
SYNTAX = ScriptError("SyntaxError", "SyntaxError: no", "train.py, line 6", "", hopeless=True)


@pytest.fixture
def life() -> LearnerSupervisor:
    return LearnerSupervisor(cast(Any, None), cast(Any, None), 1)


def ends(life: LearnerSupervisor, code: int, error: ScriptError | None = None, steps: int = 5) -> Ending:
    life.error = error
    return life.after(code, 0, steps)


def test_an_error_that_comes_again_at_the_same_line_and_step_ends_the_restarts(life: LearnerSupervisor) -> None:
    """J3: restarts are for accidents."""
    assert ends(life, 1, KEY_ERROR) is Ending.RESTART
    assert ends(life, 1, KEY_ERROR) is Ending.FORWARD
    assert life.hopeless


@pytest.mark.parametrize(
    "second",
    [
        lambda life: ends(life, 1, KEY_ERROR, steps=6),
        lambda life: ends(life, 1, OTHER_LINE),
        lambda life: ends(life, -9),
        lambda life: ends(life, 7),
    ],
)
def test_what_differs_may_be_an_accident(
    life: LearnerSupervisor, second: Callable[[LearnerSupervisor], Ending]
) -> None:
    assert ends(life, 1, KEY_ERROR) is Ending.RESTART
    assert second(life) is Ending.RESTART
    assert not life.hopeless


def test_signals_are_accidents_however_many_there_were(life: LearnerSupervisor) -> None:
    """J3: they cost no restart of the script's own errors; a loss of the mesh does not either."""
    assert [ends(life, -9) for _ in range(2 * RESTARTS_MAX)] == [Ending.RESTART] * 2 * RESTARTS_MAX
    assert ends(life, 1, OF_THE_MESH) is ends(life, 1, OF_THE_MESH) is Ending.RESTART
    assert life.restarts == 0
    endings = [ends(life, 7, steps=step) for step in range(RESTARTS_MAX + 1)]
    assert endings == [*[Ending.RESTART] * RESTARTS_MAX, Ending.FORWARD]
    assert life.given_up


def test_who_is_killed_again_and_again_backs_off() -> None:
    """J3: at once after the first time; what an error costs is told apart from that."""
    assert [pause_s(kills) for kills in (1, 2, 3, 4, 8, 9, 99)] == [0, 1, 2, 4, 60, 60, 60]


def test_an_error_at_the_same_round_comes_again(life: LearnerSupervisor) -> None:
    """J3: a process that has taken the base over from memory counts its steps anew."""
    life.error = KEY_ERROR
    assert life.after(1, 0, steps=17, round_=17) is Ending.RESTART
    assert life.after(1, 0, steps=0, round_=17) is Ending.FORWARD


def test_a_script_that_cannot_run_is_started_once(life: LearnerSupervisor) -> None:
    assert ends(life, 1, SYNTAX) is Ending.FORWARD
    assert life.hopeless


@pytest.mark.parametrize(
    ("error", "hopeless"),
    [("import nosuchthing", True), ("from os import nosuchthing", True), ("def f(:", True), ("{}['a']", False)],
)
def test_errors_of_the_script_itself_are_known(tmp_path: Path, error: str, hopeless: bool) -> None:
    seen = Ended(tmp_path, error).error
    assert seen is not None
    assert seen.hopeless is hopeless


def test_data_that_does_not_parse_is_no_wrong_script(tmp_path: Path) -> None:
    """`ast.literal_eval` raises SyntaxError of a text that is nobody's file."""
    seen = Ended(tmp_path, "import ast\nast.literal_eval('{')\n")
    assert seen.error is not None
    assert not seen.error.hopeless
    assert seen.told.startswith("train.py, line 2: ")


@pytest.mark.asyncio
async def test_the_record_of_an_earlier_process_is_not_that_of_the_next(tmp_path: Path) -> None:
    """Each process's own, and nothing stays beside the log."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "train.py").write_text("import sys\nif sys.argv[1] == 'fail':\n    raise ValueError('x')\n")
    descriptor = os.open(os.devnull, os.O_RDONLY)
    try:
        file = SimpleNamespace(told=str(descriptor), inherited=(descriptor,))
        memory = cast(Any, SimpleNamespace(file=file, kept=SimpleNamespace(file=None)))
        for what, kind in (("fail", "ValueError"), ("pass", None)):
            fields = {"script": "train.py", "args": (what,), "independent": False, "engine": "mesh", "as_module": False}
            spec = cast(Any, SimpleNamespace(**fields, learners=1))
            process = LearnerProcess(folder, spec, tmp_path / "rank0.log", memory, Path(sys.executable))
            await process.start({}, 5)
            assert await process.wait() == (kind is not None)
            found = process.error()
            assert (found and found.kind) == kind
            assert not list(tmp_path.glob("*.error"))
            (tmp_path / "rank0.error").write_bytes(SYNTAX.pack())
    finally:
        os.close(descriptor)
