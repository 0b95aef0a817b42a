"""What `mt.log` takes: a few numbers, by name."""

from collections.abc import Mapping
from typing import Any

import torch

from meshtrain.errors import UsageError
from meshwire import limits


def numbers_of(values: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """The values as numbers. Raises UsageError for too many, and for what is not a number."""
    if len(values) > limits.LOG_VALUES_MAX or max(map(len, values), default=0) > limits.LOG_NAME_CHARS_MAX:
        raise UsageError(
            f"mt.log takes at most {limits.LOG_VALUES_MAX} numbers at a time, with names of at most "
            f"{limits.LOG_NAME_CHARS_MAX} characters: write the rest into a file in mt.output_dir()"
        )
    numbers = []
    for name, value in values.items():
        try:
            numbers.append((name, float(value.detach() if isinstance(value, torch.Tensor) else value)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"mt.log({name}=...): not one number: {error}") from error
    return tuple(numbers)
