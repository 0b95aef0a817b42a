"""The figures of codecs, as text and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """What one codec costs and saves for one vector of values, in one thread.

    Attributes:
        encoded_bytes: exact, all segments.
        encode_s: all segments, with what stays behind for error feedback if the codec has it.
        add_s: decoding all segments and adding them to others.
        error: norm of what is lost in one encoding, as a part of the values' norm.
        round_s: what a member of a job of four computes for a round, contribution and sums (`job_round.py`); None where
            it was not measured.
        memory_bytes: the most that the codec held at once beside values and encoded bytes.
    """

    codec: str
    values: int
    encoded_bytes: int
    encode_s: float
    add_s: float
    error: float
    memory_bytes: int
    round_s: float | None = None

    @property
    def bits(self) -> float:
        """How many bits of an encoded vector there are for each value."""
        return 8 * self.encoded_bytes / self.values

    @property
    def encode_gb_s(self) -> float:
        """10^9 bytes of fp32 values encoded per second."""
        return FP32_BYTES * 1e-9 * self.values / self.encode_s

    @property
    def add_gb_s(self) -> float:
        """10^9 bytes of fp32 values decoded and added per second."""
        return FP32_BYTES * 1e-9 * self.values / self.add_s

    def pays_below_mbit(self, fp32: "CodecFigures") -> float | None:
        """The link speed at which the saved bytes take as long as the work beyond that of fp32, in Mbit/s.

        None if it pays at any speed, for it works no longer; 0 if it never does, for it saves nothing.
        """
        saved_bytes = fp32.encoded_bytes - self.encoded_bytes
        work_s = self.encode_s + self.add_s - fp32.encode_s - fp32.add_s
        if saved_bytes <= 0:
            return 0.0
        return saved_bytes * 8e-6 / work_s if work_s > 0 else None


@dataclass(frozen=True, slots=True)
class CodecReport:
    """What `meshtrain bench codecs` prints.

    Attributes:
        runs: timed runs, of which the fastest counts.
        fp32: for each number of values, what all others are compared with.
        figures: in the order in which they were measured.
    """

    runs: int
    fp32: dict[int, CodecFigures]
    figures: Sequence[CodecFigures]

    def as_json(self) -> dict[str, object]:
        """The report as plain values; units end their names. `pays_below_mbit` is null if it pays at any speed."""
        return {
            "runs": self.runs,
            "codecs": [
                {
                    "codec": each.codec,
                    "values": each.values,
                    "encoded_bytes": each.encoded_bytes,
                    "bits_per_value": round(each.bits, 4),
                    "encode_gb_s": round(each.encode_gb_s, 3),
                    "add_gb_s": round(each.add_gb_s, 3),
                    "encode_s": round(each.encode_s, 6),
                    "add_s": round(each.add_s, 6),
                    "round_s": None if each.round_s is None else round(each.round_s, 6),
                    "relative_error": float(f"{each.error:.4g}"),
                    "memory_bytes": each.memory_bytes,
                    "pays_below_mbit": _rounded(each.pays_below_mbit(self.fp32[each.values])),
                }
                for each in self.figures
            ],
        }

    def as_text(self) -> str:
        """A table for each number of values."""
        lines = []
        for values, fp32 in self.fp32.items():
            lines += [
                f"{values / 1e6:g} million values of heavy tails, one thread, the fastest of {self.runs} runs; "
                "encoding includes error feedback where there is any",
                f"{'codec':<26}{'bits':>8}{'encode':>18}{'decode + add':>18}{'round of 4':>12}{'error':>9}"
                f"{'memory':>10}  pays below",
            ]
            for each in self.figures:
                if each.values != values:
                    continue
                encode, add = (
                    f"{1e3 * seconds:>8.1f} ms {speed:>6.2f}"
                    for seconds, speed in ((each.encode_s, each.encode_gb_s), (each.add_s, each.add_gb_s))
                )
                of_round = "" if each.round_s is None else f"{1e3 * each.round_s:.1f} ms"
                lines.append(
                    f"{each.codec:<26}{each.bits:>8.3f}{encode:>18}{add:>18}{of_round:>12}{each.error:>9.4f}"
                    f"{each.memory_bytes / 2**20:>6.1f} MiB  {_speed(each.pays_below_mbit(fp32))}"
                )
        return "\n".join([*lines, "speeds beside the times: 10^9 bytes of fp32 values per second"])


def _rounded(speed_mbit: float | None) -> float | None:
    return None if speed_mbit is None else round(speed_mbit, 1)


def _speed(speed_mbit: float | None) -> str:
    if speed_mbit is None:
        return "any speed"
    return f"{speed_mbit / 1000:.3g} Gbit/s" if speed_mbit else "never"
