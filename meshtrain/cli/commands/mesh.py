"""`status`, `peers`, `pair`, `unpair`: this device and the others."""

import functools
import re
import time
from typing import Annotated

import typer

from meshtrain.cli.planning.measured_links import measure_links, print_links
from meshtrain.cli.planning.verdict import mbit
from meshtrain.cli.ui.completion import complete_peers, complete_waiting
from meshtrain.cli.ui.connection import connected
from meshtrain.cli.ui.errors import BadCommandLine, reported
from meshtrain.cli.ui.exits import EXIT_FAILED, EXIT_INTERRUPTED
from meshtrain.cli.ui.job import list_jobs
from meshtrain.cli.ui.options import DataDir, Json
from meshtrain.cli.ui.peer_table import print_peers
from meshtrain.cli.ui.progress import Stages
from meshtrain.cli.ui.terminal import plain, print_json, print_table, say
from meshtrain.client import Client, ask
from meshtrain.following.shown_text import human_seconds, human_step, printable_lines
from meshtrain.following.watching import has_ended
from meshtrain.pictures.qr import qr_lines, shows_qr
from meshwire.addresses import DEFAULT_PORT, Address
from meshwire.jobs.files import human_bytes
from meshwire.jobs.partition_wait import NEVER, PATIENCES, partition_wait_s
from meshwire.message_base import Wire
from meshwire.messages.job import JobSummary
from meshwire.messages.link import Software
from meshwire.messages.local import (
    GetPeers,
    GetStatus,
    IntroducedDevice,
    IntroductionPolicy,
    PairAccept,
    PairCode,
    Paired,
    PairHost,
    PairJoin,
    PairProgress,
    Peers,
    PeerSummary,
    Status,
    Unpair,
    Unpaired,
)
from meshwire.text import printable

LINES_BESIDE = 10  # of text that `pair` shows with a QR code
DEVICES_SHOWN = 8  # of those that joined, and of those that wait
ADDRESSES_SHOWN = 3  # of this device's: cable, radio and one more
ID_CHARS = 8  # of a device id that people see
PAIR_HOST_TIMEOUT_S = 900.0  # the code itself expires earlier, at the daemon
PAIR_JOIN_TIMEOUT_S = 120.0  # the search ends earlier, at the daemon
LINK_TIMEOUT_S = 10.0  # from the code to the link
LINK_POLL_S = 0.1
TRUST = (
    "A paired device may run code on this one, with the rights of the user that runs meshtraind.\n"
    "It introduces this one and its other devices to each other (meshtrain up --introductions ask|never: not so)."
)
INTRODUCTIONS = {
    IntroductionPolicy.ACCEPT: "takes devices that paired ones introduce",
    IntroductionPolicy.ASK: "asks before it takes a device that a paired one introduces",
    IntroductionPolicy.NEVER: "takes no device that another one introduces, and introduces none",
}


@reported
def status(
    data_dir: DataDir = None,
    json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also timeouts, links, who does not join.")] = False,
) -> None:
    """Show this device. Its name, links, running jobs with all their devices, and warnings.

    With -v also how long it waits for what, before a job goes on without a device (all of it follows from `up
    --patience` and from the measured round trip), what each link takes and was spared, and which devices could join a
    job, but do not.
    """
    with connected(data_dir) as client:
        reply = ask(client, GetStatus(), Status, name="status")
        shown = list_jobs(client) if reply.jobs_running and not json else []
    if json:
        print_json(plain(reply))
        return
    role = ", a hub" if reply.hub else ""
    print(f"{printable(reply.name)} ({reply.device[:ID_CHARS]}){role} is up for {human_seconds(reply.up_s)}")
    print(f"  listens   {printable(reply.listen)}")
    print(f"  peers     {reply.peers_linked} linked of {reply.peers_paired} paired")
    if verbose or reply.introductions is not IntroductionPolicy.ACCEPT:
        print(f"  joining   {INTRODUCTIONS[reply.introductions]} (up --introductions {reply.introductions})")
    print(f"  jobs      {reply.jobs_running} running")
    print(f"  software  {_software(reply.software, hub=reply.hub)}")
    print(f"  data      {printable(reply.data_dir)} (pid {reply.pid})")
    if verbose:
        _print_timeouts(reply)
        _print_links(reply)
    for job in shown:
        if not has_ended(job):
            print()
            print_peers(job)
            if verbose:
                print(f"  {_partition_wait(job, reply.patience_s)}")
                for name, why in job.not_joining:
                    print(f"  {printable(name)} does not join: {printable(why)}")
    for device in reply.joined[-DEVICES_SHOWN:]:
        say(_joined(device))
    if len(reply.joined) > DEVICES_SHOWN:
        say(f"and {len(reply.joined) - DEVICES_SHOWN} more joined within a day: meshtrain peers")
    for device in reply.waiting[:DEVICES_SHOWN]:
        say(_waiting(device), style="yellow")
    if len(reply.waiting) > DEVICES_SHOWN:
        say(f"and {len(reply.waiting) - DEVICES_SHOWN} more wait: meshtrain peers", style="yellow")
    for warning in reply.warnings:
        say(f"warning: {printable_lines(warning)}", style="yellow")
    if not reply.peers_paired:
        say("No other device is paired yet. Add one: meshtrain pair")


