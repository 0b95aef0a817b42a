"""Tells the owner when a job ends here or needs them: on their desktop, or by a command of theirs."""

import asyncio
import html
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshtraind.machine.facts import shell_command
from meshtraind.machine.process_tree import ProcessTree
from meshtraind.owner.live_settings import LiveSettings
from meshtraind.owner.settings import NOTIFY_DESKTOP, NOTIFY_OFF
from meshtraind.runtime.tasks import TaskSet
from meshtraind.storage.job_record import Job
from meshwire import limits
from meshwire.jobs.lifecycle import JobState
from meshwire.memory_layout.shared_slots import DATA_DIR_VARIABLE
from meshwire.text import printable

log = logging.getLogger(__name__)

WAITS_S = 300.0  # after which a job that waits for others needs somebody to look: most of them come back before
RUN_TIMEOUT_S = 30.0
OUTPUT_BYTES_MAX = 2000  # of a command that has failed, in the log
QUEUED_MAX = 32
HELP = "help"
COMMAND_FILE = "notify"  # in a job's folder
VERBS = {
    JobState.SUCCEEDED: "has succeeded",
    JobState.FAILED: "has failed",
    JobState.CANCELLED: "was cancelled",
    JobState.LOST: "has stopped, and may begin again",
}
# What text is on its way to osascript's display is an argument of its, and no program.
_OSASCRIPT = ("on run argv", 'display notification (item 1 of argv) with title "meshtrain"', "end run")


@dataclass(frozen=True, slots=True)
class OwnerNotice:
    """What is told of a job.

    Attributes:
        state: that it has ended in, or `HELP`: it goes on only if somebody does something.
        why: the error, or what it waits for.
        text: one sentence for a person.
    """

    job: str
    name: str
    state: str
    why: str
    text: str


@dataclass(slots=True)
class _Told:
    """What is known of a job that was looked at before."""

    ended: bool = False
    helped: str = ""  # for which need it was told
    waits_since_s: float | None = None


class JobWatch:
    """Finds what there is to tell, by looking at the jobs now and then. Pure but for what the jobs say."""

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def look(self, jobs: Iterable[Job], now_s: float) -> list[OwnerNotice]:
        """What has happened since the last look. Each end is told once, and each need."""
        known = {job.spec.job: job for job in jobs}
        self._told = {id_: self._told.get(id_, _Told()) for id_ in known}
        found = (self._news(job, self._told[id_], now_s) for id_, job in known.items())
        return [news for news in found if news is not None]

    def _news(self, job: Job, told: _Told, now_s: float) -> OwnerNotice | None:
        if job.ended:
            first, told.ended = not told.ended, True
            if not first or job.left:
                return None  # who has typed `leave` knows
            return _news(job, job.state.value, VERBS[job.state], job.error or "")
        told.waits_since_s = (told.waits_since_s or now_s) if job.waiting else None
        need = why = ""
        own = job.reports.get(job.rank)
        if own is not None and own.part == "forwards":
            need, why = "does not train here any more", own.failure or ""
        elif told.waits_since_s is not None and now_s - told.waits_since_s >= WAITS_S:
            need, why = "waits", job.waiting
        if not need:
            told.helped = ""
        if need == told.helped:
            return None
        told.helped = need
        return _news(job, HELP, need, why)


def _news(job: Job, state: str, verb: str, why: str) -> OwnerNotice:
    name, id_ = printable(job.spec.name), job.spec.job
    why = printable(why.strip().splitlines()[0] if why.strip() else "")[: limits.REASON_CHARS_MAX]
    return OwnerNotice(id_, name, state, why, f"{name} ({id_}) {verb}{': ' if why else ''}{why}")


