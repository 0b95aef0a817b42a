"""What this daemon knows of one job: state, every rank's last report, the replicas' hashes, and who waits for news."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Protocol

from meshtraind.storage.job_history import EXPIRED, HistoryError
from meshtraind.storage.resume_file import JobFile
from meshwire import limits
from meshwire.jobs.lifecycle import EXIT_CODES, TERMINAL_STATES, JobEvent, JobRecord, JobState, advance
from meshwire.membership.lineage import rank_of
from meshwire.messages.job import (
    BaseHash,
    Generation,
    GivenUp,
    JobSpec,
    JobSummary,
    Member,
    RankReport,
    RefusedRank,
)
from meshwire.sync_modes.settings_changes import (
    SettingsChanges,
    SettingsInForce,
    newest_codec,
    newest_sync,
    told_of,
)

log = logging.getLogger(__name__)

BEFORE_START = (JobState.OFFERED, JobState.FETCHING, JobState.READY)
SAVE_INTERVAL_S = 30.0  # what is known of a job's rounds if this daemon is killed


class ReplicaHashes:
    """Compares the base hashes of the ranks that compute at equal rounds (O9, drift guard).

    Only rounds that all of them have named count. The majority is right, and of equal parts that of the lowest rank.
    Whoever names such a round later, as a learner does that catches up, is compared with what was right then.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = set(ranks)
        self._open: dict[int, dict[int, bytes]] = {}
        self._right: dict[int, bytes] = {}  # of the newest rounds that were compared
        self.compared = 0
        self.unequal_round: int | None = None

    def expect(self, ranks: Iterable[int]) -> dict[int, set[int]]:
        """Compares these ranks from now on: they compute. What others have told may be of rounds that do not count any
        more (G4, cut).

        Returns by round the ranks that are found to differ, where it was only others that had not told yet.
        """
        self._ranks = set(ranks)
        differ = {}
        for round_, hashes in list(self._open.items()):
            self._open[round_] = {rank: sha256 for rank, sha256 in hashes.items() if rank in self._ranks}
            if odd := self._compare(round_):
                differ[round_] = odd
        return differ

    def forget(self, above: int = -1) -> None:
        """Rounds above this one do not count, or are made anew."""
        for rounds in (self._open, self._right):
            for round_ in [round_ for round_ in rounds if round_ > above]:
                del rounds[round_]

    def add(self, message: BaseHash, *, of_now: bool = True) -> set[int]:
        """Takes one rank's hash after one round. Returns the ranks that are found to differ from the others by it.

        Args:
            of_now: it was told in the generation of now. Else the round may be one of another history, unless the rank
                computes.
        """
        round_ = message.round
        if not of_now and (message.rank not in self._ranks or round_ in self._right):
            return set()
        told = {message.rank: message.sha256}
        if (right := self._right.get(round_)) is not None:
            return self._judge(round_, right, told)
        self._open.setdefault(round_, {}).update(told)
        odd = self._compare(round_)
        for rounds in (self._open, self._right):
            while len(rounds) > limits.HASHES_OPEN_MAX:
                del rounds[min(rounds)]
        return odd

    def _compare(self, round_: int) -> set[int]:
        told = self._open[round_]
        if not self._ranks or not self._ranks <= told.keys():
            return set()
        del self._open[round_]
        self.compared += 1
        counts = Counter(told[rank] for rank in sorted(self._ranks))  # of equal counts the first is the greatest
        right = self._right[round_] = max(counts, key=lambda sha256: counts[sha256])
        return self._judge(round_, right, told)

    def _judge(self, round_: int, right: bytes, told: Mapping[int, bytes]) -> set[int]:
        odd = {rank for rank, sha256 in told.items() if sha256 != right}
        if odd and self.unequal_round is None:
            self.unequal_round = round_
        return odd

    @property
    def equal(self) -> bool | None:
        """Whether all replicas were equal so far; None before anything was compared."""
        return None if not self.compared else self.unequal_round is None


