"""The mesh that is there: who could be in a job now, over links that were measured."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshtrain.cli.planning.measured_links import measure_links
from meshtrain.cli.ui.connection import connected
from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages
from meshtrain.client import Client, ask
from meshtrain.following.shown_text import human_seconds, printable_lines
from meshwire.messages.link import LinkedDevices
from meshwire.messages.local import AskTogether, GetPeers, GetStatus, Peers, PeerSummary, Status
from meshwire.planning.measured_link import MeasuredLink
from meshwire.text import printable

LOOPBACK = ("127.", "[::1]:")  # as addresses begin
FRESH_S = 600.0  # a figure that is older is measured again: people walk about with laptops


class NobodyLinked(CliError):
    """No other device could be in a job now."""


class OneMachine(CliError):
    """Some of the devices are reached over loopback: there is no network to predict for."""


@dataclass(frozen=True, slots=True)
class LinkedMesh:
    """The mesh that is there.

    Attributes:
        this: (id, name) of this device.
        others: that a job could have as members, and whose link is measured, in ring order.
        hubs: that it could have beside them, and whose link is measured.
        takes_all: a job that names nobody runs on these and this one.
        notes: on those that are left out.
    """

    this: tuple[str, str]
    others: tuple[tuple[PeerSummary, MeasuredLink], ...]
    takes_all: bool
    notes: tuple[str, ...]
    hubs: tuple[tuple[PeerSummary, MeasuredLink], ...] = ()


def find_mesh(data_dir: Path | None, measure: bool, stages: Stages, *, one_machine: bool = True) -> LinkedMesh:
    """Asks the daemon who is there, and has it measure what is not known.

    Args:
        measure: also links that were measured a moment ago.
        one_machine: take daemons over loopback for laptops.

    Raises:
        CliError: with a next step; NobodyLinked and OneMachine before anything is measured.
    """
    with connected(data_dir) as client:
        status = ask(client, GetStatus(), Status, name="status")
        if status.jobs_running:
            raise CliError(
                "a job runs on this device: it and what is measured here would slow each other",
                "meshtrain jobs, and meshtrain plan when it has ended",
            )
        if status.hub:
            raise CliError("this device is a hub, which trains nothing", "meshtrain plan, on a laptop")
        if status.software.torch is None:
            raise CliError("this device has no torch", "pip install '.[torch]', or plan on another laptop")
        stages.show("asking who is linked with whom")
        together = ask(client, AskTogether(), LinkedDevices, name="who is linked with whom").devices
        there = [peer for peer in _peers(client) if peer.state == "linked"]
        linked = [peer for peer in there if not peer.hub]
        hubs = [peer for peer in there if peer.hub and peer.device in together]
        wanted = [peer.device for peer in linked if peer.device in together]
        if not wanted:
            raise NobodyLinked(*_nobody(linked))
        here = _over_loopback([peer for peer in linked if peer.device in wanted])
        if here and not one_machine:
            raise OneMachine(f"{', '.join(here)}: on this very machine, whose processor all share")
        now_s = time.time()
        old = [
            peer.device
            for peer in (*linked, *hubs)
            if (peer.hub or peer.device in wanted)
            and (measure or peer.measured is None or now_s - peer.measured.at_s > FRESH_S)
        ]
        failed = measure_links(client, old, stages) if old else ()
        peers = {peer.device: peer for peer in _peers(client)}
    known = {printable(peer.name): peer.measured for peer in peers.values()}
    why = [_not_measured(name, text, known.get(printable(name)), now_s) for name, text in failed]
    known_links = [
        (peer, peer.measured)
        for device in together
        if (peer := peers.get(device)) is not None and peer.measured is not None
    ]
    chosen = [(peer, link) for peer, link in known_links if not peer.hub]
    if not chosen:
        raise CliError("no link could be measured:\n  " + "\n  ".join(why), "meshtrain peers --measure")
    alone = [
        f"{printable(peer.name)} is left out: it has no torch, or no link to one of the others (meshtrain submit "
        "says to whom)"
        for peer in linked
        if peer.device not in wanted
    ]
    measured = {peer.device for peer, _ in chosen}
    by_hubs = tuple((peer, link) for peer, link in known_links if peer.hub)
    return LinkedMesh((status.device, status.name), tuple(chosen), measured == set(wanted), (*alone, *why), by_hubs)


def _peers(client: Client) -> tuple[PeerSummary, ...]:
    return ask(client, GetPeers(), Peers, name="peers").peers


def _not_measured(name: str, why: str, kept: MeasuredLink | None, now_s: float) -> str:
    """What that means here: figures of before count, where there are some."""
    if kept is None:
        return f"{printable(name)} is left out, its link was not measured: {printable_lines(why)}"
    ago = human_seconds(max(0.0, now_s - kept.at_s))
    return (
        f"{printable(name)}: its link counts as it was measured {ago} ago, for now it was not: {printable_lines(why)}"
    )


def _over_loopback(peers: Sequence[PeerSummary]) -> list[str]:
    return [printable(peer.name) for peer in peers if (peer.address or "").startswith(LOOPBACK)]


def _nobody(linked: Sequence[PeerSummary]) -> tuple[str, str]:
    if linked:
        names = ", ".join(printable(peer.name) for peer in linked)
        return f"{names}: linked, but without torch", "pip install '.[torch]' there, and meshtrain up again"
    return (
        "no other device is linked: there is nobody to plan with",
        "meshtrain pair, or meshtrain peers; meshtrain whatif predicts for networks that are not there",
    )


def assumptions(others: Sequence[PeerSummary], device: str) -> list[str]:
    """What is not known of the others, or roughly, said before the figures.

    Args:
        device: that this laptop trains on, as torch names it.
    """
    speeds = {peer.device: peer.measured.peer_speed for peer in others if peer.measured is not None}
    known = [peer for peer in others if speeds.get(peer.device) is not None and device == "cpu"]
    told = [f"{printable(peer.name)} {speeds[peer.device]:.2f}" for peer in known]
    notes = [f"In this laptop's speed, by a short calculation: {', '.join(told)}."] if told else []
    unknown = [peer for peer in others if peer not in known]
    if unknown:
        own = os.cpu_count() or 1
        who = "All laptops" if not known else ", ".join(printable(peer.name) for peer in unknown)
        text = f"{who} are taken to compute as fast as this one."
        differ = [f"{printable(peer.name)} has {peer.cores}" for peer in unknown if peer.cores not in (None, own)]
        notes.append(f"{text} They may not: this one has {own} cores, {', '.join(differ)}." if differ else text)
    if here := [printable(peer.name) for peer in others if peer.same_machine]:
        notes.append(f"On this very machine: {', '.join(here)}. Its processor is shared, which no figure here counts.")
    if len(others) > 1:
        notes.append("Links between two others were not measured, and count as theirs with this one.")
    return notes
