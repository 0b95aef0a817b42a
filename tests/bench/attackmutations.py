"""Thousands of broken messages over live links: to a daemon without a job, to both members of one, and in a job whose
member the liar is. Valid messages are taken and broken by bits, bytes and structure, in their frames too."""

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgpack

from meshwire import limits
from meshwire.frames.header import HEADER_BYTES, Header, Kind
from meshwire.jobs.files import FileEntry, FileManifest
from meshwire.jobs.lifecycle import job_number
from meshwire.message_base import Wire
from meshwire.messages.envelope import Envelope, Role, encode
from meshwire.messages.generation import AskModel, AskState, Model, SavedState, Wish
from meshwire.messages.job import Commit, Generation, Prepare, Promise
from meshwire.messages.link import Heartbeat
from meshwire.messages.local import GetStatus
from meshwire.rounds.chain import START
from tests.bench.attackliar import call_off, offer_of, progress_of, serving, spec_of
from tests.bench.attackscene import Bounds, LeftOutError, NotHeldError, Scene, Victim, attack, linked
from tests.bench.liar import LiarLink
from tests.daemon import realjobs as jobs
from tests.wire.fuzzing import mutated
from tests.wire.wirevalues import every_message

MESSAGES = 9000  # in a run of 15 minutes, over all three daemons
OF_A_MEMBER = 1500  # besides, in a job that the liar is in
DEAF_S = 1.0  # without an answer a daemon waits for the rest of a frame, whose length was broken
FRAMES_BROKEN = 0.1  # in their header
CHUNKS = 0.1
SWAPPED = 0.2  # with a field of another message
STRETCHED = 0.3  # whole, with numbers at the ends of ranges
NUMBERS_STRETCHED = 0.15  # of such a message: one wrong number would hide what the others do
STRETCHED_OF_A_MEMBER = 0.9  # most others would end the link, and with it the membership
ENDS = (0, 1, 2, 63, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
JOBS_MAX = 40  # of the liar's own, one after the other: the first violation leaves it out of one (G10)
JOB_TIMEOUT_S = 60.0
INTAKE_TIMEOUT_S = 30.0

# A line or two each, that a link has begun and why it ended.
BROKEN = Bounds(log_bytes=1024 * 2 * MESSAGES)

NOT_SAID = ("hello", "refuse")  # they end a link by themselves
OF_MEMBERS = ("bind", "null", "call", "seal", "job.", "generation.", "model.", "state.", "round.fetch")

# A paired device may cancel a job; what is left of these is sent with job ids of no job.
ENDS_JOBS = frozenset({"cancel", "job.end", "leave"})


class Mutants:
    """Frames with broken messages, the same for the same seed.

    Args:
        job, generation: of the job that they are to be about, if they are.
        stretched: how many are whole, with numbers at the ends of their ranges: these come behind the first checks.
        names: what the message types begin with.
    """

    def __init__(
        self,
        rng: random.Random,
        job: str | None = None,
        generation: int = 0,
        *,
        stretched: float = STRETCHED,
        names: tuple[str, ...] = ("",),
    ) -> None:
        self._rng = rng
        self._stretched_share = stretched
        self._job = job
        self._generation = generation
        bodies = every_message().items()
        self._bodies = {name: body for name, body in bodies if name.startswith(names) and name not in NOT_SAID}

    def frame(self) -> bytes:
        """The next one."""
        rng = self._rng
        if rng.random() < CHUNKS:
            return self._chunk()
        if rng.random() < self._stretched_share:
            payload = self._message(stretched=True)
            return self._header(Kind.CONTROL, len(payload)) + payload
        payload = mutated(self._message(), self._message(), rng)[: limits.CONTROL_BYTES_MAX]
        header = self._header(Kind.CONTROL, len(payload))
        if rng.random() < FRAMES_BROKEN:
            at = rng.randrange(HEADER_BYTES)
            header = header[:at] + bytes([header[at] ^ (1 << rng.randrange(8))]) + header[at + 1 :]
        return header + payload

    def _header(self, kind: Kind, payload_bytes: int, **fields: Any) -> bytes:
        job = job_number(self._job) if self._job is not None else self._rng.getrandbits(64)
        generation = self._rng.choice((0, self._generation, self._rng.getrandbits(64)))
        return Header(kind, payload_bytes, job=job, generation=generation, **fields).encode()

    def _chunk(self) -> bytes:
        rng = self._rng
        size_bytes = rng.choice((0, 1, 8, 4096))
        fields = {
            "round": rng.choice((0, 1, 2, 2**32 - 1)),
            "step": rng.choice((0, 1, 2**16 - 1)),
            "bucket": rng.choice((0, 1, 2**16 - 1)),
            "first_segment": rng.choice((0, 2**32 - 1)),
            "segment_count": rng.choice((0, 1, 2**32 - 1)),
            "contributors": rng.choice((0, 1, 2**64 - 1)),
            "complete": rng.choice((0, 2**32 - 1)),
        }
        return self._header(Kind.CHUNK, size_bytes, **fields) + rng.randbytes(size_bytes)

    def _message(self, *, stretched: bool = False) -> bytes:
        """A valid one, of the job in half of all cases; or one with a field of another. `stretched`: as above."""
        rng = self._rng
        name = rng.choice(sorted(self._bodies))
        role = rng.choice((Role.NOTICE, Role.NOTICE, Role.REQUEST, Role.REQUEST, Role.REPLY, Role.EVENT, Role.FAILURE))
        packed = encode(Envelope(role, 0 if role is Role.NOTICE else rng.randint(1, 2**40), self._bodies[name]))
        plain: Any = msgpack.unpackb(packed)
        fields = plain[3]
        if self._job is not None and "job" in fields and name not in ENDS_JOBS and rng.random() < 0.5:
            fields["job"] = self._job
        if stretched:
            plain[3] = self._stretch(fields)
            return bytes(msgpack.packb(plain))
        if fields and rng.random() < SWAPPED:
            other = self._bodies[rng.choice(sorted(self._bodies))].model_dump()
            if other:
                fields[rng.choice(sorted(fields))] = other[rng.choice(sorted(other))]
        return bytes(msgpack.packb(plain))

    def _stretch(self, plain: Any) -> Any:
        """Some of the numbers at the ends of ranges."""
        if isinstance(plain, dict):
            return {name: self._stretch(value) for name, value in plain.items()}
        if isinstance(plain, list):
            return [self._stretch(value) for value in plain]
        if isinstance(plain, bool) or self._rng.random() > NUMBERS_STRETCHED:
            return plain
        if isinstance(plain, int):
            return self._rng.choice(ENDS)
        if isinstance(plain, float):
            return self._rng.choice((0.0, 1.0, -1.0, 1e308, -1e308, 5e-324, float("nan"), float("inf")))
        return plain


async def sent(
    count: int,
    mutants: Mutants,
    link: LiarLink,
    again: Callable[[], Awaitable[LiarLink]],
    goes_on: Callable[[], bool] = lambda: True,
) -> tuple[int, int]:
    """Sends so many frames, each when the one before has been read; `again` makes the next link when one was closed.

    Returns frames and links.
    """
    done, links = 0, 1
    while done < count and goes_on():
        if not link.open or link.writer.transport.is_closing():
            await link.end()
            link = await again()
            links += 1
        link.writer.write(mutants.frame())
        done += 1
        try:
            async with asyncio.timeout(DEAF_S):
                await link.ask(Heartbeat())
        except (TimeoutError, ConnectionError):
            link.writer.transport.abort()
    await link.end()
    return done, links


@attack("mutations", bounds=BROKEN)
async def to_all_three(scene: Scene) -> str:
    """9,000 messages of every type and role, broken, and chunks: to anna, and to both members of the job with its id; a
    wrong one ends the link, and the next is made"""
    count = max(300, int(MESSAGES * scene.share)) // len(scene.victims)

    async def to(victim: Victim) -> tuple[int, int]:
        rng = random.Random(f"{scene.seed} {victim.name}")
        job = None if victim is scene.anna else scene.job
        liar = scene.liar(victim)

        async def again() -> LiarLink:
            return await linked(liar, victim)

        return await sent(count, Mutants(rng, job), await again(), again)

    results = await asyncio.gather(*map(to, scene.victims))
    for victim in scene.victims:
        victim.request(GetStatus(), 2.0, "status")
    total, links = (sum(numbers) for numbers in zip(*results, strict=True))
    return f"seed {scene.seed}: {total} frames over {links} links"


@attack("mutations", bounds=BROKEN)
async def as_a_member_of_a_job(scene: Scene) -> str:
    """the liar submits a job to anna and takes part in it: broken messages of its membership and rounds, from a member
    that is believed; a violation leaves it out of that job, and another is begun"""
    count = max(60, int(OF_A_MEMBER * scene.share))
    liar, victim = scene.liar(scene.anna), scene.anna
    rng = random.Random(f"{scene.seed} member")
    total = links = jobs_begun = 0
    ends: dict[str, int] = {}
    while total < count and jobs_begun < JOBS_MAX:
        async with liar_in_job(scene, prepared=jobs_begun % 2 == 1) as (link, job, generation):
            jobs_begun += 1

            async def again() -> LiarLink:
                return await linked(liar, victim)

            def goes_on(job: str = job) -> bool:
                seen = jobs.summary(victim, job)
                return seen.state in ("starting", "running", "finishing") and not seen.refused  # nothing is heard then

            mutants = Mutants(rng, job, generation, stretched=STRETCHED_OF_A_MEMBER, names=OF_MEMBERS)
            done, more = await sent(max(1, (count - total) // 4), mutants, link, again, goes_on)
            total, links = total + done, links + more
            state = state_of(victim, job)
            ends[state] = ends.get(state, 0) + 1
        await gone(victim, job)
    return f"{total} frames over {links} links in {jobs_begun} jobs, which were then: {ends}"


@contextlib.asynccontextmanager
async def liar_in_job(scene: Scene, *, prepared: bool) -> AsyncIterator[tuple[LiarLink, str, int]]:
    """A job of the liar and anna, in which anna's learner starts: (link, job, generation). Called off afterwards.

    Args:
        prepared: anna's learner has prepared its model, which the liar says is its own too, and is ready to compute.
    """
    liar, victim = scene.liar(scene.anna), scene.anna
    content = jobs.TRAIN.encode()
    entry = FileEntry(path="train.py", size_bytes=len(content), sha256=_digest(content), executable=False)
    manifest = FileManifest(entries=(entry,)).pack()
    link = await liar.connect(victim.address, serving({_digest(manifest): manifest, entry.sha256: content}))
    offer = offer_of(liar, victim, link, spec_of(liar, manifest, args=("1000000",), env=(("OMP_NUM_THREADS", "1"),)))
    job = offer.spec.job
    try:
        await link.ask(offer)
        said = await progress_of(link, job, INTAKE_TIMEOUT_S)
        generation = Generation.first(job, liar.id, offer.members)
        promise = await link.ask(Prepare(generation=generation))
        if not said.ready or not isinstance(promise, Promise) or promise.refusal is not None:
            raise LeftOutError(f"anna takes no part: {said.error}, {promise}")
        link.notify(Commit(job=job, generation=generation.hash64()), job=job_number(job))
        async with asyncio.timeout(JOB_TIMEOUT_S):
            while state_of(victim, job) in ("ready", "starting"):
                await asyncio.sleep(0.1)
        if prepared:
            await agree(link, job)
        yield link, job, generation.hash64()
    finally:
        closing = await linked(liar, victim)
        call_off(closing, job)
        await asyncio.sleep(0.5)
        await closing.end()


async def agree(link: LiarLink, job: str) -> None:
    """Waits for anna's model, says the same, and gives a start that is anna's own, until its learner is ready; returns
    before where the job has ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(JOB_TIMEOUT_S / 2):
            while not isinstance(said := await link.ask(AskModel(job=job)), Model) and link.open:
                await asyncio.sleep(0.05)
            link.answers |= {AskModel: partial(_the_same_model, said), AskState: _the_same_start}
            while link.open and not any(isinstance(said, Wish) and said.kind == "learn" for said in link.notices):
                await asyncio.sleep(0.05)


def _the_same_model(model: Wire, _: AskModel) -> Wire:
    return model.model_copy(update={"rank": 0})


def _the_same_start(asked: AskState) -> SavedState:
    return SavedState(round=0, chain=START, units=(), left_out=tuple(range(len(asked.digests))))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def state_of(victim: Victim, job: str) -> str:
    """What a daemon says of a job."""
    return jobs.summary(victim, job).state


async def gone(victim: Victim, job: str) -> None:
    """Until nothing of a job runs there. Raises NotHeldError."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(JOB_TIMEOUT_S):
            while victim.learners():
                await asyncio.sleep(0.1)
    if victim.learners():
        raise NotHeldError(f"the learner of the job {job}, which is {state_of(victim, job)}, still runs")
