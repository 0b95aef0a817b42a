"""Modes, topologies and crews that are one and the same training, on real daemons: all runs in one mesh, and each once.
Which equality is proved where, and of which optimizer: tests/train/EQUALITIES.md."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.demo.localmesh import LocalMesh
from tests.daemon import realjobs as jobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MEMBERS = 4
TOLERANCE = 1e-6  # relative, of each tensor: sums are made in other orders, and differences of weights rounded

# Three equal nets side by side, each with an SGD of its own kind: what holds of one of them is seen in the same runs.
TRAIN = """
import json, pathlib, random, sys, time
import torch
import meshtrain as mt

options = json.loads(sys.argv[1])
torch.set_num_threads(1)
if options["patient"]:  # in a turn a learner waits for all its neighbours' weights, 20 s at most; else for as long as
    # its last local step took, 2 s at most, and mixes in later what has not come by then, which is no such equality
    from meshtrain.train.periods import mixed_weights
    mixed_weights.wait_s = lambda step_s: 20.0

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

kinds = {
    "sgd": {"lr": 0.05},
    "momentum": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {"lr": 0.7 * 0.05, "momentum": 0.9, "nesterov": True},
}
model = torch.nn.ModuleDict({kind: net() for kind in kinds})
optimizer = torch.optim.SGD([{"params": model[kind].parameters(), **how} for kind, how in kinds.items()])
xs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(torch.arange(len(xs)), xs, xs.sum(1, keepdim=True) + 1)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = mt.prepare(model, optimizer, loader)
pauses = random.Random(options["timing"] * 100 + mt.rank())

def come_abreast(step):  # all leave here when all have come, which is when all of them have ended the step before
    folder = pathlib.Path(options["abreast"])
    (folder / f"{step}.{mt.rank()}").touch()
    while not all((folder / f"{step}.{rank}").exists() for rank in range(mt.world_size())):
        time.sleep(0.001)

def values():
    return [p.double().flatten().tolist() for p in model["sgd"].parameters()]

seen, own, base, gradients = [], [], [], []
for epoch in range(2):
    for indices, x, y in loader:
        seen.append(indices.tolist())
        time.sleep(pauses.random() * 0.02 * options["timing"])
        optimizer.zero_grad()
        if options["taken_apart_every"]:  # one vector, that differs by a factor, which are 0 together; else no gradient
            factor = (1.0, 2.0, -4.0, 1.0)[mt.rank()] * ((len(seen) - 1) % options["taken_apart_every"] == 0)
            draws = torch.Generator().manual_seed(len(seen))
            vector = [2e4 * torch.randn(p.shape, generator=draws) for p in model.parameters()]
            (factor * sum((v * p).sum() for v, p in zip(vector, model.parameters()))).backward()
        else:
            sum(torch.nn.functional.mse_loss(each(x), y) for each in model.values()).backward()
        if options["abreast"]:
            come_abreast(len(seen))
        optimizer.step()
        if options["watched"]:
            gradients.append([p.grad.double().flatten().tolist() for p in model["sgd"].parameters()])
            own.append(values())
            with mt.base():
                base.append(values())
mt.finish()
state = {name: value.double().flatten().tolist() for name, value in model.state_dict().items()}
(mt.output_dir() / "all.json").write_text(json.dumps([state, seen, own, base, gradients]))
"""

Nets = dict[str, list[Tensor]]  # by their kind of SGD


@dataclass(frozen=True)
class Trained:
    """`nets`: the same on all learners, bit for bit. By learner, what it drew, and, where it was watched, its own
    weights, the base and its gradients behind each step, of the net with plain SGD."""

    nets: Nets
    seen: list[list[list[int]]]
    own: list[list[list[list[float]]]]
    base: list[list[list[list[float]]]]
    gradients: list[list[list[list[float]]]]


Train = Callable[..., Trained]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Runs TRAIN, on four devices with a learner each unless it is told otherwise. What has run already is not run
    again."""
    known: dict[str, Trained] = {}

    def run(
        sync: str,
        *,
        watched: bool = False,
        timing: int = 0,
        patient: bool = False,
        taken_apart_every: int = 0,
        abreast: bool = False,
        **options: Any,
    ) -> Trained:
        asked: dict[str, Any] = {
            "watched": watched,
            "timing": timing,
            "patient": patient,
            "taken_apart_every": taken_apart_every,
        }
        key = json.dumps([sync, asked, abreast, options], sort_keys=True)
        if key not in known:
            asked |= {"abreast": str(tmp_path_factory.mktemp("steps")) if abreast else ""}
            arguments = json.dumps(asked)
            known[key] = trained(mesh, tmp_path_factory.mktemp("job"), args=(arguments,), sync=sync, **options)
        return known[key]

    with jobs.forked_learners(), LocalMesh(("anna", "bert", "cleo", "dora"), print) as mesh:
        yield run


