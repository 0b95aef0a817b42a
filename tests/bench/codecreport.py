"""The tables of a result file of `codec_table`, as Markdown."""

import math
import statistics
from collections.abc import Iterator, Mapping

from tests.bench.codecjob import MODELS
from tests.bench.codecruns import Outcome, Run

BASELINE = "fp32"
NOISE_FACTOR = 2.0  # standard errors of the difference of two means
COLUMNS = (
    "codec",
    "held-out loss (seeds)",
    "- fp32",
    "noise",
    "right",
    "payload a step",
    "sent a step",
    "fp32 / sent",
    "replicas",
)
KILL_COLUMNS = ("codec", "held-out loss", "- fp32", "right", "replicas")
SHORT_COLUMNS = ("codec", "GPT, AdamW: loss", "fp32 / sent", "CNN, SGD: loss", "read right", "fp32 / sent")
SHORT_MEMBERS, SHORT_STEPS = 2, {"gpt": 120, "cnn": 300}
TIME_COLUMNS = ("codec", "s a step", "fp32 / it", "payload a step", "replicas")


def tables(outcomes: Mapping[Run, Outcome]) -> Iterator[str]:
    """The lines. What has failed is in them, with its reason."""
    accuracy = {run: outcome for run, outcome in outcomes.items() if run.mbit is None and not run.kill}
    kills = {run: outcome for run, outcome in outcomes.items() if run.kill}
    times = {run: outcome for run, outcome in outcomes.items() if run.mbit is not None}
    for model, members, steps in dict.fromkeys((run.model, run.members, run.steps) for run in accuracy):
        ways = _by_way(accuracy, model, members, steps, None)
        seeds = sorted({run.seed for way in ways.values() for run in way})
        yield f"### {MODELS[model].about}; {members} members, {steps} steps, seeds {' '.join(map(str, seeds))}\n"
        yield from _rows(COLUMNS, (_row(way, runs, ways.get(BASELINE, {})) for way, runs in ways.items()))
    for model, members, mbit in dict.fromkeys((run.model, run.members, run.mbit) for run in times):
        steps = next(run.steps for run in times if (run.model, run.members, run.mbit) == (model, members, mbit))
        ways = _by_way(times, model, members, steps, mbit)
        yield f"### {MODELS[model].about}; {members} members at {mbit:g} Mbit/s, {steps} steps\n"
        yield from _rows(TIME_COLUMNS, (_time_row(way, runs, ways.get(BASELINE, {})) for way, runs in ways.items()))

    for model, members, steps in dict.fromkeys((run.model, run.members, run.steps) for run in kills):
        ways = _by_way(kills, model, members, steps, None)
        yield f"### {MODELS[model].about}; one of {members} members is killed and comes back, {steps} steps\n"
        yield from _rows(KILL_COLUMNS, (_kill_row(way, runs, ways.get(BASELINE, {})) for way, runs in ways.items()))


def short_table(outcomes: Mapping[Run, Outcome]) -> Iterator[str]:
    """The lines of the table in `protocol/CODECS.md`: two members, the mean of all seeds, and its difference from fp32.
    A codec that one of the two optimizers does not suit has "-" there."""
    every = {model: _by_way(outcomes, model, SHORT_MEMBERS, steps, None) for model, steps in SHORT_STEPS.items()}
    ways = dict.fromkeys(way for ways in every.values() for way in ways)
    gpt, cnn = (every[model] for model in ("gpt", "cnn"))
    yield from _rows(SHORT_COLUMNS, ((f"`{way}`", *_short(way, gpt)[::2], *_short(way, cnn)) for way in ways))


def _short(way: str, ways: Mapping[str, Mapping[Run, Outcome]]) -> tuple[str, str, str]:
    """Loss, what was read right, and how much less was sent."""
    good, base = _good(ways.get(way, {})), _good(ways[BASELINE])
    if not good:
        return "-", "-", "-"
    loss, sent = (_mean(getattr(one, name) for one in good.values()) for name in ("loss", "sent_bytes"))
    base_loss, base_sent = (_mean(getattr(one, name) for one in base.values()) for name in ("loss", "sent_bytes"))
    against = "" if way == BASELINE else f" ({loss - base_loss:+.3f})"
    return f"{loss:.3f}{against}", f"{_mean(one.accuracy for one in good.values()):.1%}", f"{base_sent / sent:.1f}"


