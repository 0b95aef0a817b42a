"""Attacks of a paired device that speaks the protocol and lies: extreme numbers, paths, offers, floods, gossip.

A paired device may run code here as this user. These attacks are about what it must not be able to do besides: harm a
daemon, its machine's memory and disk, or jobs of others, without as much as running code.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import psutil

from meshtraind.storage.fetch import output_folder
from meshtraind.trust.identity import FILE_NAME, FOLDER_NAME, make_certificate
from meshwire import limits
from meshwire.addresses import Address
from meshwire.jobs.files import FileEntry, FileManifest
from meshwire.jobs.lifecycle import job_number, new_job_id
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope, Failure, Role, decode, encode
from meshwire.messages.generation import AskModel, AskState, CatchUp, FetchRound
from meshwire.messages.job import (
    AskCheckpoint,
    BlobRef,
    End,
    Fetch,
    Fetched,
    FilesProgress,
    Find,
    Generation,
    JobSpec,
    ListCheckpoints,
    ListOutputs,
    Member,
    Offer,
    OfferReply,
    Prepare,
    RankReport,
)
from meshwire.messages.link import Addresses, Introduction, Introductions, KnownPeer
from meshwire.messages.local import Cancel, PairHost, Shutdown, Submit, Unpair
from meshwire.messages.rounds import Call, Null
from tests.bench.attackscene import (
    NAMES,
    Bounds,
    LeftOutError,
    NotHeldError,
    Scene,
    Victim,
    attack,
    in_thread,
    linked,
)
from tests.bench.liar import Liar, LiarLink
from tests.daemon.realjobs import submission
from tests.wire.wirevalues import every_message

INTERNAL = "meshtraind failed"  # how a daemon tells of an error of its own
ANSWER_S = 5.0  # for a fetch of a few bytes, whatever else is asked
PIPES_ASKED = 40  # more than asyncio's pool of threads has
OFFERS = 400
REFUSED_LINKS = 200
OFFER_ARGS_BYTES = 60 * limits.KIB  # below JOB_SPEC_BYTES_MAX
# As many as are remembered of those that never began, with an error each and without arguments, and sqlite's journal.
HISTORY_BYTES_MAX = limits.UNBEGUN_REMEMBERED_MAX * (limits.ERROR_CHARS_MAX + 4 * limits.KIB) + 4.5 * limits.MIB
NEVER_JOB = "0" * 12

Checked = TypeVar("Checked", bound=Wire)


def spec_of(liar: Liar, manifest: bytes, **changes: Any) -> JobSpec:
    """A job that this liar submits."""
    like = every_message()["job.offer"]
    assert isinstance(like, Offer)
    fields: dict[str, Any] = {
        "job": new_job_id(secrets.token_bytes(8)),
        "name": "lies",
        "submitter": liar.id,
        "created_at_s": time.time(),
        "script": "train.py",
        "args": (),
        "env": (),
        "files": BlobRef(sha256=hashlib.sha256(manifest).digest(), size_bytes=len(manifest)),
        "data": None,
        "codec": "fp32",
        "topology": None,
        "masks": None,
        "resume": None,
        "peers_max": None,
        "trace": False,
        "hash_every": 0,
    }
    return like.spec.model_copy(update=fields | changes)


def offer_of(liar: Liar, victim: Victim, link: LiarLink, spec: JobSpec) -> Offer:
    """A job of the liar and its victim."""
    return Offer(
        spec=spec,
        members=(
            Member(device=liar.id, incarnation=liar.incarnation, name=liar.name),
            Member(device=victim.status().device, incarnation=link.hello.incarnation, name=victim.name),
        ),
    )


def serving(blobs: dict[bytes, bytes]) -> Callable[[Fetch], Wire | None]:
    """Answers fetches of these, and of nothing else."""

    def serve(wanted: Fetch) -> Wire | None:
        data = blobs.get(wanted.sha256 or b"")
        if data is None:
            return Failure(error="no such blob")
        piece = data[wanted.offset_bytes : wanted.offset_bytes + wanted.max_bytes]
        return Fetched(data=piece, total_bytes=len(data), end=wanted.offset_bytes + len(piece) >= len(data))

    return serve


async def progress_of(link: LiarLink, job: str, timeout_s: float) -> FilesProgress:
    """How a daemon's intake of a job's files ended: `ready` or `error`. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while link.open:
            for said in link.notices:
                if isinstance(said, FilesProgress) and said.job == job and (said.ready or said.error):
                    return said
            await asyncio.sleep(0.02)
    raise ConnectionError(f"the link ended: {link.refused}")