class EntryMode(Enum):
    """How a daemon comes into a job."""

    FOUNDER = "with all others, at its start"
    REJOIN = "it was in it before"
    LATE_JOIN = "others have begun it"
    REVIVAL = "with others that it was in it with, when all of them had lost it"


class JobRecords(Protocol):
    """Where it is written down what has become of jobs. `JobHistory` is one."""

    def put(self, record: JobRecord) -> None:
        """Adds the job, or replaces what is known of it. Raises HistoryError."""


class Job:
    """One job on this daemon, from offer to history.

    Args:
        rank: this device's index in `members`. Of one that joins it may change until it is taken in.
        folder: DATA/jobs/ID.
        entry_mode: how this daemon comes into the job.
        started_at_s: Unix time, if it was in it before.
        entered: the newest generation that this device was in, if it was in it before.

    Attributes:
        on_odd: called with a round and the ranks whose base after it was not that of the others (O9).
    """

    def __init__(
        self,
        spec: JobSpec,
        members: tuple[Member, ...],
        rank: int,
        folder: Path,
        history: JobRecords,
        entry_mode: EntryMode = EntryMode.FOUNDER,
        started_at_s: float | None = None,
        entered: Generation | None = None,
    ) -> None:
        self.spec = spec
        self.members = members
        self.rank = rank
        self.entry_mode = entry_mode
        self._entered = entered  # as the job's file names it
        self.folder = folder
        self._device = members[rank].device
        self._history = history
        self.state = JobState.OFFERED
        self.error: str | None = None
        self.exit_code: int | None = None
        self.port: int | None = None  # on which rank 0's script listens (P9)
        self.started_at_s = started_at_s
        self.ended_at_s: float | None = None
        self.reports: dict[int, RankReport] = {}
        self.hashes = ReplicaHashes(range(len(members)))
        self.on_odd: Callable[[int, set[int]], None] = lambda _round, _ranks: None
        self.generation: Generation | None = None
        self._awaited: tuple[int, ...] = ()  # G9: whose learners are to begin together in the next one
        self.changes: SettingsChanges = ()  # of settings that this history has gone through (C3)
        self._waiting = ""
        self._waits_to_prepare = False
        self.unlinkable: Mapping[str, str] = {}  # why devices that answer cannot be linked, by id
        self.not_joining: tuple[tuple[str, str], ...] = ()  # names of linked devices that could join, and why not
        self.expired_at_s: float | None = None  # when its results here were deleted, Unix time
        self.left = False  # this device alone has; the others go on, and hear no end from here
        self.lies_down = False  # no base of it is left: what runs of it is being stopped, and it is to begin again
        self._restarted: str | None = None
        self._out = False  # of all generations, since the one entered last
        self._seen: set[int] = set()  # ranks that took part at some time
        self._returned: set[int] = set()
        self._refused: dict[int, RefusedRank] = {}  # until they are in again
        self._given_up: dict[tuple[int, tuple[int, ...]], GivenUp] = {}  # by first round, and whose history is kept
        self._changed = asyncio.Event()
        self._save()

    @property
    def ended(self) -> bool:
        """Whether it is in a terminal state."""
        return self.state in TERMINAL_STATES

    @property
    def begins(self) -> bool:
        """Whether this daemon begins it with the others."""
        return self.entry_mode in (EntryMode.FOUNDER, EntryMode.REVIVAL)

    @property
    def was_here(self) -> bool:
        """Whether it lay here when it was begun again, or returned to: if that fails, it does so again."""
        return self.entry_mode in (EntryMode.REJOIN, EntryMode.REVIVAL)

    @property
    def ending(self) -> bool:
        """Has ended, or what runs of it is being stopped."""
        return self.ended or self.lies_down or self.state in (JobState.CANCELLING, JobState.FAILING)

    def advance(self, event: JobEvent, error: str | None = None) -> None:
        """Moves through the life cycle; the first error is the one that is kept."""
        before = self.state
        self.state = advance(before, event)
        if error is not None and self.error is None:
            self.error = error[: limits.ERROR_CHARS_MAX]
        if self.state is before:
            return
        log.info(
            "job %s (%s): %s -> %s%s", self.spec.job, self.spec.name, before, self.state, f": {error}" if error else ""
        )
        if self.state is JobState.STARTING and self.started_at_s is None:
            self.started_at_s = time.time()
        if self.ended:
            self.ended_at_s = time.time()
            self.exit_code = EXIT_CODES[self.state]
        self._save()
        self.touch()

    def take_changes(self, changes: SettingsChanges) -> None:
        """Notes which settings the rounds of this history go by (C3)."""
        if changes and changes != self.changes:
            log.info("job %s: %s", self.spec.job, told_of(changes, changes[-1]))
        self.changes = changes
        self.touch()

    def in_force(self, changes: SettingsChanges | None = None) -> SettingsInForce:
        """What rounds go by now, or are about to. `changes`: of settings; None: all that are known."""
        known = self.changes if changes is None else changes
        period = newest_sync(self.spec.sync, known).period
        return SettingsInForce(codec=newest_codec(self.spec.codec, known), period=period)

    def take(self, generation: Generation, awaited: tuple[int, ...] = ()) -> None:
        """Notes that this device is in a new generation, the first included.

        Args:
            awaited: the ranks whose learners are to begin together, where the job is at its beginning (G9).
        """
        before = self._present()
        rank = rank_of(generation, self._device)
        assert rank is not None, "not listed"
        self.rank = rank
        if self.generation is None and self.entry_mode is EntryMode.REJOIN:
            self._seen.add(self.rank)  # this daemon returns to the job, and knows nothing of what the others did
        self._returned |= (set(generation.ranks) - before) & self._seen
        for back in set(generation.ranks) - before:
            self._refused.pop(back, None)
        self._seen |= set(generation.ranks)
        self._out = False
        self.generation = self._entered = generation
        self._awaited = awaited
        self.members = generation.members
        self._save()
        self.remember()
        self.touch()
        for round_, odd in self.hashes.expect(generation.learning).items():
            self.on_odd(round_, odd)

    @property
    def file(self) -> JobFile:
        """What a daemon needs to go on with it."""
        began_s = self.started_at_s or time.time()
        return JobFile(spec=self.spec, members=self.members, started_at_s=began_s, generation=self._entered)

    def remember(self) -> None:
        """Writes down what this daemon needs to go on with it when it is started again; of a job that ends with the
        first loss (P9) there is no going on."""
        if self.spec.engine == "torchrun":
            return
        try:
            self.file.save(self.folder)
        except OSError as error:
            log.warning("job %s: a restarted meshtraind could not return to it: %s", self.spec.job, error)

    def goodbye(self) -> None:
        """The others know that this device has left the generation, and go on: it does not begin the job again."""
        self._entered = None
        self.remember()

    def take_hash(self, message: BaseHash, generation: int | None = None) -> None:
        """Takes one rank's hash of the base after one round. `generation`: hash of the one in which another member has
        told it."""
        of_now = generation is None or (self.generation is not None and generation == self.generation.hash64())
        if odd := self.hashes.add(message, of_now=of_now):
            self.on_odd(message.round, odd)

    def report(self, report: RankReport) -> None:
        """Takes a rank's news."""
        self.reports[report.rank] = report
        self.take_given_up(report.given_up)
        if not self.ended and time.monotonic() - self._saved_s >= SAVE_INTERVAL_S:
            self._save()
        self.touch()

    def expire(self, now_s: float) -> None:
        """Notes that its results here were deleted, long after its end."""
        self.expired_at_s = now_s
        self._save()

    def take_given_up(self, news: Iterable[GivenUp]) -> None:
        """Takes news of rounds that are not kept. All members pass on what they know, so that it is told wherever a
        person looks, also when those that made them are gone. Of one partition each of them tells; who has completed
        most counts, and the newest checkpoint that any of them has."""
        known = dict(self._given_up)
        for one in news:
            key = one.first, one.kept
            known[key] = one if key not in known else _of_one_partition(known[key], one)
        newest = sorted(known.items(), key=lambda item: (item[1].last, item[0]))[-limits.GIVEN_UP_MAX :]
        if dict(newest) != self._given_up:
            self._given_up = dict(newest)
            self._save()
            self.touch()

    def tell_restart(self, said: str) -> None:
        """Notes why all scripts are begun again (P6), for people."""
        self._restarted = said[: limits.ERROR_CHARS_MAX]
        self.touch()

    def refuse(self, rank: int, reason: str, violations: int) -> None:
        """Notes that a member was refused for so many times because it broke the protocol (G10)."""
        self._refused[rank] = RefusedRank(rank=rank, reason=reason[: limits.REASON_CHARS_MAX], violations=violations)
        self.touch()

    @property
    def given_up(self) -> tuple[GivenUp, ...]:
        """Rounds of this job that are in no history any more, the latest last."""
        return tuple(self._given_up.values())

    def drop_out(self) -> None:
        """Notes that this device is in no generation any more."""
        self._out = True
        self.touch()

    def _present(self) -> set[int]:
        ranks = set(self.generation.ranks) if self.generation is not None else set()
        return ranks - {self.rank} if self._out else ranks

    @property
    def _rounds(self) -> int:
        return max((report.metrics.round for report in self.reports.values()), default=0)

    @property
    def should_have_exchanged(self) -> bool:
        """Whether no round was completed where one belongs: on several devices that do not train by themselves, nor by
        what no daemon sees."""
        exchanged = any(report.metrics.round for report in self.reports.values())
        belongs = not self.spec.independent and self.spec.engine == "mesh"
        return len(self.members) > 1 and belongs and not exchanged

    @property
    def gone(self) -> set[int]:
        """Ranks whose scripts have ended for good."""
        return {rank for rank, report in self.reports.items() if report.exit_code is not None}

    @property
    def counted(self) -> tuple[int, ...]:
        """The ranks whose learners compute, or, at the job's beginning, are about to (G9)."""
        return () if self.generation is None else self.generation.learning or self._awaited

    @property
    def others_succeeded(self) -> bool:
        """Whether the script of every other rank that computes has ended well."""
        ended = {rank for rank, report in self.reports.items() if report.exit_code == 0}
        return set(self.counted) - {self.rank} <= ended

    @property
    def others_go_on(self) -> bool:
        """Whether the script of another rank that computes, or is about to, has not ended."""
        return bool(set(self.counted) - {self.rank} - self.gone)

    def wait(self, reason: str, *, to_prepare: bool = False) -> None:
        """Notes what a change of the generation waits for now; empty: for nothing. `to_prepare`: for mt.prepare."""
        self._waiting, self._waits_to_prepare = reason, to_prepare
        self.touch()

    @property
    def waiting(self) -> str:
        """What a change of the generation waits for, for people. Of scripts with process groups nobody waits for
        mt.prepare (P5)."""
        groups = any(report.metrics.stage == "process group" for report in self.reports.values())
        return "" if self._waits_to_prepare and groups else self._waiting

    def touch(self) -> None:
        """Wakes whoever waits for news."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def news(self, timeout_s: float) -> None:
        """Returns at the next change, at the latest after `timeout_s`.

        Not by `wait_for`: before Python 3.12 that forgets a cancellation which comes with the change.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def rank_of(self, device: str) -> int | None:
        """The rank of a member's device."""
        return next((rank for rank, member in enumerate(self.members) if member.device == device), None)

    def summary(self) -> JobSummary:
        """One line of `meshtrain jobs`, with every rank's last report."""
        generation, present = self.generation, self._present()
        return JobSummary(
            job=self.spec.job,
            name=self.spec.name,
            state=self.state,
            members=self.members,
            submitter=self.spec.submitter,
            created_at_s=self.spec.created_at_s,
            started_at_s=self.started_at_s,
            ended_at_s=self.ended_at_s,
            exit_code=self.exit_code,
            error=self.error,
            script=self.spec.script,
            ranks=tuple(self.reports[rank] for rank in sorted(self.reports)),
            rounds=self._rounds,
            hashes_compared=self.hashes.compared,
            replicas_equal=self.hashes.equal,
            generation=generation.number if generation is not None else 0,
            present=tuple(sorted(present)),
            learning=tuple(sorted(present & set(self.counted))),
            returned=tuple(sorted(self._returned & present)),
            waiting_for=None if self.ended else self.waiting[: limits.ERROR_CHARS_MAX] or None,
            not_joining=() if self.ended else self.not_joining,
            expired_at_s=self.expired_at_s,
            given_up=self.given_up,
            unlinkable=() if self.ended else self._unlinkable(),
            partition_wait=self.spec.partition_wait,
            prediction=self.spec.prediction,
            refused=tuple(self._refused[rank] for rank in sorted(self._refused)),
            provisional=generation is not None and generation.provisional and not self.ended,
            restarted=self._restarted,
            codec=self.spec.codec,
            changes=self.changes,
        )

    def _unlinkable(self) -> tuple[tuple[int, str], ...]:
        whys = ((rank, self.unlinkable.get(member.device)) for rank, member in enumerate(self.members))
        return tuple((rank, why) for rank, why in whys if why is not None)

    def _save(self) -> None:
        self._saved_s = time.monotonic()
        record = JobRecord(
            id=self.spec.job,
            name=self.spec.name,
            spec={
                "script": self.spec.script,
                "sync": newest_sync(self.spec.sync, self.changes).text(),
                "codec": newest_codec(self.spec.codec, self.changes),
                "topology": self.spec.topology,
                "seed": self.spec.seed,
                "names": [member.name for member in self.members],
                "generation": self.generation.number if self.generation is not None else 0,
                "present": sorted(self._present()),
                "rounds": self._rounds,
                **({} if self.expired_at_s is None else {EXPIRED: self.expired_at_s}),
                "left": self.left,
                "given_up": [one.model_dump(mode="json") for one in self.given_up],
            },
            state=self.state,
            members=tuple(member.device for member in self.members),
            submitter=self.spec.submitter,
            created_s=self.spec.created_at_s,
            started_s=self.started_at_s,
            ended_s=self.ended_at_s,
            exit_code=self.exit_code,
            error=self.error,
        )
        try:
            self._history.put(record)
        except HistoryError as error:
            # The job itself can go on; only its line in `meshtrain jobs` after a restart is at stake.
            log.error("job %s is not recorded: %s", self.spec.job, error)


