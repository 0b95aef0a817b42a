"""The learner's processes of one job here, one after the other: when another is started, and when none is (J3)."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from enum import Enum

from meshtraind.environments.environments import python_of
from meshtraind.learner.environment import ScriptPlace, calls_prepare, learner_environment, learner_threads
from meshtraind.learner.own_groups import folders_and_seed
from meshtraind.learner.process import LearnerProcess
from meshtraind.learner.script_error import ScriptError
from meshtraind.learner.shared_memory import SharedMemory
from meshtraind.peers.node import Node
from meshtraind.storage.cleanup import SOURCE
from meshtraind.storage.fetch import log_path, output_folder
from meshtraind.storage.job_record import Job
from meshwire.memory_layout.shared_slots import ENDPOINT_VARIABLE, TOKEN_VARIABLE

RESTARTS_MAX = 3  # after errors of the script's own
SAME_ERROR_WAIT_S = 1.0  # an error on all members ends the job before any of them begins anew
PAUSE_S_MAX = 60.0
SOON_S = 60.0  # after its start a script has not come far
PROGRESS_ROUNDS = 100  # a learner that was in so many rounds since its start has earned its restarts again


class Ending(Enum):
    """What follows from the end of a learner's process."""

    DONE = "its script has ended well"
    RESTART = "it is started again"
    FORWARD = "it is not started again: this peer forwards what the others send"


def after_exit(code: int, restarts: int, *, hopeless: bool) -> Ending:
    """Decides what follows from the end of a process. A script that is wrong fails everywhere, and with the last
    learner ends the job.

    Args:
        code: as `LearnerProcess.wait` returns it; negative also where it was not the script's fault.
        restarts: so far, after errors of the script's own.
        hopeless: another process would end by the same error.
    """
    if code == 0:
        return Ending.DONE
    return Ending.RESTART if code < 0 or (restarts < RESTARTS_MAX and not hopeless) else Ending.FORWARD


def pause_s(kills: int) -> float:
    """How long to wait before a process is started, after so many that were killed one after the other (J3)."""
    return 0.0 if kills < 2 else min(PAUSE_S_MAX, 2.0 ** (kills - 2))


@dataclass(frozen=True, slots=True)
class ScriptFailure:
    """A script's error, and how far its process had come: its steps, and the newest round in its base."""

    error: ScriptError
    steps: int
    round: int | None = None

    def comes_again(self, before: "ScriptFailure | None") -> bool:
        """Whether another process would end by it: by its kind, or because it has, at the same line, after as many
        steps or at the same round."""
        if before is None or not self.error.same(before.error):
            return self.error.hopeless
        at_same_round = self.round is not None and self.round == before.round
        return self.error.hopeless or self.steps == before.steps or at_same_round


