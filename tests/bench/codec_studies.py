"""`python -m tests.bench.codec_studies STUDY ...`: questions about codecs, answered on a few seeds in one process.

Each study says what was expected before it ran. What has been trained is a line of `results/codec_studies.jsonl` at
once: after ctrl-C, or when `--minutes` are over, the same command goes on behind it. `--page` writes
`results/codec_studies.md` from the file. Losses and bytes do not depend on what else the machine does.

    python -m tests.bench.codec_studies all          # what is missing, about 55 minutes of one core for all
    python -m tests.bench.codec_studies table --minutes 5
    python -m tests.bench.codec_studies --page
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from meshtraind.codecs.base import CodecError
from meshwire.codecs.registry import FAMILIES
from tests.bench.codec_seeds import train
from tests.bench.journal import say
from tests.bench.kept_lines import KeptLines, KeptLinesError

RESULTS = Path(__file__).parent / "results"
BASELINE = "fp32"
OF_SGD = "dgc"  # which takes over SGD's momentum
NOISE_FACTOR = 2.0  # standard errors of the difference of two means
COLUMNS = ("codec", "loss", "seeds", "- {}", "noise", "fp32 / vector", "kB a member and step")


@dataclass(frozen=True)
class Study:
    """A question, and what is trained for an answer.

    Attributes:
        title: for people.
        about: what is trained, and why.
        expected: before it ran.
        task: a name of `codec_tasks.TASKS`.
        ways: CODEC[@SYNC] as `codec_seeds` takes it; the first one is what the others are compared with.
        rate: the learning rate; None: the task's own.
        found: afterwards, beside what was expected.
    """

    name: str
    title: str
    about: str
    expected: str
    task: str
    ways: tuple[str, ...]
    members: int
    steps: int
    seeds: int
    rate: float | None = None
    found: str = ""


def _periods(members: int, ratio: str, found: str = "") -> Study:
    return Study(
        f"periods-{members}",
        f"Rounds of eight local steps, {members} members",
        "The small GPT, AdamW at 2e-3, 15 rounds; the second row of SparseLoCo has a ratio by which a member sends "
        "about as much as with `twobit`.",
        "MuLoCo is ahead of DiLoCo and behind a plain mean of weights, as with four members; with more members local "
        "batches are smaller, and all modes lose. SparseLoCo gains by more bytes, and is then at least as good as "
        "MuLoCo.",
        "gpt",
        (
            *("twobit@8", "@muloco:8", "twobit@diloco:8", "@sparseloco:8"),
            f"topk:{ratio},chunk=4096,senders,decay=0.95+2bit@sparseloco:8",
        ),
        members,
        120,
        2,
        found=found,
    )


def _averages(name: str, task: str, title: str, about: str, steps: int, found: str = "") -> Study:
    return Study(
        name,
        f"Averages of models, {title}",
        f"{about} Four members; `sma:H` as `--sync` has it, with its momentum of 0.5, or another.",
        "With momentum 0.9, CROSSBOW's, the central model moves by 4/4.1 of the mean of local steps, by 4/5 without, "
        "and it follows some rounds later: behind local:8 after so few rounds, most of all without momentum. With a "
        "round after each step it is near to bsp. What CROSSBOW gains, small batches whose noise the average takes "
        "out, shows late in a training, not here.",
        task,
        (
            BASELINE,
            *("fp32@8", "fp32@sma:8", "fp32@sma:8,momentum=0", "fp32@sma:8,momentum=0.9"),
            *("fp32@sma:1", "fp32@sma:1,momentum=0.9", "fp32@diloco:8"),
        ),
        4,
        steps,
        3,
        found=found,
    )


STUDIES = (
    Study(
        "brackets",
        "A task that codecs were not tuned on: an LSTM that closes brackets, AdamW",
        "Rows of 32 brackets of four kinds, the next one to be told; 124,000 parameters, AdamW at 5e-3, 32 rows a "
        "step.",
        "What rounds every value (fp16, bf16, int8, int4, nf4, qsgd) ends within the noise of fp32. terngrad is a "
        "little behind, powersgd hardly: gates are few large matrices. What waits in residuals loses most under "
        "AdamW, as with the GPT: onebit, topk, sidco, threshold, lgc, dct, and most of all randomk and cocktail, "
        "which wait however large a value is. Dion, of the same rank and bytes as powersgd, is not behind it.",
        "brackets",
        (
            BASELINE,
            *(name for name in FAMILIES if name not in (BASELINE, OF_SGD)),
            "onebit:momentum,warmup=40",
            "dion:4",
        ),
        4,
        150,
        3,
        found="As expected but for Dion, which is 0.1 behind PowerSGD of the same rank here. What rounds every value, "
        "and 1-bit Adam, end within the noise of fp32; terngrad, twobit and powersgd are 0.03 to 0.04 behind at 8"
        " to 20 times fewer bytes; onebit 0.15, what selects 0.2, and what draws its places 0.3 to 0.4.",
    ),
    Study(
        "table",
        "Another one: a regression on a table with embeddings, SGD with momentum",
        "Twelve numbers and eight categories with up to 1,000 values, of which most are rare; 125,000 parameters, "
        "half of them embeddings, SGD at 0.05 with momentum 0.9, 128 rows a step. The loss is the part of the "
        "variance that is not explained.",
        "As above for what rounds every value. Most rows of an embedding have no gradient in a step: codecs that "
        "select send what there is, and lose less than with the LSTM; onebit and twobit, whose means stand for zeros "
        "too, and powersgd, for few frequent rows outweigh many rare ones, lose more than with the CNN. Dion gives "
        "all directions the same length, those of rare rows too, and is ahead of powersgd.",
        "table",
        (BASELINE, *(name for name in FAMILIES if name != BASELINE), "dion:4"),
        4,
        250,
        3,
        found="powersgd loses nothing, unlike expected: rare rows wait in its residual, and few directions hold most of"
        " a step. onebit ends no better than the mean of all targets: to a row without a gradient one bit still "
        "says plus or minus a mean. randomk and cocktail diverge in all seeds. What selects loses as much as with"
        " the LSTM, not less. qsgd and terngrad scatter by 0.05. Dion is ahead of fp32, as another optimizer at "
        "another rate may be; beside powersgd that says nothing of bytes.",
    ),
    Study(
        "resnet-18",
        "PowerSGD beside torch's hook on ResNet-18",
        "ResNet-18 on digits of 64 x 64, four members of 16 images each, SGD at 0.02 with momentum 0.9, 64 steps of "
        "which two travel whole. The third row is the hook once more, from another first basis.",
        "Both compute the same but for the first basis. So the two differ as the hook differs from itself with "
        "another first basis, in either direction.",
        "resnet",
        ("hook:4,2", "powersgd:4,warmup=2", "hook:4,2,1"),
        4,
        64,
        2,
        found="So it is: in the second seed the hook ends at 1.69 or 0.36 by its first basis alone. powersgd ends "
        "nearer in both; in a job of daemons it was once seen 1.7 times further.",
    ),
    Study(
        "narrow",
        "The same on a ResNet-18 of a quarter of the channels, more seeds",
        "703,000 parameters, all else as above.",
        "As above, and the means of five seeds are nearer to each other than two seeds of one way are.",
        "narrow",
        ("hook:4,2", "powersgd:4,warmup=2", "hook:4,2,1", "hook:4,2,2", BASELINE),
        4,
        64,
        5,
        found="So it is. The hook ends between 0.4 and 5.4 by its first basis alone, up to ten times as far in one "
        "seed, and powersgd between 0.4 and 0.7. A ratio of two such losses says nothing.",
    ),
    Study(
        "narrow-10",
        "The same, with ten rounds that travel whole",
        "As `powersgd` does by default, and all else as above.",
        "The hook differs less from itself than with two: the first steps are the largest, and what they leave out "
        "comes back when momentum is at its fastest.",
        "narrow",
        ("hook:4,10", "powersgd:4", "hook:4,10,1", "hook:4,10,2", BASELINE),
        4,
        64,
        5,
        found="It does not: the hook still ends twice as far from one first basis as from another. Here powersgd is the"
        " furthest in four of five seeds, with two rounds the nearest in two: a way has one first basis in all "
        "seeds. From the same first basis both have the same means, to 1e-5 (`test_codecstudies.py`).",
    ),
    Study(
        "narrow-slow",
        "The same, with two again, at a quarter of the rate",
        "SGD at 0.005 with momentum 0.9, all else as above: which rate leaves the hook where it is from another first "
        "basis is to be seen, so that the two can be compared at it.",
        "With two rounds and with ten, at 0.02, the hook has ended up to nine times as far as from another first "
        "basis. At this rate it differs by less than a tenth, and PowerSGD from it.",
        "narrow",
        ("hook:4,2", "powersgd:4,warmup=2", "hook:4,2,1", "hook:4,2,2", BASELINE),
        4,
        64,
        3,
        0.005,
        found="Not less than a tenth: up to 1.8 times in one seed, 0.04 in the means of three. But nothing runs away, "
        "and powersgd ends among the hook's own results, as fp32 does.",
    ),
    Study(
        "waiting",
        "What waits, beside a momentum of 0.9",
        "The narrow ResNet-18, SGD at 0.02 with momentum 0.9.",
        "`topk` diverges: what waited a hundred rounds arrives at once, and momentum makes ten times that of it. A "
        "tenth of the values waits ten rounds, and does not. Where momentum is taken before anything waits (`dgc`, "
        "EF21) it does not either.",
        "narrow",
        (BASELINE, "topk", "topk:0.1", "topk:0.25..0.01/60", "dgc:0.01,ramp=0", "ef21:0.01"),
        4,
        64,
        2,
        found="topk ends 1.4 behind fp32, in one seed beyond the loss of a guess, and so does dgc without its ramp: "
        "that it takes momentum before anything waits does not help in 64 steps. What helps is EF21, at four "
        "times the bytes. A tenth of the values, or a ramp, helps in one seed of two.",
    ),
    Study(
        "waiting-plain",
        "The same without momentum, at ten times the rate",
        "SGD at 0.2: a step in the long run as large as with momentum 0.9 at 0.02.",
        "If it is the delay that diverges and not momentum itself, `topk` diverges here, too.",
        "narrow-plain",
        (BASELINE, "topk"),
        4,
        64,
        2,
        found="It does not: without momentum topk ends 0.03 behind fp32. So it is the two together. What has waited "
        "arrives in a lump; momentum goes on with the lump for ten steps, and what would correct it waits in "
        "turn.",
    ),
    Study(
        "waiting-slow",
        "The same with momentum, at a tenth of the rate",
        "SGD at 0.002 with momentum 0.9.",
        "`topk` does not diverge.",
        "narrow",
        (BASELINE, "topk"),
        4,
        64,
        2,
        0.002,
        found="It does not diverge, and is 0.7 behind: what waits a hundred rounds arrives after the end of 64.",
    ),
    Study(
        "dropped",
        "What waiting is worth: the largest values, with error feedback and without",
        "The CNN on digits, SGD at its rate with momentum 0.9, 120 steps. `largest` sends what `topk:R,gather` does "
        "and drops the rest; `threshold` sends what is above so many root mean squares, `sidco` fits a distribution to "
        "send one in a hundred. (Strom 2015, Aji and Heafield 2017, Abdelmoniem et al. 2021.)",
        "At a tenth of the values dropping costs little. At a hundredth the accuracy collapses without error feedback, "
        "and the loss is several times that with it; at a thousandth nothing is learnt. topk, sidco and threshold of "
        "about as many bytes are alike.",
        "cnn",
        (
            BASELINE,
            *("topk:0.1,gather", "largest:0.1", "topk:0.01,gather", "largest:0.01", "topk:0.001,gather"),
            *("largest:0.001", "topk:0.01", "sidco:0.01", "threshold:rms=2", "threshold:rms=3", "threshold:rms=4"),
        ),
        4,
        120,
        3,
        found="The contrary: at each ratio what drops the rest is nearer to fp32 than what keeps it, at 1.8 times the "
        "bytes, for it packs nothing. It is the momentum again, as with `waiting`: what has waited a hundred rounds "
        "comes as a lump, and 120 steps are few for what error feedback promises, which is of the long run. Where "
        "owners leave out of the mean, too (`topk` without gather, sidco, threshold), more waits, and the loss is "
        "higher. Of these three at about as many bytes threshold and sidco are alike, topk behind; their seeds "
        "scatter by 0.3.",
    ),
    _periods(
        2,
        "0.4",
        "MuLoCo is 0.12 ahead of DiLoCo in the same bytes and 0.22 behind a plain mean of weights. SparseLoCo is ahead "
        "of MuLoCo at a twelfth of its bytes, and with about as many as near as the seeds to a plain mean.",
    ),
    _periods(4, "0.17"),
    _periods(
        8,
        "0.08",
        "All lose by the smaller batches but MuLoCo least, 0.04: it is 0.15 ahead of DiLoCo in the same bytes and 0.19 "
        "behind a plain mean. SparseLoCo does not gain by three and a half times its bytes here: either way it is "
        "where DiLoCo is, at a third of the bytes.",
    ),
    _averages(
        "averages",
        "gpt",
        "a small GPT",
        "AdamW at 2e-3, 15 rounds of eight local steps, or 120.",
        120,
        "It is behind local:8 as expected, by 0.03, but momentum does not help: 0.9 overshoots and is 0.16 behind, 0.5 "
        "and none are level. A round after each step brings hardly more than one after eight, for eight times the "
        "bytes. "
        "Nothing here speaks for it against local:8; DiLoCo is further behind.",
    ),
    _averages(
        "averages-table",
        "table",
        "a table",
        "SGD at 0.05 with momentum 0.9, 15 rounds of eight local steps, or 120.",
        120,
        "Likewise: 0.02 to 0.03 behind local:8, which is about the noise; and with momentum 0.9 on top of the "
        "optimizer's own most of what was "
        "learnt is lost after periods of eight steps, and nothing after each step.",
    ),
)


@dataclass(frozen=True)
class Line:
    """One training. `loss` is NaN where something was not finite."""

    study: str
    way: str
    seed: int
    loss: float
    fewer: float
    link_bytes: float


class StudyFile(KeptLines[Line]):
    """What there is already. Raises KeptLinesError, OSError when it is made."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, lambda parts: Line(**parts))

    def missing(self, studies: Sequence[Study]) -> list[tuple[Study, str, int]]:
        """(study, way, seed): the first seed of all ways before the second."""
        done = {(line.study, line.way, line.seed) for line in self.lines}
        every = ((study, way, seed) for study in studies for seed, way in product(range(study.seeds), study.ways))
        return [(study, way, seed) for study, way, seed in every if (study.name, way, seed) not in done]

    def of(self, study: Study, way: str) -> list[Line]:
        """By seed."""
        found = [line for line in self.lines if (line.study, line.way) == (study.name, way)]
        return sorted(found, key=lambda line: line.seed)