def call_off(link: LiarLink, job: str) -> None:
    """Ends an offered job."""
    link.notify(End(job=job, outcome="cancelled", reason="enough", now=True), job=job_number(job))


def fetch(what: Any, job: str, **changes: Any) -> Fetch:
    """The first bytes of a file."""
    fields: dict[str, Any] = {"offset_bytes": 0, "max_bytes": 4096}
    return Fetch(job=job, what=what, **(fields | changes))


def extreme(liar: Liar, victim: Victim, link: LiarLink, job: str) -> Iterator[Wire]:
    """Every request about a job with numbers at the ends of their ranges, and beyond."""
    for biggest in (limits.DATA_BYTES_MAX, limits.NUMBER_MAX, 2**63 - 1, 2**64 - 1):
        for rank in (0, 1, limits.MEMBERS_MAX - 1, 2**31):
            for what in ("output", "log"):
                yield changed(fetch(what, job), offset_bytes=biggest, rank=rank, path="a" if what == "output" else None)
        for sha256 in (bytes(32), *some_blobs(victim)):
            yield changed(fetch("blob", job, sha256=sha256), offset_bytes=biggest)
        yield changed(fetch("log", job), max_bytes=biggest)
        yield changed(
            FetchRound(job=job, round=2**32 - 1, offset_bytes=0, max_bytes=limits.FETCH_BYTES_MAX), offset_bytes=biggest
        )
        yield changed(CatchUp(job=job, generation=0, complete=0), generation=biggest, complete=2**32 - 1)
        yield changed(AskState(job=job, after_round=0), after_round=biggest)
        yield changed(AskCheckpoint(job=job, round=0), round=biggest)
        spec = spec_of(liar, b"", job=job)
        first = Generation.first(job, liar.id, offer_of(liar, victim, link, spec).members)
        yield Prepare(generation=changed(first, number=biggest))
        huge = changed(spec.files, size_bytes=biggest)
        yield offer_of(liar, victim, link, spec_of(liar, b"", files=huge))
        yield offer_of(liar, victim, link, spec_of(liar, b"", data=huge))
    yield from (AskState(job=job, after_round=2**32 - 1), AskModel(job=job), AskCheckpoint(job=job, round=2**32 - 1))
    yield from (ListOutputs(job=job), ListCheckpoints(job=job), Find(prefix="0" * 32))
    for created_at_s in (0.0, 5e-324, limits.SECONDS_MAX, 1e308, -1e308, float("inf"), float("nan")):
        yield offer_of(liar, victim, link, spec_of(liar, b"", created_at_s=created_at_s, seed=2**63 - 1))


def changed(body: Checked, **fields: Any) -> Checked:
    """With these fields, whatever they may be."""
    return body.model_copy(update=fields)


def is_legal(body: Wire) -> bool:
    """Whether the protocol allows this."""
    return isinstance(decode(encode(Envelope(Role.REQUEST, 1, body))), Envelope)


