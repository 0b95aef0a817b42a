"""J3: what a learner keeps in memory, killed at any instant: of no use, or the base after a round with all it needs."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshtrain.errors import MeshtrainError
from meshtrain.train.model.kept_state import BUFFERS, STATE, KeptState
from meshtrain.train.model.state import SCRIPT, RoundProgress
from meshtrain.train.session import LearnerSession
from meshwire.memory_layout.kept_state import HEADER_BYTES, KeptHeader, kept_round
from tests.train.localdaemon import LocalDaemon
from tests.train.model.test_saving import (
    STEPS,
    Make,
    Moment,
    Net,
    adamw,
    batch,
    counting,
    nothing,
    replay,
    sgd,
    state_of,
    sync_of,
    train,
)


def held(data: bytes) -> int | None:
    """After which round, as a daemon sees it that reads no more than this."""
    return kept_round(lambda size, offset: data[offset : offset + size], len(data))


def told(data: bytes) -> int | None:
    """As `held`, by its word alone: of a model with many weights too few are looked at to know better."""
    header = KeptHeader.unpack(data)
    return None if header is None or header.dirty else header.round


def bytes_of(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def muons(model: nn.Module) -> torch.optim.Optimizer:
    """Its matrix is Muon's."""
    optimizer = adamw(model)
    optimizer.param_groups[0]["use_muon"] = True
    return optimizer


class Kills(TorchDispatchMode):
    """Notes the memory of a learner at each of its tensor operations, as it would be if it were killed there."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._descriptor = descriptor
        self.clean: dict[int, list[bytes]] = {}
        self.dirty = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        data = bytes_of(self._descriptor)
        if (round_ := told(data)) is None:
            self.dirty += 1
        elif data not in (found := self.clean.setdefault(round_, [])):
            found.append(data)
        return result


def base_in(data: bytes) -> bytes:
    header = KeptHeader.unpack(data)
    assert header is not None
    return data[header.base[0] :][: header.base[1]]


def record_in(data: bytes) -> Any:
    header = KeptHeader.unpack(data)
    assert header is not None
    return json.loads(data[header.record[0] :][: header.record[1]].rstrip(b"\0"))


def state_in(data: bytes) -> bytes:
    """The bytes of what all optimizers keep of their parameters, as a successor would find them."""
    return part_in(data, STATE)


def buffers_in(data: bytes) -> bytes:
    """The same of the base's buffers."""
    return part_in(data, BUFFERS)


def part_in(data: bytes, part: str) -> bytes:
    header = KeptHeader.unpack(data)
    assert header is not None
    index = json.loads(data[header.index[0] :][: header.index[1]])["index"].get(part, {})
    found = []
    for offset, dtype, shape, _ in index.values():
        found.append(data[offset:][: math.prod(shape) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()])
    return b"".join(found)


def killed_everywhere(daemon: LocalDaemon, make: Make) -> tuple[Kills, list[tuple[Net, torch.optim.Optimizer]]]:
    """A run in which the first learner is looked at after each operation of its own."""
    kills = Kills(daemon.kept[0])

    def begin(now: Moment) -> None:
        if now.rank == 0:
            kills.__enter__()  # type: ignore[no-untyped-call]

    def each(now: Moment) -> None:
        if now.rank == 0 and now.number == STEPS:
            kills.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    ended = train(daemon, make, range(1, STEPS + 1), 0, each, decayed=False, prepared=begin)
    return kills, ended