class LearnerSupervisor:
    """Starts the learner's processes of one job, one after the other, and decides what follows from the end of each.

    Args:
        learners_here: daemons with one that share this machine (M3).

    Attributes:
        restarts: after errors of the script's own, since they were earned again.
        given_up: no other is started, unless this device is taken in anew.
        error: of the process that has ended last, if its script ended by one.
        failed: the process that has ended last did so by an error of the script's own.
        hopeless: the script ends by the same error whenever it is started.
        rests: why no process is started for now; None: one may be.
        starts: of processes, after failures and for other reasons.
        run: of processes that follow each other; whoever raises it ends the one before.
    """

    def __init__(self, node: Node, job: Job, learners_here: int) -> None:
        self._node = node
        self._job = job
        self._learners_here = learners_here
        self._learner: LearnerProcess | None = None
        self._ended = False
        self._token = ""
        self._starting = asyncio.Lock()  # a process that is being started is ended once it has started
        self._rounds_before = 0
        self._failure: ScriptFailure | None = None
        self._failed_soon: ScriptError | None = None  # by which the process before ended, if soon after its start
        self._began_s = 0.0  # monotonic
        self.error: ScriptError | None = None
        self.failed = False
        self.hopeless = False
        self.restarts = 0
        self._kills = 0
        self._not_before_s = 0.0  # monotonic
        self.rests: str | None = None
        self._awake = asyncio.Event()
        self._awake.set()
        self.given_up = False
        self.starts = 0
        self.run = 0

    @property
    def running(self) -> bool:
        """A process has started and not ended."""
        return self._learner is not None and self._learner.running

    async def start(self, run: int, memory: SharedMemory, place: ScriptPlace) -> bool:
        """Starts a process, unless there shall be none any more, or none of this run. Returns whether it has.

        Args:
            memory: that the process shares with this daemon.
            place: which script of how many it is.

        Raises OSError when it cannot be started.
        """
        async with self._starting:
            job = self._job
            log = log_path(job.folder, job.rank)
            for folder in (output_folder(job.folder, job.rank), log.parent):
                await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
            if self._ended or run != self.run:
                return False
            self.starts += 1
            self.given_up = False
            python = python_of(self._node.data_dir, job.spec.requirements)
            self._learner = LearnerProcess(job.folder / SOURCE, job.spec, log, memory, python)
            several = job.spec.learners > 1  # which exchange by mt.prepare alone (R6)
            prepares = several or await asyncio.to_thread(calls_prepare, job.folder / SOURCE / job.spec.script)
            settings = self._node.settings.now
            threads = learner_threads(self._learners_here * job.spec.learners, settings.max_cpu_percent)
            environment = learner_environment(job.spec, place, prepares=prepares, threads=threads)
            self._revoke()
            self._began_s = time.monotonic()
            await self._learner.start({**environment, **self._told()}, settings.nice, place.said)
            return True

    def _told(self) -> dict[str, str]:
        """The way to this daemon; of it nothing to a script that goes on without (P9)."""
        if self._job.spec.engine == "torchrun":
            return folders_and_seed(self._job)
        self._token = self._node.entrance.learners.issue(self._job.spec.job)
        return {ENDPOINT_VARIABLE: self._node.entrance.address, TOKEN_VARIABLE: self._token}

    def follow_settings(self) -> None:
        """Has the process of now yield more to other programs, where that was set."""
        if self._learner is not None:
            self._learner.yield_more(self._node.settings.now.nice)

    async def wait(self) -> int:
        """The exit code of the process that was started last."""
        learner, token = self._learner, self._token
        assert learner is not None
        code = await learner.wait()
        if token == self._token:  # else another has been started meanwhile
            self._revoke()
            self.error = learner.error()
        return code

    async def ended(self, timeout_s: float) -> None:
        """Waits for the process to end by itself, for so long."""
        learner = await self._started()
        if learner is not None and learner.running:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await learner.exited()

    def after(self, code: int, rounds: int, steps: int, round_: int | None = None) -> Ending:
        """Decides what follows from the exit code.

        Args:
            rounds: that this device's learners were in.
            steps: of the process that has ended.
            round_: the newest in its base.
        """
        if rounds - self._rounds_before >= PROGRESS_ROUNDS:
            self.restarts = self._kills = 0
        self._rounds_before = rounds
        if code > 0 and self.error is not None and self.error.of_mesh:
            code = -1
        if code > 0 and self.error is not None:
            failure = ScriptFailure(self.error, steps, round_)
            self.hopeless = failure.comes_again(self._failure)
            self._failure = failure
        self.failed = code > 0
        ending = after_exit(code, self.restarts, hopeless=self.hopeless)
        self.given_up = ending is Ending.FORWARD
        if code > 0:
            self.restarts += ending is Ending.RESTART
            wait_s = SAME_ERROR_WAIT_S
        else:
            self._kills += 1
            wait_s = pause_s(self._kills)
        self._not_before_s = time.monotonic() + wait_s
        return ending

    def fails_again(self, code: int) -> bool:
        """Whether a script that the mesh is not to blame for would end by the same error in another process (P6): by
        its kind, or because it has, at the same line, and both soon after their start."""
        error = self.error if code > 0 else None
        soon = time.monotonic() - self._began_s < SOON_S
        own = error is not None and not error.of_mesh
        again = error is not None and own and (error.hopeless or (soon and error.same(self._failed_soon)))
        self._failed_soon = error if soon else None
        return again

    async def pause(self) -> None:
        """Waits as long as another process must not be started yet."""
        await asyncio.sleep(max(0.0, self._not_before_s - time.monotonic()))
        await self._awake.wait()

    def rest(self, why: str) -> None:
        """No process is started from now on; the one that runs is not touched."""
        self.rests = why
        self._awake.clear()

    def rise(self) -> None:
        """Ends the rest: a process may be started again."""
        self.rests = None
        self._awake.set()

    async def kill(self, *, now: bool = True) -> None:
        """Ends the process, `now` or with a while for its last words; another may be started."""
        learner = await self._started()
        if learner is not None:
            if learner.running:
                self.failed = False  # it is this daemon that ends it
            await learner.stop(now=now)

    async def stop(self, *, now: bool) -> None:
        """Ends the process; there will be no other."""
        self._ended = True
        learner = await self._started()
        if learner is not None:
            await learner.stop(now=now)
        self._revoke()

    def _revoke(self) -> None:
        self._node.entrance.learners.revoke(self._token)

    async def _started(self) -> LearnerProcess | None:
        """The newest process, if there is one, once it is not being started any more."""
        async with self._starting:
            return self._learner