@attack("liar")
async def extreme_numbers(scene: Scene) -> str:
    """every request with offsets, rounds, ranks, sizes and times at the ends of their ranges and beyond, of a job that
    runs and none: answered, or the link refused with a reason"""
    assert scene.job is not None
    asked = refused = 0
    for victim in (scene.anna, scene.bert):
        liar = scene.liar(victim)
        link = await linked(liar, victim)
        for job in (scene.job, NEVER_JOB):
            for body in list(extreme(liar, victim, link, job)):
                asked += 1
                if not link.open:
                    await link.end()
                    link = await linked(liar, victim)
                if isinstance(body, Offer):  # in the name of the present link
                    body = offer_of(liar, victim, link, body.spec)
                legal = is_legal(body)
                try:
                    reply = await link.ask(body)
                except TimeoutError:
                    raise NotHeldError(f"{body!r:.200} was not answered") from None
                except ConnectionError as error:
                    if legal or not link.refused:
                        raise NotHeldError(f"{body!r:.200} ended the link: {error}") from error
                    refused += 1
                    continue
                if not legal:
                    raise NotHeldError(f"{body!r:.200} is beyond the protocol and was answered with {reply!r:.100}")
                if isinstance(reply, Failure) and INTERNAL in reply.error:
                    raise NotHeldError(f"{body!r:.200} is an error of ours: {reply.error[:200]}")
                if isinstance(body, Offer) and isinstance(reply, OfferReply) and reply.refusal is None:
                    call_off(link, body.spec.job)
        await link.end()
    return f"{asked} requests, of which {refused} are refused with the link, and the others answered"


@attack("liar")
async def pieces_that_do_not_fit(scene: Scene) -> str:
    """fetches of the daemon answered with pieces that are empty, short, too long, behind the end or of a size that
    changes, and with blobs whose content is another"""
    liar, victim = scene.liar(scene.anna), scene.anna
    whole = secrets.token_bytes(5000)
    digest = hashlib.sha256(whole).digest()

    def piece(data: bytes, total_bytes: int, end: bool) -> Callable[[Fetch], Wire | None]:
        return lambda _wanted: Fetched(data=data, total_bytes=total_bytes, end=end)

    sizes = iter(range(10_000))
    ways: dict[str, Callable[[Fetch], Wire | None]] = {
        "nothing, and no end": piece(b"", 5000, False),
        "nothing, and the end": piece(b"", 5000, True),
        "short, and the end": piece(whole[:100], 5000, True),
        "a total of none": piece(whole[:100], 0, False),
        "a larger total": piece(whole, 2**40, False),
        "too long": piece(whole + whole, 5000, True),
        "a megabyte": piece(bytes(limits.MIB), 5000, False),
        "a total that changes": lambda _wanted: Fetched(data=b"x", total_bytes=next(sizes), end=False),
        "other content": piece(bytes(5000), 5000, True),
        "another message": lambda _wanted: Find(prefix="0"),
        "a failure that draws": lambda _wanted: Failure(error="\x1b[2J\u202e" * 100),
    }
    said: list[str] = []
    for how, serve in ways.items():
        link = await linked(liar, victim, serve)
        try:
            offer = offer_of(liar, victim, link, spec_of(liar, whole, files=BlobRef(sha256=digest, size_bytes=5000)))
            reply = await link.ask(offer)
            if not isinstance(reply, OfferReply) or reply.refusal is not None:
                raise LeftOutError(f"an offer was not taken: {reply}")
            try:
                ended = await progress_of(link, offer.spec.job, 30.0)
            except ConnectionError:
                said.append(how)  # the link was refused
                continue
            except TimeoutError:
                raise NotHeldError(f"{how}: the intake had not ended after 30 s") from None
            if ended.ready:
                raise NotHeldError(f"{how}: the files were taken")
            said.append(how)
        finally:
            if link.open:
                call_off(link, offer.spec.job)
                with contextlib.suppress(ConnectionError, TimeoutError):
                    await link.ask(Find(prefix=NEVER_JOB))
            await link.end()
    return f"{len(said)} ways, none taken"


def some_blobs(victim: Victim) -> list[bytes]:
    """Blobs that a daemon has."""
    found = (path for path in (victim.data_dir / "blobs").glob("*/*") if len(path.name) == 64)
    return [bytes.fromhex(path.name) for path, _ in zip(found, range(3), strict=False)]