def _joined(device: IntroducedDevice) -> str:
    ago = human_seconds(time.time() - device.added_at_s)
    return (
        f"{printable(device.name)} ({device.device[:ID_CHARS]}) joined {ago} ago, added by {printable(device.added_by)}"
    )


def _waiting(device: IntroducedDevice) -> str:
    id_ = device.device[:ID_CHARS]
    return (
        f"{printable(device.added_by)} introduces {printable(device.name)} ({id_}). "
        f"To take it: meshtrain pair --accept {id_}. To refuse it for good: meshtrain unpair {id_}"
    )


def _partition_wait(job: JobSummary, patience_s: float) -> str:
    part = "a part without a majority"
    if job.partition_wait == NEVER:
        return f"{part} waits for the others for ever (--partition-wait never)"
    wait = human_step(partition_wait_s(job.partition_wait, patience_s))
    why = f"{PATIENCES} x patience" if job.partition_wait is None else "--partition-wait"
    return f"{part} waits {wait} for the others ({why}), then goes on, and yields to them"


def _print_timeouts(status: Status) -> None:
    rtt = "no link yet" if status.rtt_s is None else f"round trip {status.rtt_s * 1000:.1f} ms"
    print(f"  patience  {status.patience_s:g} s ({rtt}); from these two follows:")
    for what, seconds in status.timeouts:
        print(f"    {human_step(seconds):>8}  {printable(what)}")


def _print_links(status: Status) -> None:
    for link in status.links:
        rate = "never full" if link.bytes_per_s is None else f"takes {link.bytes_per_s * 8 / 1e6:.0f} Mbit/s"
        sent, spared = human_bytes(link.sent_bytes), human_bytes(link.spared_bytes)
        print(f"  link      {printable(link.name)}: {rate}; {sent} of gradients sent, {spared} spared by LZ4")


def _software(software: Software, *, hub: bool) -> str:
    torch = f"torch {software.torch}" if software.torch is not None else "no torch"
    role = ", a hub" if hub else ""
    return printable(f"meshtrain {software.meshtrain}, Python {software.python}, {torch}, {software.system}{role}")


@reported
def peers(
    data_dir: DataDir = None,
    json: Json = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also their software, and what the links were measured to carry.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure the links first, two seconds each at most; not while a job runs."),
    ] = False,
) -> None:
    """List the other devices. STATE: linked, paired (but away), waiting (for your word), or seen on this network (not
    paired). ADDED BY: a code that was typed here, or the paired device that has introduced it.

    With -v also their software. With -v or --measure also what each link was measured to carry, in Mbit/s: what this
    device SENDS and RECEIVES, one at a time and both AT ONCE, and the round trip without and under load.
    """
    with connected(data_dir) as client:
        failed = _measure(client) if measure else ()
        reply = ask(client, GetPeers(), Peers, name="peers")
    if json:
        print_json([plain(peer) for peer in reply.peers])
    elif not reply.peers:
        say("No other device is known. Add one: meshtrain pair")
    else:
        print_table(
            ("NAME", "ID", "STATE", "ADDED BY", "ADDRESS", "RTT", "CORES", "MEMORY"),
            [_peer_row(peer) for peer in reply.peers],
        )
        if verbose:
            print()
            known = [
                (printable(peer.name), _software(peer.software, hub=peer.hub)) for peer in reply.peers if peer.software
            ]
            print_table(("NAME", "SOFTWARE"), known, "SOFTWARE")
        if verbose or measure:
            print_links(reply.peers, time.time())
        for peer in reply.peers:
            if peer.refused is not None:
                say(f"warning: {printable_lines(peer.refused)}", style="yellow")
    for name, why in failed:
        say(f"{printable(name)} was not measured: {printable_lines(why)}", style="yellow")
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _measure(client: Client) -> tuple[tuple[str, str], ...]:
    with Stages() as stages:
        return measure_links(client, (), stages)


