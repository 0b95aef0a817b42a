"""G9: what one member's learner hears from the giver before the first round, and what is loaded of its start (J1)."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.recovery import join_requests
from meshtraind.recovery.join_requests import Giver, JoinRequests
from meshtraind.recovery.state_donor import StateDonor
from meshtraind.runtime.tasks import TaskSet
from meshtraind.transport.requests import RequestFailed
from meshwire.jobs.lifecycle import new_job_id
from meshwire.message_base import Wire
from meshwire.messages.generation import AskModel, AskState, Model, SavedState
from meshwire.messages.job import BlobRef
from meshwire.messages.learner import LearnerModel, LearnerSaved, LearnerState, StateTask
from meshwire.model.manifest import ModelManifest, TensorSpec
from meshwire.rounds.chain import START

JOB = new_job_id(bytes(8))
PLAN = bytes(32)
EQUAL, OTHER = bytes(32), b"1" * 32
BLOB = BlobRef(sha256=b"b" * 32, size_bytes=1)


def manifest(values: int = 3) -> ModelManifest:
    weight = TensorSpec(name="weight", shape=(values,), dtype="float32", kind="parameter")
    return ModelManifest(tensors=(weight,), optimizer="SGD")


class GiverLink:
    """The way to the giver, which answers one after the other; the last answer it repeats."""

    name = "anna"
    closing = False

    def __init__(self, *answers: Wire | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[Wire] = []

    async def request(self, body: Wire, **_settings: object) -> Wire:
        self.asked.append(body)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Bert:
    """Rank 1, whose learner prepares; anna gives the start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, link: GiverLink | None, *, gone: bool = False) -> None:
        monkeypatch.setattr(join_requests, "POLL_S", 0.0)
        rank, name = (0, "anna") if link is not None else (1, "bert")
        giver = Giver(rank, name, link is None, cast(Any, link), start=0, decided=True, gone=gone)
        learner = SimpleNamespace(loads=lambda: 0)
        rounds = SimpleNamespace(complete=0, learner=learner, chain_after=lambda _round: START, sample_space=None)
        self.fetched: list[int] = []
        self.host = SimpleNamespace(
            giver=giver, who="rank 1 (bert)", manifest=manifest(), plan_digest=lambda: PLAN, carried_bytes=0,
            beginning=SimpleNamespace(task=lambda _body: None),
        )  # fmt: skip
        files = SimpleNamespace(folder=Path("state"), fetch=self._fetch)
        self.requests = JoinRequests(JOB, cast(Any, rounds), cast(Any, self.host), cast(Any, files))

    async def _fetch(self, units: dict[int, BlobRef], *_args: object) -> None:
        self.fetched += units

    async def model(self) -> None:
        await self.requests.model(LearnerModel(manifest=manifest(), memory_bytes=0), lambda _event: None)

    async def state(self, units: Sequence[bytes] = (EQUAL, EQUAL)) -> StateTask:
        return await self.requests.state(LearnerState(units=tuple(units)), lambda _event: None)


def model(values: int = 3, plan: bytes = PLAN) -> Model:
    return Model(job=JOB, rank=0, manifest=manifest(values), plan=plan)


@pytest.mark.asyncio
async def test_equal_models_agree_as_soon_as_the_giver_has_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    link = GiverLink(RequestFailed("anna has no history"), TimeoutError(), model())
    bert = Bert(monkeypatch, link)
    await bert.model()
    assert link.asked == [AskModel(job=JOB)] * 3
    assert not bert.requests.broken


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("other", "why"),
    [
        (model(values=4), r"the models of rank 0 \(anna\) and rank 1 \(bert\) differ: .*weight"),
        (model(plan=OTHER), r"rank 1 \(bert\) plans its buckets differently from rank 0 \(anna\)"),
    ],
)
async def test_another_model_is_named_with_both_devices_and_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, other: Model, why: str
) -> None:
    """No other learner of this script would agree."""
    bert = Bert(monkeypatch, GiverLink(other))
    with pytest.raises(RequestFailed, match=why):
        await bert.model()
    assert bert.requests.broken


@pytest.mark.asyncio
async def test_a_giver_whose_script_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bert = Bert(monkeypatch, GiverLink(RequestFailed("anna has no history")), gone=True)
    with pytest.raises(RequestFailed, match=r"rank 0 \(anna\) ended its script; waiting to prepare .* is in vain"):
        await bert.model()


