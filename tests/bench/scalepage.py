"""The page of `tests.bench.scale`: how each cost grows with the number of peers, and what "
"follows for more of them."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from meshwire.planning.network import MESSAGE_S
from tests.bench.journal import Journal
from tests.sim.clustertraffic import CHUNK, REPORT

PEERS = (4, 8, 16, 32, 64)
SYNCS = ("bsp", "ssp:2", "local:8")
FITTED_FROM = 8  # peers: with fewer what is constant shows
NEAR = 0.25  # so far from a whole exponent a cost still counts as growing by it
EXPECTED = {
    "rounds": (
        "bind and seal cost each peer m-1 messages of a size that does not depend on m, a "
        "report as many a second; with "
        "a bound and one slow peer a call and a null at most m-1 each, without one none. So "
        "control is m for each peer "
        "and m^2 for the mesh. A round takes a step and two or three of the largest delays, "
        "whatever m is. Processor "
        "time of a peer grows as m, if nothing looks at all members for each message; what it "
        "keeps grows as m, too, "
        "for the ledger and the links."
    ),
    "losses": (
        "propose, promised and enter are m messages of the whole mesh, entered m^2. A proposal "
        "lists all members, so "
        "its bytes are m^2, and so are those of the words where everybody is that a peer hears "
        "which comes back. The "
        "others go on after a round trip or two, below 1 s; two or three changes bring it back."
    ),
}

TLS_TCP_IP_BYTES = 74  # around each message: a record's 22, and 52 of TCP with timestamps and IPv4
CELL_MBIT = 150.0  # goodput of a home's access point
CROSSINGS = 2  # of the air, from station to access point to station
FRAME_S = 0.2e-3  # a small frame alone, with preamble, backoff and acknowledgement, whatever the rate (802.11n)
FRAME_WORK_S = MESSAGE_S  # of a daemon, with TLS
RATES = (0.1, 1.0, 10.0)  # rounds a second
FAR = 1000
PAGE_COLUMNS = 115


def growth(by_peers: Mapping[int, float]) -> float | None:
    """The exponent p of (m-1)^p that fits best by least squares of logarithms; None where there is nothing."""
    points = [(math.log(m - 1), math.log(value)) for m, value in by_peers.items() if m >= FITTED_FROM and value > 0]
    if len(points) < 2:
        return None
    middle = sum(x for x, _ in points) / len(points)
    height = sum(y for _, y in points) / len(points)
    return sum((x - middle) * (y - height) for x, y in points) / sum((x - middle) ** 2 for x, _ in points)


def named(exponent: float | None) -> str:
    """For people."""
    if exponent is None:
        return "none"
    for whole, name in enumerate(("constant", "m", "m^2", "m^3")):
        if abs(exponent - whole) <= NEAR:
            return name
    return f"m^{exponent:.1f}"


@dataclass(frozen=True, slots=True)
class PairCost:
    """What one peer says to one other.

    Attributes:
        messages, frame_bytes: for each round.
        messages_s, bytes_s: for each second, whatever rounds do.
    """

    messages: float
    frame_bytes: float
    messages_s: float
    bytes_s: float

    def peers_by_bytes(self, rounds_s: float, mbit: float = CELL_MBIT) -> int:
        """With how many the air carries nothing else, where it carries so many bits of any frames."""
        pair_bytes_s = rounds_s * self._carried(self.frame_bytes, self.messages)
        pair_bytes_s += self._carried(self.bytes_s, self.messages_s)
        return _peers(mbit * 1e6 / 8 / CROSSINGS / pair_bytes_s)

    def peers_by_frames(self, rounds_s: float) -> int:
        """The same where each message is a frame of its own, which takes its time whatever is in it."""
        return _peers(1 / FRAME_S / CROSSINGS / (rounds_s * self.messages + self.messages_s))

    @staticmethod
    def _carried(frame_bytes: float, messages: float) -> float:
        return frame_bytes + TLS_TCP_IP_BYTES * messages


def _peers(pairs: float) -> int:
    """The largest m with m(m-1) ordered pairs."""
    return int((1 + math.sqrt(1 + 4 * pairs)) / 2)


class Found:
    """What was measured, by what is asked of it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def by_peers(self, case: str, figure: str) -> dict[int, float]:
        """The median of a figure, of each case that is measured; 0 where a case has none of it."""
        return {
            peers: median(self._journal.figures(f"{case}{peers} peers", figure) or [0.0])
            for peers in PEERS
            if self._journal.repeats(f"{case}{peers} peers")
        }

    def kinds(self, case: str, head: str) -> list[str]:
        """Of messages that any size of a case has sent."""
        entries = [entry for peers in PEERS for entry in self._journal.of(f"{case}{peers} peers")]
        names = {name.removeprefix(head) for entry in entries for name in entry.figures if name.startswith(head)}
        return sorted(names)

    def pair(self, sync: str) -> PairCost:
        """With the most peers, divided by their number."""
        peers = PEERS[-1]
        totals = {REPORT: (0.0, 0.0), "": (0.0, 0.0)}
        for kind in self.kinds(f"{sync}, ", "messages "):
            if kind == CHUNK:
                continue
            messages = self.by_peers(f"{sync}, ", f"messages {kind}")[peers] / (peers - 1)
            frame_bytes = messages * self.by_peers(f"{sync}, ", f"bytes {kind}")[peers]
            place = REPORT if kind == REPORT else ""
            totals[place] = totals[place][0] + messages, totals[place][1] + frame_bytes
        (beats_s,), (beat_bytes,) = (self._journal.figures("heartbeats", name) for name in ("messages_s", "bytes"))
        reports = totals[REPORT]
        return PairCost(*totals[""], reports[0] + beats_s, reports[1] + beats_s * beat_bytes)


