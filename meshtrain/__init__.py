"""Train one PyTorch script on all the laptops you own.

    model, optimizer, loader = mt.prepare(model, optimizer, loader)

makes an ordinary training script part of a job; without a job all functions do what one machine alone needs, and in a
process that torchrun, Slurm or Ray Train has started what one rank of several needs.
torch is imported by the first call, not by the import of this package.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from meshtrain.errors import (
    ConnectionLost,
    DaemonNotRunning,
    JobStopped,
    MeshtrainError,
    NonFiniteGradient,
    NotSupported,
    RequestError,
    UsageError,
)

if TYPE_CHECKING:
    import torch

    from meshtrain.notebook.mesh_session import MeshSession
    from meshtrain.train.partial.progressive import Progressive

__all__ = [
    "ConnectionLost",
    "DaemonNotRunning",
    "JobStopped",
    "MeshtrainError",
    "NonFiniteGradient",
    "NotSupported",
    "Progressive",
    "RequestError",
    "UsageError",
    "barrier",
    "base",
    "clip_grad_norm_",
    "data_dir",
    "device",
    "finish",
    "is_main",
    "log",
    "no_sync",
    "output_dir",
    "prepare",
    "rank",
    "session",
    "steps",
    "world_size",
]

M = TypeVar("M", bound="torch.nn.Module")
O = TypeVar("O", bound="torch.optim.Optimizer")  # noqa: E741
L = TypeVar("L")


if not TYPE_CHECKING:  # a type checker would let any name pass

    def __getattr__(name: str) -> Any:
        """What needs torch is imported when it is asked for."""
        if name == "Progressive":
            from meshtrain.train.partial.progressive import Progressive

            return Progressive
        raise AttributeError(f"module 'meshtrain' has no attribute {name!r}")


@overload
def prepare(model: M, optimizer: O, *, scaler: "torch.amp.GradScaler | None" = None) -> tuple[M, O]: ...
@overload
def prepare(model: M, optimizer: O, loader: L, *, scaler: "torch.amp.GradScaler | None" = None) -> tuple[M, O, L]: ...
@overload
def prepare(
    model: list[M], optimizer: list[O], *, scaler: "torch.amp.GradScaler | None" = None
) -> tuple[list[M], list[O]]: ...
@overload
def prepare(
    model: list[M], optimizer: list[O], loader: L, *, scaler: "torch.amp.GradScaler | None" = None
) -> tuple[list[M], list[O], L]: ...
def prepare(
    model: Any,
    optimizer: Any,
    loader: Any = None,
    *others: object,
    scaler: "torch.amp.GradScaler | None" = None,
) -> Any:
    """Makes model, optimizer and data loader take part in the job; call it once, before the training loop.

    With `--sync bsp`, `p.grad` then holds the average over all peers, weighted by their samples, when `loss.backward()`
    returns. With `--sync ssp:S` it keeps this peer's own gradient, and `optimizer.step()` applies the averages that
    have arrived. With `--sync local:H` gradients and steps are this peer's own, and each H-th step waits for the round
    that averages what they have changed, unless `,ssp:S` lets it go on. All peers start from the first one's
    parameters, buffers and optimizer state. The model is moved to `device()` if it lies on the CPU; batches of the
    returned loader come on that device, except of an IterableDataset.

    Several models and optimizers, of a GAN say, come as lists: `prepare([g, d], [of_d, of_g], loader)`. Each backward
    pass is then a round, and optimizers step in turn, in the order given; one that steps three times in a row stands
    there three times. With `--sync bsp`, and codecs that leave nothing for later, as fp32 and fp16.

    Args:
        loader: a torch DataLoader; every peer gets other samples of the same order, `batch_size` of them a step.
            Without it each peer draws for itself and counts as one sample a step; one that seeds itself must do so by
            `rank()`, or all peers get the same samples. Over an IterableDataset, whose length nobody knows, each peer
            takes every m-th item, unless the data set asks for `rank()` and takes its part itself. `len()` of the
            returned loader, by which a scheduler may count steps, is that of one peer.
        scaler: the GradScaler that the script steps the optimizer with.

    Returns:
        The same model and optimizer, or lists of them, and a loader of the same kind.

    Raises:
        UsageError: several loaders, optimizers that share a parameter, or a scheduler.
        NotSupported: sparse gradients, optimizers that need a closure, samplers that cannot be dealt.
        RequestError: the peers do not have the same model; the text names the first difference.
    """
    from meshtrain.train import api

    api.check_given(model, optimizer, loader, others)
    whole, joint = api.joined(model, optimizer)
    if loader is None:
        api.world().prepare(whole, joint, scaler)
        return model, optimizer
    *_, dealt = api.world().prepare_with_loader(whole, joint, loader, scaler)
    return model, optimizer, dealt


def clip_grad_norm_(parameters: "torch.Tensor | Iterable[torch.Tensor]", max_norm: float) -> "torch.Tensor":
    """Clips by the norm of the averages; call it where `torch.nn.utils.clip_grad_norm_` would stand (O4).

    With `--sync ssp:S` the averages arrive later than the gradients that are in `p.grad`, so the limit counts for the
    rounds to come, and the norm returned is that of the newest one applied; torch's own function is refused there.
    With `--sync local:H` it clips this peer's own gradients, as torch's does.

    Raises:
        UsageError: with `--sync ssp:S`, for some of the parameters only; with `--codec dgc`, which clips by itself.
    """
    from meshtrain.train import api

    return api.world().clip_grad_norm_(parameters, max_norm)


def steps(count: int) -> Iterator[int]:
    """Numbers of steps, from 1, until the job has had `count` of them: the same end on all peers (X6).

    A peer that is late, or joins later, takes fewer. Where several steps make a round (`--sync local:H`) the last one
    is whole, which may be some steps more; and one that ends early, as at the end of an epoch or in `mt.barrier`,
    counts as a whole one, which makes fewer.
    """
    from meshtrain.train import api

    return api.world().steps(count)


def log(*unnamed: object, **values: "float | torch.Tensor") -> None:
    """Reports numbers of this step, such as `loss=loss`, to whoever watches the job. Tensors must hold one value.

    Raises UsageError for what comes without a name, as a dict would.
    """
    if unnamed:
        raise UsageError("mt.log takes numbers by name: mt.log(loss=loss); of a dict mt.log(**values)")
    from meshtrain.train import api

    api.world().log(values)


def rank() -> int:
    """This peer's number in the job, from 0; with several learners on each device that of the learner."""
    from meshtrain.train import api

    api.note_asked()
    return api.world().rank