def trained(mesh: LocalMesh, folder: Path, *, learners: int = 1, **options: Any) -> Trained:
    anna = mesh.daemons[0]
    summary = jobs.run(anna, folder, TRAIN, learners=learners, hash_every=1, **options)
    assert summary.state == "succeeded", summary.error
    assert summary.replicas_equal is True
    places = [(rank, learner) for rank in range(len(summary.ranks)) for learner in range(learners)]

    def output(rank: int, learner: int) -> Any:
        folder_ = f"learner{learner + 1}/" if learner else ""
        return json.loads(jobs.read(anna, summary.job, "output", rank, f"{folder_}all.json"))

    states, *rest = zip(*(output(*place) for place in places), strict=True)
    assert all(state == states[0] for state in states), "replicas, bit for bit"
    nets: Nets = {}
    for name, value in states[0].items():
        nets.setdefault(name.split(".")[0], []).append(torch.tensor(value, dtype=torch.float64))
    return Trained(nets, *(list(each) for each in rest))


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for p, q in zip(ours, theirs, strict=True):
        assert float((p - q).norm() / q.norm()) <= TOLERANCE


def assert_same_bits(one: Trained, other: Trained) -> None:
    for kind, tensors in one.nets.items():
        assert all(torch.equal(p, q) for p, q in zip(tensors, other.nets[kind], strict=True)), kind


def assert_same(one: Trained, other: Trained, *kinds: str) -> None:
    """To TOLERANCE, and of the same samples."""
    assert one.seen == other.seen
    for kind in kinds or one.nets:
        assert_close(one.nets[kind], other.nets[kind])


def alone(seen: list[list[int]]) -> nn.Module:
    """The net with plain SGD, in one process that knows nothing of a mesh."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    xs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    for indices in seen:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(xs[indices]), xs[indices].sum(1, keepdim=True) + 1).backward()
        optimizer.step()
    return net


def flat(of: list[list[list[list[float]]]]) -> Tensor:
    """[rank, step, value]"""
    return torch.stack([torch.stack([torch.cat([torch.tensor(p).double() for p in at]) for at in r]) for r in of])


def test_a_bound_of_zero_is_bsp(train: Train) -> None:
    """R7: bit for bit, whatever the timing."""
    assert_same_bits(train("ssp:0", timing=1), train("bsp"))


def test_one_device_under_a_bound_is_one_process(train: Train) -> None:
    """Bit for bit, with rounds that are three steps late: alone own gradients are the means (O2), so delays cost
    nothing. It is what is left of rounds without any bound, which are refused."""
    late = train("ssp:3", on=("anna",), visibility="fixed", own="1", shares=None)
    own = [p.detach().double().flatten() for p in alone(late.seen[0]).parameters()]
    assert len(late.seen) == 1
    assert all(torch.equal(p, q) for p, q in zip(late.nets["sgd"], own, strict=True))


def test_periods_of_one_step_are_bsp(train: Train) -> None:
    """R9, ALGORITHMS 2: by linearity, with momentum too, to rounding; delayed gradient averaging without a delay, and
    DiLoCo whose outer step is the mean, are that mode."""
    periods = train("local:1,ssp:0")
    assert_same(periods, train("bsp"))
    assert_same_bits(periods, train("diloco:1,rate=1,momentum=0", timing=1))


def test_delayed_periods_of_one_step_are_the_same_bound(train: Train) -> None:
    """R8, O2: with `fixed` and c=1, of SGD without momentum."""
    fixed = {"visibility": "fixed", "own": "1", "shares": None}
    assert_same(train("local:1,ssp:2", **fixed), train("ssp:2", **fixed), "sgd")


def test_averages_of_periods_are_one_mode_under_three_names(train: Train) -> None:
    """Local SGD, delayed gradient averaging without a delay, DiLoCo with outer rate 1 and no momentum: bit for bit."""
    periods = train("local:3")
    assert_same_bits(train("local:3,ssp:0", timing=1), periods)
    assert_same_bits(train("diloco:3,rate=1,momentum=0", timing=1), periods)


def test_one_step_and_the_outer_step_are_nesterov_sgd(train: Train) -> None:
    """ALGORITHMS 5, DiLoCo: H=1, inner SGD(eta), outer (a, mu, Nesterov) is Nesterov SGD of rate a * eta."""
    periods, steps = train("diloco:1"), train("bsp")
    assert periods.seen == steps.seen
    assert_close(periods.nets["sgd"], steps.nets["nesterov"])
    assert float((steps.nets["sgd"][0] - steps.nets["nesterov"][0]).norm()) > 1e-2, "or it says nothing"


@pytest.mark.parametrize(
    "topology",
    [
        *("star:1", "sharded", "sharded:0,0,1", "sharded:2"),  # one server; all are servers; of two thirds and one; one
        *("tree", "butterfly", "grid:2x2", "hierarchical:2", "gather"),
    ],
)
def test_a_mean_is_the_same_over_any_topology(train: Train, topology: str) -> None:
    """W3, C2: servers that sum all or a fraction, a tree, pairs of pairs, rows, then columns (Moshpit's, exact behind
    the second), two groups, all-to-all: a ring's mean, but for the order in which it is added."""
    assert_same(train("bsp", topology=topology), train("bsp"))


