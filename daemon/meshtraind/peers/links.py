"""Links to paired devices: dialled or accepted, authenticated by their pinned keys, one for each pair (W4)."""

import asyncio
import contextlib
import functools
import logging
import socket
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from meshtraind.machine.event_loop import accepted
from meshtraind.machine.facts import running_system
from meshtraind.peers.handshake import Doorway, Greeting
from meshtraind.peers.own_presence import Presence
from meshtraind.peers.refused_dial import refuses
from meshtraind.runtime.log_limit import caused_by
from meshtraind.runtime.tasks import TaskSet
from meshtraind.transport.connection import Connection, ConnectionEnded, Emit, Handler, RequestFailed
from meshtraind.transport.send_cap import SendCap
from meshtraind.trust.pairing_host import ServeGuest
from meshtraind.trust.tls import NotPinnedError, Trust
from meshwire import limits
from meshwire.addresses import Address
from meshwire.discovery.addressbook import AddressBook, Dial, Source
from meshwire.frames.header import Header, versions_differ
from meshwire.message_base import Wire
from meshwire.messages.envelope import Done
from meshwire.messages.job import Member
from meshwire.messages.link import Addresses, Heartbeat, Hello, KnownPeer
from meshwire.text import printable
from meshwire.timeouts import Timeouts

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.25
ROUND_TRIPS = 3  # whose median counts
IDLE_BEATS = 8  # of a link that no job needs, for one that asks for an answer
DIAL_TIMEOUT_S = 5.0
BACKLOG = 64
ACCEPT_RETRY_S = 1.0
GOSSIP_INTERVAL_S = 2.0  # between two words on what has changed: anybody can announce addresses in a device's name
NOT_LINKED = (OSError, NotPinnedError, ConnectionEnded)  # TLS's errors and time-outs are OSErrors


class ListenError(Exception):
    """The port cannot be had; the text says who may hold it and what to do."""


@dataclass
class Link:
    """A peer that can be talked to now.

    Attributes:
        address: where to reach it: its host, with the port on which it listens.
        rtt_s: the round trip of now, a median; None before the first heartbeat was answered.
        round_trips_s: the newest ones, at most three.
        dialled_by: device id of the side that dialled.
        told: what the peer was told of others' addresses.
        listens_at: the same as `address`, by the IP address that it turned out to have.
    """

    device: str
    hello: Hello
    connection: Connection
    address: Address
    dialled_by: str
    listens_at: Address
    rtt_s: float | None = None
    round_trips_s: tuple[float, ...] = ()
    told: tuple[KnownPeer, ...] = ()

    @property
    def same_machine(self) -> bool:
        """Whether the peer computes on this machine's cores (M3), as by a container or over loopback."""
        return self.connection.same_host or (self.hello.machine != "" and self.hello.machine == running_system())

    @property
    def computes_here(self) -> bool:
        """Whether learners of the peer share this machine's cores with the own ones. A hub has none (H1)."""
        return self.same_machine and not self.hello.hub

    @property
    def member(self) -> Member:
        """The daemon at its other end as a member of a job (G1)."""
        hello = self.hello
        return Member(device=self.device, incarnation=hello.incarnation, name=hello.name, hub=hello.hub)


class LinkUser(Handler, Protocol):
    """Whoever uses the links: gets what arrives on them, hellos and heartbeats excepted, and hears how they fare.

    A link that has ended is told by `lost`, whether or not another one has replaced it.
    """

    def link_made(self, link: Link) -> None:
        """Hears of a new link."""

    def was_away(self) -> None:
        """Hears that this machine slept, stood still or changed networks; before it hears of links that were lost by
        that."""

    def peer_gone(self, device: str, incarnation: int) -> None:
        """Hears that the daemon at the other end of a lost link has ended: nobody listens there any more."""

    def violated(self, device: str, reason: str) -> None:
        """Hears that a linked device has sent what is no frame, no message or no payload."""


