"""`doctor`: why laptops do not meet, or are slow."""

import textwrap
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshtrain.cli.ui.errors import BadCommandLine, CliError, reported
from meshtrain.cli.ui.exits import EXIT_FAILED
from meshtrain.cli.ui.options import DataDir, Json
from meshtrain.cli.ui.progress import Stages
from meshtrain.cli.ui.terminal import console, print_json, say
from meshtrain.datadir import data_folder
from meshtrain.doctor.facts import Facts, OtherLaptop, Reach
from meshtrain.doctor.finding import Finding
from meshtrain.following.shown_text import printable_lines
from meshwire.addresses import Address

AT_MAX = 8
SHOW_EVERY_S = 0.25
INDENT = "   "
AT_EXAMPLE = "meshtrain doctor --at 192.168.1.20"


@reported
def doctor(
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at",
            metavar="IP[:PORT]",
            help="Where another laptop is that is on and does not appear; repeatable.",
        ),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="FILE",
            help="Also write a report that may be shown to strangers: no names, addresses, ids or keys.",
        ),
    ] = None,
    json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Find out why laptops do not meet, or are slow, and say which command mends it. Changes nothing.

    Looks at this laptop's port, daemon, interfaces, firewall, VPNs, clock and radio, asks the network by multicast, and
    tries to reach the other laptops, all at once: a few seconds. Without a daemon it looks at the laptop and its
    network. On both laptops it sees more than on one. Some rules root alone may read: it names what it could not see.

    Exit code: 0 nothing wrong was found, 1 something was.
    """
    try:
        named = [Address.parse(one) for one in at or ()]
    except ValueError as error:
        raise BadCommandLine(f"--at: {error}", AT_EXAMPLE) from error
    for one in named:
        if one.ip is None or one.ip.version != 4:
            raise BadCommandLine(f"--at {one.host}: its IPv4 address is wanted; `meshtrain pair` shows it", AT_EXAMPLE)
    if len(named) > AT_MAX:
        raise BadCommandLine(f"--at: at most {AT_MAX} laptops", AT_EXAMPLE)
    if bundle is not None and bundle.exists():
        raise CliError(f"{bundle} exists already, and is not overwritten", "another file, or remove that one")
    # Imported here: other commands need none of it.
    from meshtrain.doctor.bundle import write_bundle
    from meshtrain.doctor.diagnosis import diagnose
    from meshtrain.doctor.examination import Examination

    with Stages() as stages, ThreadPoolExecutor(1, thread_name_prefix="doctor") as beside:
        looking = beside.submit(Examination(data_folder(data_dir), named).run)
        while not looking.done():
            stages.show("Looking at this laptop, its network and the others: a few seconds")
            wait((looking,), SHOW_EVERY_S)
        facts = looking.result()
    findings = diagnose(facts)
    if json:
        print_json(_as_json(facts, findings))
    else:
        _show(facts, findings)
    if bundle is not None:
        write_bundle(bundle, facts, findings)
        say(f"Wrote {bundle}: kinds and numbers, no names, addresses, ids or keys. Look before you send it.")
    if findings:
        raise typer.Exit(EXIT_FAILED)


def _as_json(facts: Facts, findings: tuple[Finding, ...]) -> dict[str, object]:
    return {
        "daemon_running": facts.daemon.running,
        "findings": [asdict(finding) for finding in findings],
        "laptops": [asdict(laptop) for laptop in facts.laptops],
        "looked_at": list(facts.looked_at),
        "not_looked_at": [asdict(one) for one in facts.unknown],
    }


def _show(facts: Facts, findings: tuple[Finding, ...]) -> None:
    screen = console()

    def paragraph(text: str, first: str = INDENT) -> None:
        text = printable_lines(text)
        screen.print(textwrap.fill(text, screen.width, initial_indent=first, subsequent_indent=INDENT))

    for number, finding in enumerate(findings, 1):
        paragraph(finding.what, f"{number}. ".ljust(len(INDENT)))
        paragraph(finding.why)
        on = "" if finding.where is None else f"on {finding.where}: "
        screen.print(printable_lines(f"{INDENT}{on}{finding.mend}"), style="bold")  # in one piece, to be copied
        print()
    away = [laptop for laptop in facts.apart() if laptop.state == "paired" and not laptop.there]
    if not findings:
        # Of a laptop that is silent nothing is known from here: what keeps it away may be wrong over there.
        print("nothing wrong was found here" if away else "nothing wrong was found")
    say(f"Looked at: {', '.join(printable_lines(one) for one in facts.looked_at)}.")
    for gap in facts.unknown:
        how = "" if gap.command is None else f": {gap.command}"
        say(printable_lines(f"Not looked at: {gap.what} ({gap.why}){how}"), style="yellow")
    for laptop in away:
        say(printable_lines(_away(laptop)))
    if not facts.daemon.running:
        say("No daemon runs on this laptop, so no other can meet it. Next: meshtrain up")
    elif not findings and not any(one.state == "linked" for one in facts.laptops):
        say("If another laptop is on and does not appear: meshtrain doctor there, or here with --at its address.")


def _away(laptop: OtherLaptop) -> str:
    where = f" at {laptop.address}" if laptop.address else ""
    if laptop.reach is Reach.REFUSED:
        return f"A machine answers{where}, where {laptop.name} was, and no daemon listens there: is it down?"
    return f"{laptop.name} does not answer{where}. If it is on and in this network: meshtrain doctor there."
