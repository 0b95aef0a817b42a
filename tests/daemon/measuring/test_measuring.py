"""W7: two devices measure the link between them, over that link; what a lying, silent or busy one brings about."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshtraind.measuring import link_measurement as legs_module
from meshtraind.measuring import measuring as measuring_module
from meshtraind.measuring import speed as speed_module
from meshtraind.measuring.goodput import WINDOW_BYTES_MIN
from meshtraind.measuring.measuring import Measuring
from meshtraind.runtime.tasks import TaskSet, told_elsewhere
from meshtraind.transport.connection import Connection, RequestFailed
from meshwire import limits
from meshwire.frames.header import Header, Kind
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.link import Heartbeat, Software
from meshwire.messages.local import LinksMeasured, MeasureProgress, PeerSummary
from meshwire.messages.measuring import AskSpeed, ComputeSpeed, MeasureLink, MeasureReady, ProbeEnd, ProbeTaken
from tests.daemon.connectionpair import DEADLINE_S, Recorder, every_transport, pair, run
from tests.daemon.waiting import until

ANNA, BERT = "a" * 64, "b" * 64
ALLOWED_S = limits.MEASURE_S_MAX


@pytest.fixture(autouse=True)
def a_machine_may_be_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends are in one loop here, and have as long as they need, where a test does not say otherwise."""
    monkeypatch.setattr(limits, "MEASURE_S_MAX", DEADLINE_S)
    monkeypatch.setattr(measuring_module, "ANSWER_S_MAX", DEADLINE_S)


