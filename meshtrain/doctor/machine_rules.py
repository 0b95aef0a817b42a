"""What is wrong with this machine or another one, whatever the network: rules from facts to findings."""

from meshtrain.doctor.facts import Facts
from meshtrain.doctor.finding import Fault, Finding

EARLIEST_S = 1_793_491_200.0  # 2026-11-01: this program is not older
APART_S = 30.0  # clocks that are set by the network differ by less than one
UPDATE = "git pull && pip install '.[torch]' && meshtrain down && meshtrain up"


def wrong_clock(facts: Facts) -> list[Finding]:
    """This machine's clock is wrong, or differs from another's."""
    why = "Jobs are listed in a wrong order, and results, which are kept for a time, are deleted too early or too late."
    mend = "sudo timedatectl set-ntp true"
    if facts.now_s < EARLIEST_S:
        what = "The clock of this laptop is wrong: it is of a time before this version of meshtrain was made."
        return [Finding(Fault.CLOCK, what, why, mend)]
    for one in facts.apart():
        if one.dial_failed is not None and "certificate has expired" in one.dial_failed:
            what = f"By the clock of this laptop the key of {one.name}, which is good for 20 years, has expired."
            return [Finding(Fault.CLOCK, what, f"No link to it can be made. {why}", mend)]
    ahead_s = facts.daemon.ahead_s
    if ahead_s is None or abs(ahead_s) < APART_S:
        return []
    behind = "behind" if ahead_s > 0 else "ahead of"
    what = f"The clock of this laptop is at least {_span(ahead_s)} {behind} that of another one, as a job of it tells."
    return [Finding(Fault.CLOCK, what, why, f"{mend}    # on both: one of them is wrong")]


def _span(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if abs(seconds) >= 2 * length:
            return f"{abs(seconds) / length:.0f} {unit}"
    return f"{abs(seconds):.0f} s"


def other_version(facts: Facts) -> list[Finding]:
    """Somebody speaks another wire version (W6): the daemon here, or another laptop."""
    found = []
    daemon = facts.daemon
    if daemon.other_version is not None:
        found.append(
            Finding(
                Fault.VERSION,
                f"The daemon of this laptop speaks wire version {daemon.other_version}, what is installed here "
                f"{facts.own_version}.",
                "It was started before meshtrain was installed anew, and understands no command.",
                "meshtrain down && meshtrain up",
            )
        )
    told = set()
    for one in facts.apart():
        theirs = one.wire_version
        differs = theirs is not None and theirs != facts.own_version
        if one.name in told or not (differs or (one.refused is not None and "speaks wire version" in one.refused)):
            continue
        told.add(one.name)
        behind_here = theirs is not None and theirs > facts.own_version
        if theirs is None and one.refused is not None:
            behind_here = not one.refused.endswith(f"update meshtrain on {one.name}")
        speaks = f"wire version {theirs}" if differs else "another wire version"
        found.append(
            Finding(
                Fault.VERSION,
                f"{one.name} speaks {speaks}, this laptop {facts.own_version}.",
                "Devices of different wire versions make no link.",
                f"{UPDATE}    # in its clone of meshtrain",
                where=None if behind_here else one.name,
            )
        )
    return found


def port_taken(facts: Facts) -> list[Finding]:
    """No daemon runs, and another program has its port."""
    taken = facts.port_taken
    if facts.daemon.running or taken is None:
        return []
    by = taken.program or "another program (sudo ss -ltnp names it)"
    other = taken.free if taken.free is not None else 0
    return [
        Finding(
            Fault.PORT,
            f"Port {taken.port}/tcp of this laptop is taken by {by}.",
            "The daemon cannot start there: stop that program, or let the daemon listen elsewhere.",
            f"meshtrain up --listen 0.0.0.0:{other}",
        )
    ]