@pytest.mark.parametrize(
    ("make", "staleness", "own"),
    [
        (adamw, 0, "0"),
        (adamw, 2, "1"),
        pytest.param(sgd, 2, "0", marks=pytest.mark.slow),
        pytest.param(counting, 2, "1", marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_instant_memory_holds_a_base_or_says_that_it_holds_none(
    make: Make, staleness: int, own: str, tmp_path: Path
) -> None:
    """J3, O2: whoever takes its place goes on bit for bit as if it had never been killed."""
    with LocalDaemon(2, **sync_of(staleness, own)) as first:
        kills, ended = killed_everywhere(first, make)
    assert kills.dirty, "it was seen while a round went into the base"
    assert {3, 5, 6} <= kills.clean.keys()
    for round_, found in kills.clean.items():
        assert len(set(map(base_in, found))) == 1, f"one base after round {round_}"
    for round_, data in ((3, kills.clean[3][-1]), (6, kills.clean[6][0])):
        with LocalDaemon(2, **sync_of(staleness, own)) as second:
            second.begin_from(tmp_path, round_, 0, data)
            replay(second, first)
            resumed = train(second, make, range(round_ + 1, STEPS + 1), 50, decayed=False)
        for later in range(round_ + 1, STEPS + 1):
            assert second.hashes[later][0] == first.hashes[later][0], f"the base after round {later}"
        for (model, optimizer), (like, other) in zip(resumed, ended, strict=True):
            assert all(torch.equal(value, like.state_dict()[name]) for name, value in model.state_dict().items())
            assert state_of(optimizer) == state_of(other)


@pytest.mark.parametrize(
    ("make", "sync", "local_steps"),
    [
        (adamw, "local:3", 3),
        (sgd, "diloco:4,stream=2,tau=1", 2),
        pytest.param(sgd, "diloco:3", 3, marks=pytest.mark.slow),
        pytest.param(adamw, "local:2,ssp:1", 2, marks=pytest.mark.slow),
        pytest.param(sgd, "sma:3", 3, marks=pytest.mark.slow),
        pytest.param(adamw, "local:3,gossip=2", 3, marks=pytest.mark.slow),
        pytest.param(adamw, "local:4,stream=2,random", 2, marks=pytest.mark.slow),
        pytest.param(muons, "muloco:3", 3, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_instant_of_a_period_memory_holds_the_base_that_it_began_on(
    make: Make, sync: str, local_steps: int, tmp_path: Path
) -> None:
    """J3, R9: local steps are lost with their process, the base, what rounds go on with, and the optimizer's state are
    not: each later round makes of the base what it has made of it where nobody was killed."""
    options: dict[str, Any] = {"sync": sync} | ({"visibility": "fixed"} if "ssp" in sync else {})
    with LocalDaemon(2, **options) as first:
        kills, ended = killed_everywhere(first, make)
    assert kills.dirty, "it was seen while the base or the optimizer's state changed"
    assert {1, 2} <= kills.clean.keys()
    steps_at_most = local_steps * (2 if "ssp" in sync else 1)  # between two rounds
    for round_, found in kills.clean.items():
        assert len(set(map(base_in, found))) == 1, f"one base after round {round_}"
        assert len(set(map(buffers_in, found))) == 1, f"and its buffers after round {round_}"
        assert {record_in(data)["progress"]["round"] for data in found} == {round_}
        assert len(set(map(state_in, found))) <= steps_at_most + 1, "as whole steps have left it"
    assert len(kills.clean[1]) > 1, "it was seen within a period, too"
    for data in (kills.clean[1][0], kills.clean[1][-1]):
        with LocalDaemon(2, **options) as second:
            second.begin_from(tmp_path, 1, 0, data)
            replay(second, first)
            resumed = train(second, make, range(local_steps + 1, STEPS + 1), 50, decayed=False)
        for later in range(2, second.round + 1):
            assert second.hashes[later][0] == first.hashes[later][0], f"the base after round {later}"
        for (model, _), (like, _) in zip(resumed, ended, strict=True):
            assert all(torch.equal(value, like.state_dict()[name]) for name, value in model.state_dict().items())


def test_what_a_learner_keeps_of_its_own_is_in_memory_as_the_last_local_step_has_left_it(tmp_path: Path) -> None:
    """O8: the moments of its optimizer, which its next process begins with; and the script's rate, not the longer one
    of local steps (O13)."""
    left: list[tuple[bytes, list[Any]]] = []

    def each(now: Moment) -> None:
        if now.rank == 0:
            left.append((bytes_of(first.kept[0]), state_of(now.optimizer)))

    with LocalDaemon(2, sync="local:3") as first:
        train(first, adamw, range(1, 6), 0, each, decayed=False)
    assert [held(data) for data, _ in left] == [0, 0, 1, 1, 1]
    for data, state in left:
        with LocalDaemon(2, sync="local:3") as second:
            second.begin_from(tmp_path, held(data) or 0, 0, data)
            taken = train(second, adamw, range(0), 50, decayed=False)
        for _, optimizer in taken:
            assert state_of(optimizer) == state


def half_used(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def test_what_is_not_finite_is_in_no_memory_behind_its_round(tmp_path: Path) -> None:
    """V1: from then on an optimizer has no state, its next process has none, and what some parameters have again later
    is kept, though others are not used any more."""
    left: list[tuple[int | None, bytes, list[Any]]] = []

    def script(session: LearnerSession, rank: int) -> None:
        net, optimizer = session.prepare(models[rank], half_used(models[rank]))
        for number in range(1, 9):
            optimizer.zero_grad()
            values = net[0](batch(rank, number))
            loss = (net[1](values) if number < 5 else values).square().mean()
            if rank == 0:
                data = bytes_of(first.kept[0])
                left.append((held(data), data, state_of(optimizer)))
            (loss * (float("nan") if (rank, number) == (0, 3) else 1.0)).backward()
            optimizer.step()

    models = [nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(2)]
    with LocalDaemon(2, sync="local:2", on_nan="skip") as first:
        first.run(script)
    assert [round_ for round_, _, _ in left] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert left[4][2][0] == [{}] * 4, "it was forgotten"
    assert [bool(state) for state in left[5][2][0]] == [True, True, False, False]
    for round_, data, state in left[3:]:
        taken = [nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(2)]
        optimizers = [half_used(model) for model in taken]
        with LocalDaemon(2, sync="local:2") as second:
            second.begin_from(tmp_path, round_ or 0, 0, data)
            second.run(lambda session, rank: session.prepare(taken[rank], optimizers[rank]))  # noqa: B023
        if round_ != 1:  # else the step that brings it about is over, and its round is not
            assert [state_of(optimizer)[0] for optimizer in optimizers] == [state[0]] * 2


@pytest.mark.parametrize("sync", ["bsp", "local:2"])
def test_memory_is_of_use_while_a_closure_computes(sync: str) -> None:
    """As frameworks give it to `step`: all of a step lies in there."""
    seen: list[int | None] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(models[rank], adamw(models[rank]))

        def closure() -> float:
            if rank == 0:
                seen.append(held(bytes_of(daemon.kept[0])))
            optimizer.zero_grad()
            loss = model(batch(rank, 1)).square().mean()
            loss.backward()
            return float(loss.detach())

        for _ in range(4):
            optimizer.step(closure)

    models = [Net(0), Net(1)]
    with LocalDaemon(2, sync=sync) as daemon:
        daemon.run(script)
    assert seen == ([0, 1, 2, 3] if sync == "bsp" else [0, 0, 1, 1])


def test_a_base_of_parts_in_turns_is_whole_while_its_learner_waits() -> None:
    """Behind a round of one part, for the word to begin the next step."""
    seen: list[int | None] = []

    def script(session: LearnerSession, rank: int) -> None:
        model, optimizer = session.prepare(models[rank], sgd(models[rank]))
        if rank == 0:
            assert session._engine is not None
            boundary = session._engine.boundary
            wait = boundary.wait_start

            def watched() -> None:
                seen.append(held(bytes_of(daemon.kept[0])))
                wait()

            vars(boundary)["wait_start"] = watched
        for number in range(1, 9):
            optimizer.zero_grad()
            model(batch(rank, number)).square().mean().backward()
            optimizer.step()

    models = [Net(0), Net(1)]
    with LocalDaemon(2, sync="local:4,stream=2", hash_every=0) as daemon:
        daemon.run(script)
    assert seen[:4] == [1, 2, 3, 4]


def test_a_base_is_beside_the_parameters_while_they_hold_a_view() -> None:
    """O2: with own gradients ahead, the base is the copy beside."""
    with LocalDaemon(2, **sync_of(2, "1")) as daemon:
        kills, _ = killed_everywhere(daemon, adamw)
    headers = [KeptHeader.unpack(data) for data in kills.clean[5]]
    assert len({header.base for header in headers if header is not None}) == 2


def test_a_script_that_writes_into_its_model_leaves_nothing_to_go_on_from() -> None:
    """Weights of another model for an evaluation, say: nobody knows that they are not the base."""
    with LocalDaemon(1, **sync_of(0)) as daemon:
        seen: list[int | None] = []

        def each(now: Moment) -> None:
            seen.append(held(bytes_of(daemon.kept[0])))
            with torch.no_grad():
                parameters = list(now.optimizer.param_groups[0]["params"])
                kept = [parameter.clone() for parameter in parameters]
                for parameter in parameters:
                    parameter.zero_()
                seen.append(held(bytes_of(daemon.kept[0])))
                for parameter, value in zip(parameters, kept, strict=True):
                    parameter.copy_(value)
            seen.append(held(bytes_of(daemon.kept[0])))

        train(daemon, adamw, range(1, 3), 0, each)
    assert seen == [1, None, 1, 2, None, 2]


def test_what_a_script_writes_into_the_base_is_of_the_base() -> None:
    """O7: on all peers alike. Killed while it writes, nobody knows what of it is there."""
    with LocalDaemon(1, **sync_of(2, "1")) as daemon:
        seen: list[int | None] = []

        def each(now: Moment) -> None:
            if now.number != 4:
                return
            seen.append(held(bytes_of(daemon.kept[0])))
            with now.session.base(), torch.no_grad():
                for group in now.optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.add_(1.0)
                seen.append(held(bytes_of(daemon.kept[0])))
            seen.append(held(bytes_of(daemon.kept[0])))

        train(daemon, adamw, range(1, 5), 0, each)
    assert seen == [seen[0], None, seen[0]]
    assert seen[0] is not None


def test_what_cannot_be_kept_is_not() -> None:
    """Parameters that are parts of one vector would be torn from it; the run is as without."""
    vectors: list[Tensor] = []

    def flat(model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        vector = torch.cat([p.detach().flatten() for p in trained])
        at = 0
        for parameter in trained:
            parameter.data = vector[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        vectors.append(vector)
        return torch.optim.SGD(trained, lr=0.01)

    with LocalDaemon(1, **sync_of(0)) as daemon:
        train(daemon, flat, range(1, 4), 0, nothing)
        assert held(bytes_of(daemon.kept[0])) is None
    assert daemon.round == 3


def test_a_model_that_the_script_moves_elsewhere_is_kept_no_more() -> None:
    with LocalDaemon(1, **sync_of(0)) as daemon:
        seen: list[int | None] = []

        def each(now: Moment) -> None:
            if now.number == 2:
                parameter = now.optimizer.param_groups[0]["params"][0]
                parameter.data = parameter.data.clone()
            seen.append(held(bytes_of(daemon.kept[0])))

        train(daemon, adamw, range(1, 5), 0, each)
    assert seen[0] == 1
    assert seen[2:] == [None, None]


class AfterRoundFour:
    def progress(self) -> RoundProgress:
        return RoundProgress(round=4)


def test_memory_of_another_model_is_refused() -> None:
    descriptor = os.memfd_create("kept")
    one, other = nn.Linear(3, 3), nn.Linear(3, 4)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    KeptState(descriptor, list(one.parameters()), [], {SCRIPT: optimizer}).begin([], {}, AfterRoundFour())
    assert held(bytes_of(descriptor)) == 4
    others = {SCRIPT: torch.optim.SGD(other.parameters(), lr=0.1)}
    taker = KeptState(descriptor, list(other.parameters()), [], others)
    with pytest.raises(MeshtrainError, match="another model"):
        taker.take_over(lambda _: torch.zeros(1), 4)
    with pytest.raises(MeshtrainError, match="memory does not hold the base after round 5"):
        KeptState(descriptor, list(one.parameters()), [], {SCRIPT: optimizer}).take_over(lambda _: torch.zeros(1), 5)
    os.close(descriptor)


@pytest.mark.parametrize("data", [b"", b"MTKEPT01", bytes(HEADER_BYTES), b"x" * HEADER_BYTES])
def test_what_is_no_base_is_none(data: bytes) -> None:
    """A file that was never filled, or filled by whom no daemon knows."""
    assert held(data) is None


def test_a_header_that_tells_of_more_than_there_is_is_none() -> None:
    header = KeptHeader(False, 3, (HEADER_BYTES, 1 << 40), (HEADER_BYTES, 8), (HEADER_BYTES, 8), 1 << 41, bytes(16))
    assert KeptHeader.unpack(header.pack()) == header
    assert held(header.pack().ljust(HEADER_BYTES, b"\0")) is None


def test_a_second_process_takes_over_what_the_second_has_changed() -> None:
    """From process to process to process, in the same memory."""
    with LocalDaemon(1, **sync_of(0)) as first:
        whole = train(first, adamw, range(1, 7), 0, nothing, decayed=False)
    data = b""
    hashes: dict[int, dict[int, bytes]] = {}
    for begin in (1, 3, 5):
        with LocalDaemon(1, **sync_of(0)) as daemon:
            if data:
                daemon.begin_from(Path("none"), begin - 1, 0, data)
            parts = train(daemon, adamw, range(begin, begin + 2), 7 if data else 0, nothing, decayed=False)
            data = bytes_of(daemon.kept[0])
            hashes |= daemon.hashes
    assert hashes == first.hashes
    assert state_of(parts[0][1]) == state_of(whole[0][1])


@pytest.mark.parametrize("kept", [True, False])
def test_a_second_process_goes_on_though_a_scheduler_wrote_into_the_options(kept: bool, tmp_path: Path) -> None:
    """J1, O3: what a scheduler made after `mt.prepare` keeps in the groups is there again, and does not travel: a
    schedule by the first rate of all begins with that, not with the rate of the round that was saved."""
    schedules: list[torch.optim.lr_scheduler.OneCycleLR | torch.optim.lr_scheduler.LambdaLR] = []
    first_rates = []

    def decay(optimizer: torch.optim.Optimizer) -> None:
        schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))
        first_rates.append(schedules[-1].base_lrs)

    with LocalDaemon(2, **sync_of(2, "1")) as first:
        data: list[bytes] = []

        def each(now: Moment) -> None:
            if now.number == 1:
                decay(now.optimizer)
            if (now.rank, now.number) == (0, 6):
                data.append(bytes_of(first.kept[0]))
            if (now.rank, now.number) == (1, 1) and not kept:
                first.save(1, 4, tmp_path)

        whole = train(first, adamw, range(1, STEPS + 1), 0, each, decayed=False)
    (round_,) = {held(data[0])} if kept else {saved.round for _, saved in first.saved}
    assert round_ is not None

    with LocalDaemon(2, **sync_of(2, "1")) as second:
        second.begin_from(tmp_path, round_, 0 if kept else first.saved[0][1].units, data[0] if kept else b"")
        replay(second, first)

        def once(now: Moment) -> None:
            if now.number == round_ + 1:
                decay(now.optimizer)

        resumed = train(second, adamw, range(round_ + 1, STEPS + 1), 50, once, decayed=False)
    assert second.round == STEPS
    for (model, _), (like, _) in zip(resumed, whole, strict=True):
        assert all(torch.equal(value, like.state_dict()[name]) for name, value in model.state_dict().items())
    assert first_rates == [[0.02, 0.01]] * 4