def page(journal: Journal) -> str:
    """All of it."""
    found = Found(journal)
    lines = (*_head(journal), *_rounds(found), *_totals(found), *_losses(found), *_next(found))
    return "\n".join(line if line.startswith("|") else _wrapped(line) for line in lines)


def _wrapped(line: str) -> str:
    """A paragraph, or one point of a list."""
    return textwrap.fill(line, PAGE_COLUMNS, subsequent_indent="  " * line.startswith("- "))


def _head(journal: Journal) -> Iterator[str]:
    conditions = journal.of(f"bsp, {PEERS[-1]} peers")[-1].conditions
    yield from (
        "# What a job costs each of many peers",
        "",
        "```",
        "python -m tests.bench.scale",
        "```",
        "",
        "Daemons of the simulator: the shells that ship, in virtual time, all linked with each "
        "other; each message takes 1, "
        "5 or 20 ms. Steps of 0.5 s that differ by 5 %; with `ssp:2` one peer takes three times "
        "as long, with `local:8` a "
        "step is a period. `m` is the number of peers. Counts and virtual seconds repeat to the "
        "letter; processor time "
        f"is one core's of the machine of all these pages (load {conditions.load:g} when it began).",
        "",
        f"**Expected before it ran, of rounds:** {EXPECTED['rounds']}",
        "",
        f"**Of a loss:** {EXPECTED['losses']}",
        "",
    )


def _rounds(found: Found) -> Iterator[str]:
    yield from (
        f"**Found.** {FOUND}",
        "",
        "## Messages of one peer in a round",
        "",
        "Sent on all its links together; reports a second instead. *bytes* is one message as a "
        "frame, header included, with "
        f"{PEERS[-1]} peers. *grows as* is the power of m-1 that fits from {FITTED_FROM} peers on.",
        "",
        _row(["", "message", *(f"m={m}" for m in PEERS), "grows as", "bytes", "which grow as"]),
        _row(["---"] * (len(PEERS) + 5)),
    )
    for sync in SYNCS:
        for kind in found.kinds(f"{sync}, ", "messages "):
            counts = found.by_peers(f"{sync}, ", f"messages {kind}")
            sizes = {m: size for m, size in found.by_peers(f"{sync}, ", f"bytes {kind}").items() if size}
            yield _row(
                [
                    f"`{sync}`",
                    "chunk (headers; each with each)" if kind == CHUNK else f"{kind}{' a second' * (kind == REPORT)}",
                    *_shown(counts, 1),
                    named(growth(counts)),
                    f"{sizes[max(sizes)]:.0f}" if sizes else "",
                    named(growth(sizes)),
                ]
            )
    yield ""