def _of_one_partition(one: GivenUp, other: GivenUp) -> GivenUp:
    """Joins what two members tell of one partition, in whichever order, and however often."""
    longest = max(one, other, key=lambda told: (told.last, told.samples, told.made_by))
    saved = max((told.saved for told in (one, other) if told.saved is not None), default=None)
    unsaved = None if saved is not None else max(one.unsaved or "", other.unsaved or "") or None
    return longest.model_copy(update={"saved": saved, "unsaved": unsaved})


def summary_of(record: JobRecord) -> JobSummary:
    """A past job as `meshtrain jobs` shows it."""
    names = record.spec.get("names")
    labels = [str(name) for name in names] if isinstance(names, list) else []
    members = tuple(
        Member(device=device, incarnation=0, name=labels[rank] if rank < len(labels) else device[:8])
        for rank, device in enumerate(record.members)
    )
    generation, present, rounds = (record.spec.get(key) for key in ("generation", "present", "rounds"))
    expired_s = record.spec.get(EXPIRED)
    given_up = record.spec.get("given_up")
    return JobSummary(
        job=record.id,
        name=record.name,
        state=record.state,
        members=members,
        submitter=record.submitter,
        created_at_s=record.created_s,
        started_at_s=record.started_s,
        ended_at_s=record.ended_s,
        exit_code=record.exit_code,
        error=record.error,
        script=str(record.spec.get("script", "")),
        rounds=rounds if isinstance(rounds, int) else 0,
        generation=generation if isinstance(generation, int) else 0,
        present=tuple(rank for rank in present if isinstance(rank, int)) if isinstance(present, list) else (),
        expired_at_s=expired_s if isinstance(expired_s, float) else None,
        given_up=tuple(GivenUp.load(one) for one in given_up) if isinstance(given_up, list) else (),
    )
