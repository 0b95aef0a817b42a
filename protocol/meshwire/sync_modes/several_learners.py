"""Which jobs may have several learners on each device (R6), why another may not, and how many of them pay."""

from collections.abc import Mapping

from meshwire import limits
from meshwire.sync_modes.mode import SyncSettings

LEGAL = (
    "bsp, local:H, diloco:H, muloco:H, sparseloco:H, sma:H or demo, without ,ssp:S, ,stream=P, ,gossip=G and "
    ",accumulate=A behind them"
)

LEARNERS_GAIN = 1.1
"""How much faster twice as many learners must train together: less is not worth their memory, nor the larger batch.
CROSSBOW (Koliousis et al. 2019, 4.2) adds one to a GPU as long as throughput rises by more than a threshold."""


def next_learners(speeds: Mapping[int, float], cores: int) -> int | None:
    """How many learners of a device to time next: 1, 2, 4 and so on, while each doubling pays and all have a core.

    Args:
        speeds: samples/s of all learners together, by their number.

    Returns:
        None: enough is known.
    """
    if not speeds:
        return 1
    most = max(speeds)
    if best_learners(speeds) < most or 2 * most > min(cores, limits.LEARNERS_MAX):
        return None
    return 2 * most


def best_learners(speeds: Mapping[int, float]) -> int:
    """The largest number up to which each doubling brought LEARNERS_GAIN."""
    best = 1
    while speeds.get(2 * best, 0.0) >= LEARNERS_GAIN * speeds[best]:
        best *= 2
    return best


def refusal_of_learners(
    sync: SyncSettings, *, masks: bool, by_torchrun: bool, independent: bool, restarts: bool
) -> str | None:
    """Why such a job cannot have several learners on a device, with what it can have; None if it can.

    Where nobody waits for a round, the learners of a device would have to agree on which rounds each has applied; parts
    of a model that travel by themselves would have to be added up part by part, and each learner would have neighbours.

    Args:
        masks, by_torchrun, independent, restarts: whether `--masks`, `--engine torchrun`, `--independent`, `--restart`
            were asked for.
    """
    without_rounds = {"--engine torchrun": by_torchrun, "--independent": independent, "--restart": restarts}
    for option, is_asked in without_rounds.items():
        if is_asked:
            return f"--learners is for scripts whose gradients the daemons add up, by mt.prepare: omit it, or {option}"
    if masks:
        return "--learners does not go with --masks, which move weights by the gradients of one learner: omit one"
    if sync.staleness or sync.fragments or sync.gossip or sync.accumulate > 1:
        return (
            f"--learners with --sync {sync.text()}: the learners of a device add up what they have for the same round, "
            f"and wait for it: use {LEGAL}"
        )
    return None
