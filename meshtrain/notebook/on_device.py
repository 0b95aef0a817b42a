"""What runs on each device: loads the call that came from a notebook, makes it, and writes down what it returned.

Nowhere else is unpickled what a notebook has sent: in the learner's process, which would run any script.
"""

import os
import pickle
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from meshtrain.errors import UsageError


def run_call(call: str, result: str, *, python: str, cloudpickle: str) -> None:
    """Makes the call, and raises what it raises.

    Args:
        call: file in the working directory.
        result: file to write in the job's output folder.
        python, cloudpickle: the versions that have made the call.

    Raises UsageError: it cannot be loaded by what is installed here.
    """
    function, args, kwargs = _loaded(call, python, cloudpickle)
    value = function(*args, **kwargs)

    from meshtrain.train.api import world
    from meshtrain.train.returned_values import pack_value

    packed = pack_value(value)
    folder = world().output_dir
    part = folder / f"{result}.part"
    part.write_bytes(packed)
    os.replace(part, folder / result)


def _loaded(call: str, python: str, cloudpickle: str) -> Any:
    here = ".".join(platform.python_version_tuple()[:2])
    if here != python:
        raise UsageError(
            f"a function from a notebook with Python {python} cannot run here, where it is {here}: compiled code goes "
            "between equal minor versions only"
        )
    try:
        return pickle.loads(Path(call).read_bytes())
    except ImportError:
        raise  # it says what is missing
    except Exception as error:  # whatever loading the person's own objects raises
        try:
            own = version("cloudpickle")
        except PackageNotFoundError:
            own = "none"
        raise UsageError(
            f"what the notebook has sent cannot be loaded here ({type(error).__name__}: {error}); it was made by "
            f"cloudpickle {cloudpickle}, here is {own}: versions of packages that differ can be the cause"
        ) from error