def _peer_row(peer: PeerSummary) -> tuple[str, ...]:
    return (
        printable(peer.name),
        peer.device[:ID_CHARS],
        f"{peer.state}, a hub" if peer.hub else peer.state,
        "-" if peer.state == "seen" else "a code" if peer.added_by is None else printable(peer.added_by),
        printable(peer.address or "-"),
        "-" if peer.rtt_s is None else f"{peer.rtt_s * 1000:.1f} ms",
        "-" if peer.cores is None else str(peer.cores),
        "-" if peer.memory_bytes is None else human_bytes(peer.memory_bytes),
    )


@reported
def pair(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="The code that the other device shows, e.g. 483-917.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at", metavar="HOST[:PORT]", help="Where the other device is, as its screen says; if mDNS is blocked."
        ),
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(
            "--accept",
            metavar="PEER",
            help="Take a device that waits: name or id prefix. See status.",
            autocompletion=complete_waiting,
        ),
    ] = None,
    qr: Annotated[
        bool | None,
        typer.Option("--qr/--no-qr", help="Whether to draw the command for the other device as a QR code."),
    ] = None,
    json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Pair with another device. Without CODE show one and wait; with CODE join the device that shows it.

    One code joins all: a third device is paired with any of the others, which introduces it. A paired device may run
    code on this one, with the rights of the user that runs meshtraind. Where the code is typed the new link is
    measured, in two seconds, unless a job runs.

    The QR code holds the whole command for the other device, with this one's address. It is drawn where the terminal
    shows UTF-8 and has room; --qr draws it anyhow.
    """
    if accept is not None:
        if code is not None or at is not None:
            raise BadCommandLine("--accept goes without a code", "meshtrain pair --accept PEER")
        with connected(data_dir) as client:
            reply = ask(client, PairAccept(peer=accept), Paired, name="pairing")
        _show_paired(reply, json)
        return
    if code is None:
        if at is not None:
            raise BadCommandLine("--at goes with a code", "meshtrain pair CODE --at HOST[:PORT]")
        _show_paired(_pair_host(data_dir, qr), json)
        return
    digits = re.sub(r"[\s-]", "", code)
    if not re.fullmatch(r"[0-9]{6}", digits):
        raise BadCommandLine(
            f"{code!r} is not a pairing code; a code has six digits",
            "meshtrain pair, on the other device: it shows the code",
        )
    with connected(data_dir) as client:
        body = PairJoin(code=f"{digits[:3]}-{digits[3:]}", at=at)
        reply = ask(client, body, Paired, name="pairing", timeout_s=PAIR_JOIN_TIMEOUT_S, on_event=_show_progress)
        _show_paired(reply, json, client)


def _pair_host(data_dir: DataDir, qr: bool | None) -> Paired:
    show = functools.partial(_show_code, qr)
    try:
        with connected(data_dir) as client:
            return ask(client, PairHost(), Paired, name="pairing", timeout_s=PAIR_HOST_TIMEOUT_S, on_event=show)
    except KeyboardInterrupt:
        say("Not paired: the code is no longer valid.")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _show_code(qr: bool | None, event: Wire) -> None:
    if isinstance(event, PairCode):
        if qr is not False:
            # All of it, for that is what nobody likes to type; the address makes it work where mDNS does not.
            where = f" --at {_to_type(event.addresses[0], event.port)}" if event.addresses else ""
            drawn = qr_lines(f"meshtrain pair {event.code}{where}")
            if qr or shows_qr(drawn, LINES_BESIDE):
                say("\n".join(drawn))
        say(f"Pairing code: {event.code}    (valid for {human_seconds(event.expires_s)})")
        say("On the other device type:")
        say(f"  meshtrain pair {event.code}")
        say("or, where the network hides devices from each other:")
        for number, host in enumerate(event.addresses[:ADDRESSES_SHOWN]):
            other = "" if number == 0 else "    (or this address)"
            say(f"  meshtrain pair {event.code} --at {printable(_to_type(host, event.port))}{other}")
        say(TRUST)
        say("Waiting; ctrl-C stops it.")


def _to_type(host: str, port: int) -> str:
    """HOST[:PORT] as `--at` takes it, without the port that it fills in."""
    address = Address(host=host, port=port)
    if port != DEFAULT_PORT:
        return str(address)
    return str(address).removesuffix(f":{port}")


def _show_progress(event: Wire) -> None:
    if isinstance(event, PairProgress):
        say(printable_lines(event.text))


def _show_link(client: Client, paired: Paired) -> None:
    """Measures the link to a new device, for the next plan, and says what it carries: a slow one is noticed here."""
    name = printable(paired.name)
    with Stages() as stages:
        until_s = time.monotonic() + LINK_TIMEOUT_S
        while (peer := _peer(client, paired.device)) is None or peer.state != "linked":
            if time.monotonic() > until_s:
                say(f"There is no link to {name} yet. If there is none in a minute: meshtrain doctor, on both")
                return
            stages.show(f"waiting for the link to {name}")
            time.sleep(LINK_POLL_S)
        failed = measure_links(client, (paired.device,), stages)
        peer = _peer(client, paired.device)
    for _, why in failed:
        say(f"What its link carries is measured when a job is planned, for now it was not: {printable_lines(why)}")
    if not failed and peer is not None and (link := peer.measured) is not None:
        rates = f"sends {mbit(link.send_bytes_s)} and receives {mbit(link.receive_bytes_s)} Mbit/s"
        say(f"Its link {rates}, a round trip takes {link.rtt_s * 1000:.1f} ms.")


def _peer(client: Client, device: str) -> PeerSummary | None:
    peers = ask(client, GetPeers(), Peers, name="peers").peers
    return next((peer for peer in peers if peer.device == device), None)


def _show_paired(reply: Paired, json: bool, measures: Client | None = None) -> None:
    """`measures`: has the new link measured; None: that is not this side's to do."""
    if json:
        print_json(plain(reply))
        return
    print(f"paired with {printable(reply.name)} ({reply.device[:ID_CHARS]})")
    say("If either of the two is paired with others, these are introduced, too, and join within seconds.")
    if measures is not None:
        _show_link(measures, reply)
    say("Next: meshtrain peers")


