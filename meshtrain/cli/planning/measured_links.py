"""What links were measured to carry: asked of the daemon, and shown."""

from collections.abc import Collection, Sequence

from meshtrain.cli.planning.verdict import mbit
from meshtrain.cli.ui.progress import Stages
from meshtrain.cli.ui.terminal import print_table, say
from meshtrain.client import Client, ask
from meshtrain.following.shown_text import human_seconds
from meshwire import limits
from meshwire.message_base import Wire
from meshwire.messages.local import LinksMeasured, MeasureLinks, MeasureProgress, PeerSummary
from meshwire.text import printable

COLUMNS = ("LINK TO", "SENDS", "RECEIVES", "AT ONCE", "RTT", "LOADED", "MEDIUM", "MEASURED")
SILENCE_S = limits.MEASURE_S_MAX + 8.0  # of one link, on a busy machine
ALL_S = limits.PEERS_MAX * SILENCE_S


def measure_links(client: Client, devices: Collection[str], stages: Stages) -> tuple[tuple[str, str], ...]:
    """Has the daemon measure the links to these devices, or to all; returns whose could not be, and why.

    Raises what `Client.request` raises.
    """

    def show(event: Wire) -> None:
        if isinstance(event, MeasureProgress):
            stages.show(f"measuring the link to {printable(event.name)} ({event.done + 1} of {event.total})")

    request = MeasureLinks(devices=tuple(devices))
    reply = ask(
        client,
        request,
        LinksMeasured,
        name="measuring links",
        timeout_s=ALL_S,
        on_event=show,
        silence_s=SILENCE_S,
    )
    return reply.failed


def print_links(peers: Sequence[PeerSummary], now_s: float) -> None:
    """The table of what is known, in Mbit/s, and how old it is."""
    rows = [_row(peer, now_s) for peer in peers if peer.measured is not None]
    if rows:
        print()
        print_table(COLUMNS, rows)
    else:
        say("No link was measured yet: meshtrain peers --measure")


def _row(peer: PeerSummary, now_s: float) -> tuple[str, ...]:
    link = peer.measured
    assert link is not None
    return (
        printable(peer.name),
        mbit(link.send_bytes_s),
        mbit(link.receive_bytes_s),
        f"{mbit(link.both_send_bytes_s)} + {mbit(link.both_receive_bytes_s)}",
        f"{link.rtt_s * 1000:.1f} ms",
        "-" if link.loaded_rtt_s is None else f"{link.loaded_rtt_s * 1000:.1f} ms",
        "shared" if link.shared else "both ways",
        f"{human_seconds(max(0.0, now_s - link.at_s))} ago",
    )
