"""`python -m tests.bench.scale`: what a job costs each of 4 to 64 peers beside its data, and what stops it beyond.

The peers are the simulator's: the shells that ship, each on a loop of its own in virtual time, one network. Counts of
messages and bytes, and virtual seconds, are the same wherever it runs; seconds of a processor are this machine's.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from meshtraind.peers.links import HEARTBEAT_INTERVAL_S
from meshwire import limits
from meshwire.frames.header import HEADER_BYTES
from meshwire.membership.effects import MembershipPhase
from meshwire.messages.envelope import Done, Envelope, Role, decode, encode
from meshwire.messages.link import Heartbeat
from meshwire.rounds.rounds_and_learner import JobRounds
from meshwire.sync_modes.mode import sync_settings
from tests.bench.journal import Case, Figures, Journal, Section, measure, say
from tests.bench.kept_lines import KeptLinesError
from tests.bench.scalepage import EXPECTED, page
from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterdaemon import Daemon
from tests.sim.clustertraffic import CHUNK, REPORT, Traffic

RESULTS = Path(__file__).parent / "results"
PEERS = (4, 8, 16, 32, 64)
SYNCS = ("bsp", "ssp:2", "local:8")
LOSSES_SYNC = "ssp:2"
STEP_S = 0.5
SPREAD = 0.05  # learners' steps differ by so much, both ways; with a bound one of them takes SLOW times as long
SLOW = 3.0
BATCHES = 40  # of each rank in an epoch
WARM_ROUNDS = 1
COUNTED_ROUNDS = 3  # as many as the slow one takes for a step: then its nulls are as often as ever
TIMED_ROUNDS = 1
TICK_S = 0.01
CHANGE_S_MAX, RETURN_S_MAX = 10.0, 60.0
DECODINGS = 200
SECONDS = {4: 1, 8: 2, 16: 4, 32: 10, 64: 40}  # that a case takes, about


class Stopwatch:
    """Seconds that this thread has computed in a function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def on(self, owner: type, name: str) -> Iterator[None]:
        """Times each call of this method meanwhile."""
        timed = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            began_s = time.thread_time()
            try:
                return timed(*args, **options)
            finally:
                self.seconds += time.thread_time() - began_s

        setattr(owner, name, call)
        try:
            yield
        finally:
            setattr(owner, name, timed)


def cluster_of(peers: int, sync: str, seed: int) -> Cluster:
    """It has completed some rounds."""
    settings = sync_settings(sync)
    steps_s = [STEP_S * (1 + SPREAD * (at % 5 - 2) / 2) for at in range(peers)]
    if settings.staleness:
        steps_s[-1] = SLOW * STEP_S
    setting = Setting(
        founders=peers,
        sync=settings,
        total=peers * BATCHES,
        batch=1,
        patience_s=limits.PATIENCE_S,
        step_s=tuple(steps_s),
    )
    cluster = Cluster(seed, setting)
    run_rounds(cluster, WARM_ROUNDS)
    return cluster


def run_rounds(cluster: Cluster, count: int) -> int:
    """Until everybody has so many rounds more; returns how many it were."""
    before = cluster.least_complete
    while cluster.least_complete < before + count:
        cluster.run_until(cluster.now_s + TICK_S)
        assert cluster.failed is None, cluster.failed
    return cluster.least_complete - before


def rounds(peers: int, sync: str, repeat: int, short: bool) -> Figures:
    """What each peer says, hears and computes in a round in which nobody is lost."""
    cluster = cluster_of(peers, sync, repeat + 1)
    try:
        traffic = cluster.network.watcher = Traffic()
        began_s = cluster.now_s
        done = run_rounds(cluster, 1 if short else COUNTED_ROUNDS)
        took_s = cluster.now_s - began_s
        cluster.network.watcher = None
        found: Figures = {"round_s": [took_s / done]}
        for kind, messages in traffic.messages.items():
            parts = peers * (took_s if kind == REPORT else done)
            found[f"messages {kind}"] = [messages / parts]
            found[f"bytes {kind}"] = [traffic.frame_bytes[kind] / messages]
        gc.collect()
        gc.disable()  # it would go through what all peers keep, which are in one process here alone
        deciding = Stopwatch()
        began_s = time.process_time()
        done = run_rounds(cluster, TIMED_ROUNDS)
        found["simulated_ms"] = [1e3 * (time.process_time() - began_s) / (peers * done)]
        with deciding.on(JobRounds, "handle"):
            done = run_rounds(cluster, TIMED_ROUNDS)
        found["deciding_ms"] = [1e3 * deciding.seconds / (peers * done)]
        found["messages_ms"] = [1e3 * messages_s(traffic, peers * done)]
        return found
    finally:
        gc.enable()
        cluster.end()


def messages_s(traffic: Traffic, rounds_of_peers: int) -> float:
    """What encoding and decoding a round's messages costs a peer: each once as it leaves, and as often as it comes."""
    total_s = 0.0
    for kind, payload in traffic.newest.items():
        envelope = decode(payload)
        assert isinstance(envelope, Envelope), envelope
        began_s = time.thread_time()
        for _ in range(DECODINGS):
            decode(payload)
        decoding_s = (time.thread_time() - began_s) / DECODINGS
        began_s = time.thread_time()
        for _ in range(DECODINGS):
            encode(envelope)
        encoding_s = (time.thread_time() - began_s) / DECODINGS
        heard = traffic.messages[kind] / rounds_of_peers
        total_s += heard * decoding_s + min(heard, 1.0) * encoding_s
    return total_s