class Device(Recorder):
    """One end: a real `Measuring` behind the link's handler, as `PeerHandler` has it.

    Attributes:
        running: how many jobs it has.
        silent: it drops chunks unread.
        takes_s: what its calculation takes; 0: it cannot be measured.
        on_chunk: called with the header of each one that has come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.silent = False
        self.takes_s = 0.01
        self.on_chunk: Callable[[Header], None] = lambda _: None
        self.links: dict[str, Any] = {}
        self.received_bytes = 0

    def is_called(self, name: str, other: str, other_name: str, connection: Connection) -> None:
        connection.device = other
        hello = SimpleNamespace(name=other_name)
        self.links[other] = SimpleNamespace(device=other, hello=hello, connection=connection, rtt_s=0.001)
        self.node = SimpleNamespace(name=name, links=self.links)
        self.measuring = Measuring(cast(Any, self.node), self, self)

    async def kernel_s(self) -> float:
        if not self.takes_s:
            raise RequestFailed("its speed was not measured")
        return self.takes_s

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        self.received_bytes += header.payload_bytes
        assert not header.job
        return None if self.silent else self.measuring.chunk_announced(conn.device or "", header)

    def chunk_received(self, conn: Connection, header: Header) -> None:
        self.on_chunk(header)
        self.measuring.chunk_received(conn.device or "", header)

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        assert isinstance(body, ProbeTaken | ProbeEnd)
        self.notices.append(body)
        self.measuring.heard(conn.device or "", body)

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Callable[[Wire], None]) -> Wire:
        if isinstance(body, Heartbeat):
            return Done()
        if isinstance(body, AskSpeed):
            return await self.measuring.answer_speed()
        assert isinstance(body, MeasureLink)
        return await self.measuring.answer(conn, body, emit)

    @property
    def figures(self) -> Any:
        """What it knows of the only other one."""
        (device,) = self.links
        (summary,) = self.measuring.with_figures([peer(device)])
        return summary.measured


class Liar(Device):
    """An end that answers as it is told to.

    Attributes:
        answer: in place of the real one.
    """

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Callable[[Wire], None]) -> Wire:
        if isinstance(body, MeasureLink):
            return await self.answer(conn, body, emit)
        return await super().request(conn, header, body, emit)

    async def answer(self, conn: Connection, body: MeasureLink, emit: Callable[[Wire], None]) -> Wire:
        raise NotImplementedError

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        self.notices.append(body)


def peer(device: str, state: Any = "linked") -> PeerSummary:
    software = Software(meshtrain="1", python="3.11.1", torch="2.0", system="Linux")
    return PeerSummary(
        device=device,
        name="bert",
        state=state,
        address=None,
        rtt_s=None,
        software=software,
        cores=4,
        memory_bytes=1,
    )


@asynccontextmanager
async def two(make: Callable[[], Device] = Device, tls: bool = True) -> AsyncIterator[tuple[Device, Any]]:
    """Anna, who asks, and bert."""
    made: list[Device] = []

    def one() -> Device:
        made.append(make() if made else Device())
        return made[-1]

    async with pair(tls, one) as (to_bert, _, to_anna, _):
        anna, bert = made
        anna.is_called("anna", BERT, "bert", to_bert)
        bert.is_called("bert", ANNA, "anna", to_anna)
        yield anna, bert
        for device in made:
            await device.measuring.close()


async def measured(device: Device) -> LinksMeasured:
    async with asyncio.timeout(DEADLINE_S):
        return await device.measuring.measure((), lambda _: None)


async def begun(device: Device, number: int) -> "asyncio.Task[Wire]":
    """Asks as the wire has it, and returns when the other end is ready; what becomes of it."""
    events: list[Wire] = []
    (link,) = device.links.values()
    request = MeasureLink(number=number)
    asked: asyncio.Task[Wire] = TaskSet("test", told_elsewhere).spawn(
        link.connection.request(request, timeout_s=DEADLINE_S, name="it", on_event=events.append), "ask"
    )
    await until(lambda: events, "MeasureReady")
    return asked


async def why_not(device: Device) -> str:
    ((name, why),) = (await measured(device)).failed
    assert name == "bert"
    assert device.figures is None
    return why


@every_transport
def test_both_directions_are_measured_alone_and_together(loop_name: str, tls: bool) -> None:
    async def test() -> None:
        async with two(tls=tls) as (anna, bert):
            told: list[Wire] = []
            began_s = time.time()
            assert await anna.measuring.measure((BERT,), told.append) == LinksMeasured(failed=())
            assert told == [MeasureProgress(name="bert", done=0, total=1)]
            found = anna.figures
            rates = (found.send_bytes_s, found.receive_bytes_s, found.both_send_bytes_s, found.both_receive_bytes_s)
            assert min(rates) > 1e6, "a loopback carries more than 8 Mbit/s"
            assert 0 < found.rtt_s < 1
            assert found.at_s >= began_s
            assert bert.figures is None, "who was asked knows nothing of it"
            for one in (anna, bert):
                assert one.received_bytes <= 2 * limits.MEASURE_LEG_BYTES_MAX
                (connection,) = (link.connection for link in one.links.values())
                assert connection.chunk_payload_bytes_sent > WINDOW_BYTES_MIN

    run(loop_name, test())


@pytest.mark.asyncio
async def test_a_job_on_either_side_refuses_and_says_where_it_runs() -> None:
    async with two() as (anna, bert):
        bert.running = 1
        assert await why_not(anna) == "a job runs on bert: links are measured when it has ended"
        bert.running, anna.running = 0, 1
        with pytest.raises(RequestFailed, match="a job runs on anna: links are measured when it has ended"):
            await measured(anna)
        assert not bert.received_bytes
        assert not anna.received_bytes
        anna.running = 0
        assert await measured(anna) == LinksMeasured(failed=()), "a refusal costs no rest"


@pytest.mark.parametrize("busy", ["anna", "bert"])
@pytest.mark.asyncio
async def test_a_job_that_begins_meanwhile_ends_it(busy: str) -> None:
    async with two() as (anna, bert):

        def begins(_: Header) -> None:
            {"anna": anna, "bert": bert}[busy].running = 1

        bert.on_chunk = begins
        why = await why_not(anna)
        assert why == f"a job runs on {busy}: links are measured when it has ended"
        sent = anna.links[BERT].connection.chunk_payload_bytes_sent
        assert sent < limits.MEASURE_LEG_BYTES_MAX / 4


@pytest.mark.asyncio
async def test_one_at_a_time_and_a_pause_after_what_others_have_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as (anna, bert):
        first = TaskSet("test").spawn(measured(anna), "the first")
        await until(lambda: bert.received_bytes)
        with pytest.raises(RequestFailed, match="another link of bert is being measured: try again"):
            await bert.measuring.answer(bert.links[ANNA].connection, MeasureLink(number=7), lambda _: None)
        assert (await bert.measuring.measure((ANNA,), lambda _: None)).failed[0][1].startswith("another link of bert")
        assert await first == LinksMeasured(failed=())
        before = anna.figures
        ((_, why),) = (await measured(anna)).failed
        assert why.startswith("bert was measured a moment ago: again in ")
        assert anna.figures == before, "what was known stays"
        monkeypatch.setattr(time, "monotonic", lambda clock=time.monotonic: clock() + limits.MEASURE_PAUSE_S)
        assert await measured(anna) == LinksMeasured(failed=())


@pytest.mark.asyncio
async def test_who_takes_nothing_is_sent_one_small_window_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEASURE_S_MAX", 0.8)
    async with two() as (anna, bert):
        bert.silent = True
        why = await why_not(anna)
        assert "0.8 s have passed, and bert to take what is sent is still awaited" in why
        assert anna.links[BERT].connection.chunk_payload_bytes_sent == WINDOW_BYTES_MIN


@pytest.mark.asyncio
async def test_who_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEASURE_S_MAX", 0.2)

    class Silent(Liar):
        async def answer(self, conn: Connection, body: MeasureLink, emit: Callable[[Wire], None]) -> Wire:
            await asyncio.Event().wait()
            raise AssertionError

    async with two(Silent) as (anna, _):
        assert "0.2 s have passed, and the first answer is still awaited" in await why_not(anna)


class TakesWhatWasNotSent(Liar):
    async def answer(self, conn: Connection, body: MeasureLink, emit: Callable[[Wire], None]) -> Wire:
        emit(MeasureReady(wired=True))
        await until(lambda: self.received_bytes)
        conn.notify(ProbeTaken(number=body.number, leg=1, taken_bytes=limits.MEASURE_LEG_BYTES_MAX))
        await asyncio.Event().wait()
        raise AssertionError


class TakesOfALegThatDidNotBegin(Liar):
    async def answer(self, conn: Connection, body: MeasureLink, emit: Callable[[Wire], None]) -> Wire:
        emit(MeasureReady(wired=True))
        conn.notify(ProbeTaken(number=body.number, leg=3, taken_bytes=1))
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("liar", [TakesWhatWasNotSent, TakesOfALegThatDidNotBegin])
@pytest.mark.asyncio
async def test_a_lie_about_what_came_is_named(liar: Callable[[], Device]) -> None:
    async with two(liar) as (anna, _):
        assert (await why_not(anna)).startswith("bert says that it has taken ")


@pytest.mark.asyncio
async def test_an_asker_that_takes_nothing_is_sent_one_small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is asked bounds what it sends as well, and its time; then it rests."""
    monkeypatch.setattr(measuring_module, "ANSWER_S_MAX", 0.8)
    async with two() as (anna, bert):
        anna.silent = True
        to_bert = anna.links[BERT].connection
        asked = await begun(anna, 9)
        to_bert.notify(ProbeEnd(number=9, leg=1))
        with pytest.raises(RequestFailed, match=r"0.8 s have passed, and anna to take what is sent is still awaited"):
            await asked
        assert bert.links[ANNA].connection.chunk_payload_bytes_sent == WINDOW_BYTES_MIN
        with pytest.raises(RequestFailed, match="bert was measured a moment ago"):
            await to_bert.request(MeasureLink(number=10), timeout_s=DEADLINE_S, name="it")