def measure(file: StudyFile, studies: Sequence[Study], minutes: float) -> None:
    """Trains what is missing; begins nothing any more when the time is over."""
    missing, began_s = file.missing(studies), time.monotonic()
    say(f"{len(missing)} to train; what is done is in {file.path}")
    for at, (study, way, seed) in enumerate(missing, 1):
        if time.monotonic() - began_s > 60 * minutes:
            say(f"{minutes:g} minutes are over; the same command goes on")
            return
        started_s = time.monotonic()
        try:
            trained = train(way, study.task, study.members, study.steps, seed, study.rate)
            line = Line(study.name, way, seed, *trained)
        except CodecError as error:
            say(f"  diverged: {error}")
            line = Line(study.name, way, seed, math.nan, math.nan, math.nan)
        file.add(line)
        took_s = time.monotonic() - started_s
        say(f"[{at}/{len(missing)}] {study.name}, {way}, seed {seed}: loss {line.loss:.4f} ({took_s:.0f} s)")


def page(file: StudyFile) -> str:
    """In Markdown; studies of which nothing is trained are left out."""
    lines = [
        "# Questions about codecs",
        "",
        "```",
        "python -m tests.bench.codec_studies all",
        "python -m tests.bench.codec_studies --page",
        "```",
        "",
        "Made from `codec_studies.jsonl`. Members are simulated in one process, with the daemon's codecs, parts, "
        "residuals",
        "and momentum; every codec has its defaults unless more is said. *loss*: held-out, its mean and that of each "
        "seed;",
        "all ways of a seed have the same weights and samples. *noise*: two standard errors of the difference. *fp32 /",
        "vector*: how much smaller an encoded vector is, rounds of a warm-up included. *kB a member and step*: on all"
        " its",
        "links. What was expected was written before it ran.",
        "",
    ]
    for study in STUDIES:
        if any(line.study == study.name for line in file.lines):
            lines += _section(file, study)
    return "\n".join(lines).rstrip() + "\n"


