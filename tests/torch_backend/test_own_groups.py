"""P9 without real jobs: where scripts meet for which gloo carries all, what is refused with it, and what ends it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.jobs.spec import check_engine
from meshtraind.jobs.submission import Submission
from meshtraind.learner import own_groups
from meshtraind.learner.environment import ScriptPlace, learner_environment
from meshtraind.learner.own_groups import Meeting, NoMeetingError, folders_and_seed, free_port, meet
from meshtraind.learner.process import LearnerProcess
from meshtraind.learner.script_error import ScriptError
from meshtraind.learner.supervisor import LearnerSupervisor
from meshtraind.session.session import JobSession
from meshtraind.storage.job_record import Job
from meshtraind.storage.resume_file import NAME
from meshtraind.transport.requests import RequestFailed
from meshwire.messages.job import BlobRef, JobSpec, Member
from meshwire.messages.local import Submit
from tests.daemon.fakedaemon import SOFTWARE
from tests.daemon.realjobs import submission
from tests.torch_backend.specs import SPEC

NAMES = ("anna", "bert", "cleo")
MEMBERS = tuple(Member(device=f"{at:064x}", incarnation=1, name=name) for at, name in enumerate(NAMES))
BY_TORCHRUN = SPEC.model_copy(update={"engine": "torchrun", "seed": 7})
INTERFACES = {"10.0.0.1": "eth0", "10.0.0.2": "eth0", "10.0.1.1": "wlan0"}


def job_of(rank: int, spec: JobSpec = BY_TORCHRUN, members: tuple[Member, ...] = MEMBERS) -> Any:
    return SimpleNamespace(spec=spec, rank=rank, members=members, port=4000, folder=Path("jobs/one"), gone=set())


def link(here: str, there: str) -> Any:
    return SimpleNamespace(local_host=here, remote_host=there)


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_groups, "interface_of", INTERFACES.get)


def test_all_meet_at_the_address_of_rank_0_by_the_interface_of_that_link() -> None:
    first = meet(job_of(0), {1: link("10.0.0.1", "10.0.0.2"), 2: link("::ffff:10.0.0.1", "10.0.0.3")})
    assert first == Meeting("10.0.0.1", 4000, "eth0")
    other = meet(job_of(1), {0: link("10.0.0.2", "::ffff:10.0.0.1"), 2: link("10.0.1.1", "10.0.1.2")})
    assert other == Meeting("10.0.0.1", 4000, "eth0")
    assert meet(job_of(0, members=MEMBERS[:1]), {}) == Meeting("127.0.0.1", 4000, None)


def test_who_has_no_way_to_the_others_is_told_why() -> None:
    apart = {1: link("10.0.0.1", "10.0.0.2"), 2: link("10.0.1.1", "10.0.1.2")}
    with pytest.raises(NoMeetingError, match="linked with bert by eth0 and cleo by wlan0: put all on one network"):
        meet(job_of(0), apart)
    named = BY_TORCHRUN.model_copy(update={"env": (("GLOO_SOCKET_IFNAME", "eth0"),)})
    assert meet(job_of(0, named), apart) == Meeting("10.0.0.1", 4000, None)
    with pytest.raises(NoMeetingError, match="cleo was lost before the scripts began"):
        meet(job_of(1), {0: link("10.0.0.2", "10.0.0.1")})
    with pytest.raises(NoMeetingError, match=r"no interface of this device has the address 10\.9\.9\.9 any more"):
        meet(job_of(1), {0: link("10.9.9.9", "10.0.0.1"), 2: link("10.0.0.2", "10.0.0.3")})
    untold = job_of(0)
    untold.port = None
    with pytest.raises(NoMeetingError, match="on which port"):
        meet(untold, {})


def test_a_free_port_can_be_listened_on() -> None:
    assert 1024 <= free_port() < 2**16


def test_every_script_finds_torchs_variables_and_no_daemon() -> None:
    """Also one that calls mt.prepare; and the folders and the seed of the job."""
    place = ScriptPlace(1, 3, meeting=Meeting("10.0.0.1", 4000, "eth0"))
    for prepares in (True, False):
        found = learner_environment(BY_TORCHRUN, place, prepares=prepares, threads=1)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
        assert [found[name] for name in names] == ["1", "3", "0", "10.0.0.1", "4000", "eth0"]
    unnamed = learner_environment(BY_TORCHRUN, ScriptPlace(0, 1, meeting=Meeting("127.0.0.1", 4000, None)),
                                  prepares=False, threads=1)  # fmt: skip
    assert "GLOO_SOCKET_IFNAME" not in unnamed
    own = BY_TORCHRUN.model_copy(update={"env": (("GLOO_SOCKET_IFNAME", "eth1"),)})
    assert learner_environment(own, place, prepares=False, threads=1)["GLOO_SOCKET_IFNAME"] == "eth1"

    issued: list[str] = []

    def issue(job: str) -> str:
        issued.append(job)
        return "t"

    entrance = SimpleNamespace(address="unix:x", learners=SimpleNamespace(issue=issue))
    told = LearnerSupervisor(cast(Any, SimpleNamespace(entrance=entrance)), job_of(1), 1)._told()
    assert set(told) == {"MESHTRAIN_SEED", "MESHTRAIN_OUTPUT"}
    assert told["MESHTRAIN_SEED"] == "7"
    assert Path(told["MESHTRAIN_OUTPUT"]).is_absolute()
    assert not issued
    with_data = BY_TORCHRUN.model_copy(update={"data": BlobRef(sha256=bytes(32), size_bytes=1)})
    assert "MESHTRAIN_DATA" in folders_and_seed(job_of(1, with_data))
    by_daemons = LearnerSupervisor(cast(Any, SimpleNamespace(entrance=entrance)), job_of(1, SPEC), 1)._told()
    assert by_daemons == {"MESHTRAIN_ENDPOINT": "unix:x", "MESHTRAIN_TOKEN": "t"}


@pytest.mark.asyncio
async def test_nothing_takes_the_place_of_torchs_process_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, ...]] = []

    async def start(*command: str, **_: Any) -> Any:
        started.append(command)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    memory: Any = SimpleNamespace(file=None, kept=SimpleNamespace(file=None))
    log = tmp_path / "jobs" / "one" / "logs" / "0.log"
    log.parent.mkdir(parents=True)
    for spec in (BY_TORCHRUN, SPEC, SPEC.model_copy(update={"as_module": True})):
        await LearnerProcess(tmp_path, spec, log, memory, Path("python")).start({}, 0)
    own = len(SPEC.args) + 1
    assert [command[-own - 2 : -own] for command in started] == [("alone", ""), ("", ""), ("", "module")]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"codec": "fp16"}, "Leave out --codec fp16, or --engine torchrun"),
        ({"sync": "ssp:2", "topology": "ring"}, "Leave out --sync ssp:2 and --topology, or"),
        ({"masks": "0.8"}, "--masks"),
        ({"scale_lr": "linear"}, "--scale-lr"),
        ({"straggler": "wait"}, "--straggler"),
        ({"visibility": "fixed"}, "--visibility"),
        ({"own": "0"}, "--own"),
        ({"shares": "speed"}, "--shares speed"),
        ({"on_nan": "skip"}, "--on-nan skip"),
        ({"checkpoint_every": "7"}, "--checkpoint-every 7"),
        ({"independent": True}, "--independent"),
        ({"peers": 2, "peers_max": 3}, "--peers N:MAX"),
        ({"restarts_max": 2}, "Take --restart without --engine, and the daemons carry"),
    ],
)
def test_what_is_the_daemons_part_of_an_exchange_is_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestFailed, match=why):
        check_engine(submission(tmp_path, "pass", engine="torchrun", **options))


@pytest.mark.asyncio
async def test_whoever_submits_is_told_that_gradients_are_not_encrypted(tmp_path: Path) -> None:
    member = MEMBERS[0]
    node: Any = SimpleNamespace(device=member.device, member=member, software=SOFTWARE, links={})
    for engine, is_told in (("torchrun", True), ("mesh", False)):
        body = submission(tmp_path, "import meshtrain as mt\nmt.prepare(m)", engine=engine, dry_run=True)
        told = await Submission(node, cast(Any, None), body, lambda _: None).run("test")
        unencrypted = "gradients travel unencrypted, by gloo, on ports of its own: for a network that you trust"
        assert any(unencrypted in note for note in told.notes) is is_told
    refused = submission(tmp_path, "pass", engine="torchrun", masks="0.8", dry_run=True)
    with pytest.raises(RequestFailed, match="--masks"):
        await Submission(node, cast(Any, None), refused, lambda _: None).run("test")


def test_records_of_before_are_of_jobs_whose_daemons_carry_all(tmp_path: Path) -> None:
    old = {name: value for name, value in SPEC.model_dump().items() if name != "engine"}
    assert JobSpec.model_validate(old) == SPEC
    assert SPEC.engine == "mesh"
    typed = submission(tmp_path, "pass").model_dump()
    del typed["engine"]
    assert Submit.model_validate(typed).engine == "mesh"


def test_no_daemon_begins_such_a_job_again_nor_asks_what_it_has_exchanged(tmp_path: Path) -> None:
    """J4, J5."""
    for spec, is_daemons in ((BY_TORCHRUN, False), (SPEC, True)):
        folder = tmp_path / spec.engine
        folder.mkdir()
        job = Job(spec, MEMBERS, 0, folder, cast(Any, SimpleNamespace(put=lambda _record: None)))
        job.remember()
        assert (folder / NAME).exists() is is_daemons
        assert job.should_have_exchanged is is_daemons


def session_of(job: Any, links: dict[str, Any]) -> tuple[JobSession, list[str], list[str]]:
    """A session, with why it has failed at once, and what it waits with."""
    session = JobSession.__new__(JobSession)
    failed: list[str] = []
    later: list[str] = []
    session.job = job
    cast(Any, session).fail = failed.append
    session._node = cast(Any, SimpleNamespace(links=links))
    session.worlds = cast(Any, SimpleNamespace(
        group=SimpleNamespace(link_lost=lambda *_: None, is_disturbed=None, loss=None)))  # fmt: skip

    def spawn(waits: Any, name: str) -> None:
        waits.close()
        later.append(name)

    session._tasks = cast(Any, SimpleNamespace(spawn=spawn))
    return session, failed, later


def test_a_lost_device_ends_the_job_unless_it_has_done_its_part() -> None:
    same, anew = (SimpleNamespace(hello=SimpleNamespace(incarnation=number)) for number in (1, 2))
    lost = ["rank 2 (cleo) was lost: silence"]
    for spec, gone, links, told in (
        (BY_TORCHRUN, set(), {}, lost),
        (BY_TORCHRUN, set(), {MEMBERS[2].device: anew}, lost),
        (BY_TORCHRUN, set(), {MEMBERS[2].device: same}, []),  # another link has taken its place
        (BY_TORCHRUN, {2}, {}, []),
        (SPEC, set(), {}, []),
    ):
        job = job_of(0, spec)
        job.gone, job.rank_of = gone, {member.device: at for at, member in enumerate(MEMBERS)}.get
        session, failed, _ = session_of(job, cast(Any, links))
        session.group_link_lost(MEMBERS[2].device, "silence")
        assert failed == told


@pytest.mark.asyncio
async def test_nobody_goes_on_when_this_daemon_stops() -> None:
    job = job_of(0)
    job.ending = False
    session, _, _ = session_of(job, {})
    session.passage = cast(Any, SimpleNamespace(may_leave=True))
    assert not await session.leave()


def test_an_error_that_follows_from_another_ranks_end_waits_for_that_ones_word() -> None:
    def error(kind: str, what: str) -> ScriptError:
        return ScriptError(kind, what, "train.py, line 3", "", hopeless=False)

    own = error("ValueError", "ValueError: as ordered")
    closed = "RuntimeError: [/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    follows = [error("RuntimeError", closed), error("ConnectionLost", "this rank takes step 3, and another one ..."),
               error("DistNetworkError", "recvValue failed")]  # fmt: skip
    for each, is_told in (
        (own, True),
        (None, True),
        (error("RuntimeError", "CUDA"), True),
        *((e, False) for e in follows),
    ):
        session, failed, later = session_of(job_of(0), {})
        session._learners = cast(Any, SimpleNamespace(error=each))
        session._fail_of_group("rank 0 (anna): why")
        assert bool(failed) is is_told
        assert bool(later) is not is_told