def _by_way(
    outcomes: Mapping[Run, Outcome], model: str, members: int, steps: int, mbit: float | None
) -> dict[str, dict[Run, Outcome]]:
    ways: dict[str, dict[Run, Outcome]] = {}
    for run, outcome in outcomes.items():
        if (run.model, run.members, run.steps, run.mbit) == (model, members, steps, mbit):
            ways.setdefault(run.way, {})[run] = outcome
    return dict(sorted(ways.items(), key=lambda item: _order(item[1])))


def _order(runs: Mapping[Run, Outcome]) -> float:
    """The largest payload first, what has failed last."""
    payload_bytes = _mean(outcome.payload_bytes for outcome in _good(runs).values())
    return math.inf if math.isnan(payload_bytes) else -payload_bytes


def _rows(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def _row(way: str, runs: Mapping[Run, Outcome], baseline: Mapping[Run, Outcome]) -> tuple[str, ...]:
    good, failed = _good(runs), _failures(runs)
    if not good:
        return way, failed, *("-" for _ in COLUMNS[2:])
    losses = [outcome.loss for _, outcome in sorted(good.items(), key=lambda item: item[0].seed)]
    sent = _mean(outcome.sent_bytes for outcome in good.values())
    base = _good(baseline)
    base_losses = [outcome.loss for outcome in base.values()]
    base_sent = _mean(outcome.sent_bytes for outcome in base.values())
    difference = statistics.mean(losses) - statistics.mean(base_losses) if base_losses else math.nan
    return (
        f"`{way}`",
        f"{statistics.mean(losses):.4f} ({' '.join(f'{loss:.4f}' for loss in losses)})" + failed,
        "" if way == BASELINE else f"{difference:+.4f}",
        "" if way == BASELINE else _noise(losses, base_losses),
        f"{_mean(outcome.accuracy for outcome in good.values()):.1%}",
        _size(_mean(outcome.payload_bytes for outcome in good.values())),
        _size(sent),
        f"{base_sent / sent:.1f}",
        _replicas(good),
    )


def _time_row(way: str, runs: Mapping[Run, Outcome], baseline: Mapping[Run, Outcome]) -> tuple[str, ...]:
    good = _good(runs)
    if not good:
        return way, _failures(runs), *("-" for _ in TIME_COLUMNS[2:])
    step_s = _mean(outcome.step_s for outcome in good.values())
    base_s = _mean(outcome.step_s for outcome in _good(baseline).values())
    size = _size(_mean(outcome.payload_bytes for outcome in good.values()))
    return f"`{way}`", f"{step_s:.3f}", f"{base_s / step_s:.1f}", size, _replicas(good)


def _kill_row(way: str, runs: Mapping[Run, Outcome], baseline: Mapping[Run, Outcome]) -> tuple[str, ...]:
    good = _good(runs)
    if not good:
        return f"`{way}`", _failures(runs), *("-" for _ in KILL_COLUMNS[2:])
    loss = _mean(outcome.loss for outcome in good.values())
    difference = loss - _mean(outcome.loss for outcome in _good(baseline).values())
    right = _mean(outcome.accuracy for outcome in good.values())
    against = "" if way == BASELINE else f"{difference:+.4f}"
    return f"`{way}`", f"{loss:.4f}" + _failures(runs), against, f"{right:.1%}", _replicas(good)


def _good(runs: Mapping[Run, Outcome]) -> dict[Run, Outcome]:
    return {run: outcome for run, outcome in runs.items() if outcome.error is None}


def _failures(runs: Mapping[Run, Outcome]) -> str:
    return "".join(f" FAILED, seed {run.seed}: {outcome.error}" for run, outcome in runs.items() if outcome.error)


def _mean(values: Iterator[float]) -> float:
    """NaN of none."""
    found = list(values)
    return statistics.mean(found) if found else math.nan


def _noise(losses: list[float], base: list[float]) -> str:
    if min(len(losses), len(base)) < 2:
        return "-"
    squares = statistics.variance(losses) / len(losses) + statistics.variance(base) / len(base)
    return f"{NOISE_FACTOR * squares**0.5:.4f}"


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.3f} MB"


def _replicas(good: Mapping[Run, Outcome]) -> str:
    if all(outcome.replicas_equal is True for outcome in good.values()):
        return f"equal ({sum(outcome.hashes_compared for outcome in good.values())})"
    return "DIFFER"