def _section(file: StudyFile, study: Study) -> Iterator[str]:
    base = study.ways[0]
    yield from (f"## {study.title}", "", study.about, "", f"**Expected.** {study.expected}", "")
    heads = [column.format(f"`{base}`") for column in COLUMNS]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    base_losses = {line.seed: line.loss for line in file.of(study, base)}
    for way in study.ways:
        if found := file.of(study, way):
            yield f"| {' | '.join(_row(way, found, None if way == base else base_losses))} |"
    yield ""
    if study.found:
        yield from (f"**Found.** {study.found}", "")


def _row(way: str, found: Sequence[Line], by_seed: Mapping[int, float] | None) -> tuple[str, ...]:
    """Beside the first way's losses of the same seeds; None: it is that one."""
    base = [by_seed[line.seed] for line in found if line.seed in by_seed] if by_seed else []
    losses = [line.loss for line in found]
    ended = [line for line in found if not math.isnan(line.loss)]
    mean = (
        "diverged" if not ended else f"{statistics.mean(losses):.3f}" if len(ended) == len(found) else "some diverged"
    )
    known = len(base) == len(ended) == len(found)
    return (
        f"`{way}`",
        mean,
        " ".join("-" if math.isnan(loss) else f"{loss:.3f}" for loss in losses),
        f"{statistics.mean(losses) - statistics.mean(base):+.3f}" if known else "",
        f"{_noise(losses, base)}" if known else "",
        f"{ended[0].fewer:.1f}" if ended else "",
        f"{ended[0].link_bytes / 1000:.2f}" if ended else "",
    )


