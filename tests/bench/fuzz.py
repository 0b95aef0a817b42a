"""`python -m tests.bench.fuzz`: every decoder of the tests' tables under a coverage-guided fuzzer, for as long as told.

Needs atheris (`pip install -e '.[fuzz]'`; wheels for Linux): inputs that reach new code are kept and
broken further, so this finds what lies behind several checks. Inputs that were kept, and those that broke something,
lie in the corpus folder; the latter are named crash-*, and the command ends with 1.
"""

import argparse
import importlib.util
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, given, settings

if TYPE_CHECKING:
    from tests.wire.fuzzing import Decoder

SEEDS = 50  # valid inputs to begin with
INPUT_BYTES_MAX = 8192


def decoders() -> dict[str, "Decoder"]:
    """The tables by name."""
    from tests.daemon.decoders import DAEMON_DECODERS
    from tests.wire.decoders import WIRE_DECODERS

    return {decoder.name: decoder for decoder in (*WIRE_DECODERS, *DAEMON_DECODERS)}


def valid_inputs(decoder: "Decoder") -> list[bytes]:
    """Some of what the decoder accepts."""
    found: list[bytes] = []

    @settings(
        max_examples=SEEDS,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(decoder.valid)
    def collect(data: bytes) -> None:
        found.append(data)

    collect()
    return found


def fuzz(name: str, corpus: Path, seconds: int) -> None:
    """Does not return: libFuzzer ends the process, with 0 after `seconds` or with another code at the first finding."""
    import atheris

    with atheris.instrument_imports(include=["meshwire", "meshtraind"]):
        decoder = decoders()[name]
    from tests.wire.fuzzing import mutated

    corpus.mkdir(parents=True, exist_ok=True)
    seeds = valid_inputs(decoder)
    for number, data in enumerate(seeds):
        (corpus / f"valid-{number}").write_bytes(data)

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            mutant: bytes = atheris.Mutate(data, max_bytes)
            return mutant
        return mutated(data, rng.choice(seeds), rng)[:max_bytes]

    options = [
        f"-max_total_time={seconds}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-artifact_prefix={corpus}/",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, "-print_final_stats=1", str(corpus)], decoder.survives, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> int:
    """Runs the decoders one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("decoders", nargs="*", help="names from the tables; all unless named")
    parser.add_argument("--seconds", type=int, default=60, help="for each of them")
    parser.add_argument("--corpus", type=Path, default=Path(tempfile.gettempdir()) / "meshtrain-fuzz")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        (name,) = options.decoders
        fuzz(name, options.corpus / name.replace(" ", "-"), options.seconds)
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is missing: pip install -e '.[fuzz]'")
    known = decoders()
    if unknown := set(options.decoders) - known.keys():
        parser.error(f"no decoder is called {', '.join(unknown)}; there are {', '.join(known)}")
    failed = []
    for name in options.decoders or known:
        print(f"\n{name}: {options.seconds} s", flush=True)
        command = [sys.executable, "-m", "tests.bench.fuzz", "--one", name, "--seconds", str(options.seconds)]
        if subprocess.run([*command, "--corpus", str(options.corpus)], check=False).returncode != 0:
            failed.append(name)
    print(f"\nbroken: {', '.join(failed)}; inputs in {options.corpus}" if failed else "\nnothing was found")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