@attack("liar")
async def paths_in_fetches(scene: Scene) -> str:
    """outputs by .., absolute and odd paths, and through a symlinked folder and a symlink in the output folder: the
    private key is wanted"""
    assert scene.job is not None
    root = output_folder(scene.bert.data_dir / "jobs" / scene.job, 0)
    root.mkdir(parents=True, exist_ok=True)
    identity = scene.bert.data_dir / FOLDER_NAME
    planted = {root / "folder": identity, root / "file": identity / FILE_NAME, root / "home": Path("/")}
    up = "../" * 4
    paths = [
        *(f"{up}{FOLDER_NAME}/{FILE_NAME}", str(identity / FILE_NAME), f"a/{up}../{FOLDER_NAME}/{FILE_NAME}"),
        *(f"./{up}{FOLDER_NAME}/{FILE_NAME}", f"folder/{FILE_NAME}", "file", "home/etc/passwd", "folder/../file"),
        *("..\\..\\identity\\device.pem", "a\0b", "C:/x", f"home{identity}/{FILE_NAME}"),
    ]
    for link_path, target in planted.items():
        link_path.symlink_to(target)
    try:
        async with scene.liar(scene.bert).at(scene.bert.address) as link:
            for path in paths:
                reply = await link.ask(fetch("output", scene.job, path=path))
                if isinstance(reply, Fetched) and (reply.data or reply.total_bytes):
                    key = " with the private key" if b"PRIVATE KEY" in reply.data else ""
                    raise NotHeldError(f"output {path!r} gave {len(reply.data)} bytes{key}")
                if isinstance(reply, Failure) and INTERNAL in reply.error:
                    raise NotHeldError(f"output {path!r} is an error of ours: {reply.error[:200]}")
    finally:
        for link_path in planted:
            link_path.unlink()
    return f"{len(paths)} paths, not a byte"


@attack("liar")
async def a_pipe_among_the_outputs(scene: Scene) -> str:
    """forty fetches of a FIFO in an output folder; then a log is wanted, and `status`, and later the daemon's end"""
    assert scene.job is not None
    folder = scene.bert.data_dir / "jobs" / scene.job
    pipe = output_folder(folder, 0) / "pipe"
    pipe.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(pipe)
    loop = asyncio.get_running_loop()
    try:
        async with scene.liar(scene.bert).at(scene.bert.address) as link:
            asked = [
                loop.create_task(link.ask(fetch("output", scene.job, path="pipe")), name="pipe")
                for _ in range(PIPES_ASKED)
            ]
            try:
                await asyncio.wait(asked, timeout=ANSWER_S)
                began_s = time.monotonic()
                try:
                    async with asyncio.timeout(ANSWER_S):
                        reply = await link.ask(fetch("log", scene.job))
                except TimeoutError:
                    raise NotHeldError(f"a log is not served within {ANSWER_S:.0f} s while a pipe is read") from None
                took_s = time.monotonic() - began_s
                if unanswered := sum(not task.done() for task in asked):
                    raise NotHeldError(f"{unanswered} fetches of the pipe are not answered")
            finally:
                for task in asked:
                    task.cancel()
                await asyncio.wait(asked)
    finally:
        await let_go(pipe)
    return f"a log after {took_s:.2f} s: {type(reply).__name__}"


async def let_go(pipe: Path) -> None:
    """Whoever waits for a writer of the pipe gets one, which then leaves."""
    for _ in range(PIPES_ASKED):
        with contextlib.suppress(OSError):  # nobody reads
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        await asyncio.sleep(0.02)
    pipe.unlink()


