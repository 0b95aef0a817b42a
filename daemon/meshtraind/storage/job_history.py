"""What this daemon remembers of its jobs: DATA/jobs.db, which outlives jobs and restarts.

Jobs that have ended are forgotten by number, by age and by bytes (`limits`), the oldest ends first; those that never
began before those that did. A job that has not ended is never forgotten.

Calls block for a fraction of a millisecond, now and then for one disk flush; any thread may make them.
"""

import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshtraind.runtime.data_folder import FORMAT
from meshwire import limits
from meshwire.jobs.lifecycle import JOB_ID_PATTERN, TERMINAL_STATES, JobRecord, JobState

_COLUMNS = tuple(JobRecord.model_fields)
_JSON_COLUMNS = ("spec", "members")
_CREATE = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    spec TEXT NOT NULL,
    state TEXT NOT NULL,
    members TEXT NOT NULL,
    submitter TEXT NOT NULL,
    created_s REAL NOT NULL,
    started_s REAL,
    ended_s REAL,
    exit_code INTEGER,
    error TEXT
) STRICT, WITHOUT ROWID
"""
LOST_REASON = "the daemon on this device stopped while the job was {state}; {way_on}"
SUBMIT_AGAIN = "submit the job again"
RESUME = "to go on from its last checkpoint: meshtrain submit --resume {job}"
_BUSY_TIMEOUT_S = 5.0  # somebody looks into the file with the sqlite3 tool
_CANDIDATES_SHOWN = 5
EXPIRED = "expired_s"  # in a record's spec: when the job's results were deleted here, Unix time
_JOURNAL_BYTES_MAX = 4 * limits.MIB  # of jobs.db-wal, once its entries are in the file
_ROW_BYTES = "length(spec) + length(members) + ifnull(length(error), 0) + 512"  # the rest of a row is small


class HistoryError(Exception):
    """The history cannot be read or written; the message names the file and what to do."""


class UnknownJobError(HistoryError):
    """No job has an id that begins like this."""


class AmbiguousJobError(HistoryError):
    """Several jobs have an id that begins like this."""


class JobHistory:
    """The job history in one sqlite file, made if missing, readable by its owner only.

    Jobs that had not ended when the daemon did are marked lost on opening.

    Args:
        path: e.g. DATA/jobs.db.
        now_s: Unix time, the end of jobs found lost.

    Raises:
        HistoryError: the file is of a newer version, is no history, or cannot be opened.

    Attributes:
        lost: the jobs that were found lost.
    """

    def __init__(self, path: Path, now_s: float) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._explained():
            # sqlite gives its -wal and -shm files the mode of the file itself; specs may hold secrets.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            with self._explained():
                self._open_schema()
                self.lost = self._mark_lost(now_s)
                self._forget_old(now_s)
                self._shrink()
        except BaseException:
            self._db.close()
            raise

    def _open_schema(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > FORMAT:
            raise HistoryError(
                f"{self.path} was written by a newer meshtraind (format {version}, this one knows "
                f"{FORMAT}): update meshtraind, or use another --data-dir"
            )
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last entries, never the file
        self._db.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES_MAX}")
        if version == 0:
            with self._transaction():
                self._db.execute(_CREATE)
                self._db.execute(f"PRAGMA user_version = {FORMAT}")

    def _mark_lost(self, now_s: float) -> tuple[JobRecord, ...]:
        marks = ", ".join("?" for _ in TERMINAL_STATES)
        rows = self._db.execute(
            f"SELECT {', '.join(_COLUMNS)} FROM jobs WHERE state NOT IN ({marks}) ORDER BY id",
            sorted(TERMINAL_STATES),
        ).fetchall()
        lost = []
        with self._transaction():
            for record in map(_record, rows):
                way_on = SUBMIT_AGAIN if record.started_s is None else RESUME.format(job=record.id)
                reason = LOST_REASON.format(state=record.state.value, way_on=way_on)
                changes = {"state": JobState.LOST, "ended_s": now_s, "error": record.error or reason}
                lost.append(record.model_copy(update=changes))
                self._put(lost[-1])
        return tuple(lost)

    def put(self, record: JobRecord) -> None:
        """Adds the job, or replaces what is known of it.

        Raises:
            ValueError: a field breaks a limit (`model_copy` does not check what it changes).
            HistoryError: the specification is too large, or the disk refuses.
        """
        JobRecord.load(record.model_dump())
        spec_bytes = len(json.dumps(record.spec).encode())
        if spec_bytes > limits.JOB_SPEC_BYTES_MAX:
            raise HistoryError(
                f"the specification of job {record.id} has {spec_bytes} bytes, "
                f"at most {limits.JOB_SPEC_BYTES_MAX} are kept"
            )
        with self._lock, self._explained():
            self._put(record)
            if record.ended_s is not None:
                self._forget_old(record.ended_s)

    def _forget_old(self, now_s: float) -> None:
        """Forgets the jobs that ended longest ago, where there are too many. Ends are of this device's clock; when a
        job was made says its submitter, who may lie."""
        rows = self._db.execute(
            f"SELECT id, ended_s, started_s IS NULL, {_ROW_BYTES} FROM jobs WHERE ended_s IS NOT NULL "
            "ORDER BY ended_s DESC, id DESC"
        ).fetchall()
        kept, unbegun, kept_bytes, forgotten = 0, 0, 0, []
        for id_, ended_s, never_began, row_bytes in rows:
            if (
                ended_s < now_s - limits.JOBS_REMEMBERED_S_MAX
                or kept >= limits.JOBS_REMEMBERED_MAX
                or (never_began and unbegun >= limits.UNBEGUN_REMEMBERED_MAX)
                or kept_bytes + row_bytes > limits.HISTORY_BYTES_MAX
            ):
                forgotten.append((id_,))
                continue
            kept, unbegun, kept_bytes = kept + 1, unbegun + never_began, kept_bytes + row_bytes
        if forgotten:
            with self._transaction():
                self._db.executemany("DELETE FROM jobs WHERE id = ?", forgotten)

    def _shrink(self) -> None:
        """Gives the room of what was forgotten back to the disk; while the daemon runs, new jobs take its place in the
        file."""
        (pages,), (free,) = (self._db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count"))
        if free * 2 > pages:
            self._db.execute("VACUUM")

    def _put(self, record: JobRecord) -> None:
        plain = record.model_dump(mode="json")
        for column in _JSON_COLUMNS:
            plain[column] = json.dumps(plain[column])
        marks = ", ".join(f":{column}" for column in _COLUMNS)
        self._db.execute(f"INSERT OR REPLACE INTO jobs ({', '.join(_COLUMNS)}) VALUES ({marks})", plain)

    def expire(self, id_: str, now_s: float) -> None:
        """Notes that a job's results were deleted. Raises HistoryError, also where the job is not known."""
        record = self.find(id_)
        self.put(record.model_copy(update={"spec": {**record.spec, EXPIRED: now_s}}))

    def newest(self, count: int = limits.JOBS_LISTED_MAX, id_prefix: str = "") -> tuple[JobRecord, ...]:
        """The latest `count` jobs whose ids begin so, newest first; no more than one message could hold of them, for
        anybody who is paired may ask for this as often as he likes."""
        if not 0 < count <= limits.JOBS_LISTED_MAX:
            raise ValueError(f"{count} jobs asked for, 1 to {limits.JOBS_LISTED_MAX} can be listed")
        found: list[JobRecord] = []
        read_chars = 0
        with self._lock, self._explained():
            ids = self._db.execute(  # alone: to sort whole rows sqlite would read them all
                "SELECT id FROM jobs WHERE substr(id, 1, ?) = ? ORDER BY created_s DESC, id DESC LIMIT ?",
                (len(id_prefix), id_prefix, count),
            ).fetchall()
            for id_ in ids:
                row = self._db.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs WHERE id = ?", id_).fetchone()
                read_chars += sum(len(value) for value in row if isinstance(value, str))
                if found and read_chars > limits.JOBS_LISTED_BYTES_MAX:
                    break
                found.append(_record(row))
        return tuple(found)

    def find(self, id_prefix: str) -> JobRecord:
        """The one job whose id begins with `id_prefix`.

        Raises:
            UnknownJobError, AmbiguousJobError: none does, or several do, which are then named.
        """
        if not id_prefix:
            raise UnknownJobError("an empty job id")
        if re.fullmatch(JOB_ID_PATTERN, id_prefix):
            found = self._select("WHERE id = ?", id_prefix)
        else:
            found = self._select(
                "WHERE substr(id, 1, ?) = ? ORDER BY created_s DESC, id DESC LIMIT ?",
                len(id_prefix),
                id_prefix,
                _CANDIDATES_SHOWN + 1,
            )
        if not found:
            raise UnknownJobError(f"no job {id_prefix!r} on this device; see `meshtrain jobs`")
        if len(found) > 1:
            shown = ", ".join(f"{record.id} ({record.name})" for record in found[:_CANDIDATES_SHOWN])
            more = ", ..." if len(found) > _CANDIDATES_SHOWN else ""
            raise AmbiguousJobError(f"several jobs begin with {id_prefix!r}: {shown}{more}")
        return found[0]

    def _select(self, clause: str, *arguments: str | int) -> tuple[JobRecord, ...]:
        with self._lock, self._explained():
            rows = self._db.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs {clause}", arguments).fetchall()
            return tuple(map(_record, rows))

    def close(self) -> None:
        """Folds the write-ahead log into the file."""
        with self._lock, self._explained():
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk has ended it already, and is what is to be told
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, ValueError) as error:
            raise HistoryError(
                f"the job history {self.path}: {error}; make it readable and writable to the daemon's user, "
                "or move it away to begin a new one"
            ) from error


def _record(row: tuple[str | int | float | None, ...]) -> JobRecord:
    plain = dict(zip(_COLUMNS, row, strict=True))
    return JobRecord.load(
        {name: json.loads(str(value)) if name in _JSON_COLUMNS else value for name, value in plain.items()}
    )