TOTALS = (
    ("round_s", "virtual seconds a round", 2),
    ("deciding_ms", "deciding, ms of a core a round", 2),
    ("messages_ms", "encoding and decoding messages, ms of a core a round", 2),
    ("simulated_ms", "all that the simulator computes for it, ms of a core a round", 1),
)


def _totals(found: Found) -> Iterator[str]:
    yield from (
        "## Each peer's time",
        "",
        "*deciding* is the round machine with schedule and samples, *messages* msgpack and its "
        "checks, beside which a real daemon pays for TLS and sockets: about 40 us for a frame at each end. What "
        "the simulator computes is mostly its own. Garbage collection is left out, for here all peers share one "
        "heap. Memory is not measured.",
        "",
        _row(["", "a peer's", *(f"m={m}" for m in PEERS), "grows as"]),
        _row(["---"] * (len(PEERS) + 3)),
    )
    for sync in SYNCS:
        for figure, label, digits in TOTALS:
            values = found.by_peers(f"{sync}, ", figure)
            yield _row([f"`{sync}`", label, *_shown(values, digits), named(growth(values))])
    yield ""


def _losses(found: Found) -> Iterator[str]:
    yield from (
        "## One of them is killed, and comes back",
        "",
        "`ssp:2`; messages of all peers together, but what rounds and reports cost anyway. The "
        "simulator's state is a word "
        "long: what a joiner's model costs is its size, once, from one donor (J1).",
        "",
        _row(["", *(f"m={m}" for m in PEERS), "grows as", "KB with most peers", "which grow as"]),
        _row(["---"] * (len(PEERS) + 4)),
    )
    for figure, label in (
        ("loss_s", "killed, until all others go on, virtual s"),
        ("loss_round_s", "until their next round, virtual s"),
        ("return_s", "started again, until it computes, virtual s"),
        ("return_generations", "changes of generation meanwhile"),
    ):
        values = found.by_peers("kill, ", figure)
        yield _row([label, *_shown(values, 2), named(growth(values)), "", ""])
    for what in ("loss", "return"):
        for kind in found.kinds("kill, ", f"{what} messages "):
            counts = found.by_peers("kill, ", f"{what} messages {kind}")
            sizes = found.by_peers("kill, ", f"{what} bytes {kind}")
            yield _row(
                [
                    f"{what}: {kind}",
                    *_shown(counts, 0),
                    named(growth(counts)),
                    f"{sizes[max(sizes)] / 1000:.1f}",
                    named(growth(sizes)),
                ]
            )
    yield ""


def _next(found: Found) -> Iterator[str]:
    pair = found.pair("ssp:2")
    yield from (
        "## What breaks next",
        "",
        f"In a round of `ssp:2` a peer says {pair.messages:.1f} messages of "
        f"{pair.frame_bytes:.0f} bytes in all to each other "
        f"one, and {pair.messages_s:.1f} of {pair.bytes_s:.0f} bytes a second whatever rounds "
        f"do: reports and heartbeats. "
        f"With {TLS_TCP_IP_BYTES} bytes around each, and {CROSSINGS} crossings of the air of a "
        f"home whose access point "
        f"carries {CELL_MBIT:g} Mbit/s, control alone fills that with",
        "",
        _row(["rounds a second", "peers, by bytes", f"peers, if each message is a frame of {FRAME_S * 1e3:g} ms"]),
        _row(["---"] * 3),
    )
    for rate in RATES:
        yield _row([f"{rate:g}", f"{pair.peers_by_bytes(rate)}", f"{pair.peers_by_frames(rate)}"])
    others = FAR - 1
    peers = PEERS[-1]
    of_peer_s = sum(found.by_peers("ssp:2, ", figure)[peers] for figure in ("deciding_ms", "messages_ms")) / 1e3
    frames = 2 * others * (pair.messages + pair.messages_s)  # heard and said
    core = of_peer_s * others / (peers - 1) + frames * FRAME_WORK_S
    round_mb = others * (pair.frame_bytes + TLS_TCP_IP_BYTES * pair.messages) / 1e6
    yield from (
        "",
        "The second is what WiFi does where it packs nothing together; the truth lies between. "
        "With more, rounds are slower "
        "and the next thing breaks:",
        "",
        *BREAKS,
        f"With {FAR} peers in one group each would hold {others} TLS links ({FAR * others // 2:,} in the "
        f"mesh), hear {others * pair.messages:,.0f} messages in a round ({round_mb:.2f} MB) and "
        f"{others * pair.messages_s:,.0f} a second besides: at a round a second {core:.1f} of a core by these "
        f"figures and {FRAME_WORK_S * 1e6:.0f} us for a frame at each end.",
        "",
        *CHANGES,
    )