@attack("liar")
async def paths_in_manifests(scene: Scene) -> str:
    """offered files with paths that lead out of the job's folder, are one on other systems, or are no paths"""
    liar, victim = scene.liar(scene.anna), scene.anna
    canary = f"canary-{scene.seed}"
    content = b"print('hello')\n"
    digest = hashlib.sha256(content).digest()
    names = [
        *(f"../{canary}", f"../../../{canary}", f"/tmp/{canary}", str(scene.folder / canary), f"a/../../{canary}"),
        *(f"a\\..\\..\\{canary}", f"C:{canary}", f"{canary}\0", f"{canary}/", f"./{canary}", "con", f"{canary}. "),
        *("x" * 600, "/".join("abcdefgh" * 8), "\ud800", "A.py\x1b[2J"),
    ]
    ended = []
    for name in names:
        entries = [
            {"path": path, "size_bytes": len(content), "sha256": digest, "executable": True}
            for path in ("train.py", name)
        ]
        try:
            manifest = msgpack.packb({"entries": entries}, unicode_errors="surrogatepass")
        except ValueError:
            continue
        async with liar.at(
            victim.address, serving({hashlib.sha256(manifest).digest(): manifest, digest: content})
        ) as link:
            offer = offer_of(liar, victim, link, spec_of(liar, manifest))
            reply = await link.ask(offer)
            if not isinstance(reply, OfferReply) or reply.refusal is not None:
                raise LeftOutError(f"an offer was not taken: {reply}")
            said = await progress_of(link, offer.spec.job, 20.0)
            call_off(link, offer.spec.job)
            if said.ready:
                raise NotHeldError(f"a job with the file {name!r} was taken")
            ended.append(said.error or "")
    if found := [path for path in outside_of_jobs(scene) if canary in path.name]:
        raise NotHeldError(f"written: {found}")
    return f"{len(ended)} manifests refused, nothing written; the last: {ended[-1][:90]}"


def outside_of_jobs(scene: Scene) -> Iterator[Path]:
    """What lies where a trick path could lead."""
    data_dir = scene.anna.data_dir
    for folder in (scene.folder, data_dir, data_dir / "jobs", scene.temporary, Path("/tmp")):
        if folder.exists():
            yield from folder.iterdir()


@attack("liar", bounds=Bounds(log_bytes_per_s=64 * limits.KIB, disk_bytes=32 * limits.MIB))
async def offers_without_files(scene: Scene) -> str:
    """400 offers of large jobs one after the other, whose files nobody has; then the device's owner submits one"""
    liar, victim = scene.liar(scene.anna), scene.anna
    count = max(40, int(OFFERS * scene.share))
    history = victim.data_dir / "jobs.db"
    before_bytes = history_bytes(history)
    arguments = ("x" * OFFER_ARGS_BYTES,)
    taken, refusals = 0, set()
    async with liar.at(victim.address, lambda _wanted: Failure(error="no such blob")) as link:
        for number in range(count):
            offer = offer_of(liar, victim, link, spec_of(liar, b"%d" % number, args=arguments))
            reply = await link.ask(offer)
            if isinstance(reply, OfferReply) and reply.refusal is None:
                taken += 1
                with contextlib.suppress(TimeoutError):
                    await progress_of(link, offer.spec.job, 5.0)
            else:
                refusals.add(str(reply)[:80])
                await asyncio.sleep(0.05)
    grown_bytes = history_bytes(history) - before_bytes
    await owner_submits(scene)
    seen = f"{taken} of {count} taken, jobs.db grew by {grown_bytes // limits.KIB} KiB; refused: {refusals or 'none'}"
    if grown_bytes > HISTORY_BYTES_MAX:
        raise NotHeldError(seen)
    return seen


def history_bytes(path: Path) -> int:
    """Of the table, with what sqlite keeps beside it."""
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*"))


async def owner_submits(scene: Scene) -> None:
    """Anna's owner tries a job on anna; raises NotHeldError when there is no place left for it."""
    work = scene.folder / f"owner-{secrets.token_hex(4)}"
    work.mkdir()
    wanted = submission(work, "print('mine')", on=("anna",), dry_run=True)
    try:
        await in_thread(lambda: scene.anna.request(wanted, 30.0, "submission"))
    except Exception as error:
        raise NotHeldError(f"anna's owner cannot submit: {' '.join(str(error).split())[:200]}") from error