class Links:
    """All links of this daemon: made by `start`, kept alive by heartbeats, given up after silence.

    Args:
        trust: whom to let in. None only in the benchmark, where peers are let in by what their hello says.
        hello: what to say first; the port is filled in.
        port: 0 takes any free one.
        patience_s: silence after which a peer is lost.
        cap: on what is sent on all links together; None: there is none.

    Attributes:
        linked: the links by device id; live.
        unlinkable: which paired devices answered last in another wire version (W6), in words; live.
        port: the actual one, once started.
    """

    def __init__(
        self,
        device: str,
        trust: Trust | None,
        book: AddressBook,
        *,
        hello: Hello,
        host: str,
        port: int,
        patience_s: float = limits.PATIENCE_S,
        cap: SendCap | None = None,
    ) -> None:
        self.user: LinkUser  # from `start` on: before it there is no link
        self.port = port
        self._device = device
        self._trust = trust
        self._book = book
        self._hello = hello
        self._host = host
        self._patience_s = patience_s
        self._cap = cap
        self._presence = Presence(min(HEARTBEAT_INTERVAL_S, patience_s / 4))
        self._linked: dict[str, Link] = {}
        self._needed: frozenset[str] = frozenset()  # by jobs
        self._leaving: dict[str, Connection] = {}  # by device: the last one that was to end, while it is there
        self._unlinkable: dict[str, str] = {}
        self._dial_failures: dict[str, str] = {}
        self._listener: socket.socket | None = None
        self._welcoming: dict[asyncio.Task[None], str] = {}  # who calls from which host; oldest first
        self._serve_guest: ServeGuest | None = None  # while a pairing code is shown
        self._guests: set[asyncio.Task[None]] = set()
        self._dial_wanted = asyncio.Event()
        self._book_changed = asyncio.Event()
        self._dials: dict[asyncio.Task[None], Dial] = {}  # under way
        self._tasks = TaskSet("links")

    @property
    def linked(self) -> Mapping[str, Link]:
        """The links by device id; a live view."""
        return self._linked

    @property
    def unlinkable(self) -> Mapping[str, str]:
        """Why a link to a paired device that answers cannot be, by device id; a live view."""
        return self._unlinkable

    @property
    def dial_failures(self) -> Mapping[str, str]:
        """How the newest dial to a paired device ended, by device id, since it was linked last; a live view."""
        return self._dial_failures

    async def start(self, user: LinkUser) -> None:
        """Listens, and dials what the address book says. Raises ListenError."""
        self.user = user
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            self._listener = socket.create_server(
                (self._host, self.port), family=family, backlog=BACKLOG, dualstack_ipv6=self._host == "::"
            )
        except OSError as error:
            raise ListenError(
                f"cannot listen on {self._host}:{self.port}: {error.strerror or error}. Another meshtraind may run "
                "here (`meshtrain status`), or another program holds the port; choose one with --listen HOST:PORT"
            ) from error
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._hello = self._hello.model_copy(update={"listen_port": self.port})
        self._tasks.spawn(self._accept_all(), "accept")
        self._tasks.spawn(self._dial_all(), "dial")
        self._tasks.spawn(self._gossip_changes(), "gossip")
        self._tasks.spawn(self._watch_presence(), "own presence")

    async def close(self) -> None:
        """Ends every link, letting what was said last arrive. None is made meanwhile: nobody would end it."""
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()
        connections = [link.connection for link in self._linked.values()]
        for connection in connections:
            connection.close("meshtraind is stopping")
        await asyncio.gather(*(connection.closed() for connection in connections))
        await self._tasks.close()  # those of a link that was made just before

    def dial_now(self) -> None:
        """Dials at once what the address book says now."""
        self._dial_wanted.set()
        self._book_changed.set()

    def await_devices(self, devices: Collection[str]) -> None:
        """Dials these devices often from now on, and measures round trips to them at each beat: jobs wait for them."""
        self._needed = frozenset(devices)
        self._book.awaits(devices, time.monotonic())
        self.dial_now()

    @property
    def away(self) -> Mapping[str, str]:
        """Names of the paired devices that are not linked, by device id."""
        names = self._trust.names if self._trust is not None else {}
        return {device: printable(name) for device, name in names.items() if device not in self._linked}

    def gossip_for(self, device: str) -> tuple[KnownPeer, ...]:
        """What a linked device may be told of where others are."""
        return self._book.gossip_for(device)

    def met_elsewhere(self, device: str, addresses: Collection[Address]) -> None:
        """Somebody has reached a device at these addresses: dials them, if it is trusted."""
        for address in addresses:
            self._book.learn(device, address, Source.GOSSIP, time.monotonic())
        self.dial_now()

    def drop(self, device: str, reason: str) -> None:
        """Ends the link to a device, e.g. because it was unpaired."""
        self._unlinkable.pop(device, None)
        self._dial_failures.pop(device, None)
        link = self._linked.get(device)
        if link is not None:
            link.connection.refuse(reason)

    @contextlib.asynccontextmanager
    async def admit_guests(self, serve: ServeGuest) -> AsyncIterator[None]:
        """While entered, callers that name pairing's ALPN are let in without a certificate, and are `serve`'s alone.

        Before and after it TLS refuses them. They take places among the callers that have not said hello, and no link.

        Args:
            serve: is given a guest's stream and IP address; cancelled when this is left.
        """
        assert self._trust is not None, "guests come by TLS"
        self._serve_guest = serve
        self._trust.admit_guests(True)
        try:
            yield
        finally:
            self._trust.admit_guests(False)
            self._serve_guest = None
            for task in self._guests:
                task.cancel()
            while self._guests:
                await asyncio.wait(self._guests)

    # Dialling

    async def _dial_all(self) -> None:
        while True:
            now_s = time.monotonic()
            dial = self._book.next_dial(now_s)
            if dial is not None and dial.at_s <= now_s:
                self._book.dialling(dial, now_s)
                task = self._tasks.spawn(self._dial(dial), f"dial {dial.address}")
                self._dials[task] = dial
                task.add_done_callback(self._dialled)
                continue
            self._dial_wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if dial is None else dial.at_s - now_s):
                    await self._dial_wanted.wait()

    def _dialled(self, task: "asyncio.Task[None]") -> None:
        # Not in the task itself: one that is cancelled before its first step never runs.
        self._book.ended(self._dials.pop(task), time.monotonic())
        self.dial_now()

    async def _dial(self, dial: Dial) -> None:
        """Dials once. A link is made when the other end's hello arrives, see `make_link`."""
        loop = asyncio.get_running_loop()
        context = self._trust.client_context if self._trust is not None else None
        greeting = Greeting(self, dial.address)
        greeting.connection.cap = self._cap
        try:
            async with greeting.within(DIAL_TIMEOUT_S):
                await loop.create_connection(
                    lambda: greeting.connection,
                    dial.address.host,
                    dial.address.port,
                    ssl=context,
                    server_hostname="meshtrain" if context is not None else None,
                )
                await greeting.finish(None)
        except NOT_LINKED as error:
            log.debug("dialling %s: %s", dial.address, error)
            device = dial.device
            if device is not None and device not in self._linked and self._book.is_pinned(device):
                self._dial_failures[device] = str(error) or type(error).__name__

    # Accepting

    async def _accept_all(self) -> None:
        assert self._listener is not None
        while True:
            try:
                caller, host = await accepted(self._listener)
            except BlockingIOError:  # who called has gone again
                continue
            except OSError as error:  # e.g. no descriptor is free at the moment
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            while len(self._welcoming) >= limits.HANDSHAKES_MAX:
                self._make_room()
            door = Doorway(self)
            door.greeting.connection.cap = self._cap
            door.greeting.connection.name = f"a connection from {host}"
            task = self._tasks.spawn(self._welcome(caller, door, host), "welcome")
            self._welcoming[task] = host
            task.add_done_callback(functools.partial(self._welcomed, caller, door))

    def _make_room(self) -> None:
        """Sends away the oldest caller of the host that has the most, so that a flood from one takes only its own."""
        ((crowded, _),) = Counter(self._welcoming.values()).most_common(1)
        oldest = next(task for task, host in self._welcoming.items() if host == crowded)
        del self._welcoming[oldest]
        oldest.cancel()

    def _welcomed(self, accepted: socket.socket, door: Doorway, task: "asyncio.Task[None]") -> None:
        self._welcoming.pop(task, None)
        self._guests.discard(task)
        if not door.made:  # also when it was cancelled before its first step
            accepted.close()
        if door.guest is not None:
            door.guest[1].transport.abort()

    async def _welcome(self, accepted: socket.socket, door: Doorway, host: str) -> None:
        loop = asyncio.get_running_loop()
        context = self._trust.server_context if self._trust is not None else None
        try:
            async with door.greeting.within(limits.HANDSHAKE_TIMEOUT_S):
                await loop.connect_accepted_socket(lambda: door, accepted, ssl=context)
                if door.guest is None:
                    await door.greeting.finish(self._hello)
        except NOT_LINKED as error:
            name = door.greeting.connection.name
            level = logging.DEBUG if door.greeting.other_version else logging.INFO  # told already
            log.log(level, "%s was not let in: %s", name, str(error) or type(error).__name__, extra=caused_by(host))
            return
        if door.guest is not None and self._serve_guest is not None:
            self._guests.add(cast("asyncio.Task[None]", asyncio.current_task()))
            await self._serve_guest(*door.guest, host)

    # Both

    def verify_peer(self, connection: Connection) -> None:
        """Notes whose key the other end has, if that is pinned at this moment. Raises NotPinnedError."""
        if self._trust is not None:
            connection.device = self._trust.verify_peer(connection.ssl_object())

    def note_other_version(self, connection: Connection, version: int) -> str:
        """A verified peer speaks another wire version (W6): notes it, tells it once, and returns it in words."""
        device, name = connection.device, connection.name
        if device is not None and self._trust is not None:
            name = printable(self._trust.name_of(device))
        told = versions_differ(name, version, self._hello.name)
        if device is not None and self._unlinkable.get(device) != told:
            self._unlinkable[device] = told
            log.warning("%s", told, extra=caused_by(connection.remote_host))
        return told

    def make_link(self, connection: Connection, hello: Hello, dialled: Address | None) -> str:
        """A verified peer has said hello: makes the link, and returns the device. Raises ConnectionEnded."""
        if connection.device is None:
            connection.device = hello.name  # the benchmark's peers, without TLS, go by their names
        self._book_connected(connection, hello, dialled)
        if connection.device == self._device:
            raise ConnectionEnded("this is the device itself")
        self._link(connection, hello, dialled)
        return connection.device

    def _book_connected(self, connection: Connection, hello: Hello, dialled: Address | None) -> None:
        assert connection.device is not None
        now_s = time.monotonic()
        if dialled is None:
            host = connection.remote_host
            if host is not None and hello.listen_port:
                self._book.learn(connection.device, Address(host=host, port=hello.listen_port), Source.OBSERVED, now_s)
        self._book.connected(connection.device, now_s, dialled)

    def _link(self, connection: Connection, hello: Hello, dialled: Address | None) -> None:
        """Makes the link, or keeps the older one: of two connections the lower device id's dial stays, on both sides
        (W4)."""
        device = connection.device
        assert device is not None
        dialled_by = self._device if dialled is not None else device
        there = self._linked.get(device)
        if there is not None and not there.connection.closing:
            restarted = there.hello.incarnation != hello.incarnation
            if not restarted and (there.dialled_by == dialled_by or there.dialled_by < dialled_by):
                connection.close("there is a link already")
                self._let_leave(device, connection)
                return
        host = connection.remote_host or "localhost"
        if dialled is not None:
            connection.notify(self._hello)
        address = dialled or Address(host=host, port=hello.listen_port or self.port)
        link = Link(device, hello, connection, address, dialled_by, Address(host=host, port=address.port))
        connection.name = f"{printable(hello.name)} ({device[:8]})"
        connection.handler = _Linked(self, link)
        connection.on_violated = functools.partial(self._violated, device)
        self._linked[device] = link
        self._unlinkable.pop(device, None)
        self._dial_failures.pop(device, None)
        if there is not None:
            if not there.connection.closing:  # who is refused has still to read why
                there.connection.close("a better link has replaced it")
            self._let_leave(device, there.connection)
        log.info("linked with %s at %s (%s)", connection.name, address, connection.congestion or "this host")
        self._tasks.spawn(self._keep_alive(link), f"heartbeat {hello.name}")
        self._give_up_dials(device, dialled)
        self._gossip(link)
        self._book_changed.set()  # the others hear of it with whatever else is new: links come in bursts
        self.user.link_made(link)

    def _let_leave(self, device: str, connection: Connection) -> None:
        """Lets a connection end that has CLOSE_TIMEOUT_S for its last words. Each device has one such, beside its link:
        else who comes back at once and never closes its own end could take every descriptor."""
        before = self._leaving.get(device)
        if before is not None and before is not connection:
            before.cut_short()
        self._leaving[device] = connection

    def left(self, connection: Connection) -> None:
        """Forgets a connection that was told to end, and has."""
        if connection.device is not None and self._leaving.get(connection.device) is connection:
            del self._leaving[connection.device]

    def _give_up_dials(self, device: str, winner: Address | None) -> None:
        """Ends the other dials to a device that is linked now. None of them has become a link: this end has not said
        hello there."""
        for task, dial in self._dials.items():
            if dial.device == device and dial.address != winner:
                task.cancel("another dial was quicker")

    def _gossip(self, link: Link) -> None:
        known = self._book.gossip_for(link.device)
        if _places(known) != _places(link.told):
            link.told = known
            link.connection.notify(Addresses(peers=known))

    async def _gossip_changes(self) -> None:
        """Passes on where devices are that were linked, or have moved, lately: mDNS announces that where its network
        carries it. Who has come is told at once where all others are, and dials them itself."""
        while True:
            await self._book_changed.wait()
            self._book_changed.clear()
            for link in self._linked.values():
                self._gossip(link)
            await asyncio.sleep(GOSSIP_INTERVAL_S)

    def learn(self, gossip: Addresses) -> None:
        """Takes another daemon's word on where devices are."""
        now_s = time.monotonic()
        for peer in gossip.peers:
            for address in peer.addresses:
                self._book.learn(peer.device, address, Source.GOSSIP, now_s)
        self.dial_now()

    async def _keep_alive(self, link: Link) -> None:
        """Says something every patience / 4, a second or so, however late answers come, and hears as much; silence for
        the patience ends the link. Where no job needs the link, few of these words ask for an answer.

        Not sooner than a dial may take where nothing was answered yet: the other end makes the link half a round trip
        later, and speaks only then. And not where this daemon itself stood still, as on a laptop that was asleep: then
        what was sent meanwhile is unread, and the silence is its own (Lifeguard, Dadgar et al. 2018).
        """
        connection = link.connection
        interval_s = min(HEARTBEAT_INTERVAL_S, self._patience_s / 4)
        say_at_s = time.monotonic() + interval_s
        measuring: asyncio.Task[None] | None = None
        beats = 0
        while not connection.closing:
            began_s = time.monotonic()
            if began_s >= say_at_s:
                say_at_s = began_s + interval_s
                beats += 1
                known = len(link.round_trips_s) == ROUND_TRIPS and link.device not in self._needed
                if (measuring is None or measuring.done()) and (not known or beats % IDLE_BEATS == 0):
                    measuring = self._tasks.spawn(self._measure(link), f"round trip to {link.hello.name}")
                else:
                    connection.notify(Heartbeat())
            patience_s = self._patience_s if link.rtt_s is not None else max(self._patience_s, DIAL_TIMEOUT_S)
            lost_s = connection.last_received_s + patience_s - began_s
            wait_s = min(say_at_s - began_s, lost_s if lost_s > 0 else interval_s)
            await asyncio.sleep(wait_s)
            now_s = time.monotonic()
            silent_s = now_s - connection.last_received_s
            if silent_s >= patience_s and now_s - began_s < wait_s + interval_s and not connection.closing:
                connection.close(f"silent for {silent_s:.1f} s", now=True)

    async def _measure(self, link: Link) -> None:
        """Measures one round trip. The median of three counts: one late answer, as after a stutter, says nothing of the
        next."""
        began_s = time.monotonic()
        try:
            # A peer too busy for one more request says so, which measures the round trip as well.
            with contextlib.suppress(RequestFailed):
                await link.connection.request(Heartbeat(), timeout_s=limits.PATIENCE_S_MAX, name="heartbeat")
        except (ConnectionEnded, TimeoutError):  # it ends, or is so slow that the next one may measure it
            return
        link.round_trips_s = (*link.round_trips_s[1 - ROUND_TRIPS :], time.monotonic() - began_s)
        link.rtt_s = statistics.median_low(link.round_trips_s)

    def _violated(self, device: str, reason: str) -> None:
        self.user.violated(device, reason)

    def lost(self, link: Link, reason: str) -> None:
        """A link's connection has ended. Whoever used it must know, even if another has replaced it meanwhile."""
        self.left(link.connection)
        self._look_at_presence()
        newest = self._linked.get(link.device) is link
        now_s = time.monotonic()
        if newest:
            del self._linked[link.device]
            log.info("lost %s: %s", link.connection.name, reason)
            self._book.disconnected(link.device, now_s)
            self.dial_now()
        self.user.lost(link.connection, reason)
        if newest and link.connection.broke and now_s - link.connection.last_received_s < self._patience_s:
            self._tasks.spawn(self._see_whether_gone(link, now_s), f"look for {link.hello.name}")

    async def _see_whether_gone(self, link: Link, ended_s: float) -> None:
        """Finds out whether the daemon of a lost link has ended: where nobody listens who did a moment ago, it has, and
        is not elsewhere.

        Known only where this machine itself was there all the time: elsewhere others have these addresses. What is said
        here may still be wrong: a firewall on the way may refuse for everybody behind it.
        """
        timeouts = Timeouts(self._patience_s, link.rtt_s) if link.rtt_s else Timeouts(self._patience_s)
        refused = await refuses(link.listens_at, timeouts.relink_grace_s)
        if link.device in self._linked:
            return
        if not refused:
            log.info("%s may be elsewhere: %s did not refuse in time", link.hello.name, link.listens_at)
            return
        self._look_at_presence()
        if not self._presence.unbroken_since(ended_s - self._patience_s):
            log.info("%s may be elsewhere: this device slept, stood still or changed networks", link.hello.name)
            return
        log.info("%s is gone: nobody listens at %s any more", link.connection.name, link.listens_at)
        self.user.peer_gone(link.device, link.hello.incarnation)

    def _look_at_presence(self) -> None:
        if self._presence.look():
            self.user.was_away()

    async def _watch_presence(self) -> None:
        while True:
            await asyncio.sleep(self._presence.interval_s)
            self._look_at_presence()