def world_size() -> int:
    """How many peers train; with several learners on each device, how many learners."""
    from meshtrain.train import api

    api.note_asked()
    return api.world().world_size


def is_main() -> bool:
    """Whether this is the peer that should save results and print: rank 0."""
    return rank() == 0


def device() -> "torch.device":
    """Where the model is, or, before `prepare`, the best device here: CUDA, then MPS, then CPU.

    MESHTRAIN_DEVICE overrides the choice.
    """
    from meshtrain.train import api

    return api.world().device


def barrier() -> None:
    """Returns when every peer has called it. The models of all are equal then, also with `--sync ssp:S`.

    Raises:
        UsageError: between `backward()` and `optimizer.step()`.
        RequestError: some peer has finished without it.
    """
    from meshtrain.train import api

    api.world().barrier()


def no_sync() -> AbstractContextManager[None]:
    """Inside, `backward()` only accumulates; the next one outside averages the sum (O6)."""
    from meshtrain.train import api

    return api.world().no_sync()


def base() -> AbstractContextManager[None]:
    """Inside, the model holds the state that all peers have in common: evaluate and save there (O7)."""
    from meshtrain.train import api

    return api.world().base()


def data_dir() -> Path:
    """The folder given to `meshtrain submit --data`; else $MESHTRAIN_DATA, ./data if there is one, or `.`.

    A job's files in it are read-only: copy what the script wants to change.
    """
    from meshtrain.train import api

    return api.world().data_dir


def output_dir() -> Path:
    """The folder for results, which `meshtrain get` fetches from any peer; ./out without a job, ./out/rankN under
    torchrun."""
    from meshtrain.train import api

    return api.world().output_dir


def finish() -> None:
    """Ends this peer's part; the model then holds the final state, the same on all peers. Save results after it.

    Done at the end of the script in any case. With `--sync ssp:S` it waits for the other peers' last rounds.
    """
    from meshtrain.train import api

    api.world().finish()


def session(
    *,
    peers: int | None = None,
    on: Sequence[str] = (),
    sync: str | None = None,
    codec: str | None = None,
    topology: str | None = None,
    learners: int = 1,
    masks: str | None = None,
    scale_lr: str | None = None,
    straggler: str | None = None,
    visibility: str | None = None,
    own: str | None = None,
    shares: str | None = None,
    on_nan: str = "stop",
    seed: int | None = None,
    checkpoint_every: str | None = None,
    data: "str | Path | None" = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    requirements: Sequence[str] = (),
    independent: bool = False,
    folder: "str | Path | None" = None,
    data_dir: "str | Path | None" = None,
) -> "MeshSession":
    """The paired devices, to run functions on from a notebook or any Python process that is no job itself.

        with mt.session(peers=3) as mesh:
            run = mesh.run(train, 0.01)
        run.result, run.plot()

    `mesh.run` sends the function, wherever it was defined, with its arguments by cloudpickle: code of your own, which
    runs as their user on devices that you have paired, and on no others. Results come back as data, never as code.
    What is not said is chosen as by `meshtrain submit --no-plan`: all linked devices, `bsp`, `fp32`.

    Args:
        peers: on so many devices, this one included.
        on: on exactly these, by names or ids.
        sync, codec, topology, learners, masks, scale_lr, straggler, visibility, own, shares, on_nan, seed,
            checkpoint_every: as of `meshtrain submit`. Of several learners on a device the first one's result counts.
        data: folder to ship; ./data if there is one.
        include, exclude: patterns of files of the working directory to ship, or not to. Notebooks stay here.
        env: environment variables of the function.
        requirements: packages that are installed for it on every device, as in `einops>=0.8`.
        independent: each device may work by itself; else a run of several that exchanges nothing fails.
        folder: in place of the working directory.
        data_dir: of the daemon, where several run on this machine.

    Raises:
        DaemonNotRunning: `meshtrain up` starts it.
        UsageError: in a job, without cloudpickle, or for an option that makes no sense.
        RequestError: as `meshtrain submit` fails: there are not so many devices, say.
    """
    from meshtrain.notebook.mesh_session import MeshSession
    from meshtrain.notebook.session_options import SessionOptions
    from meshwire.jobs.checkpoint_schedule import CHECKPOINT_EVERY

    def path(given: "str | Path | None") -> Path | None:
        return None if given is None else Path(given)

    return MeshSession.opened(
        SessionOptions(
            peers=peers,
            on=on,
            sync=sync,
            codec=codec,
            topology=topology,
            learners=learners,
            masks=masks,
            scale_lr=scale_lr,
            straggler=straggler,
            visibility=visibility,
            own=own,
            shares=shares,
            on_nan=on_nan,
            seed=seed,
            checkpoint_every=checkpoint_every or CHECKPOINT_EVERY,
            data=path(data),
            include=include,
            exclude=exclude,
            env=env or {},
            requirements=requirements,
            independent=independent,
            folder=path(folder),
            data_dir=path(data_dir),
        )
    )
