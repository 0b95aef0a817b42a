"""Which jobs may have several learners on each device (R6), and why another may not."""

from meshwire.sync_modes.mode import SyncSettings

LEGAL = (
    "bsp, local:H, diloco:H, muloco:H, sparseloco:H, sma:H or demo, without ,ssp:S, ,stream=P, ,gossip=G and "
    ",accumulate=A behind them"
)


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