FOUND = (
    "All grows as was expected; calls stay below, for who hears one does not call. What was not expected: a round to "
    "which a rank above 52 had contributed could not be told to a learner, whose message took the bitmap for a count "
    "(of at most 2^53), so 54 peers completed no round. And two wastes: a daemon encoded what goes to all once for "
    "each link, 5 us each, and whoever made a link told all others where all devices are: m^2 messages of each peer of "
    "a mesh that comes up, each of which lists up to m. All three are mended. At a round a second, reports and "
    "heartbeats are more bytes than what rounds say."
)
BREAKS = (
    "- **The air, first.** What a round's data are crosses it twice: a dense all-reduce of N "
    "bytes is 2(m-1)N of the mesh. "
    "Only sparse codecs and long periods leave so little that control is what is left.",
    "- **Latency.** A ring takes 2(m-1) steps one after the other: 126 with 64 peers, 2.5 ms "
    "each way are 0.3 s a round. "
    "A butterfly takes 12.",
    "- **Devices that come and go.** A job loses one of m laptops m times as often as one: if "
    "each lid closes every two "
    "hours, with 64 every two minutes, with 1000 every 7 s; each costs the changes above, in "
    "which no round is complete.",
    "- **64 members of all times.** A chunk names its contributors in a u64, a bit for each rank, and a rank is "
    "never used again (`limits.MEMBERS_MAX`): a job in which 64 devices have ever been takes no other one, however "
    "few are there.",
    "- **Lists of all members.** Proposals, words where a device is, promises and deals of "
    "samples list all: their bytes are m "
    "for each receiver. `--shares speed` puts m sizes into a bind.",
    "- **Links.** Each with each, over TLS: m-1 descriptors a daemon, of 256 on macOS; 64 dials "
    "at once; 256 pinned devices "
    "(`limits.PEERS_MAX`), 128 of them by introductions. Each says two heartbeats in 1.25 s.",
    "- **mDNS** announces each device to all, at the air's slowest rate, and 256 strangers are remembered "
    "(`limits.DEVICES_SEEN_MAX`).",
    "- **Hashes** of bases are m-1 messages of each peer every `--hash-every` rounds; none "
    "unless asked for. Barriers as many.",
    "",
)
CHANGES = (
    "What would have to change, in this order; none of it is built: groups of at most 64 with a "
    "bitmap, binds, seals and "
    "generations of their own, so that a round's messages are of the group and not of the mesh "
    "(Moshpit: each round other "
    "groups, and after d rounds of a full grid the mean of all); ranks that belong to a group's "
    "generation and are used "
    "again; within a group binds up and down a tree, or along the ring with the data, m-1 "
    "messages of all together instead of "
    "m(m-1), at the price of a longer way; reports and heartbeats to neighbours alone; links to "
    "the own group and a few others. Of what a job counts, the bitmap and the ranks would be the group's; which "
    "samples count is decided in one generation of the whole job (X3), so either each group deals a part of the epoch "
    "by itself, or what groups have counted is summed with the values, and a group that is lost takes back its own.",
    "",
    "A job takes 64 devices for these reasons, and so does the rest of the design: at a round a second some 20 to 80 "
    "fill the air of one home with what they say beside their data.",
    "",
)


def _shown(values: Mapping[int, float], digits: int) -> Iterator[str]:
    """By peers; a dash where nothing is measured."""
    for peers in PEERS:
        yield f"{values[peers]:.{digits}f}" if peers in values else "-"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
