"""Puts a daemon together, and takes it apart again."""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from meshtraind.api.endpoint import Endpoint, EndpointError
from meshtraind.api.local_handler import LocalHandler
from meshtraind.api.peer_handler import PeerHandler
from meshtraind.api.rundir import RunDir, RunDirError
from meshtraind.dashboard.dashboard import Dashboard, dashboard_port
from meshtraind.jobs.queries import JobQueries
from meshtraind.jobs.routing import JobRouter
from meshtraind.learner.software import installed_software
from meshtraind.machine.facts import memory_bytes, running_system
from meshtraind.measuring.measuring import Measuring
from meshtraind.owner.live_settings import LiveSettings
from meshtraind.owner.machine_sensors import MachineSensors
from meshtraind.owner.notifier import Notifier
from meshtraind.owner.resting import RestWish
from meshtraind.owner.settings import OwnerSettings
from meshtraind.peers.interfaces import InterfaceError, usable_interfaces
from meshtraind.peers.introducer import Introducer
from meshtraind.peers.links import Links, ListenError
from meshtraind.peers.mesh import Mesh, MeshSettings
from meshtraind.peers.node import Node
from meshtraind.runtime.data_folder import FormatError, read_format
from meshtraind.storage.blob_writer import BlobError
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.job_history import HistoryError, JobHistory
from meshtraind.storage.migration import migrate
from meshtraind.transport.send_cap import SendCap
from meshtraind.trust.identity import IdentityError, load_or_create
from meshtraind.trust.pins import PinsError, PinTable
from meshtraind.trust.tls import Trust
from meshwire import limits
from meshwire.addresses import Address, split_host_port
from meshwire.discovery.addressbook import AddressBook
from meshwire.messages.link import Hello, Software
from meshwire.messages.local import IntroductionPolicy

log = logging.getLogger(__name__)

UNUSABLE = (FormatError, IdentityError, PinsError, HistoryError, BlobError, ListenError, EndpointError)


class StartError(Exception):
    """The daemon cannot start; says why and what to do."""


@dataclass(frozen=True)
class Config:
    """What `meshtraind run` was told."""

    data_dir: Path
    listen_host: str
    listen_port: int
    interfaces: tuple[str, ...]
    peers: tuple[Address, ...]
    mdns: bool
    name: str | None  # None: as it was before, else the host's
    patience_s: float
    introductions: IntroductionPolicy | None = None  # None: as it was before
    dashboard: int | None = 0  # its port, 0: any free one; None: it is not served
    hub: bool = False  # it runs no learner (H1)

    @classmethod
    def from_options(
        cls,
        *,
        listen: str,
        interfaces: Sequence[str],
        peers: Sequence[str],
        mdns: bool,
        name: str | None,
        data_dir: Path,
        patience_s: float = limits.PATIENCE_S,
        introductions: str | None = None,
        dashboard: str = "0",
        hub: bool = False,
    ) -> Self:
        """Reads the command line's words. Raises ValueError with what to write instead."""
        host, port = split_host_port(listen)
        if name is not None and (not 0 < len(name) <= limits.NAME_CHARS_MAX or not name.isprintable()):
            raise ValueError(f"--name: 1 to {limits.NAME_CHARS_MAX} printable characters")
        if not limits.PATIENCE_S_MIN <= patience_s <= limits.PATIENCE_S_MAX:  # nan is not between anything
            raise ValueError(
                f"--patience {patience_s:g}: from {limits.PATIENCE_S_MIN:g} to {limits.PATIENCE_S_MAX:g} seconds"
            )
        return cls(
            data_dir=data_dir.expanduser().absolute(),
            listen_host=host,
            listen_port=port,
            interfaces=tuple(interfaces),
            peers=tuple(Address.parse(peer) for peer in peers),
            mdns=mdns,
            name=name,
            patience_s=patience_s,
            introductions=None if introductions is None else IntroductionPolicy(introductions),
            dashboard=dashboard_port(dashboard),
            hub=hub,
        )


def host_name() -> str:
    """What a device is called of which nobody has said a name."""
    return socket.gethostname().split(".")[0][: limits.NAME_CHARS_MAX] or "device"