@pytest.mark.asyncio
async def test_chunks_that_nobody_awaits_are_dropped_and_not_told_of() -> None:
    """Of no measurement, of another one, of a leg in which one sends alone, too large, empty, or tiny."""
    async with two() as (anna, bert):
        to_bert, to_anna = anna.links[BERT].connection, bert.links[ANNA].connection
        asked = await begun(anna, 9)
        for number, leg, size in ((8, 1, 8192), (9, 2, 8192), (9, 7, 8192), (9, 1, limits.CHUNK_BYTES + 1), (9, 1, 0)):
            header = Header(Kind.CHUNK, size, generation=number, round=leg)
            to_bert.send_chunk(header, bytes(size) if size else None)
        for _ in range(40):
            to_bert.send_chunk(Header(Kind.CHUNK, 100, generation=9, round=1), bytes(100))
        to_bert.send_chunk(Header(Kind.CHUNK, 96, generation=9, round=1), bytes(96))
        await until(lambda: anna.notices)
        assert anna.notices == [ProbeTaken(number=9, leg=1, taken_bytes=4096)]
        assert not to_anna.chunk_payload_bytes_sent
        asked.cancel()
        header = Header(Kind.CHUNK, 1, generation=9, round=1)
        assert isinstance(bert.chunk_announced(to_anna, header), memoryview), "it goes on until its deadline"
        assert bert.measuring.chunk_announced("c" * 64, header) is None, "from a device that takes no part"


@pytest.mark.asyncio
async def test_no_more_than_a_leg_has_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEASURE_LEG_BYTES_MAX", 10_000)
    async with two() as (anna, bert):
        to_bert = anna.links[BERT].connection
        asked = await begun(anna, 9)
        for _ in range(5):
            to_bert.send_chunk(Header(Kind.CHUNK, 4096, generation=9, round=1), bytes(4096))
        to_bert.notify(ProbeEnd(number=9, leg=1))
        await until(lambda: bert.links[ANNA].connection.chunk_payload_bytes_sent)
        assert [body.taken_bytes for body in anna.notices if isinstance(body, ProbeTaken)] == [4096, 8192]
        asked.cancel()


