"""One learner in a job: attached to its daemon, then prepared, then training, then finished."""

import logging
import os
import random
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from meshtrain.client import Client
from meshtrain.errors import ConnectionLost, NotSupported, UsageError
from meshtrain.train import optimizers, tensors
from meshtrain.train.alone import local_data_dir
from meshtrain.train.buffers import Buffers, base_hash
from meshtrain.train.channel import Channel
from meshtrain.train.device import best_device, move_model
from meshtrain.train.drawn import DrawnSamples
from meshtrain.train.environment import Environment
from meshtrain.train.gradients import Gradients
from meshtrain.train.loader import Deal, DealtLoader, dealable
from meshtrain.train.optimizerhooks import StepBoundary
from meshtrain.train.slots import Slots
from meshtrain.train.startstate import StartState
from meshtrain.train.tensors import ModelTensors
from meshwire import limits
from meshwire.messages.local import (
    Attach,
    LearnerBarrier,
    LearnerHash,
    LearnerIdle,
    LearnerLog,
    LearnerModel,
    LearnerReady,
    LearnerState,
    LearnerWelcome,
    StateTask,
)
from meshwire.plan import plan_buckets
from meshwire.samples import epoch_seed

log = logging.getLogger("meshtrain")

M = TypeVar("M", bound=torch.nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
L = TypeVar("L")


class Session:
    """What `meshtrain`'s functions do inside a job."""

    def __init__(self, client: Client, welcome: LearnerWelcome, memory_fd: int) -> None:
        if welcome.staleness != 0:
            client.close()
            raise NotSupported(
                f"the daemon asks for the staleness bound {welcome.staleness}; this version knows only 0"
            )
        self._pid = os.getpid()
        self._channel = Channel(client)
        self._welcome = welcome
        self._memory_fd = memory_fd
        self._drawn = DrawnSamples()
        self._device: torch.device | None = None
        self._model: ModelTensors | None = None
        self._buffers: Buffers | None = None
        self._gradients: Gradients | None = None
        self._boundary: StepBoundary | None = None
        self._barriers = 0
        self._hashed_round = 0
        self._finished = False

    @classmethod
    def attach(cls, environment: Environment) -> "Session":
        """Calls the daemon. Raises ConnectionLost, RequestError."""
        attach = Attach(
            token=environment.token,
            role="learner",
            job=environment.job,
            pid=os.getpid(),
            torch=torch.__version__,
        )
        try:
            client, welcome = Client.attach(environment.endpoint, attach)
        except OSError as error:
            raise ConnectionLost(f"the daemon that started this script does not answer: {error}") from error
        if not isinstance(welcome, LearnerWelcome):
            client.close()
            raise ConnectionLost(f"the daemon answered with {type(welcome).__name__}: it is of another version")
        if environment.threads is not None:
            torch.set_num_threads(environment.threads)
        return cls(client, welcome, environment.memory_fd)

    # Preparation

    def prepare(self, model: M, optimizer: O) -> tuple[M, O]:
        """Without a loader: every peer draws its own samples (X6)."""
        self._check_unprepared()
        self._draw_apart("no loader was given to mt.prepare")
        self._join(model, optimizer, "no loader")
        return model, optimizer

    def prepare_with_loader(self, model: M, optimizer: O, loader: L) -> tuple[M, O, L]:
        """With the loader whose samples are dealt."""
        self._check_unprepared()
        given = dealable(loader)
        if given is None:
            self._draw_apart("the loader reads an IterableDataset")
            self._join(model, optimizer, "an iterable data set")
            return model, optimizer, loader
        deal = Deal(given, self.rank, self.world_size, self._welcome.spec.seed)
        self._drawn.start_counting()
        self._join(model, optimizer, deal.describe())
        return model, optimizer, cast(L, DealtLoader(given, deal, self._drawn.add, self.device))

    def _check_unprepared(self) -> None:
        self._check_running()
        if self._model is not None:
            raise UsageError(
                "mt.prepare was called before: a job trains one model with one optimizer; put several models into one "
                "nn.ModuleDict and prepare that"
            )

    def _draw_apart(self, why: str) -> None:
        """X6: equal seeds would give all peers the same samples."""
        seed = epoch_seed(self._welcome.spec.seed, self.rank)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        log.warning(
            "%s: this peer draws its own samples, seeded by its rank; each step weighs the same, and nothing ensures "
            "that every sample is seen exactly once",
            why,
        )

    def _join(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: str) -> None:
        optimizers.check(optimizer)
        self._device = move_model(model, optimizer, best_device())
        specs, places = tensors.collect(model)
        layout = optimizers.describe(optimizer, specs, places)
        self._model = tensors.build(model, f"{layout}; loader: {samples}")
        size_bytes = len(self._model.manifest.pack())
        if size_bytes > limits.MODEL_BYTES_MAX:
            raise NotSupported(
                f"the description of this model's {len(self._model.manifest.tensors)} tensors has {size_bytes} bytes, "
                f"at most {limits.MODEL_BYTES_MAX} are possible: use fewer tensors, or shorter names of modules"
            )
        plan = plan_buckets(self._model.manifest, self._welcome.spec.bucket_bytes)
        slots = Slots(self._memory_fd, plan, self._welcome.staleness)
        self._ask(
            LearnerModel(manifest=self._model.manifest, memory_bytes=slots.layout.total_bytes), "agreement on the model"
        )
        self._take_over_start(StartState(self._model, optimizer))
        self._buffers = Buffers(self._model, plan)
        self._gradients = Gradients(
            self._model, plan, slots, self._buffers, self._channel, self._drawn, self._with_names
        )
        self._boundary = StepBoundary(optimizer, self._model, self._gradients, self._channel, self._after_round)

    def _take_over_start(self, state: StartState) -> None:
        task = self._ask(LearnerState(units=state.digests()), "comparison of the start states")
        if not isinstance(task, StateTask):
            raise ConnectionLost(f"the daemon answered with {type(task).__name__}: it is of another version")
        if self.rank == 0:
            state.export(task.units, Path(task.folder))
        else:
            state.load(task.units, Path(task.folder))
        self._ask(LearnerReady(), "the start of round 1")

    def _ask(self, body: Any, name: str) -> Any:
        return self._channel.ask(body, name, lambda reason: log.debug("%s: %s", name, reason))

    # Training

    def _after_round(self, round_: int) -> None:
        every = self._welcome.spec.hash_every
        if every and round_ % every == 0:
            self._tell_hash(round_)

    def _tell_hash(self, round_: int) -> None:
        assert self._model is not None
        assert self._buffers is not None
        self._hashed_round = round_
        self._channel.tell(LearnerHash(round=round_, sha256=base_hash(self._model, self._buffers)))

    def log(self, values: Mapping[str, Any]) -> None:
        """Sends numbers to whoever watches the job. Raises UsageError for what is not a number."""
        self._check_running()
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
        step = self._gradients.step if self._gradients is not None else 0
        self._channel.tell(LearnerLog(step=step, values=tuple(numbers)))

    def no_sync(self) -> AbstractContextManager[None]:
        """O6. Before `prepare` nothing is sent in any case."""
        return self._gradients.no_sync() if self._gradients is not None else nullcontext()

    def base(self) -> AbstractContextManager[None]:
        """O7: with s=0 the model itself is the base."""
        return nullcontext()

    def barrier(self) -> None:
        """Returns when every peer's learner has entered its barrier of the same number."""
        self._check_running()
        self._barriers += 1
        self._ask(LearnerBarrier(number=self._barriers), f"barrier {self._barriers}")

    def finish(self) -> None:
        """Tells the daemon that no step will follow (R5), and the hash of the final base. Later calls do nothing.

        From then on model and optimizer are ordinary ones again.
        """
        if self._finished or os.getpid() != self._pid:
            return
        self._finished = True
        try:
            if self._gradients is not None:
                self._channel.tell(LearnerIdle(reason="it has finished"))
                # Between backward() and step() there is no base: buffers are of the new round, parameters are not.
                if self._gradients.done is None and self._channel.applied > self._hashed_round:
                    self._tell_hash(self._channel.applied)
        finally:
            self._channel.close()
            if self._gradients is not None:
                self._gradients.close()
            if self._boundary is not None:
                self._boundary.close()

    # Facts

    @property
    def rank(self) -> int:
        """Index in the job's members."""
        return self._welcome.rank

    @property
    def world_size(self) -> int:
        """Number of the job's members."""
        return len(self._welcome.members)

    @property
    def device(self) -> torch.device:
        """Where the prepared model lies, before that the best device."""
        return self._device or best_device()

    @property
    def data_dir(self) -> Path:
        """What was given to --data, else as without a job."""
        told = self._welcome.data_dir
        return Path(told) if told is not None else local_data_dir()

    @property
    def output_dir(self) -> Path:
        """This rank's results."""
        folder = Path(self._welcome.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _check_running(self) -> None:
        if self._finished:
            raise UsageError("mt.finish() was called before: this peer takes no further part in the job")
        if os.getpid() != self._pid:
            raise UsageError(
                "this process was forked from the learner: call meshtrain's functions in the script itself"
            )

    def _with_names(self, reason: str) -> str:
        """V1 wants the peer's name; a round's verdict knows ranks."""
        members = self._welcome.members

        def named(match: re.Match[str]) -> str:
            rank = int(match[1])
            return f"rank {rank} ({members[rank].name}):" if rank < len(members) else match[0]

        return re.sub(r"\brank (\d+):", named, reason)
