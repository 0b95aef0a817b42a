"""H1: by which topology a job with hubs goes, when it is submitted and when it begins again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshtraind.jobs.submission
from meshtraind.jobs.checkpoint_search import CheckpointSearch
from meshtraind.jobs.submission import Submission, hub_topology, topology_at
from meshtraind.storage.blobs import BlobStore
from meshwire import limits
from meshwire.messages.job import JobSpec, Member, ResumePoint
from meshwire.messages.local import Resubmit, ResumeFrom, Submit
from tests.daemon.jobs.test_file_intake import make_spec

ANNA, BERT = (Member(device=letter * 64, incarnation=1, name=name) for letter, name in (("a", "anna"), ("b", "bert")))
NAS, PI = (
    Member(device=letter * 64, incarnation=1, name=name, hub=True) for letter, name in (("c", "nas"), ("d", "pi"))
)


def typed(**more: Any) -> Submit:
    given: dict[str, Any] = {
        "name": "job", "root": "/here", "manifest": "/m", "data_root": None, "data_manifest": None,
        "script": "train.py", "args": (), "env": (), "on": (), "peers": None, "sync": "bsp", "on_nan": "stop",
        "seed": None, "bucket_bytes": None, "hash_every": 0, "trace": False, "dry_run": False,
    }  # fmt: skip
    return Submit(**given | more)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return make_spec(BlobStore(tmp_path / "blobs"), {"train.py": b"print()"})


def submission(body: Submit | Resubmit) -> Submission:
    node: Any = SimpleNamespace(device=ANNA.device, name="anna", links={}, blobs=None)
    nobody: Any = None
    return Submission(node, nobody, body, lambda _progress: None)


def test_one_hub_is_the_middle_of_a_star_and_several_share_the_vector() -> None:
    """By their ranks, wherever those are."""
    assert topology_at((ANNA, BERT)) is None
    assert topology_at((ANNA, NAS)) == "star:1"
    assert topology_at((NAS, ANNA, BERT)) == "star:0"
    assert topology_at((ANNA, BERT, NAS, PI)) == "sharded:2,3"
    assert hub_topology(typed(topology="ring"), (ANNA, NAS)) is None, "what was typed stays"


@pytest.mark.asyncio
async def test_hubs_count_beside_the_laptops_of_peers(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--peers 2:4` with two hubs: a fifth and sixth member have room, and a job has no more members than it may."""

    async def ingested(*_asked: object) -> Any:
        return spec.files, None

    monkeypatch.setattr(meshtraind.jobs.submission, "ingest_all", ingested)
    for members, peers_max, topology, most in (
        ((ANNA, BERT), 4, "ring", 4),
        ((ANNA, BERT, NAS), 4, "star:2", 5),
        ((ANNA, BERT, NAS, PI), 4, "sharded:2,3", 6),
        ((ANNA, BERT, NAS), limits.MEMBERS_MAX, "star:2", limits.MEMBERS_MAX),
        ((ANNA, BERT, NAS), None, "star:2", None),
    ):
        body = typed(peers=None if peers_max is None else 2, peers_max=peers_max)
        made = await submission(body)._new(body, "owner", members, [])
        assert (made.topology, made.peers_max) == (topology, most)
        assert made.by_hubs == any(member.hub for member in members)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("members", "topology"), [((ANNA, NAS), "star:1"), ((ANNA, BERT, NAS, PI), "sharded:2,3"), ((ANNA, BERT), None)]
)
async def test_a_job_that_begins_again_goes_by_the_hubs_of_now(
    spec: JobSpec, monkeypatch: pytest.MonkeyPatch, members: tuple[Member, ...], topology: str | None
) -> None:
    """Those of before have other ranks, or are not there."""
    before = spec.model_copy(update={"topology": "star:3", "by_hubs": True})
    resumed = SimpleNamespace(
        spec=before, point=ResumePoint(job=spec.job, round=40, files=spec.files), source=None, notes=()
    )

    async def brings(*_asked: object) -> Any:
        return resumed

    monkeypatch.setattr(CheckpointSearch, "bring", brings)
    monkeypatch.setattr(CheckpointSearch, "bring_files", brings)
    body = Resubmit(resume=ResumeFrom(job=spec.job))
    again = await submission(body)._again(body, "owner", [], members)
    assert (again.topology, again.by_hubs) == (topology, topology is not None)
    as_it_was = await submission(body)._again(body, "owner", [])
    assert (as_it_was.topology, as_it_was.by_hubs) == ("star:3", True), "with the members of before"
