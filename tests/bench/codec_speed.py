"""What every codec costs one core, beside fp32: `python -m tests.bench.codec_speed` prints the result page."""

import argparse
import os
import platform
import sys

from meshtraind.bench.codec_report import CodecFigures, CodecReport
from meshwire.codecs.registry import parse_codec

COMMAND = "python -m tests.bench.codec_speed > tests/bench/results/codec_speed.md"
LIMIT_S = 0.06  # encode, decode and add 11.7 million values; a step of ResNet-18 took 135 ms there
COLUMNS = (
    "codec",
    "bits a value",
    "error",
    "encode",
    "decode + add",
    "both",
    "x fp32",
    "a round",
    "memory",
    "pays below",
)

SPARSELOCO = "topk:0.015625,chunk=4096,decay=0.95,senders+2bit"  # what --sync sparseloco:H brings
REASONS = {
    "dct": "two 64 x 64 transforms there and two back of all values, and the way back has to be bit-equal everywhere, "
    "so it is no matrix product; the residual needs it on the way there, too",
    "qsgd": "a random number for each value",
    "cocktail": "draws a tenth of the places anew, there and back, and then does what topk does with the values there",
    "powersgd": "products of all matrices with their bases, three there and one back, the latter bit-equal everywhere",
    "int8:sr,block=256": "a random number for each value",
    "terngrad": "a random number for each value, and five of them in a byte",
    "onebit": "what it leaves out follows from the means of both signs, which take a pass over all values first",
    "homomorphic": "each value that is sent goes into three of its cells, and is found there again one by one",
    "lgc": "its leader chooses among 1024 values at a time, and all multiply what is chosen by a basis, there and back",
    SPARSELOCO: "chooses in each 4096 values apart, and then rounds what it has chosen to means",
    "dgc": "sends a quarter of all values at first; from its last stage on it is as fast as topk",
}
"""Of codecs that take longer than LIMIT_S, by text or by family."""


def page(report: CodecReport, load: float) -> str:
    """Markdown. `report` is of one number of values; `load` is the load average before it was measured."""
    (fp32,) = report.fp32.values()
    unit_s = fp32.encode_s + fp32.add_s
    rows = [_row(each, fp32, unit_s) for each in report.figures]
    slow = [each for each in report.figures if each.encode_s + each.add_s > LIMIT_S]
    return "\n".join(
        [
            "# What codecs cost one core",
            "",
            f"`{COMMAND}`",
            "",
            f"{fp32.values / 1e6:g} million values of heavy tails, in segments as a job has them; `powersgd` on the "
            f"shapes of ResNet-18. One thread, its own CPU time, the fastest of {report.runs} runs; "
            f"{platform.machine()}, Python {platform.python_version()}, load average {load:.1f} when it began. "
            "Encoding includes error feedback where there is any. The unit is what fp32 takes, a copy there and an "
            f"addition back: {1e3 * unit_s:.1f} ms. Below "
            "the speed in the last column the bytes that are spared would take longer than the work. A round is what "
            "a member of a job of four computes for it, on the shapes of ResNet-18: its contribution with all that is "
            "kept of it, a quarter of the means and the decoding of the others, or with `gather` all of them; of "
            "codecs whose parts meet whole.",
            "",
            f"| {' | '.join(COLUMNS)} |",
            f"|{'---|' * len(COLUMNS)}",
            *rows,
            "",
            f"## Above {1e3 * LIMIT_S:g} ms",
            "",
            *([f"- `{each.codec}`, {_ms(each.encode_s + each.add_s)}: {_reason(each)}." for each in slow] or ["None."]),
            "",
        ]
    )


def _row(each: CodecFigures, fp32: CodecFigures, unit_s: float) -> str:
    both_s = each.encode_s + each.add_s
    below_mbit = each.pays_below_mbit(fp32)
    speed = "any speed" if below_mbit is None else f"{below_mbit / 1000:.3g} Gbit/s" if below_mbit else "never"
    cells = (
        f"`{each.codec}`",
        f"{each.bits:.3f}",
        f"{each.error:.4f}",
        _ms(each.encode_s),
        _ms(each.add_s),
        _ms(both_s),
        f"{both_s / unit_s:.1f}",
        "" if each.round_s is None else _ms(each.round_s),
        f"{each.memory_bytes / 2**20:.1f} MiB",
        speed,
    )
    return f"| {' | '.join(cells)} |"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _reason(each: CodecFigures) -> str:
    return REASONS.get(each.codec) or REASONS.get(parse_codec(each.codec).name, "no reason is known: a fault")


def main() -> None:
    """Prints the page; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=float, default=11.7e6)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read by numpy, which is imported only now
    from meshtraind.bench.codecs import all_codecs, measure

    def progress(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    load = os.getloadavg()[0]
    print(page(measure([*all_codecs(), SPARSELOCO], [int(options.values)], options.runs, progress), load))


if __name__ == "__main__":
    main()