@pytest.mark.asyncio
async def test_the_giver_begins_from_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bert = Bert(monkeypatch, None)
    await bert.model()
    task = await bert.state()
    assert (task.units, task.round, task.kept) == ((), 0, False)
    assert bert.requests.own_start


@pytest.mark.asyncio
async def test_only_what_differs_is_fetched_and_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """J1: what is equal does not cross the network, in a start as in a return."""
    for left_out, loaded in (((0, 1), ()), ((0,), (1,))):
        link = GiverLink(SavedState(round=0, chain=START, units=(BLOB,) * len(loaded), left_out=left_out))
        bert = Bert(monkeypatch, link)
        assert (await bert.state((EQUAL, OTHER))).units == loaded
        assert link.asked == [AskState(job=JOB, after_round=0, digests=(EQUAL, OTHER))]
        assert tuple(bert.fetched) == loaded


@pytest.mark.asyncio
async def test_a_state_of_another_script_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bert = Bert(monkeypatch, GiverLink(SavedState(round=0, chain=START, units=(BLOB, BLOB, BLOB))))
    with pytest.raises(RequestFailed, match=r"rank 0 \(anna\): it has 3 units of state, this peer 2"):
        await bert.state()
    assert bert.requests.broken


@pytest.mark.asyncio
async def test_a_start_that_is_lost_while_it_is_fetched_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """G9: another one is given, and its learner has loaded nothing yet: it needs no other process."""
    bert = Bert(monkeypatch, GiverLink(SavedState(round=0, chain=START, units=(BLOB, BLOB))))

    async def fetch(*_args: object) -> None:
        bert.host.giver = Giver(1, "bert", own=True, link=None, start=1, decided=True, gone=False)

    cast(Any, bert.requests)._states.fetch = fetch
    assert (await bert.state()).units == ()
    assert (bert.requests.start, bert.requests.own_start) == (1, True)


@pytest.mark.asyncio
async def test_a_state_is_given_again_where_what_it_leaves_out_is_equal() -> None:
    """J1: several that start alike cost the giver one look at its state; one that does not, another one."""
    saved: list[tuple[bytes, ...]] = []

    async def save(after: int, _folder: Path, _timeout_s: float, digests: tuple[bytes, ...]) -> LearnerSaved:
        saved.append(digests)
        if after:
            raise RequestFailed("what there is is too old")
        left_out = tuple(unit for unit, digest in enumerate(digests) if digest == EQUAL)
        return LearnerSaved(number=1, round=0, units=2, left_out=left_out)

    async def begin(_number: int) -> Path:
        return Path("saved")

    async def keep(_number: int, units: Sequence[int]) -> tuple[BlobRef, ...]:
        return (BLOB,) * len(units)

    async def discard(_number: int) -> None:
        pass

    files = SimpleNamespace(begin=begin, keep=keep, discard=discard, release=discard)
    rounds = SimpleNamespace(chain_after=lambda _round: START)
    learner = SimpleNamespace(states=SimpleNamespace(save=save), rounds=rounds)
    job = SimpleNamespace(spec=SimpleNamespace(job=JOB, restarts_max=None, engine="mesh"), generation=None)
    tasks = TaskSet("test")
    donor = StateDonor(cast(Any, job), files, cast(Any, learner), cast(Any, SimpleNamespace(newest=None)), tasks)

    async def ask(device: str, *digests: bytes) -> SavedState:
        return await donor.state(device, AskState(job=JOB, after_round=0, digests=digests))

    first = await ask("b", EQUAL, OTHER)
    assert (first.by_number, first.left_out) == ({1: BLOB}, (0,))
    assert await ask("c", EQUAL, b"2" * 32) == first, "unit 1 is there for whoever lacks it"
    assert len(saved) == 1
    assert donor.newest_round() is None, "not everybody could load it"
    assert (await ask("d", OTHER, OTHER)).count == 2
    assert len(saved) == 2
    with pytest.raises(RequestFailed, match="too old"):
        await donor.state("e", AskState(job=JOB, after_round=3, digests=(OTHER, OTHER)))
    await tasks.close()