@attack("liar", bounds=Bounds(log_bytes_per_s=64 * limits.KIB))
async def files_that_never_end(scene: Scene) -> str:
    """offers whose files are asked for and never come, as many as may run: the owner needs a place all the same"""
    liar, victim = scene.liar(scene.anna), scene.anna
    taken = []

    async with liar.at(victim.address, lambda _wanted: None) as link:
        for number in range(limits.JOBS_RUNNING_MAX + 4):
            offer = offer_of(liar, victim, link, spec_of(liar, b"never" * (number + 1)))
            large = BlobRef(sha256=offer.spec.files.sha256, size_bytes=limits.MIB)
            offer = offer.model_copy(update={"spec": offer.spec.model_copy(update={"files": large})})
            reply = await link.ask(offer)
            if isinstance(reply, OfferReply) and reply.refusal is None:
                taken.append(offer.spec.job)
        await asyncio.sleep(scene.seconds(10))
        fetched = link.fetches
        try:
            await owner_submits(scene)
        finally:
            for job in taken:
                call_off(link, job)
            await asyncio.sleep(1.0)
    running = victim.status().jobs_running
    if running:
        raise NotHeldError(f"{running} of the offered jobs still run after they were called off")
    return f"{len(taken)} offers taken, {fetched} pieces asked for; none is left"


# In proportion: ten times its bytes while it is read and checked.
LARGE = Bounds(peak_bytes=320 * limits.MIB, memory_bytes=128 * limits.MIB, disk_bytes=64 * limits.MIB)