class Notifier:
    """Looks for news of jobs, and runs what tells the owner, one after the other.

    Args:
        data_dir: told to commands, for `meshtrain` in them.
        jobs: by id; live.
        environment: of the desktop, and of the owner's commands.
    """

    def __init__(
        self,
        data_dir: Path,
        settings: LiveSettings,
        jobs: Mapping[str, Job],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._data_dir = data_dir
        self._settings = settings
        self._jobs = jobs
        self._environment = environment
        self._watch = JobWatch()
        self._tasks = TaskSet("notify")
        self._one = asyncio.Lock()
        self._queued = 0

    def look(self) -> None:
        """Tells what is new since the last look."""
        for news in self._watch.look(self._jobs.values(), time.monotonic()):
            self.tell(news)

    def tell(self, news: OwnerNotice) -> None:
        """Tells the owner, soon."""
        setting = command_of(self._data_dir / "jobs" / news.job) or self._settings.now.notify
        if setting == NOTIFY_OFF:
            return
        if self._queued >= QUEUED_MAX:
            log.warning("not told, for %d are waiting: %s", self._queued, news.text)
            return
        self._queued += 1
        self._tasks.spawn(self._run(setting, news), f"notify of {news.job}")

    async def close(self) -> None:
        """What is being told is cut off."""
        await self._tasks.close()

    async def _run(self, setting: str, news: OwnerNotice) -> None:
        try:
            async with self._one:
                if setting != NOTIFY_DESKTOP:
                    # A shell, so that they may be used as in one; they are never a part of what it reads as commands.
                    await self._execute(shell_command(setting), variables(news))
                elif (command := desktop_command(news.text, sys.platform, self._environment)) is not None:
                    await self._execute(command, {})
        finally:
            self._queued -= 1

    async def _execute(self, command: Sequence[str], more: Mapping[str, str]) -> None:
        tree = ProcessTree()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**self._environment, **more, **tree.environment, DATA_DIR_VARIABLE: str(self._data_dir)},
                cwd=self._data_dir,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                **tree.options,
            )
        except OSError as error:
            log.warning("notify: %s cannot be run: %s", command[0], error.strerror or error)
            return
        assert process.stdout is not None
        try:
            async with asyncio.timeout(RUN_TIMEOUT_S):
                said = b""
                while piece := await process.stdout.read(OUTPUT_BYTES_MAX):
                    said = (said + piece)[-OUTPUT_BYTES_MAX:]
                code = await process.wait()
        except TimeoutError:
            log.warning("notify: %s did not end within %.0f s, and was ended", command[0], RUN_TIMEOUT_S)
            return
        finally:
            await tree.end(process.pid)
            await process.wait()
        if code:
            log.warning("notify: exit code %d: %s", code, printable(said.decode(errors="replace").strip()))


def keep_command(folder: Path, command: str) -> None:
    """Has the owner told of the job in this folder by a command of its own. Raises OSError."""
    handle = os.open(folder / COMMAND_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(command)


def command_of(folder: Path) -> str | None:
    """What `keep_command` has kept for a job; None: nothing."""
    try:
        return (folder / COMMAND_FILE).read_text("utf-8") or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        log.warning("the command to notify by cannot be read: %s", error)
        return None


def variables(news: OwnerNotice) -> dict[str, str]:
    """What a command of the owner's finds in its environment."""
    return {
        "MESHTRAIN_JOB": news.job,
        "MESHTRAIN_JOB_NAME": news.name,
        "MESHTRAIN_JOB_STATE": news.state,
        "MESHTRAIN_JOB_ERROR": news.why,
        "MESHTRAIN_TEXT": news.text,
    }


def desktop_command(
    text: str, platform: str, environment: Mapping[str, str], find: Callable[[str], str | None] = shutil.which
) -> list[str] | None:
    """What shows a text on this machine's desktop; None where there is none, or nothing that could."""
    if platform == "darwin" and (found := find("osascript")) is not None:
        return [found, *(part for line in _OSASCRIPT for part in ("-e", line)), f"Job {text}"]  # no option of its
    session = any(environment.get(name) for name in ("DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "WAYLAND_DISPLAY"))
    if platform.startswith("linux") and session and (found := find("notify-send")) is not None:
        # Desktops read markup in it, links and pictures included, and another device has chosen some of these words.
        return [found, "--app-name=meshtrain", "--", "meshtrain", html.escape(text, quote=False)]
    return None
