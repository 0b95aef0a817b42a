"""What the daemon on this machine knows: its interfaces, the other laptops, and why it is not linked with them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from meshtrain.client import Client
from meshtrain.doctor.facts import Daemon, OtherLaptop, Unknown
from meshtrain.errors import ConnectionLost, DaemonNotRunning, OtherVersion, RequestError
from meshwire.message_base import Wire
from meshwire.messages.job import Found, JobSummary
from meshwire.messages.local import GetJobs, GetStatus, Status
from meshwire.messages.network import DeviceSeen, GetNetwork, NetworkView
from meshwire.text import printable

ASK_TIMEOUT_S = 5.0
LAPTOPS_MAX = 24
ADDRESSES_MAX = 3  # of each
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class AskedDaemon:
    """What it has said. `places`: each laptop at each of its addresses, with its device id."""

    daemon: Daemon
    own_device: str | None = None
    places: tuple[tuple[str, OtherLaptop], ...] = ()
    unknown: tuple[Unknown, ...] = ()


def ask_daemon(data_dir: Path, now_s: float) -> AskedDaemon:
    """Asks the daemon of this data folder. Never raises for its sake."""
    try:
        client = Client.connect(data_dir, ASK_TIMEOUT_S)
    except DaemonNotRunning as error:
        return _silent(error) if isinstance(error.__cause__, TimeoutError) else AskedDaemon(Daemon())
    except OtherVersion as error:
        return AskedDaemon(Daemon(running=True, other_version=error.version))
    except (ConnectionLost, RequestError, TimeoutError) as error:
        return _silent(error)
    try:
        status, view = _ask(client, GetStatus()), _ask(client, GetNetwork())
        jobs = _ask(client, GetJobs())
    except (ConnectionLost, RequestError, TimeoutError) as error:
        return _silent(error)
    finally:
        client.close()
    if not (isinstance(status, Status) and isinstance(view, NetworkView) and isinstance(jobs, Found)):
        return _silent(ConnectionLost("it is of another version"))
    daemon = Daemon(
        running=True,
        host=printable(view.host),
        port=view.port,
        mdns=view.mdns,
        interfaces=tuple(map(printable, view.interfaces)),
        ahead_s=clock_ahead_s(jobs.jobs, status.device, now_s),
    )
    places = [(device.device, place) for device in view.devices[:LAPTOPS_MAX] for place in _places(device)]
    return AskedDaemon(daemon, status.device, tuple(places))


def _ask(client: Client, body: Wire) -> Wire:
    return client.request(body, timeout_s=ASK_TIMEOUT_S, name=type(body).__name__)


def _silent(error: Exception) -> AskedDaemon:
    """It is there, and says nothing that is understood: it is from before this command, or hangs."""
    why = f"it runs, and does not tell ({printable(str(error))})"
    return AskedDaemon(Daemon(running=True), unknown=(Unknown("the daemon", why, "meshtrain down && meshtrain up"),))


def _places(device: DeviceSeen) -> Iterable[OtherLaptop]:
    """A laptop at each IPv4 address that it may have; at none where none is known."""
    addresses = [one for one in device.addresses if one.ip is not None and one.ip.version == 4][:ADDRESSES_MAX]
    known = OtherLaptop(
        name=printable(device.name),
        address="",
        state=device.state,
        wire_version=device.announced_version,
        refused=device.refused,
        dial_failed=device.dial_failed,
    )
    return [replace(known, address=one.host, port=one.port) for one in addresses] or [known]


def clock_ahead_s(jobs: Iterable[JobSummary], own_device: str, now_s: float) -> float | None:
    """How far the clock of another laptop is ahead of this one's (below 0: behind), as far as jobs tell.

    A job is created by the clock of who submits it, and started by this one's. Between the two lies what it takes to
    ship files, so that of less than a day behind nothing is known.
    """
    told = [
        (job.started_at_s, job.created_at_s - job.started_at_s)
        for job in jobs
        if job.submitter != own_device and job.started_at_s is not None and abs(now_s - job.started_at_s) < DAY_S
    ]
    if not told:
        return None
    _, ahead_s = max(told)
    return ahead_s if ahead_s > 0 or ahead_s < -DAY_S else 0.0
