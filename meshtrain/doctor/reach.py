"""Who can be reached by TCP, and who holds a port here."""

import errno
import re
import socket
from concurrent.futures import ThreadPoolExecutor

from meshtrain.doctor.facts import PortHolder, Reach
from meshtrain.doctor.routes import hardware_known
from meshtrain.doctor.tools import AskTool

CONNECT_TIMEOUT_S = 2.5
GATEWAY_PORTS = (53, 80, 443)  # whatever it says to one of them, it is there
GATEWAY_TIMEOUT_S = 1.5
PORTS_TRIED = 20

_BY_ERROR = {
    errno.ECONNREFUSED: Reach.REFUSED,
    errno.ECONNRESET: Reach.REFUSED,
    errno.ETIMEDOUT: Reach.SILENT,
    errno.ENETUNREACH: Reach.NO_ROUTE,
    errno.EADDRNOTAVAIL: Reach.NO_ROUTE,
    errno.EPERM: Reach.FORBIDDEN,
    errno.EACCES: Reach.FORBIDDEN,
}


def reach(host: str, port: int, timeout_s: float | None = None) -> Reach:
    """Connects, says nothing, and hangs up. `timeout_s`: else CONNECT_TIMEOUT_S."""
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S if timeout_s is None else timeout_s):
            return Reach.OPEN
    except TimeoutError:
        return Reach.SILENT
    except OSError as error:
        return _BY_ERROR.get(error.errno or 0, Reach.UNREACHABLE)


def is_there(ask: AskTool, address: str) -> bool | None:
    """Whether the machine at this address, a gateway, answers anything at all; None: that is not known."""
    with ThreadPoolExecutor(len(GATEWAY_PORTS)) as pool:
        answers = list(pool.map(lambda port: reach(address, port, GATEWAY_TIMEOUT_S), GATEWAY_PORTS))
    if {Reach.OPEN, Reach.REFUSED} & set(answers):
        return True
    return card_answers(ask, address)


def card_answers(ask: AskTool, address: str) -> bool | None:
    """Whether the network card at an address that was just dialled has answered (ARP); None: that may be old."""
    return hardware_known(ask("ip", "-j", "-s", "neigh", "show", address).text or "", address)


def echoes(ask: AskTool, address: str) -> bool:
    """Whether a machine answers a ping, which many do that let no connection in."""
    return ask("ping", "-n", "-c", "1", "-W", "1", address).text is not None


def port_holder(ask: AskTool, port: int) -> PortHolder | None:
    """Who listens on this machine's port; None: nobody."""
    if _free(port):
        return None
    listening = ask("ss", "-Hltnp", "sport", "=", f":{port}").text or ""
    found = re.search(r'users:\(\("([^"]+)",pid=(\d+)', listening)
    program = f"{found[1]} (pid {found[2]})" if found else None
    free = next((other for other in range(port + 1, port + 1 + PORTS_TRIED) if _free(other)), None)
    return PortHolder(port, program, free)


def _free(port: int) -> bool:
    try:
        with socket.create_server(("0.0.0.0", port)):
            return True
    except OSError:
        return False
