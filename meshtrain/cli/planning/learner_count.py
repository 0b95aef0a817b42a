"""`submit --learners N` and `--learners auto`: how many learners each laptop has, where it is to be found out."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshtrain.cli.planning.script_profiles import Shipped, lay_out_copy
from meshtrain.cli.submission.measuring import NotMeasured, trace_together
from meshtrain.cli.ui.errors import BadCommandLine
from meshtrain.cli.ui.progress import Stages
from meshwire import limits
from meshwire.job_figures import rate_text
from meshwire.jobs.files import human_bytes
from meshwire.sync_modes.several_learners import LEARNERS_GAIN, best_learners, next_learners

AUTO = "auto"
MEMORY_PART = 0.8  # of what is free, that more copies may take


def learners_wanted(text: str) -> int | None:
    """Reads `--learners`; None: it is to be found out. Raises BadCommandLine."""
    if text == AUTO:
        return None
    if text.isascii() and text.isdigit() and 1 <= int(text) <= limits.LEARNERS_MAX:
        return int(text)
    raise BadCommandLine(
        f"--learners {text!r} is neither {AUTO} nor a number from 1 to {limits.LEARNERS_MAX}", f"--learners {AUTO}"
    )


@dataclass(frozen=True, slots=True)
class TimedLearners:
    """How fast so many learners train beside each other on this laptop, without a job.

    Attributes:
        speeds: samples/s of all together, by their number.
        stopped: why no more were tried, where it was not for their speed.
    """

    speeds: dict[int, float]
    stopped: str | None = None

    @property
    def count(self) -> int:
        """How many pay."""
        return best_learners(self.speeds)

    def sentence(self) -> str:
        """What was found."""
        tried = self.count if self.count > 1 else max(self.speeds)
        told = f"learners: {self.count} on each laptop"
        if tried > 1:
            beside = f"{tried} beside each other train {self.speeds[tried] / self.speeds[1]:.2f}x as fast here as one"
            figures = f"({rate_text(self.speeds[tried])} samples/s, {rate_text(self.speeds[1])} alone)"
            why = "" if self.count > 1 else f", and they pay from {LEARNERS_GAIN:g}x on"
            told = f"{told}, for {beside} {figures}{why}"
        return told if self.stopped is None else f"{told}; {self.stopped}"


def time_learners(shipped: Shipped, cores: int, stages: Stages) -> TimedLearners:
    """Runs the script as 1, 2, 4 .. copies beside each other, as long as each doubling pays.

    Args:
        cores: that they have together.

    Raises:
        CliError: it cannot be timed.
    """
    found: dict[int, float] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="meshtrain-") as name:
            root = Path(name)
            lay_out_copy(shipped, root)
            data = None if shipped.data is None else shipped.data.root
            while (copies := next_learners(found, cores)) is not None:
                traced, held_bytes = trace_together(
                    *(root, shipped.script, shipped.args, dict(shipped.env), data),
                    *(copies, max(1, cores // copies), stages),
                    *(shipped.python, shipped.module),
                )
                found[copies] = sum(each.step.samples_s for each in traced)
                if (device := traced[0].step.device) != "cpu":
                    return TimedLearners(found, f"on {device} more are not timed: type how many GPUs there are")
                if next_learners(found, cores) is not None and held_bytes > MEMORY_PART * _free_bytes():
                    return TimedLearners(
                        found, f"there is no memory for more ({copies} take {human_bytes(held_bytes)})"
                    )
    except NotMeasured as problem:
        raise problem.of_steps(shipped.script, shipped.module) from None
    most = max(found)
    if best_learners(found) == most and 2 * most > cores:
        return TimedLearners(found, f"there are {cores} cores" if cores > 1 else "there is one core")
    return TimedLearners(found)


def _free_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
