"""What codec studies are made of: rounds as a job computes them, others' methods, and the page that follows from the
file."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from meshtraind.codecs.base import CodecError, Values
from meshtraind.contributions.seeds import segment_seed
from meshtraind.projection.orthonormal import orthonormal
from meshwire.codecs.registry import FAMILIES, parse_codec
from meshwire.model.manifest import Momentum
from tests.bench import codec_studies
from tests.bench.codec_studies import STUDIES, Line, Study, StudyFile, measure, page
from tests.bench.codec_tasks import TASKS
from tests.bench.kept_lines import KeptLinesError
from tests.bench.other_methods import Dion, Ef21Momentum, LargestAlone, TorchsPowerSgd
from tests.bench.simulated_rounds import SEED, SimulatedRounds
from tests.daemon.tcpmembers import manifest_of, members

SHAPES = [(48, 64), (64,), (32, 16, 3, 3)]
VALUES = sum(map(math.prod, SHAPES))
MOMENTUM = Momentum(factor=0.5, nesterov=False)  # as in `members`
# Owners round by chance, each with seeds of its own, and the simulated ones are all the first member.
BY_CHANCE = {"qsgd", "terngrad", "cocktail"}
SIMULATED = {
    "dgc": "dgc:0.1,ramp=0",
    "lgc": "lgc:0.05,warmup=2,train=2+fp32",
    "powersgd": "powersgd:3,warmup=2",
    "homomorphic": "homomorphic:0.1",
}


def gradients(members: int, rounds: int) -> list[list[Values]]:
    """By round and member; most of what members have is common to all."""
    rng = np.random.default_rng(3)
    common = rng.standard_normal((rounds, VALUES))
    return [[(each + 0.5 * rng.standard_normal(VALUES)).astype(np.float32) for _ in range(members)] for each in common]


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in BY_CHANCE])
async def test_a_simulated_job_has_the_means_of_a_real_one(name: str) -> None:
    """Of two daemons' executors: with all that is left out, owed, chosen, announced and carried on from round to round.
    On a ring fp16 is rounded at other hops of each shard."""
    text = SIMULATED.get(name, name)
    simulated = SimulatedRounds(text, SHAPES, 2, MOMENTUM if parse_codec(text).momentum else None)
    async with members(text, manifest_of(SHAPES)) as two:
        assert two.plan == simulated.plan
        for of_members in gradients(2, 8):
            real = await two.round([simulated.placed(each) for each in of_members])
            assert real is not None
            made = simulated.mean(of_members)
            away = np.abs(made - simulated.flat(real)).max() / np.abs(made).max()
            assert away < {"bf16": 8e-3, "fp16": 1e-3, "lgc": 1e-3, "powersgd": 1e-3}.get(name, 1e-6)


@pytest.mark.parametrize("name", sorted(BY_CHANCE))
def test_what_is_rounded_by_chance_is_right_on_average(name: str) -> None:
    simulated, (constant,) = SimulatedRounds(name, SHAPES, 3), gradients(3, 1)
    mean = np.mean(constant, 0)
    made = np.mean([simulated.mean(constant) for _ in range(150)], 0)
    owed = 0.3 if name == "cocktail" else 0.05  # a fiftieth of the values in a round
    large = np.abs(mean) < 1.0  # terngrad loses what is far out
    assert abs(np.dot(made[large], mean[large]) / np.dot(mean[large], mean[large]) - 1) < owed


@pytest.mark.parametrize("name", ["topk", "powersgd:3,warmup=0", "homomorphic"])
def test_what_is_not_finite_ends_a_simulated_job(name: str) -> None:
    simulated, (first, second) = SimulatedRounds(name, SHAPES, 2), gradients(2, 1)[0]
    first[7] = math.inf
    with pytest.raises(CodecError):
        simulated.mean([first, second])


def test_what_is_sent_is_counted() -> None:
    for text, members_, bits in (("fp32", 3, 32.0), ("fp16", 3, 16.0), ("onebit", 4, 1.1), ("topk:0.1,gather", 4, 2.2)):
        simulated = SimulatedRounds(text, SHAPES, members_)
        simulated.mean(gradients(members_, 1)[0])
        vectors = members_ if simulated.gathered else members_ + 1
        assert simulated.sent_bytes * 8 / vectors / VALUES == pytest.approx(bits, rel=0.1), text


def test_power_sgd_is_torchs_but_for_the_first_basis() -> None:
    """On kernels of convolutions, too, and with members' own gradients: the same tensors travel whole, and the means of
    all others are those of the hook, round by round."""
    rounds, rank = gradients(4, 8), 4
    ours, hook = SimulatedRounds(f"powersgd:{rank},warmup=2", SHAPES, 4), TorchsPowerSgd(rank, 2, SHAPES, 4)
    first: dict[int, torch.Tensor] = {}
    for span in ours.plan.spans:
        nothing: Values = np.zeros((rank, span.columns), np.float32)
        if span.columns > rank:
            first[span.tensor] = torch.from_numpy(orthonormal(nothing, segment_seed(SEED, 3, span.start))).mT
    hook.begin_with(first)
    for number, of_members in enumerate(rounds, 1):
        mean, theirs = ours.mean(of_members), hook.mean(of_members)
        assert np.abs(mean - theirs).max() < (1e-5 if number > 2 else 1e-3) * np.abs(theirs).max(), "fp16 at first"
        last = mean
    whole = slice(48 * 64, 48 * 64 + 64)
    assert np.abs(last[whole] - np.mean(of_members, 0)[whole]).max() < 1e-6
    assert np.abs(last - np.mean(of_members, 0)).max() > 0.1, "or nothing was left out"
    other = TorchsPowerSgd(rank, 2, SHAPES, 4, 1)
    apart = [np.abs(other.mean(each) - hook_mean).max() for each, hook_mean in zip(rounds, [last] * 8, strict=True)]
    assert min(apart) > 0.1, "another first basis gives other means"


def test_ef21_with_all_values_is_sgd_with_momentum() -> None:
    every, few = Ef21Momentum(1.0, SHAPES, 3, 0.9), Ef21Momentum(0.1, SHAPES, 3, 0.9)
    velocity = np.zeros(VALUES)
    for of_members in gradients(3, 6):
        velocity = 0.9 * velocity + np.mean(of_members, 0)
        assert np.abs(every.mean(of_members) - velocity).max() < 1e-4
        behind = few.mean(of_members)
    assert 0.1 < np.abs(behind - velocity).max() < np.abs(velocity).max()


def test_the_largest_alone_are_means_of_what_is_sent_and_what_is_dropped_stays_away() -> None:
    every, few, of_members = LargestAlone(1.0, SHAPES), LargestAlone(0.1, SHAPES), gradients(3, 1)[0]
    assert np.abs(every.mean(of_members) - np.mean(of_members, 0)).max() < 1e-6
    sent = few.mean(of_members)
    assert VALUES * 0.1 <= np.count_nonzero(sent) <= VALUES * 0.31
    assert not np.any(few.mean([np.zeros(VALUES, np.float32)] * 3)), "nothing has waited"
    assert few.sent_bytes == 2 * 3 * 6 * math.ceil(0.1 * VALUES)


def test_dion_steps_along_orthonormal_directions_and_keeps_what_they_leave_out() -> None:
    """Of rank r: r singular values, all the same but for how Q is normalised; vectors are means. What is left of a
    gradient that came once is applied in later rounds."""
    dion, of_members = Dion(4, SHAPES, 2), gradients(2, 1)[0]
    mean, nothing = np.mean(of_members, 0), [np.zeros(VALUES, np.float32)] * 2
    made = dion.mean(of_members)
    assert np.abs(made - mean)[48 * 64 : 49 * 64].max() < 1e-6
    matrix = made[: 48 * 64].reshape(48, 64)
    assert np.linalg.matrix_rank(matrix, tol=1e-3) == 4
    assert np.linalg.norm(matrix) == pytest.approx(0.2 * 64**0.5 * 4**0.5, rel=1e-3)
    assert np.vdot(matrix, mean[: 48 * 64]) > 0
    again = dion.mean(nothing)[: 48 * 64].reshape(48, 64)
    alike = np.vdot(matrix, again) / np.linalg.norm(matrix) / np.linalg.norm(again)
    assert 0.5 < alike < 0.999, "0.95 of what was applied stays in the momentum"


def ends_at(text: str, rate: float, momentum: float = 0.9) -> float:
    """What is left of a quadratic after 400 steps of two members with equal gradients; above 10: it diverges."""
    rng = np.random.default_rng(0)
    at, curvature = rng.standard_normal(4096), np.exp(rng.uniform(-2, 0, 4096))
    taken_over = text.startswith(("dgc", "ef21"))
    if text.startswith("ef21"):
        means: Ef21Momentum | SimulatedRounds = Ef21Momentum(0.01, [(64, 64)], 2, momentum)
    else:
        means = SimulatedRounds(text, [(64, 64)], 2, Momentum(factor=momentum, nesterov=False) if taken_over else None)
    first, velocity = float(curvature @ at**2), np.zeros(4096)
    for _ in range(400):
        gradient = (curvature * at).astype(np.float32)
        velocity = (0.0 if taken_over else momentum) * velocity + means.mean([gradient, gradient])
        at -= rate * velocity
        if (left := float(curvature @ at**2) / first) > 10:
            break
    return left


def test_what_waits_bounds_the_rate_and_momentum_counts_as_a_rate() -> None:
    """A value that waits a hundred rounds stands a hundredth of rate / (1 - momentum): what momentum is taken of, and
    where, changes little in that where all values matter as much."""
    assert ends_at("fp32", 0.1) < 1e-3
    assert ends_at("topk", 0.1) > 10
    assert ends_at("topk", 1.0, momentum=0.0) > 10, "the same without momentum, at a rate that moves as far"
    assert ends_at("topk", 0.01) < 10
    assert ends_at("topk", 0.1, momentum=0.0) < 10
    assert ends_at("topk:0.1", 0.1) < 1e-3, "a tenth of the delay"
    assert ends_at("dgc:0.01,ramp=0", 0.1) > 10
    assert ends_at("ef21", 0.1) > 10


def test_every_way_of_a_study_is_one_that_can_be_trained() -> None:
    for study in STUDIES:
        assert study.task in TASKS
        assert len(set(study.ways)) == len(study.ways)
        for way in study.ways:
            text = way.partition("@")[0]
            if text and text.partition(":")[0] not in ("hook", "ef21", "dion", "largest"):
                parse_codec(text)
    assert {way.partition(":")[0] for way in STUDIES[1].ways} == {*FAMILIES, "dion"}, "every codec meets a new task"


STUDY = Study(
    "small", "A small one", "About it.", "Nothing.", "table", ("fp32", "topk", "int8"), 2, 3, 2, found="It is so."
)


def test_a_study_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, trained = tmp_path / "lines.jsonl", list[tuple[str, int]]()

    def train(way: str, _task: str, _members: int, _steps: int, seed: int, _rate: float | None) -> tuple[float, ...]:
        trained.append((way, seed))
        if len(trained) == 4:
            raise KeyboardInterrupt
        return 1.0 + seed, 2.0, 3000.0

    monkeypatch.setattr(codec_studies, "train", train)
    with pytest.raises(KeyboardInterrupt):
        measure(StudyFile(path), [STUDY], 1.0)
    measure(StudyFile(path), [STUDY], 1.0)
    ways = [(way, seed) for seed in range(2) for way in STUDY.ways]
    assert trained == [*ways[:4], *ways[3:]]
    assert [(line.way, line.seed) for line in StudyFile(path).lines] == ways
    measure(StudyFile(path), [STUDY], 1.0)
    assert len(trained) == 7
    path.write_text(path.read_text()[:-10])
    with pytest.raises(KeptLinesError, match=r"line 6: .*; remove the line"):
        StudyFile(path)


def test_nothing_begins_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_studies, "train", pytest.fail)
    file = StudyFile(tmp_path / "lines.jsonl")
    measure(file, [STUDY], -1.0)
    assert not file.lines


def test_the_page_says_what_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_studies, "STUDIES", (STUDY,))
    file = StudyFile(tmp_path / "lines.jsonl")
    for way, losses in {"fp32": (1.0, 1.2), "topk": (1.5,), "int8": (1.1, math.nan)}.items():
        for seed, loss in enumerate(losses):
            file.add(Line("small", way, seed, loss, 8.0 if way == "topk" else 1.0, 1500.0))
    lines = page(StudyFile(file.path)).splitlines()
    assert "## A small one" in lines
    assert "**Expected.** Nothing." in lines
    assert "**Found.** It is so." in lines
    assert "| codec | loss | seeds | - `fp32` | noise | fp32 / vector | kB a member and step |" in lines
    assert "| `fp32` | 1.100 | 1.000 1.200 |  |  | 1.0 | 1.50 |" in lines
    assert "| `topk` | 1.500 | 1.500 | +0.500 | - | 8.0 | 1.50 |" in lines, "beside the same seeds"
    file.add(Line("small", "topk", 1, 1.7, 8.0, 1500.0))
    assert "| `topk` | 1.600 | 1.500 1.700 | +0.500 | 0.283 | 8.0 | 1.50 |" in page(StudyFile(file.path)).splitlines()
    file.add(Line("small", "topk", 2, 1.6, 8.0, 1500.0))
    assert "| `topk` | 1.600 | 1.500 1.700 1.600 |  |  | 8.0 | 1.50 |" in page(StudyFile(file.path)).splitlines()
    assert "| `int8` | some diverged | 1.100 - |  |  | 1.0 | 1.50 |" in lines
