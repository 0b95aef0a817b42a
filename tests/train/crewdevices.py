"""Devices with several learners, in one process: what stands between them and `LocalDaemon` is the real thing (R6)."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshtrain.errors import JobStopped
from meshtrain.train.link.environment import Environment
from meshtrain.train.session import LearnerSession
from meshtraind.crew.joint_learner import DaemonEntrance, JointLearner
from meshtraind.crew.slots import CrewMemory
from meshtraind.machine.event_loop import serve_locally
from tests.train.localdaemon import WAIT_TIMEOUT_S, LocalDaemon

T = TypeVar("T")


class CrewDevice:
    """One rank of the job, with `daemon.spec.learners` learners. Use as a context manager.

    Attributes:
        failure: why its learners cannot go on together.
    """

    def __init__(self, daemon: LocalDaemon, rank: int) -> None:
        self._daemon = daemon
        self._rank = rank
        self._tokens = [f"learner {learner}" for learner in range(daemon.spec.learners)]
        self._memory = CrewMemory(len(self._tokens), str(daemon.environment(rank).memory_fd))
        self._listens = threading.Event()
        self._address = ""
        self.failure: str | None = None

    def __enter__(self) -> "CrewDevice":
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._listens.wait(WAIT_TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(WAIT_TIMEOUT_S)

    def environment(self, learner: int) -> Environment:
        return Environment(
            endpoint=self._address,
            token=self._tokens[learner],
            job=self._daemon.spec.job,
            memory_fd=int(self._memory.told(learner)),
            kept_fd=None if learner else self._daemon.kept[self._rank],
        )

    def _failed(self, why: str) -> None:
        """As the process ends its learners."""
        self.failure = self.failure or why
        self._daemon.stop(why)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        environment = self._daemon.environment(self._rank)
        entrance = DaemonEntrance(environment.endpoint, environment.token, environment.job)
        folder: Path = self._daemon.folder / f"crew{self._rank}"
        folder.mkdir()
        joint = JointLearner(entrance, self._memory, self._tokens, folder, self._failed)
        path = self._daemon.folder / f"crew{self._rank}.sock"
        server, self._address = await serve_locally(self._loop, joint.accept, path)
        self._listens.set()
        await self._over.wait()
        server.close()
        await joint.close()
        self._memory.close()


def run_crews(daemon: LocalDaemon, script: Callable[[LearnerSession, int], T]) -> list[T]:
    """Runs the script once for each learner of each rank, by `mt.rank()`, as `LocalDaemon.run` does for each rank."""
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(CrewDevice(daemon, rank)) for rank in range(daemon.members)]
        environments = [device.environment(each) for device in devices for each in range(daemon.spec.learners)]
        results, errors = daemon.run_each(environments, script)
        failures = [device.failure for device in devices if device.failure is not None]
    daemon.wait_until_all_have_left()  # a learner waits until its device has read what it said, and no further
    if errors and not isinstance(errors[0], JobStopped):
        raise errors[0]
    if failures:
        raise AssertionError(failures[0])
    if errors:
        raise errors[0]
    return results