@pytest.mark.asyncio
async def test_a_link_that_ends_ends_it() -> None:
    async with two() as (anna, bert):
        bert.on_chunk = lambda _: bert.links[ANNA].connection.abort("gone")
        assert (await why_not(anna)).startswith("the link has ended: ")
        bert.on_chunk = lambda _: None
        assert bert.measuring._legs is None, "the next one can be measured"


@pytest.mark.asyncio
async def test_what_is_known_of_a_device_is_forgotten_with_it() -> None:
    async with two() as (anna, _):
        assert await measured(anna) == LinksMeasured(failed=())
        assert anna.figures is not None
        assert anna.measuring.with_figures([peer(BERT, "paired")])[0].measured is not None, "it is away"
        anna.measuring.with_figures([peer(BERT, "seen")])
        assert anna.figures is None


@pytest.mark.asyncio
async def test_one_that_is_not_linked_is_named_and_the_others_are_measured() -> None:
    async with two() as (anna, _):
        reply = await anna.measuring.measure(("c" * 64, BERT), lambda _: None)
        assert reply.failed == (("cccccccc", "it is not linked any more"),)
        assert anna.figures is not None


def test_the_legs_leave_time_for_answers() -> None:
    assert 3 * limits.MEASURE_LEG_S + legs_module.ROUND_TRIPS_S < ALLOWED_S - 0.5


# --- speed ---


@pytest.mark.parametrize(
    ("own_s", "others_s", "speed"), [(0.01, 0.02, 0.5), (0.03, 0.01, 3), (0, 0.01, None), (1, 0, None)]
)
@pytest.mark.asyncio
async def test_how_fast_the_other_computes_is_known_with_its_link_where_it_says_so(
    own_s: float, others_s: float, speed: float | None
) -> None:
    async with two() as (anna, bert):
        anna.takes_s, bert.takes_s = own_s, others_s
        assert (await measured(anna)).failed == ()
        assert anna.figures.peer_speed == (None if speed is None else pytest.approx(speed))


@pytest.mark.asyncio
async def test_nobody_computes_for_others_beside_a_job_or_a_measurement() -> None:
    async with two() as (anna, bert):
        to_bert = anna.links[BERT].connection

        async def answer() -> Wire:
            return await to_bert.request(AskSpeed(), timeout_s=DEADLINE_S, name="speed")  # type: ignore[no-any-return]

        assert await answer() == ComputeSpeed(kernel_s=0.01)
        bert.running = 1
        with pytest.raises(RequestFailed, match="a job runs on bert"):
            await answer()
        bert.running = 0
        asked = await begun(anna, 7)
        with pytest.raises(RequestFailed, match="a link of bert is being measured"):
            await answer()
        bert.running = 1
        with pytest.raises(RequestFailed, match="a job runs on bert"):
            await asked


@pytest.mark.parametrize(
    ("used_s", "idle_s", "times"), [(0.8, 0.0, 1), (0.4, 0.0, 1), (0.4, 0.4, 2), (0.1, 0.7, 8), (0.8, -0.01, 1)]
)
def test_a_part_of_the_cores_is_as_fast_as_it_is_and_other_programs_change_nothing(
    used_s: float, idle_s: float, times: float
) -> None:
    """Of two cores in 0.4 s: all; half, and another program the rest; half, and nobody the rest; an eighth."""
    assert speed_module.allowed_s(1e-4, used_s, idle_s) == pytest.approx(times * 1e-4)


@pytest.mark.asyncio
async def test_the_calculation_runs_once_in_a_while_and_never_twice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    async def calculated() -> float:
        runs.append(1)
        await asyncio.sleep(0)
        return 0.5

    monkeypatch.setattr(speed_module, "_measured_s", calculated)
    own = speed_module.OwnSpeed()
    assert list(await asyncio.gather(own.kernel_s(), own.kernel_s())) == [0.5, 0.5]
    assert len(runs) == 1
    monkeypatch.setattr(speed_module, "KEPT_S", -1.0)
    await own.kernel_s()
    assert len(runs) == 2


@pytest.mark.asyncio
async def test_the_calculation_is_a_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < await speed_module.OwnSpeed().kernel_s() < limits.SPEED_S_MAX
    monkeypatch.setattr(speed_module, "MODULE", "no.such.module")
    with pytest.raises(RequestFailed, match="its speed was not measured: exit code 1"):
        await speed_module.OwnSpeed().kernel_s()
    monkeypatch.setattr(speed_module, "MODULE", "this")
    monkeypatch.setattr(limits, "SPEED_S_MAX", 0.0)
    with pytest.raises(RequestFailed, match="not measured within 0 s"):
        await speed_module.OwnSpeed().kernel_s()
