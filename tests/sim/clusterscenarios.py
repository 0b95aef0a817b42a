"""The ten histories that a reader should know, as transcripts: who was lost, who noticed when, and how rounds went on.

`python -m tests.sim.clusterscenarios` writes `transcripts/` anew.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from meshwire.sync_modes.mode import sync_settings
from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterdaemon import Daemon
from tests.sim.clusterfaults import Fault, befall

FOLDER = Path(__file__).parent / "transcripts"
AT_S = 2.1  # in the middle of a round

Scenario = Callable[[Cluster], None]


def at(cluster: Cluster, kind: str, one: int, other: int = 0, *, at_s: float = AT_S, for_s: float = 0.0) -> None:
    """This fault will befall it."""
    cluster.clock.at(at_s, partial(befall, cluster, Fault(at_s, kind, one, other, for_s=for_s)))


def parted(cluster: Cluster, side: tuple[int, ...]) -> None:
    fault = Fault(AT_S, "partition", side[0], 0 if side[0] else 1, side, 14.0)
    cluster.clock.at(AT_S, partial(befall, cluster, fault))


def peer_killed(cluster: Cluster) -> None:
    at(cluster, "kill", 2)


def peer_silent(cluster: Cluster) -> None:
    at(cluster, "power cut", 2)


def learner_killed(cluster: Cluster) -> None:
    at(cluster, "kill learner", 2)


def two_peers_killed(cluster: Cluster) -> None:
    at(cluster, "kill", 0)
    at(cluster, "kill", 2)


def proposer_killed(cluster: Cluster) -> None:
    """Between the promises to it and its word to enter."""
    at(cluster, "kill", 3)
    proposer = cluster.daemons[0]

    def kill_when_promised() -> None:
        promised = proposer.machine.promised
        if promised is not None and promised.number == 3:
            cluster.clock.at(0.0012, partial(cluster.kill, proposer))
        else:
            cluster.clock.at(0.0002, kill_when_promised)

    cluster.clock.at(AT_S, kill_when_promised)


def parted_in_halves(cluster: Cluster) -> None:
    parted(cluster, (2, 3))


def parted_from_one(cluster: Cluster) -> None:
    parted(cluster, (3,))


def link_reset(cluster: Cluster) -> None:
    at(cluster, "reset", 1, 2)


def restarted_in_grace(cluster: Cluster) -> None:
    at(cluster, "quick restart", 2)


def joiner_dies(cluster: Cluster) -> None:
    """A device that is taken in for the first time, while its learner loads."""
    joiner = cluster.daemons[3]
    assert isinstance(joiner, Daemon)
    cluster.clock.at(AT_S, partial(cluster.kill, joiner))


SCENARIOS: dict[str, tuple[Scenario, int, float]] = {  # with how many founders of four devices, and until when
    "peer-killed": (peer_killed, 4, 4.5),
    "peer-silent": (peer_silent, 4, 6.5),
    "learner-killed": (learner_killed, 4, 5.5),
    "two-peers-killed-at-once": (two_peers_killed, 4, 4.5),
    "proposer-killed-between-promise-and-enter": (proposer_killed, 4, 4.5),
    "partition-2-2-healed": (parted_in_halves, 4, 24.0),
    "partition-3-1-healed": (parted_from_one, 4, 24.0),
    "link-reset": (link_reset, 4, 4.5),
    "daemon-restarted-within-the-grace": (restarted_in_grace, 4, 6.0),
    "joiner-dies-while-loading": (joiner_dies, 3, 4.5),
}


def transcript(name: str) -> str:
    """Plays a scenario; all invariants hold at every event."""
    scenario, founders, until_s = SCENARIOS[name]
    setting = Setting(
        founders=founders,
        newcomers=4 - founders,
        sync=sync_settings("ssp:2"),
        step_s=(0.5, 0.5, 0.5, 0.6),
        delays_s=(0.001, 0.002),
        load_s=(1.5,),
    )
    cluster = Cluster(1, setting, recording=True)
    scenario(cluster)
    cluster.run_until(until_s)
    cluster.check_end()
    cluster.end()
    assert cluster.transcript is not None
    began = next(number for number, line in enumerate(cluster.transcript) if "linked" not in line)
    return "\n".join([name.replace("-", " "), "", *cluster.transcript[began:], ""])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for scenario_name in SCENARIOS:
        (FOLDER / f"{scenario_name}.txt").write_text(transcript(scenario_name), "utf-8")
