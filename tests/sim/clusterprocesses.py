"""One daemon's learner processes, one after the other: when they are started, what they say first, how they end.

It stands where the session and its supervisor start and end processes (J3). What follows from the end of one for the
job decides the host that ships.
"""

import asyncio
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshtraind.transport.requests import RequestFailed
from meshwire.frames.header import Header, Kind
from meshwire.message_base import Wire
from meshwire.messages.group import GroupWorld
from meshwire.messages.job import BaseHash, End, Stage
from meshwire.messages.learner import (
    LearnerHash,
    LearnerModel,
    LearnerReady,
    LearnerState,
    LearnerStepped,
    RoundDone,
    StateTask,
)
from tests.sim.clusterdisk import State
from tests.sim.clusterlearner import Learner

if TYPE_CHECKING:
    from meshtraind.rounds.driver import Rounds
    from tests.sim.clusterdaemon import Daemon

LOCAL_S = 0.001  # between daemon and learner
ENDED_S = 5 * LOCAL_S  # until a daemon sees that a process has ended
HASH_S = 0.002  # from one daemon to another
FAILED_S = 1.0  # until a script that gets no state has ended


class Figures:
    """A `StepFigures` of the learner's handler that ships; nobody looks at them here."""

    values: tuple[tuple[str, float], ...] = ()
    stage: Stage | None = None
    rounds_planned = 0

    def stepped(self, message: LearnerStepped) -> None:
        """It is counted elsewhere."""


class Socket:
    """The way from a daemon to one process: a `LearnerLink` of the learner's handler that ships."""

    writable = True

    def __init__(self, processes: "LearnerProcesses", process: Learner) -> None:
        self._processes = processes
        self._process = process

    def notify(self, body: Wire) -> None:
        self._processes.send(self._process, body)

    def close(self, reason: str) -> None:
        """The process ends where its daemon hears it no more."""
        self._processes.exit(self._process, failed=True)


