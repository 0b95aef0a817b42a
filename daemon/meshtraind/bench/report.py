"""The figures of one comparison: only ratios within one run mean anything, the machine is shared."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from meshtraind.bench.settings import Settings


@dataclass(frozen=True, slots=True)
class Series:
    """What the rounds of meshtrain, or of the other program, took; figures for the table are made of it.

    Attributes:
        seconds: from the common start to the end of the last rank, by round.
        cpu_s: of the processes of all ranks together, by round.
    """

    seconds: tuple[float, ...]
    cpu_s: tuple[float, ...]

    def bus_mbit(self, settings: Settings) -> float:
        """Median bus bandwidth per rank, 2(m-1)/m * N / time, in Mbit/s."""
        return settings.bus_bytes * 8e-6 / median(self.seconds)

    def cpu_s_per_gb(self, settings: Settings) -> float:
        """Median CPU seconds of a rank per 10^9 bytes that it moves (sends, and receives as many)."""
        return median(self.cpu_s) / (settings.peers * settings.bus_bytes * 1e-9)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the peer process that took most, in bytes.

    Attributes:
        before: resident with everything imported and linked, before there was a vector.
        slots: the learner's shared memory: one raw and one result slot (M1, s=0).
        encoded_round: the encoded bytes of one round, which are kept until it is committed (M1, G5).
        encoded_rounds: how many such areas there were.
        peak: the largest resident size, shared pages included.
    """

    before: int
    slots: int
    encoded_round: int
    encoded_rounds: int
    peak: int

    @property
    def beyond(self) -> int:
        """What the collective took beyond slots and retained rounds."""
        return self.peak - self.before - self.slots - self.encoded_round * self.encoded_rounds


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed of meshtrain over that of gloo, round by round; above 1 meshtrain is faster."""

    rounds: tuple[float, ...]

    @classmethod
    def of(cls, meshtrain: Sequence[float], gloo: Sequence[float]) -> "Ratio":
        """Pairs round k of one side with round k of the other, which ran right after it."""
        return cls(tuple(theirs / ours for ours, theirs in zip(meshtrain, gloo, strict=True)))

    @property
    def median(self) -> float:
        return median(self.rounds)


@dataclass(frozen=True, slots=True)
class Report:
    """What `meshtrain bench allreduce` prints. Results were checked before anything was timed."""

    settings: Settings
    meshtrain: Series
    gloo: Series
    memory: Memory

    @property
    def ratio(self) -> Ratio:
        return Ratio.of(self.meshtrain.seconds, self.gloo.seconds)

    def as_json(self) -> dict[str, object]:
        """Units end the names; bus bandwidth per rank."""
        settings, ratio = self.settings, self.ratio
        result: dict[str, object] = {
            "peers": settings.peers,
            "mb": settings.mb,
            "codec": settings.codec,
            "topology": settings.topology,
            "tls": settings.tls,
            "ratio_median": round(ratio.median, 4),
            "ratio_min": round(min(ratio.rounds), 4),
            "ratio_max": round(max(ratio.rounds), 4),
            "ratios": [round(value, 4) for value in ratio.rounds],
        }
        for name, series in (("meshtrain", self.meshtrain), ("gloo", self.gloo)):
            result[name] = {
                "seconds": [round(value, 6) for value in series.seconds],
                "bus_mbit": round(series.bus_mbit(settings), 1),
                "cpu_s_per_gb": round(series.cpu_s_per_gb(settings), 4),
            }
        result["memory"] = {
            "before_bytes": self.memory.before,
            "slots_bytes": self.memory.slots,
            "encoded_round_bytes": self.memory.encoded_round,
            "encoded_rounds": self.memory.encoded_rounds,
            "peak_bytes": self.memory.peak,
            "beyond_bytes": self.memory.beyond,
        }
        return result

    def as_text(self) -> str:
        """The report as people see it: a table of both sides, and two lines about it."""
        settings, ratio, memory = self.settings, self.ratio, self.memory
        security = "TLS" if settings.tls else "no TLS"
        how = settings.codec if settings.topology is None else f"{settings.codec}, {settings.topology}"
        lines = [
            f"all-reduce of {settings.mb} MB of fp32 over {settings.peers} peers, {how}, {security}, "
            f"{settings.rounds} rounds of each side in turn; results checked, bit-equal on all peers",
            f"{'':<12}{'median':>12}{'fastest':>12}{'slowest':>12}{'bus per rank':>18}{'CPU':>14}",
        ]
        for name, series in (("meshtrain", self.meshtrain), ("gloo fp32", self.gloo)):
            times = "".join(
                f"{value * 1000:>9.1f} ms"
                for value in (median(series.seconds), min(series.seconds), max(series.seconds))
            )
            bus, cpu = f"{series.bus_mbit(settings):.0f} Mbit/s", f"{series.cpu_s_per_gb(settings):.2f} s/GB"
            lines.append(f"{name:<12}{times}{bus:>18}{cpu:>14}")
        lines.append(
            f"speed meshtrain / gloo, by round: median {ratio.median:.2f} "
            f"[{min(ratio.rounds):.2f} to {max(ratio.rounds):.2f}]"
        )
        lines.append(
            f"memory of a peer: peak {_mib(memory.peak)} = {_mib(memory.before)} before + {_mib(memory.slots)} slots + "
            f"{memory.encoded_rounds} x {_mib(memory.encoded_round)} retained + {_mib(memory.beyond)} beyond"
        )
        return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