@attack("liar", bounds=LARGE)
async def manifests_as_large_as_may_be(scene: Scene) -> str:
    """as many files as are allowed, of which none is delivered, 28 MiB of names; and as many, each deep in folders of
    its own: 320 MiB of memory at most"""
    liar, victim = scene.liar(scene.anna), scene.anna
    files = max(10_000, int(limits.FILES_MAX * min(1.0, 2 * scene.share)))
    deep = "/".join("d" * 6 for _ in range(limits.FOLDER_DEPTH_MAX - 2))
    found = []
    for how, path in (("legal", f"{deep}/{{folder:06}}/{{number:06}}"), ("too deep", f"{{number:07}}/{deep}/f")):
        entries = [FileEntry(path="train.py", size_bytes=1, sha256=bytes(32), executable=False)]
        for number in range(1, files):
            where = path.format(folder=number // 2, number=number)
            digest = number.to_bytes(32, "big")
            entries.append(FileEntry(path=where, size_bytes=1, sha256=digest, executable=False))
        manifest = await asyncio.to_thread(FileManifest(entries=tuple(entries)).pack)
        async with liar.at(victim.address, serving({hashlib.sha256(manifest).digest(): manifest})) as link:
            offer = offer_of(liar, victim, link, spec_of(liar, manifest))
            reply = await link.ask(offer)
            if not isinstance(reply, OfferReply) or reply.refusal is not None:
                raise LeftOutError(f"the offer was not taken: {reply}")
            try:
                said = await progress_of(link, offer.spec.job, 120.0)
            except TimeoutError:
                raise NotHeldError("the intake had not ended after 120 s") from None
            call_off(link, offer.spec.job)
            await asyncio.sleep(2.0)
        found.append(f"{how}: {len(manifest) / limits.MIB:.0f} MiB, refused with: {(said.error or '')[:90]}")
    peak_bytes = scene.watch.peak_bytes(victim)
    return f"{files} files took {peak_bytes // limits.MIB} MiB at the peak; {'; '.join(found)}"


@attack("liar")
async def jobs_that_it_is_not_in(scene: Scene) -> str:
    """requests for rounds, model and state of the job of two others, and words in the name of its members; also what
    only people may ask"""
    assert scene.job is not None
    job, number = scene.job, job_number(scene.job)
    liar, victim = scene.liar(scene.bert), scene.bert
    forbidden: list[Wire] = [
        CatchUp(job=job, generation=0, complete=0),
        FetchRound(job=job, round=1, offset_bytes=0, max_bytes=1000),
        AskModel(job=job),
        AskState(job=job, after_round=0),
        Shutdown(),
        PairHost(),
        Unpair(peer="anna"),
        *(body for body in every_message().values() if isinstance(body, Submit)),
        Cancel(job=NEVER_JOB, now=True),
    ]
    async with liar.at(victim.address) as link:
        for body in forbidden:
            reply = await link.ask(body)
            if not isinstance(reply, Failure):
                raise NotHeldError(f"{type(body).__name__} was answered with {reply!r:.100}")
        anna = scene.anna.status().device
        lent = offer_of(liar, victim, link, spec_of(liar, b"", submitter=anna))
        reply = await link.ask(lent)
        if not (isinstance(reply, OfferReply) and reply.refusal):
            raise NotHeldError(f"an offer in the name of anna was answered with {reply}")
    generation = 0
    words: list[Wire] = [
        Null(round=2**32 - 1),
        Call(round=1),
        RankReport(job=job, rank=0, state="failed", exit_code=1, error="lies"),
        End(job=job, outcome="failed", reason="lies", now=True),
        *(
            body.model_copy(update={"job": job})
            for name, body in every_message().items()
            if name.startswith(("generation.", "job.hash", "job.barrier", "job.model", "job.state"))
            and "job" in type(body).model_fields
        ),
    ]
    for body in words:
        async with liar.at(victim.address) as link:
            link.notify(body, job=number, generation=generation)
            with contextlib.suppress(ConnectionError, TimeoutError):
                await link.ask(Find(prefix=NEVER_JOB))
    return f"{len(forbidden) + 1} requests refused, {len(words)} words ignored"


@attack("liar")
async def links_that_are_refused_and_stay(scene: Scene) -> str:
    """200 links one after the other, each ended by a message that breaks the protocol, of which the liar closes none:
    they may not take the daemon's descriptors"""
    liar, victim = scene.liar(scene.anna), scene.anna
    process = psutil.Process(victim.pid)
    before, most = process.num_fds(), 0
    links: list[LiarLink] = []
    began_s = time.monotonic()
    try:
        for _ in range(max(20, int(REFUSED_LINKS * scene.share))):
            link = await linked(liar, victim)
            links.append(link)
            link.stays = True
            link.notify(liar.hello)  # the second one
            most = max(most, process.num_fds() - before)
    finally:
        for link in links:
            await link.end()
    seen = f"{len(links)} links in {time.monotonic() - began_s:.1f} s, {most} more descriptors at the most"
    if most > Bounds().descriptors:
        raise NotHeldError(seen)
    return seen


# A link's backlog in TLS's buffer (`limits`), whose place the allocator may keep: more would be another link's.
UNREAD = Bounds(log_bytes_per_s=8 * limits.KIB, memory_bytes=4 * limits.LINK_BACKLOG_BYTES_MAX)


@attack("liar", bounds=UNREAD)
async def floods_of_requests(scene: Scene) -> str:
    """requests as fast as the link takes them, whose answers are not read, and then whose answers are"""
    liar, victim = scene.liar(scene.anna), scene.anna
    sent = answered = 0
    for reads in (False, True):
        link = await liar.connect(victim.address)
        if not reads:
            link.deafen()
        until_s = time.monotonic() + scene.seconds(15)
        loop = asyncio.get_running_loop()
        asked: set[asyncio.Task[Wire]] = set()
        while time.monotonic() < until_s and link.open:
            asked = {task for task in asked if not task.done()}
            for _ in range(200):
                asked.add(loop.create_task(link.ask(Find(prefix="")), name="flood"))
                sent += 1
            await asyncio.sleep(0.01)
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(0.5):
                    await link.writer.drain()
            answered += sum(task.done() and not task.cancelled() and task.exception() is None for task in asked)
        for task in asked:
            task.cancel()
        if asked:
            await asyncio.wait(asked)
        await link.end()
    if "mallory" not in {peer.name for peer in victim.peers().peers}:
        raise NotHeldError("the liar is not paired any more")
    return f"{sent} requests, {answered} answered"


@attack("liar")
async def gossip(scene: Scene) -> str:
    """addresses of paired devices that lead nowhere, of thousands of devices, host names beyond reason; and a name that
    draws on terminals and logs"""
    liar, victim = scene.liar(scene.anna), scene.anna
    paired = [one.status().device for one in (scene.bert, scene.cleo)]
    hosts = [f"10.77.0.{number}" for number in range(150, 150 + limits.ADDRESSES_PER_PEER_MAX)]
    evil = "\x1b]0;owned\x07\x1b[2J\u202eevil\n\x9b31m"
    async with liar.at(victim.address, name=evil) as link:
        shown = [peer.name for peer in victim.peers().peers]
        for round_number in range(max(3, int(30 * scene.share))):
            lies = [KnownPeer(device=device, addresses=addresses_of(hosts, round_number)) for device in paired]
            lies += [
                KnownPeer(device=secrets.token_hex(32), addresses=addresses_of(["x" * 60 + ".invalid"], 1))
                for _ in range(limits.PEERS_MAX - len(lies))
            ]
            link.notify(Addresses(peers=tuple(lies)))
            await asyncio.sleep(0.2)
        await asyncio.sleep(2.0)
        if missing := set(NAMES) - {victim.name} - victim.linked():
            raise NotHeldError(f"anna has lost {missing}")
        seen = len(victim.peers().peers)
        output = await in_thread(lambda: shown_peers(scene))
    log = b"".join(path.read_bytes() for path in victim.data_dir.glob("daemon.log*"))
    for where, text in (("daemon.log", log.decode(errors="replace")), ("`meshtrain peers`", str(output))):
        if drawn := [char for char in text if not (char.isprintable() or char in "\n\t")]:
            raise NotHeldError(f"{where} holds {drawn[0]!r}, from the peer's name")
    if seen > limits.PEERS_MAX + limits.DEVICES_SEEN_MAX:
        raise NotHeldError(f"anna shows {seen} devices")
    return f"all links stand, {seen} devices shown; the name: {next((name for name in shown if 'evil' in name), '?')!r}"


def addresses_of(hosts: list[str], number: int) -> tuple[Address, ...]:
    """On ports that change with the number."""
    return tuple(Address(host=host, port=20_000 + number) for host in hosts)


def shown_peers(scene: Scene) -> str:
    """What `meshtrain peers` writes on a terminal."""
    command = [sys.executable, "-m", "meshtrain.cli", "peers", "--data-dir", str(scene.anna.data_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@attack("liar")
async def introductions(scene: Scene) -> str:
    """thousands of invented devices, what is no certificate, and again those that a person has removed"""
    liar, victim = scene.liar(scene.anna), scene.anna
    waves = max(3, int(20 * scene.share))
    first = invented(limits.INTRODUCTIONS_MAX)

    def joined() -> set[str]:
        return {peer.device for peer in victim.peers().peers if peer.added_by == liar.name}

    async with liar.at(victim.address) as link:
        link.notify(Introductions(devices=first))
        for _ in range(waves):
            await asyncio.sleep(1.2)
            junk = Introduction(certificate_der=secrets.token_bytes(400), name="x", addresses=())
            link.notify(Introductions(devices=(junk,)))
            link.notify(Introductions(devices=invented(limits.INTRODUCTIONS_MAX)))
        await asyncio.sleep(2.5)  # the last word is read, too: who waited at the one before waits no more
        came = await asyncio.to_thread(joined)
        if not 0 < len(came) <= limits.INTRODUCTIONS_MAX:
            raise NotHeldError(f"{len(came)} devices joined by the liar's word")
        for device in came:
            await asyncio.to_thread(victim.request, Unpair(peer=device), ANSWER_S, "unpair")
        link.notify(Introductions(devices=first))
        await asyncio.sleep(2.5)
        if back := await asyncio.to_thread(joined) & came:
            raise NotHeldError(f"{len(back)} devices that were removed are back")
    if missing := set(NAMES) - {victim.name} - victim.linked():
        raise NotHeldError(f"anna has lost {missing}")
    return f"{len(came)} of {(1 + waves) * len(first)} invented devices joined; removed, none of them came back"


def invented(count: int) -> tuple[Introduction, ...]:
    """Devices with certificates as good as any."""
    made = (ssl.PEM_cert_to_DER_cert(make_certificate()[0]) for _ in range(count))
    return tuple(Introduction(certificate_der=der, name=secrets.token_hex(4), addresses=()) for der in made)
