"""What is left of four laptops' speed when something is killed every 15 s or every 2 s, and while one comes back.

Samples are counted by the model itself (`chaosjob`): what is in the base has survived. Learners sleep in their steps,
for all share this machine's cores; a learner that starts again imports torch on these cores, as it would on its own.
"""

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwire import limits
from meshwire.messages.local import Cancel
from tests.bench import recovery
from tests.bench.chaosjob import ChaosJob, Record, missing, repeated
from tests.bench.journal import Case, Figures, Section
from tests.bench.kills import Killer
from tests.bench.proof.places import ProofError
from tests.bench.soak import wait_running
from tests.lab.chaosmesh import ChaosMesh

PEERS = 4
STEP_S = 0.25
BATCH = 8
EPOCH_ROUNDS = (40, 5)  # who comes back runs through all epochs that are over: short ones make returns long
STEADY_S = 5.0
LEFT = 1  # computing members that a kill leaves
POLL_S = 0.1
REJOIN_MBIT = 50.0
WINDOWS_S = {None: 40.0, 15.0: 90.0, 2.0: 60.0}  # by seconds between two kills; None: it is left alone
EXPECTED = (
    "A learner that is killed is back after 4 to 6 s, 3 of which are Python and torch. A kill every 15 s takes one of "
    "four for a third of the time, and leaves 0.9; one every 2 s takes more than two of four at any time, and leaves "
    "0.4: the goal of 0.88 is out of reach there while a learner starts from nothing. Beside what was there to compute "
    "it is above 0.9 in both. While one rejoins, which loads 46 MB, the others keep 0.9 of their speed."
)


@dataclass(frozen=True)
class Kills:
    """A job whose daemons and learners are killed.

    Attributes:
        every_s: None: it is left alone.
        rounds: of an epoch, at whose beginnings the base is counted.
    """

    every_s: float | None
    rounds: int

    @property
    def name(self) -> str:
        """Under which the file keeps it."""
        often = "left alone" if self.every_s is None else f"a kill every {self.every_s:g} s"
        return f"{often}, epochs of {self.rounds} rounds"

    @property
    def window_s(self) -> float:
        """In which it is watched."""
        return WINDOWS_S[self.every_s]


def of_epochs(rounds: int) -> tuple[Kills, ...]:
    """The one that is left alone first."""
    return tuple(Kills(every_s, rounds) for every_s in WINDOWS_S)


REJOIN = "one of four rejoins"


def sections() -> tuple[Section, ...]:
    """Kills, and a return."""
    cases = [
        Case(kills.name, round(30 + kills.window_s), _kills(kills))
        for rounds in EPOCH_ROUNDS
        for kills in of_epochs(rounds)
    ]
    return (
        Section("goodput", f"samples kept by {PEERS} peers under kills", tuple(cases), repeats=2, expected=EXPECTED),
        Section("rejoin", "the others' speed while one loads 46 MB", (Case(REJOIN, 100, _rejoin),), repeats=3),
    )


def _kills(kills: Kills) -> Callable[[int, bool], Figures]:
    def measured(repeat: int, short: bool) -> Figures:
        return under_kills(kills, 15.0 if short else kills.window_s, repeat)

    return measured


def under_kills(kills: Kills, window_s: float, seed: int) -> Figures:
    """One job on a mesh of its own: samples kept a second, and how many of the members computed meanwhile.

    A kill hits a daemon, whose learner ends with it, or a learner alone; a daemon is started again at once. Raises
    ProofError, and what starting a mesh or a job raises.
    """
    every_s = kills.every_s or window_s
    with ChaosMesh(PEERS, seed=seed) as mesh:
        with tempfile.TemporaryDirectory(prefix="meshtrain-goodput-") as folder:
            job = ChaosJob(
                mesh, Path(folder), samples=kills.rounds * PEERS * BATCH, batch=BATCH, step_s=STEP_S, hash_every=50
            )
        wait_running(mesh, job)
        killer = Killer(mesh, job.id, job.names, random.Random(seed), (0.0, 0.0), LEFT)
        time.sleep(STEADY_S)
        began_s = time.monotonic()
        next_s = began_s + every_s
        learning: list[int] = []
        skipped = 0
        while (now_s := time.monotonic()) < began_s + window_s:
            seen = killer.look()
            if seen is not None and seen.ended_at_s is not None:
                raise ProofError(f"the job is {seen.state}: {seen.error}")
            if seen is not None:
                learning.append(len(seen.learning))
            if now_s >= next_s:
                next_s += every_s
                if seen is None or killer.kill(seen) is None:
                    skipped += 1
            time.sleep(POLL_S)
        records = _counted_after(job, began_s + window_s)
        for daemon in mesh.daemons.values():
            if daemon.up and daemon.ask(Cancel(job=job.id, now=True), "cancel") is not None:
                break
        return {
            "kept_s": [kept_a_second(records, began_s, began_s + window_s)],
            "computing": [sum(learning) / len(learning) / PEERS],
            "kills": [float(killer.kills.total())],
            "skipped": [float(skipped)],
            "missing": [float(missing(records))],
            "twice": [float(len(repeated(records)))],
        }


def _counted_after(job: ChaosJob, until_s: float) -> list[Record]:
    """All records once there is one from behind this moment. Raises ProofError."""
    deadline_s = time.monotonic() + recovery.RECOVERY_TIMEOUT_S
    while not (records := job.records()) or records[-1].t_s < until_s:
        if time.monotonic() > deadline_s:
            raise ProofError(f"waited {recovery.RECOVERY_TIMEOUT_S:.0f} s for an epoch behind the kills")
        time.sleep(POLL_S)
    return records


def kept_a_second(records: Sequence[Record], from_s: float, to_s: float) -> float:
    """Samples that the base has gained a second, from the last count before the window to the first behind it."""
    before = [record for record in records if record.t_s <= from_s]
    after = [record for record in records if record.t_s >= to_s]
    if not before or not after:
        raise ProofError("no epoch began before, or behind, what was to be measured")
    first, last = before[-1], after[0]
    return (last.kept - first.kept) / (last.t_s - first.t_s)


def _rejoin(_repeat: int, _short: bool) -> Figures:
    row = recovery.measure("peer rejoins", PEERS, REJOIN_MBIT, limits.PATIENCE_S, False)
    if row.outcome != "recovered" or row.rate is None:
        raise ProofError(row.outcome)
    found = {"rate": row.rate, "round_s": row.round_s, "whole_s": row.whole_s, "imports_s": row.imports_s}
    counted = {"missing": float(row.missing), "twice": float(row.repeated)}
    return {name: [value] for name, value in {**found, **counted}.items() if value is not None}