def _noise(losses: Sequence[float], base: Sequence[float]) -> str:
    if min(len(losses), len(base)) < 2:
        return "-"
    squares = statistics.variance(losses) / len(losses) + statistics.variance(base) / len(base)
    return f"{NOISE_FACTOR * squares**0.5:.3f}"


def main() -> int:
    """The exit code."""
    names = ["all", *(study.name for study in STUDIES)]
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.codec_studies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=30.0, help="begin nothing after these (default %(default)g)")
    parser.add_argument("--page", action="store_true", help="write results/codec_studies.md from the file at the end")
    parser.add_argument("--resume", type=Path, default=RESULTS / "codec_studies.jsonl", metavar="FILE")
    options = parser.parse_args()
    if unknown := [name for name in options.studies if name not in names]:
        parser.error(f"{unknown[0]}: choose from {', '.join(names)}")
    if not options.studies and not options.page:
        parser.error(f"which study? Choose from {', '.join(names)}")
    torch.set_num_threads(1)
    try:
        file = StudyFile(options.resume)
        chosen = [study for name in options.studies for study in STUDIES if name in (study.name, "all")]
        if chosen:
            measure(file, chosen, options.minutes)
        if options.page:
            path = RESULTS / "codec_studies.md"
            path.write_text(page(file), encoding="utf-8")
            say(f"wrote {path}")
    except (KeptLinesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on behind what is in {options.resume}")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
