"""How long the parts of a training step take on one machine, as a script was seen to run there.

A message, for the process of the script writes it and the command reads it.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from meshwire import limits
from meshwire.memory_layout.footprint import Measurement
from meshwire.message_base import Seconds, Wire

WARM_UP_STEPS = 2  # the first ones, which compile, allocate and start workers, and are not timed

Fraction = Annotated[float, Field(ge=0, le=1)]


class StepTrace(Wire):
    """Medians over some steps of one process.

    Attributes:
        samples: that a step takes.
        steps: how many were measured.
        threads: that it computed with.
        device: that it computed on, as torch names it.
        before_s: from the step's beginning until its last backward pass begins: loading, the forward pass, and all
            passes that only accumulate.
        backward_s: that pass.
        after_s: from its end to the step's: clipping, the optimizer.
        copy_s: writing all gradients where a daemon finds them, which a job does on top.
        ready: by tensor of the manifest, at which part of the backward pass its gradient was there; 1 for others.
    """

    samples: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]
    threads: Annotated[int, Field(ge=1)]
    device: Annotated[str, Field(max_length=limits.NAME_CHARS_MAX)] = "cpu"
    before_s: Seconds
    backward_s: Annotated[float, Field(gt=0, le=limits.SECONDS_MAX)]
    after_s: Seconds
    copy_s: Seconds
    ready: Annotated[tuple[Fraction, ...], Field(max_length=limits.TENSORS_MAX)]

    @property
    def alone_s(self) -> float:
        """How long a step takes without a job: what several laptops are compared with."""
        return self.before_s + self.backward_s + self.after_s

    @property
    def samples_s(self) -> float:
        """How many samples a second one laptop does without a job."""
        return self.samples / self.alone_s

    def at_speed(self, speed: float) -> "StepTrace":
        """On a machine that is so many times as fast."""
        names = ("before_s", "backward_s", "after_s", "copy_s")
        return self.model_copy(update={name: getattr(self, name) / speed for name in names})

    def of_samples(self, samples: int) -> "StepTrace":
        """With another number of samples: what the optimizer and the copy take stays."""
        factor = samples / self.samples
        changes = {"before_s": factor * self.before_s, "backward_s": factor * self.backward_s, "samples": samples}
        return self.model_copy(update=changes)


class TracedScript(Wire):
    """What a script has prepared, and how it steps."""

    measurement: Measurement
    step: StepTrace

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.step.ready) != len(self.measurement.manifest.tensors):
            raise ValueError(
                f"{len(self.step.ready)} times of gradients for {len(self.measurement.manifest.tensors)} tensors"
            )
        return self
