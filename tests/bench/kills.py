"""`python -m tests.bench.kills`: SIGKILL of daemons, the submitter's too, and of learners at random instants.

Each seed trains the same small classifier twice on four real daemons: left alone, and with its share of the kills. A
killed daemon is started again after up to 3 s. Ends with exit code 1 when a job does not succeed, when replicas differ
at its end, or when the mean difference in held-out loss is larger than the spread of the seeds left alone.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meshtrain.client import ConnectionLost, RequestError
from meshtrain.demo.localmesh import LocalMeshError
from meshtraind.storage.fetch import output_folder
from meshwire.messages.job import JobSummary
from tests.bench.chaosjob import summary_on
from tests.bench.soak import interruptible, say
from tests.daemon import realjobs as jobs
from tests.lab.chaosmesh import ChaosMesh

PEERS = 4
PATIENCE_S = 2.0
INTERVAL_S = (0.5, 6.0)  # between kills
DOWN_S = (0.0, 3.0)  # until a killed daemon is started again
STEP_S = 0.05  # a step of a job with kills, so that these fall into all of it
LEFT = 2  # computing members that a kill leaves at least: whoever holds the base must not be gone
LIMIT_S = 600.0  # of one job
POLL_S = 0.1
END = "end.json"

SCRIPT = """
import hashlib, json, sys, time
import torch
import meshtrain as mt

options = json.loads(sys.argv[1])
torch.set_num_threads(1)  # all peers share this machine's cores


def network(width, seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Tanh(), torch.nn.Linear(width, 4))


def labelled(count, seed):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=made)
    noise = torch.randn(count, 4, generator=made)
    return x, (4 * teacher(x) + noise).argmax(1)


with torch.no_grad():
    teacher = network(32, 1234)
    train, held_out = labelled(8192, 1), labelled(4096, 2)
model = network(64, options["seed"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), batch_size=8, shuffle=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)
for epoch in range(options["epochs"]):
    for x, y in loader:
        time.sleep(options["step_s"])
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        mt.log(loss=loss)
mt.finish()
with mt.base(), torch.no_grad():
    loss = torch.nn.functional.cross_entropy(model(held_out[0]), held_out[1]).item()
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    (mt.output_dir() / "end.json").write_text(json.dumps({"loss": loss, "digest": hashlib.sha256(bits).hexdigest()}))
"""


@dataclass(frozen=True)
class End:
    """What a job has come to.

    Attributes:
        loss: held-out, of the base; NaN when there is none.
        ranks: that were there at the end.
        kills: by role.
        generations: that the job went through.
        wrong: None when the job has succeeded and all replicas are bit-equal.
    """

    seed: int
    loss: float
    ranks: int
    rounds: int
    generations: int
    lasted_s: float
    kills: dict[str, int]
    wrong: str | None


class Killer:
    """Looks at a job, kills its daemons and learners at random, and starts what was killed again.

    Args:
        names: of the daemons, by rank: the first one has submitted the job.
        down_s: from and until how long a killed daemon stays away.
        left: computing members that a kill leaves at least.

    Attributes:
        kills: by role.
    """

    def __init__(
        self,
        mesh: ChaosMesh,
        job: str,
        names: Sequence[str],
        draws: random.Random,
        down_s: tuple[float, float],
        left: int,
    ) -> None:
        self.kills: Counter[str] = Counter()
        self._mesh, self._job, self._names, self._random = mesh, job, names, draws
        self._down_s, self._left = down_s, left
        self._starts_s: dict[str, float] = {}  # when a killed daemon is started again

    @property
    def all_up(self) -> bool:
        """Whether none is to be started again."""
        return not self._starts_s

    def look(self) -> JobSummary | None:
        """The summary of the daemon that knows most; starts those whose time has come.

        A daemon that has just begun again takes its job for lost until it hears of it.
        """
        for name, start_s in list(self._starts_s.items()):
            if time.monotonic() >= start_s:
                self._mesh.daemons[name].start()
                del self._starts_s[name]
        answers = [summary_on(daemon, self._job) for daemon in self._mesh.daemons.values()]
        seen = [summary for summary in answers if summary is not None]
        return max(
            seen, key=lambda one: (one.state != "lost", one.ended_at_s is not None, one.generation), default=None
        )

    def kill(self, seen: JobSummary) -> str | None:
        """SIGKILL of one that is up; says of whom. None: too few would be left, or there was no learner."""
        computing = {self._names[rank] for rank in seen.learning} - self._starts_s.keys()
        name = self._random.choice([name for name in self._names if name not in self._starts_s])
        if len(computing - {name}) < self._left:
            return None
        role = self._random.choice(("daemon", "learner"))
        daemon = self._mesh.daemons[name]
        if role == "learner":
            if not daemon.kill_learner():
                return None
        else:
            role = "submitter" if name == self._names[0] else role
            daemon.kill()
            self._starts_s[name] = time.monotonic() + self._random.uniform(*self._down_s)
        self.kills[role] += 1
        return f"{name}'s {role}"


class Run:
    """One job, from its submission to its end."""

    def __init__(self, mesh: ChaosMesh, seed: int, epochs: int, step_s: float, sync: str) -> None:
        self._mesh = mesh
        self._seed = seed
        self._random = random.Random(seed)
        self._began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="meshtrain-kills-") as folder:
            arguments = json.dumps({"seed": seed, "epochs": epochs, "step_s": step_s})
            submitter = mesh.daemons[mesh.names[0]]
            submitted = jobs.submit(submitter, Path(folder), SCRIPT, args=(arguments,), seed=seed, sync=sync)
        self._job = submitted.job
        self._names = tuple(member.name for member in submitted.members)
        self._killer = Killer(mesh, self._job, self._names, self._random, DOWN_S, LEFT)

    def until_end(self, kills: int) -> End:
        """Kills so often, and waits for the job's end."""
        next_s = time.monotonic() + self._random.uniform(*INTERVAL_S)
        while True:
            seen = self._killer.look()
            over = seen is not None and seen.ended_at_s is not None and self._killer.all_up
            if over or time.monotonic() - self._began_s > LIMIT_S:
                return self._end(seen, kills)
            if self._killer.kills.total() < kills and time.monotonic() >= next_s and seen is not None:
                if (who := self._killer.kill(seen)) is not None:
                    say(f"{time.monotonic() - self._began_s:7.1f} s  round {seen.rounds}: kill -9 of {who}")
                next_s = time.monotonic() + self._random.uniform(*INTERVAL_S)
            time.sleep(POLL_S)

    def _end(self, seen: JobSummary | None, kills: int) -> End:
        ends = []
        for rank, name in enumerate(self._names):
            path = output_folder(self._mesh.folder / name / "jobs" / self._job, rank) / END
            if path.exists():
                ends.append(json.loads(path.read_text()))
        wrong = None
        if seen is None or seen.state != "succeeded":
            wrong = "no daemon answers" if seen is None else f"the job is {seen.state}: {seen.error}"
        elif len({end["digest"] for end in ends}) != 1 or len(ends) < LEFT:
            wrong = f"the bases of {len(ends)} ranks are not equal: {[end['digest'][:8] for end in ends]}"
        elif self._killer.kills.total() < kills:
            wrong = f"the job ended after {self._killer.kills.total()} of {kills} kills: use more --epochs"
        return End(
            seed=self._seed,
            loss=ends[0]["loss"] if ends else math.nan,
            ranks=len(ends),
            rounds=seen.rounds if seen is not None else 0,
            generations=seen.generation if seen is not None else 0,
            lasted_s=time.monotonic() - self._began_s,
            kills=dict(self._killer.kills),
            wrong=wrong,
        )