@reported
def unpair(
    peer: Annotated[
        str,
        typer.Argument(
            metavar="PEER",
            help="Name or id prefix, as `meshtrain peers` shows them.",
            autocompletion=complete_peers,
        ),
    ],
    introduced: Annotated[
        bool, typer.Option("--introduced", help="Remove those that joined by its word, or by theirs, as well.")
    ] = False,
    json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Remove a device that is paired or waits. Its link is dropped, and it may no longer run anything here.

    No introduction takes it in again, only a code that is typed here. The other devices go on trusting it until the
    same is typed there; their status says so.
    """
    with connected(data_dir) as client:
        reply = ask(client, Unpair(peer=peer, introduced=introduced), Unpaired, name="unpair")
    if json:
        print_json(plain(reply))
        return
    for one in reply.removed:
        print(f"removed {_named(one)}: only a code that is typed here takes it in again")
    first = reply.removed[0].device[:ID_CHARS]
    if reply.stay:
        say(f"By its word joined, and are still trusted: {', '.join(map(_named, reply.stay))}")
        say(f"To remove one: meshtrain unpair {reply.stay[0].device[:ID_CHARS]}")
    if reply.others:
        say(f"Where it is to be removed as well, type there: meshtrain unpair {first}")
        say(f"The other devices are {', '.join(map(printable, reply.others))}.")
    say("It still trusts this device until `meshtrain unpair` is typed there as well.")


def _named(device: Paired) -> str:
    return f"{printable(device.name)} ({device.device[:ID_CHARS]})"
