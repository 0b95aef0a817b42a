"""What codecs and rounds cost this processor: measured once, by the daemon's benchmarks; kept in the data folder."""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from meshtrain.cli.ui.errors import CliError
from meshtrain.cli.ui.progress import Stages
from meshtrain.datadir import data_folder
from meshwire import limits
from meshwire.codecs.registry import CodecSpec, parse_codec
from meshwire.planning.daemon_work import EXACT, FEW_VALUES, MANY_VALUES, MeasuredRounds, fitted
from meshwire.planning.kept_prices import NAME, KeptPrice, KeptPrices, KeptRounds
from meshwire.planning.network import USUAL_WORK, DaemonWork
from meshwire.planning.price import CodecPrice

MODULE = "meshtraind.bench"  # a process of its own: the command imports nothing of the daemon
SEGMENTS = 4  # full ones
VALUES = SEGMENTS * limits.SEGMENT_VALUES_MAX
SHORT_VALUES = 1024  # of a short one: what it takes is mostly not for its values
RUNS = 5
ROUNDS = 15  # of which the median counts
TIMEOUT_S = 120.0
CPUINFO = Path("/proc/cpuinfo")

_Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class ProcessorPrices:
    """What predictions take from this processor.

    Attributes:
        codecs: by their text.
        work: what else a daemon does.
    """

    codecs: Mapping[str, CodecPrice]
    work: DaemonWork = USUAL_WORK


def processor_prices(codecs: Sequence[str], data_dir: Path | None, stages: Stages) -> ProcessorPrices:
    """What these codecs, and daemons, cost this processor. Measures what is not known yet, and keeps it.

    Raises CliError when that fails.
    """
    file = data_folder(data_dir) / NAME
    kept = _read(file)
    wanted = list(dict.fromkeys([EXACT, *codecs]))
    missing = [codec for codec in wanted if codec not in kept.prices]
    rounds = [codec for codec in wanted if codec not in kept.rounds and not parse_codec(codec).family.transforms]
    if missing or rounds:
        stages.show(f"measuring what {len({*missing, *rounds})} codecs cost on this processor; it is kept")
        priced = {**kept.prices, **_measured(missing)}
        kept = kept.model_copy(update={"prices": priced, "rounds": {**kept.rounds, **_measured_rounds(rounds)}})
        _write(file, kept)
    prices = {
        codec: CodecPrice(price.encode_s, price.add_s, price.filled, price.encode_segment_s, price.add_segment_s)
        for codec, price in kept.prices.items()
        if codec in wanted
    }
    measured = MeasuredRounds(
        {codec: each.few_s for codec, each in kept.rounds.items()},
        {codec: each.many_s for codec, each in kept.rounds.items()},
    )
    work, fitting = fitted(prices, measured)
    return ProcessorPrices(fitting, work)


def _measured(codecs: Sequence[str]) -> dict[str, KeptPrice]:
    rows = _bench("codecs", codecs, (SHORT_VALUES, VALUES), RUNS, "--no-rounds")
    return {codec: _price(parse_codec(codec), rows[codec, SHORT_VALUES], rows[codec, VALUES]) for codec in codecs}


def _measured_rounds(codecs: Sequence[str]) -> dict[str, KeptRounds]:
    rows = _bench("rounds", codecs, (FEW_VALUES, MANY_VALUES), ROUNDS)

    def took_s(codec: str, values: int) -> float:
        return rows[codec, values]["processor_s"]

    return {codec: KeptRounds(few_s=took_s(codec, FEW_VALUES), many_s=took_s(codec, MANY_VALUES)) for codec in codecs}


def _bench(
    what: str, codecs: Sequence[str], counts: tuple[int, ...], runs: int, *options: str
) -> dict[tuple[str, int], _Row]:
    """A benchmark's rows, by codec and number of values. Raises CliError."""
    if not codecs:
        return {}
    chosen = [argument for codec in codecs for argument in ("--codec", codec)]
    sizes = ["--values", ",".join(map(str, counts)), "--runs", str(runs), "--json"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE, what, *options, *sizes, *chosen],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CliError(
            f"timing {len(codecs)} codecs took more than {TIMEOUT_S:.0f} s", "meshtrain bench codecs, to see which"
        ) from None
    if done.returncode:
        told = done.stderr.strip().splitlines()
        raise CliError(f"timing the codecs failed: {told[-1] if told else 'no word'}", "meshtrain bench codecs")
    return {(row["codec"], row["values"]): row for row in json.loads(done.stdout)[what]}


def _price(spec: CodecSpec, short: dict[str, float], full: dict[str, float]) -> KeptPrice:
    """From a short segment and some full ones: a + b * values. Codecs of whole matrices have no segments."""

    def split(name: str) -> tuple[float, float]:
        if spec.family.transforms:
            return 0.0, full[name] / VALUES
        of_value = max(0.0, full[name] / SEGMENTS - short[name]) / (limits.SEGMENT_VALUES_MAX - SHORT_VALUES)
        return max(0.0, short[name] - of_value * SHORT_VALUES), of_value

    encode_segment_s, encode_s = split("encode_s")
    add_segment_s, add_s = split("add_s")
    return KeptPrice(
        encode_s=encode_s,
        add_s=add_s,
        encode_segment_s=encode_segment_s,
        add_segment_s=add_segment_s,
        filled=_filled(spec, int(full["encoded_bytes"])),
    )


def _filled(spec: CodecSpec, encoded_bytes: int) -> float:
    """What values with heavy tails take of the largest size that their segments can have: 1 where sizes are fixed."""
    if spec.fixed or spec.family.transforms:
        return 1.0
    return min(1.0, encoded_bytes / (SEGMENTS * spec.segment_bytes_max(limits.SEGMENT_VALUES_MAX)))


def _read(file: Path) -> KeptPrices:
    processor, software = processor_model(), _software()
    with suppress(OSError, ValidationError):  # there is none yet, or one that is broken: it is made anew
        kept = KeptPrices.model_validate_json(file.read_bytes())
        if (kept.processor, kept.software) == (processor, software):
            return kept
    return KeptPrices(processor=processor, software=software, prices={}, rounds={})


def _write(file: Path, kept: KeptPrices) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(kept.model_dump_json(indent=1), encoding="utf-8")
    part.replace(file)


def processor_model() -> str:
    """The processor's model, where the system tells it: figures of another one do not count."""
    with suppress(OSError):  # not Linux
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"{platform.machine()} {platform.processor()}".strip()


def _software() -> str:
    """The versions that arithmetic depends on: figures of others do not count."""
    found = [f"python {platform.python_version()}"]
    for name in ("meshtraind", "numpy"):
        with suppress(PackageNotFoundError):  # from a source tree that is not installed
            found.append(f"{name} {version(name)}")
    return ", ".join(found)
