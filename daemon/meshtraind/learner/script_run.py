"""Runs a job's script: the main program of its process, run by path, which then is the script to all purposes.

Beyond what Python itself does it tells the daemon of the exception that ends the script, frames that exception in the
log (`meshwire.jobs.script_log`), lets a full disk cost what is printed and no more, gives torch the process groups of
the mesh, and leaves its compiler to scripts that compile something.
"""

import sys

if __name__ == "__main__":
    # Nothing that lies beside this file, or beside the script, stands in for a module that is imported here.
    del sys.path[0]

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from meshtraind.learner import late_compiler
from meshtraind.learner.script_error import ScriptError
from meshtraind.learner.script_output import survive_full_disks
from meshtraind.machine.control_pipe import hear_daemon
from meshwire.jobs.script_log import ERROR_BEGINS, ERROR_ENDS

PROCESS_GROUPS = "torch.distributed.distributed_c10d"
EXIT_CODES = (None, 0)  # of a script that ends well by sys.exit


class Reporting:
    """Tells of the exception that ends the script, once.

    Args:
        record: the file that the daemon reads when the process has ended.
        root: the folder that was submitted.
    """

    def __init__(self, record: Path, root: Path) -> None:
        self._record = record
        self._root = root
        self._pid = os.getpid()
        self._told = False

    def tell(self, error: BaseException) -> None:
        """Writes what the daemon reads. Only the first one counts, and none of processes that the script forks."""
        if self._told or os.getpid() != self._pid or _is_stop(error):
            return
        self._told = True
        try:
            self._record.write_bytes(ScriptError.of(error, self._root).pack())
        except OSError as problem:  # the log has the traceback, if it has room
            sys.stderr.write(f"the daemon is not told of this error: {problem}\n")

    def hook(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        """Takes the place of `sys.excepthook`: the whole traceback goes into the log, of a stop the message alone."""
        self.tell(error)
        if _is_stop(error):
            text = f"{error}\n"
        else:
            text = "".join(traceback.format_exception(kind, error, _without_this_file(trace)))
        write_framed(text)


def write_framed(text: str) -> None:
    """Writes a text into the log, as the error that ends the script."""
    sys.stdout.flush()
    sys.stderr.write(f"{ERROR_BEGINS}\n{text.rstrip()}\n{ERROR_ENDS}\n")
    sys.stderr.flush()


def run(script: Path, reporting: Reporting, name: str = "") -> None:
    """Runs a file as `__main__`. Raises what it raises.

    Args:
        name: that it has as a module, where it is run as one: its packages are imported first, as by `python -m`, so
            that it may import what lies beside it by a leading dot.
    """
    module = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader(name or "__main__", str(script))
    module.__dict__.update(__file__=str(script), __loader__=loader, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    try:
        if name:
            spec = importlib.util.spec_from_file_location(name, script, loader=loader)
            assert spec is not None
            if spec.parent:
                importlib.import_module(spec.parent)
            module.__dict__.update(__spec__=spec, __package__=spec.parent)  # workers that are spawned find it by that
        exec(compile(script.read_bytes(), str(script), "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        if error.code in EXIT_CODES:
            raise
        sys.last_value = error  # it has not finished: nobody waits for its last rounds
        reporting.tell(error)
        if isinstance(error.code, int):
            raise
        write_framed(str(error.code))
        raise SystemExit(1) from None
    except BaseException as error:
        reporting.tell(error)  # the script may have a hook of its own
        raise


def module_name(script: str) -> str:
    """The dotted name of a file, from the folder on that was submitted."""
    return ".".join(PurePosixPath(script).with_suffix("").parts)


def provide_process_groups() -> None:
    """Makes torch's process groups those of the mesh, once the script imports them; torch is not imported for that."""
    sys.meta_path.insert(0, _Changing({PROCESS_GROUPS: _masquerade}))


def import_compiler_late() -> None:
    """torch's compiler is left out until the script needs it; torch is not imported for that."""
    sys.meta_path.insert(0, _Changing(late_compiler.CHANGES))


def _masquerade(module: types.ModuleType) -> None:
    importlib.import_module("meshtrain.masquerade").install(module)


class _Changing(importlib.abc.MetaPathFinder):
    """Finds some modules as Python does, and changes each once it has been executed."""

    def __init__(self, changes: Mapping[str, Callable[[types.ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute, change = spec.loader.exec_module, self._changes[fullname]

        def changing(module: types.ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = changing  # type: ignore[method-assign]
        return spec


def _is_stop(error: BaseException) -> bool:
    """Whether the daemon has ended the script."""
    errors = sys.modules.get("meshtrain.errors")
    return errors is not None and isinstance(error, errors.JobStopped)


def _without_this_file(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The part of a traceback that is below the frames that run the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def main(arguments: list[str]) -> None:
    """Arguments: the record's path, "alone" for a script that no daemon carries anything for (else ""), "module" for
    one that is run as by `python -m` (else ""), the script, and its own."""
    record, alone, as_module, script, *own = arguments
    path = Path(script).absolute()
    sys.argv = [str(path) if as_module else script, *own]
    sys.path.insert(0, str(Path.cwd() if as_module else path.parent))
    if not alone:
        provide_process_groups()
    import_compiler_late()
    survive_full_disks()
    hear_daemon()
    reporting = Reporting(Path(record), Path.cwd())
    sys.excepthook = reporting.hook
    run(path, reporting, module_name(script) if as_module else "")


if __name__ == "__main__":
    main(sys.argv[1:])