def losses(peers: int, repeat: int, _short: bool) -> Figures:
    """What it costs all together that a peer is killed, and that it comes back."""
    cluster = cluster_of(peers, LOSSES_SYNC, repeat + 1)
    try:
        number = peers // 2
        traffic = cluster.network.watcher = Traffic()
        began_s, before = cluster.now_s, cluster.least_complete
        cluster.kill(cluster.daemons[number])
        run_until(cluster, partial(goes_on, cluster, number), CHANGE_S_MAX)
        found: Figures = {"loss_s": [cluster.now_s - began_s], **_counted("loss", traffic)}
        run_until(cluster, lambda: cluster.least_complete > before, CHANGE_S_MAX)
        found["loss_round_s"] = [cluster.now_s - began_s]
        run_rounds(cluster, WARM_ROUNDS)
        traffic = cluster.network.watcher = Traffic()
        began_s, generations = cluster.now_s, cluster.generations
        cluster.restart(number)
        run_until(cluster, cluster.well, RETURN_S_MAX)
        found |= {"return_s": [cluster.now_s - began_s], **_counted("return", traffic)}
        found["return_generations"] = [cluster.generations - generations]
        return found
    finally:
        cluster.end()


def _counted(what: str, traffic: Traffic) -> Figures:
    """All peers' together, but what rounds and reports cost anyway."""
    usual = {CHUNK, REPORT, "Bind", "Seal", "Null", "Call"}
    found: Figures = {}
    for kind in traffic.messages.keys() - usual:
        found[f"{what} messages {kind}"] = [traffic.messages[kind]]
        found[f"{what} bytes {kind}"] = [traffic.frame_bytes[kind]]
    return found


def goes_on(cluster: Cluster, without: int) -> bool:
    """Whether all others run in a generation that does not list this one."""
    return all(_runs(daemon, cluster.devices - 1) for daemon in cluster.daemons if daemon.number != without)


def _runs(daemon: Daemon, members: int) -> bool:
    machine = daemon.machine
    of_now = machine.generation
    return machine.phase is MembershipPhase.RUNNING and of_now is not None and len(of_now.ranks) == members


def run_until(cluster: Cluster, true: Callable[[], bool], within_s: float) -> None:
    """Raises AssertionError where it does not come true within so long."""
    end_s = cluster.now_s + within_s
    while not true():
        assert cluster.now_s < end_s, cluster.story()
        cluster.run_until(cluster.now_s + TICK_S)


def beside(_repeat: int, _short: bool) -> Figures:
    """What keeps links alive: a daemon says it on each of them while a job needs them, and is asked as often."""
    asked = HEADER_BYTES + len(encode(Envelope(Role.REQUEST, 10_000, Heartbeat())))
    answered = HEADER_BYTES + len(encode(Envelope(Role.REPLY, 10_000, Done())))
    return {"messages_s": [2 / HEARTBEAT_INTERVAL_S], "bytes": [(asked + answered) / 2]}


def sections() -> tuple[Section, ...]:
    """All that is measured."""
    return (
        Section(
            "rounds",
            "messages, bytes, virtual seconds and processor time of rounds in which nobody is lost",
            tuple(
                Case(f"{sync}, {peers} peers", SECONDS[peers], partial(rounds, peers, sync))
                for sync in SYNCS
                for peers in PEERS
            ),
            repeats=1,
            expected=EXPECTED["rounds"],
        ),
        Section(
            "losses",
            "one is killed, and comes back",
            tuple(Case(f"kill, {peers} peers", SECONDS[peers], partial(losses, peers)) for peers in PEERS),
            repeats=1,
            expected=EXPECTED["losses"],
        ),
        Section("links", "what keeps them alive", (Case("heartbeats", 1, beside),), repeats=1),
    )


def main() -> int:
    """The exit code: 1 when something could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m tests.bench.scale          goes on behind results/scale.jsonl, writes scale.md\n"
        "  python -m tests.bench.scale --short --into /tmp/scale.jsonl --only 'bsp, 8 peers'",
    )
    parser.add_argument("--into", type=Path, default=RESULTS / "scale.jsonl", help="where measurements are kept")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases alone, such as 'bsp, 64 peers'")
    parser.add_argument("--page", action="store_true", help="write the page, though cases be missing")
    parser.add_argument("--short", action="store_true", help="one round a case: shows that the command works")
    options = parser.parse_args()
    chosen = sections()
    names = [case.name for section in chosen for case in section.cases]
    if unknown := [name for name in options.only or () if name not in names]:
        parser.error(f"{unknown[0]!r}: choose from {', '.join(names)}")
    try:
        journal = Journal(options.into)
        missing = [
            (case, repeat)
            for case, repeat in journal.missing(chosen, None, short=options.short)
            if not options.only or case.name in options.only
        ]
        failed = measure(journal, chosen, missing, (AssertionError,), short=options.short)
        if options.page or not (options.short or journal.missing(chosen, None, short=False)):
            told = page(journal)
            print(told)
            path = options.into.with_suffix(".md")
            path.write_text(told, encoding="utf-8")
            say(f"wrote {path}")
    except (KeptLinesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on behind what is in {options.into}")
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