def measure(seed: int, options: argparse.Namespace, kills: int) -> End:
    """One job on a mesh of its own. Raises what starting a mesh or a job raises."""
    with ChaosMesh(PEERS, seed=seed, patience_s=PATIENCE_S, keep=options.keep) as mesh:
        say(f"seed {seed}, {kills} kills, in {mesh.folder}")
        end = Run(mesh, seed, options.epochs, STEP_S if kills else 0.0, options.sync).until_end(kills)
    say(f"seed {seed}: {end.wrong or 'succeeded'}, loss {end.loss:.4f} after {end.lasted_s:.0f} s")
    return end


def judged(alone: list[End], killed: list[End]) -> dict[str, object]:
    """The result: mean difference, spread of the seeds, and what is wrong."""
    difference = statistics.mean(two.loss - one.loss for one, two in zip(alone, killed, strict=True))
    noise = statistics.stdev(one.loss for one in alone)
    wrong = [f"seed {end.seed}: {end.wrong}" for end in (*alone, *killed) if end.wrong is not None]
    if not abs(difference) <= noise:  # also when one is NaN
        wrong.append(f"the mean difference {difference:+.4f} is larger than the noise {noise:.4f}")
    return {
        "alone": [asdict(end) for end in alone],
        "killed": [asdict(end) for end in killed],
        "difference": difference,
        "noise": noise,
        "wrong": wrong,
    }


def show(alone: list[End], killed: list[End], result: dict[str, object]) -> None:
    """A table, for people."""
    print("| seed | loss left alone | loss with kills | kills | generations | ranks at the end, bit-equal |")
    print("|---|---|---|---|---|---|")
    for one, two in zip(alone, killed, strict=True):
        kills = ", ".join(f"{count} {role}" for role, count in sorted(two.kills.items()))
        print(f"| {one.seed} | {one.loss:.4f} | {two.loss:.4f} | {kills} | {two.generations} | {two.ranks} |")
    print(f"\nmean difference {result['difference']:+.4f}, spread of the seeds left alone {result['noise']:.4f}")
    wrong = result["wrong"]
    assert isinstance(wrong, list)
    for text in wrong:
        print(f"WRONG: {text}")
    print("FAIL" if wrong else "PASS")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=51, help="of all seeds together (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="at least two (default 0 1 2)")
    parser.add_argument("--epochs", type=int, default=6, help="of 256 rounds (default %(default)s)")
    parser.add_argument("--sync", default="bsp", help="as of `meshtrain submit`")
    parser.add_argument("--keep", action="store_true", help="leave the daemons' folders")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if len(options.seeds) < 2:
        parser.error("--seeds: the noise is the spread of at least two")
    share = -(-options.kills // len(options.seeds))
    alone: list[End] = []
    killed: list[End] = []
    try:
        with interruptible():
            for seed in options.seeds:
                alone.append(measure(seed, options, 0))
                killed.append(measure(seed, options, share))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except (LocalMeshError, RequestError, ConnectionLost, TimeoutError, OSError) as error:
        say(f"error: {error}")
        return 1
    result = judged(alone, killed)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(alone, killed, result)
    return int(bool(result["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