@pytest.mark.parametrize("sync", ["bsp", "local:3"])
def test_two_devices_of_two_learners_are_four_devices(train: Train, sync: str) -> None:
    """R6: to rounding; each learner draws the samples that this device draws."""
    assert_same(train(sync, on=("anna", "bert"), learners=2), train(sync))


def test_an_average_that_own_weights_are_drawn_to_loses_nothing(train: Train) -> None:
    """ALGORITHMS 2, SMA: with mu = 0 the sum of all own weights and z is changed by -eta * sum g alone, and z is the
    mean of what all had stepped to."""
    run = train("sma:1,momentum=0", watched=True)

    own, base, gradients = flat(run.own), flat(run.base), flat(run.gradients)
    assert own.shape[0] == MEMBERS
    assert torch.equal(base, base[:1].expand_as(base)), "z is bit-equal"
    stepped = own[:, :-1] - 0.05 * gradients[:, 1:]
    total, before = own[:, 1:].sum(0) + base[0, 1:], stepped.sum(0) + base[0, :-1]
    assert float((total - before).norm() / before.norm()) <= TOLERANCE
    assert float((base[0, 1:] - stepped.mean(0)).norm() / base[0, 1:].norm()) <= TOLERANCE
    assert float((own[0, 1:] - base[0, 1:]).norm() / base[0, 1:].norm()) > 1e-3, "own weights are not the base"


def test_two_that_mix_behind_each_step_are_bsp(train: Train) -> None:
    """R9: halves of both are the mean of a step, of SGD without momentum, where learners wait until they have come."""
    two = ("anna", "bert")
    assert_same(train("local:3,gossip=1", on=two, patient=True), train("bsp", on=two), "sgd")


def mixed_in_turns(train: Train, over: str, *, abreast: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What four are apart from their mean by, [rank, period, value]: behind the first step of each period, which takes
    them far apart, and, without any gradient from there on, behind each of the period's two turns. Learners wait until
    neighbours' weights have come; one that does not come in time is mixed in later, and none of this holds."""
    how = {"watched": True, "patient": True, "taken_apart_every": 3, "abreast": abreast}
    run = train(f"local:3,gossip=1,over={over}", **how)
    own, base, gradients = flat(run.own), flat(run.base), flat(run.gradients)
    assert own.shape[:2] == (MEMBERS, 12)
    assert not gradients[:, 1::3].any()
    stepped = base - 0.05 * gradients  # a period begins at the base
    for_all = stepped.mean(0)
    first, second, third = ((of - for_all)[:, at::3] for of, at in ((stepped, 0), (own, 0), (own, 1)))
    assert float(first.norm(dim=(0, 2)).min()) > 1e3 * float(base[0, 0].norm()), "rounding of weights is far below"
    return first, second, third


def test_weights_of_a_ring_come_together_by_its_second_eigenvalue(train: Train) -> None:
    """R9: around a ring of four what is not the mean shrinks to a third in each turn, whatever it is: (1 + 2 cos 90) /
    3 is the eigenvalue of two directions, and -1/3 of the third. And it is W's, value by value."""
    for before, after in itertools.pairwise(mixed_in_turns(train, "ring", abreast=False)):
        told = (before + before.roll(1, 0) + before.roll(-1, 0)) / 3
        for period in range(4):
            shrunk = float(after[:, period].norm() / before[:, period].norm())
            assert shrunk == pytest.approx(1 / 3, rel=TOLERANCE), period
            assert float((after - told)[:, period].norm() / told[:, period].norm()) <= TOLERANCE, period


def test_weights_of_pairs_are_the_mean_after_log2_m_turns(train: Train) -> None:
    """R9: of four behind the second turn of each period, and not behind the first one. Learners begin a turn together:
    a daemon takes what is shown in its learner's turn and the next one, and of two pairs one could be further ahead."""
    turns = mixed_in_turns(train, "pairs", abreast=True)
    stepped, halfway, mean = (each.norm(dim=(0, 2)) for each in turns)
    assert float((halfway / stepped).min()) > 0.1
    assert float((mean / stepped).max()) <= TOLERANCE