class App:
    """One daemon: its parts are made and started in the order in which they need each other, and closed in reverse.

    Attributes:
        started: it answers; `mesh` and `jobs` exist.
    """

    def __init__(self, config: Config) -> None:
        self.started = False
        self._config = config
        self._stopping = asyncio.Event()
        self.mesh: Mesh
        self.jobs: JobRouter

    def request_stop(self) -> None:
        """Begins the end."""
        self._stopping.set()

    async def run(self) -> None:
        """Runs until it is told to stop. Raises StartError."""
        config = self._config
        try:
            if config.interfaces:
                usable_interfaces(config.interfaces)
            read_format(config.data_dir)  # before anything is written
            rundir = RunDir(config.data_dir)
        except (RunDirError, InterfaceError, FormatError) as error:
            raise StartError(str(error)) from error
        for note in rundir.notes:
            log.warning("%s", note)
        with rundir:
            try:
                software = installed_software()
                migrate(config.data_dir, software.meshtrain)
                await self._run(rundir, software)
            except UNUSABLE as error:
                raise StartError(str(error)) from error

    async def _run(self, rundir: RunDir, software: Software) -> None:
        config = self._config
        pins = PinTable(config.data_dir / "pins.db")
        history = None
        try:
            if config.name is not None:
                pins.own_name = config.name
            if config.introductions is not None:
                pins.introductions = config.introductions
            name = pins.own_name or host_name()
            identity = load_or_create(config.data_dir, name)
            history = JobHistory(config.data_dir / "jobs.db", time.time())
            incarnation = secrets.randbits(62)
            trust = Trust(identity, pins)
            book = AddressBook(identity.device_id)
            sensors = MachineSensors()
            owner_settings = LiveSettings(config.data_dir, sensors)
            cap = SendCap()

            def limit_sending() -> None:
                now = owner_settings.now
                cap.limit(now.bandwidth_mbit, low_delay=now.yield_to_calls)

            owner_settings.subscribe(limit_sending)
            owner_settings.load()
            limit_sending()  # also where nothing is set
            links = Links(
                identity.device_id,
                trust,
                book,
                hello=Hello(
                    incarnation=incarnation,
                    name=name,
                    listen_port=0,
                    software=software,
                    cores=os.cpu_count() or 1,
                    memory_bytes=memory_bytes(),
                    hub=config.hub,
                    machine=running_system(),
                ),
                host=config.listen_host,
                port=config.listen_port,
                patience_s=config.patience_s,
                cap=cap,
            )
            endpoint = Endpoint(rundir)
            node = Node(
                device=identity.device_id,
                incarnation=incarnation,
                name=name,
                links=links.linked,
                blobs=BlobStore(config.data_dir / "blobs"),
                history=history,
                data_dir=config.data_dir,
                entrance=endpoint,
                software=software,
                patience_s=config.patience_s,
                settings=owner_settings,
                hub=config.hub,
            )
            settings = MeshSettings(config.listen_host, config.interfaces, config.peers, config.mdns)
            introducer = Introducer(node, pins, links)
            self.mesh = Mesh(node, identity, pins, book, links, introducer, settings)
            self.jobs = JobRouter(node, links)
            queries = JobQueries(node, self.jobs.registry, self.jobs.admission)
            measuring = Measuring(node, self.jobs.registry)
            dashboard = Dashboard(config.dashboard)
            local = LocalHandler(self.mesh, self.jobs, queries, measuring, dashboard, self.request_stop, rundir.notes)
            async with AsyncExitStack() as started:
                started.push_async_callback(links.close)
                started.push_async_callback(introducer.close)
                introducer.start()
                await links.start(PeerHandler(node, self.jobs, queries, introducer, measuring))
                started.push_async_callback(measuring.close)
                started.push_async_callback(endpoint.close)
                await endpoint.start(local)
                started.push_async_callback(self.mesh.stop)
                await self.mesh.start()
                started.push_async_callback(self.jobs.close)
                self.jobs.start()
                notifier = Notifier(config.data_dir, owner_settings, self.jobs.registry.jobs)
                started.push_async_callback(notifier.close)
                owner_settings.at_every_look(notifier.look)
                rest = RestWish(sensors)
                owner_settings.at_every_look(lambda: self._look_whether_to_rest(rest, owner_settings.now))
                started.push_async_callback(owner_settings.close)
                owner_settings.start()
                started.push_async_callback(dashboard.close)
                rundir.announce(listen=self.mesh.listen, endpoint=endpoint.address)
                self.started = True
                what = " (a hub: it trains nothing)" if config.hub else ""
                log.info("%s (%s)%s listens on %s", name, identity.device_id[:8], what, self.mesh.listen)
                await self._stopping.wait()
                log.info("stopping")
        finally:
            if history is not None:
                history.close()
            pins.close()

    def _look_whether_to_rest(self, rest: RestWish, settings: OwnerSettings) -> None:
        self.jobs.registry.look_whether_to_rest(rest.why(settings, datetime.now().time()))