class LearnerProcesses:
    """Of one daemon: a `LearnerKeeper` and `LearnerOwner` of the shells that ship.

    Attributes:
        starts: of processes.
    """

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._world = daemon.world
        self._process: Learner | None = None  # that is to run now; it may be starting
        self._sockets: dict[Learner, Socket] = {}  # of those that have called, until they are seen to end
        self._talks: dict[Learner, asyncio.Task[None]] = {}  # their first words
        self._given_up = daemon.is_hub  # no process ever runs there
        self.starts = 0

    @property
    def learner(self) -> Learner | None:
        """The process that is to run, once it has called and as long as it is heard."""
        process = self._process
        socket = self._sockets.get(process) if process is not None else None
        return process if socket is not None and self._daemon.handler.is_over(socket) else None

    # What befalls them

    def found(self) -> None:
        """The first process begins the job with the others'."""
        if self._daemon.is_hub:
            return
        if not self._world.setting.begun:
            self._run()
            return
        process = self._process = self._new()
        self._daemon.happen(lambda: self._attach(process, self._join(process)))

    def kill(self) -> None:
        """Its process is killed; the daemon sees it end."""
        if self._process is not None and self._process.alive:
            self._world.tell(self._daemon.name, "'s learner is killed")
            self.exit(self._process)

    def give_up(self) -> None:
        """It has failed too often and is started no more: this daemon only forwards."""
        if self._process is not None:
            self._given_up = True
            self._world.tell(self._daemon.name, "'s learner is started no more")
            self.exit(self._process, failed=True)

    def exit(self, process: Learner, *, failed: bool = False) -> None:
        """It ends, and the daemon hears of it later."""
        if process.alive:
            process.die()
            if (talk := self._talks.pop(process, None)) is not None:
                talk.cancel()
            self._daemon.later(ENDED_S, partial(self._ended, process, failed))

    def _ended(self, process: Learner, failed: bool) -> None:
        """Another one takes its place (J3)."""
        daemon = self._daemon
        socket = self._sockets.pop(process, None)
        if socket is not None:
            daemon.handler.lost(socket)
        if process is self._process:
            goes_on = daemon.host.learner_died(failed=failed)
            assert goes_on or self._world.failed, f"{daemon.name}: its learner has ended, and so would the job"
            if process is self._process:
                self._process = None
                if not self._given_up:
                    self._run()
        self._world.check(daemon)

    def _run(self) -> None:
        """Starts a process, which takes a time until it calls."""
        self._given_up = False
        process = self._process = self._new()
        self._daemon.later(self._world.random.choice(self._world.start_s), partial(self._call, process))

    def _new(self) -> Learner:
        daemon = self._daemon
        self.starts += 1
        return Learner(f"{daemon.number}.{daemon.member.incarnation}.{self.starts}", daemon)

    # What they say, and are told

    def _call(self, process: Learner) -> None:
        if process is self._process and process.alive:
            self._attach(process, self._join(process))

    def _attach(self, process: Learner, talk: Coroutine[object, object, None]) -> None:
        daemon = self._daemon
        socket = self._sockets[process] = Socket(self, process)
        daemon.handler.attach(socket)
        self._talks[process] = daemon.tasks.spawn(talk, "learner's requests")

    async def _join(self, process: Learner) -> None:
        """As `meshtrain.prepare` asks: for the model, for a state, and whether it is taken in."""
        daemon, request = self._daemon, self._daemon.handler.request
        try:
            await request(
                LearnerModel(manifest=daemon.maker.manifest, memory_bytes=0, samples=self._world.space), _quiet
            )
            task = await request(LearnerState(units=(bytes(32),)), _quiet)
            assert isinstance(task, StateTask)
            kept = process.memory.kept
            assert not task.kept or kept.round() == task.round, "J3: what is taken over is whole, and trusted"
            if task.kept:
                state = kept.state
            else:
                state = daemon.disk.written[Path(task.folder)] if task.units else State.first(process.name)
            assert state is not None
            assert state.round == task.round, "J1: a learner holds the base that its daemon counts on"
            how = "finds the base after round {} in memory" if task.kept else "has loaded the base after round {}"
            how = how if task.units else "gives its own start"
            self._world.tell(daemon.name, f"'s learner {how.format(state.round)}")
            process.hold(state)
            await request(LearnerReady(), _quiet)
        except RequestFailed as error:
            if "no peer has given its state" not in str(error):
                raise AssertionError(f"{daemon.name}: honest daemons break no rule: {error}") from error
            self._world.tell(daemon.name, "'s learner gets its state from nobody")
            daemon.later(FAILED_S, partial(self.exit, process, failed=True))
        self._world.check(daemon)

    def say(self, process: Learner, body: Wire) -> None:
        """A notice of it, which is heard as long as this daemon has not turned to another."""
        socket = self._sockets.get(process)
        if socket is not None and self._daemon.handler.is_over(socket):
            self._daemon.handler.notice(body)

    def send(self, process: Learner, body: Wire) -> None:
        """A notice to it, which it reads a little later."""
        chain = b""
        if isinstance(body, RoundDone):
            assert self._daemon.maker.watched is not None
            chain = self._daemon.maker.watched.path[body.round]
        self._daemon.later(LOCAL_S, partial(process.take, body, chain))

    # What the host asks of whoever keeps them

    @property
    def learner_comes(self) -> bool:
        return not self._given_up

    @property
    def learner_given_up(self) -> bool:
        return self._given_up

    def begin_learner(self) -> None:
        self.end_learner()
        if not self._daemon.is_hub:
            self._run()

    def end_learner(self) -> None:
        """It ends, and nothing follows from that."""
        process, self._process = self._process, None
        if process is not None:
            self.exit(process)
        self._daemon.learner_ended()

    def generation_changed(self) -> None:
        self._daemon.report()

    def fail(self, reason: str) -> None:
        self._world.fail(reason)

    def world(self) -> None:
        """It restarts no scripts."""

    def world_entered(self, world: GroupWorld) -> None:
        """There is none."""
        raise AssertionError(world)

    def world_begins(self) -> None:
        """There is none."""
        raise AssertionError

    @property
    def learner_failed(self) -> bool:
        return self._given_up and not self._daemon.is_hub

    def lie_down(self) -> None:
        """It begins again from what lies on disks, of which the clusters know nothing."""
        self._world.fail("no base is left anywhere")

    def why_none_learns(self) -> str:
        return "no peer can run the script any more"

    def turned_away(self, reason: str) -> None:
        self._daemon.turned_away(reason)

    # What their handler asks of whoever runs the job

    @property
    def who(self) -> str:
        return self._daemon.name

    # What whoever hears the members asks of whoever runs the job

    @property
    def rounds(self) -> "Rounds | None":
        return self._daemon.host.rounds

    def member_reported(self) -> None:
        """Nobody here looks whether all are done."""

    def member_ended(self, rank: int, end: End) -> None:
        raise AssertionError(f"{self.who}: rank {rank} ends the job: {end}")

    def tell_hash(self, body: LearnerHash) -> None:
        """O9: to all others, past their links, so that no schedule changes by it."""
        daemon, job = self._daemon, self._daemon.known_job
        assert daemon.generation is not None
        message = BaseHash(job=job.spec.job, rank=daemon.rank, round=body.round, sha256=body.sha256)
        job.take_hash(message)
        header = Header(kind=Kind.CONTROL, payload_bytes=0, generation=daemon.generation.hash64())
        for end in daemon.round_links.values():
            peer = self._world.of_node(end.link.other(daemon))
            self._world.clock.at(HASH_S, partial(peer.hear, partial(peer.hear_hash, daemon, header, message)))

    def tell_report(self) -> None:
        self._daemon.report()


def _quiet(event: Wire) -> None:
    """A learner that waits reads for what; here nobody looks."""
