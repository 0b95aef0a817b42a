"""What it costs to wait for ever, against going on provisionally: `python -m tests.sim.clusterwaits` prints the table.

Laptops that take two steps a second lose each other in the ways that people know. After ten minutes: how many rounds
are in the history that is kept, how many were given up, and for how many seconds a laptop that was on completed none.
"""

import sys
from collections.abc import Callable
from functools import partial

from tests.sim.cluster import Cluster, Setting
from tests.sim.clusterfaults import Fault, befall

AT_S = 5.0
END_S = 600.0
PATIENCE_S = 5.0
WAITS_S = (float("inf"), None)
LAST = -1  # of the ranks

Befall = Callable[[Cluster], None]


def router_restarts(for_s: float, cluster: Cluster) -> None:
    """Nobody hears anybody."""
    for one in range(cluster.devices):
        befall(cluster, Fault(AT_S, "offline", one, (one + 1) % cluster.devices, for_s=for_s))


def lid_closed(device: int, for_s: float, cluster: Cluster) -> None:
    cluster.sleep(device % cluster.devices, for_s)


def battery_empty(device: int, for_s: float, cluster: Cluster) -> None:
    """It is started again when it is charged."""
    cluster.kill(cluster.daemons[device], "loses its power", silent=True)
    cluster.clock.at(for_s, partial(cluster.restart, device % cluster.devices))


CASES: dict[str, Befall] = {
    "router away for 8 s": partial(router_restarts, 8.0),
    "router away for 20 s": partial(router_restarts, 20.0),
    "router away for 2 min": partial(router_restarts, 120.0),
    "lid of rank 0 closed for 5 min": partial(lid_closed, 0, 300.0),
    "lid of the last closed for 5 min": partial(lid_closed, LAST, 300.0),
    "battery of rank 0 empty for 5 min": partial(battery_empty, 0, 300.0),
    "battery of the last empty for 5 min": partial(battery_empty, LAST, 300.0),
}


def costs(laptops: int, case: Befall, wait_s: float | None) -> tuple[int, int, int]:
    """(rounds kept, rounds given up, seconds idle of all laptops together)."""
    cluster = Cluster(1, Setting(laptops, patience_s=PATIENCE_S, total=4000, partition_wait_s=wait_s))
    cluster.run_until(AT_S)
    case(cluster)
    idle = 0
    held = [0] * laptops
    while cluster.now_s < END_S:
        cluster.run_until(cluster.now_s + 1.0)
        for number, daemon in enumerate(cluster.daemons):
            complete = 0 if daemon.rounds is None else daemon.rounds.machine.complete
            idle += daemon.alive and not daemon.asleep and complete <= held[number]
            held[number] = complete
    assert cluster.well(), cluster.story()
    cluster.check_end()
    rounds = cluster.daemons[0].rounds
    assert rounds is not None
    cluster.end()
    kept = len(cluster.histories.path(rounds.history.chain))
    return kept, cluster.histories.count - kept, idle


def main() -> int:
    lines = ["| what happens | laptops | | rounds kept | given up | s idle |", "|---|---|---|---|---|---|"]
    for name, case in CASES.items():
        for laptops in (2, 3):
            for wait_s in WAITS_S:
                kept, given_up, idle_s = costs(laptops, case, wait_s)
                how = "waits" if wait_s else "goes on"
                lines.append(f"| {name} | {laptops} | {how} | {kept} | {given_up} | {idle_s} |")
    sys.stdout.write("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