class _Linked:
    """Hears a link: keeps what is the link's own, passes on the rest."""

    def __init__(self, links: Links, link: Link) -> None:
        self._links = links
        self._link = link

    def chunk_announced(self, conn: Connection, header: Header) -> memoryview | str | None:
        return self._links.user.chunk_announced(conn, header)

    def chunk_received(self, conn: Connection, header: Header) -> None:
        self._links.user.chunk_received(conn, header)

    def notice(self, conn: Connection, header: Header, body: Wire) -> None:
        if isinstance(body, Addresses):
            self._links.learn(body)
        elif isinstance(body, Heartbeat):
            pass  # that it came is what it says
        elif isinstance(body, Hello):
            conn.refuse("a second hello")
        else:
            self._links.user.notice(conn, header, body)

    async def request(self, conn: Connection, header: Header, body: Wire, emit: Emit) -> Wire:
        if isinstance(body, Heartbeat):
            return Done()
        return await self._links.user.request(conn, header, body, emit)

    def lost(self, conn: Connection, reason: str) -> None:
        self._links.lost(self._link, reason)


def _places(known: tuple[KnownPeer, ...]) -> set[tuple[str, Address]]:
    """A device's addresses in no order: which is tried first changes often."""
    return {(peer.device, address) for peer in known for address in peer.addresses}
