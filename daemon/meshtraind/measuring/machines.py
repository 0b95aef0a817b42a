"""How machines are now: this one, for whoever asks, and those of linked devices, for a person here."""

import asyncio
import logging
import time

from meshtraind.peers.links import Link
from meshtraind.peers.node import Node
from meshtraind.runtime.threads import in_thread
from meshtraind.transport.connection import ConnectionEnded, RequestFailed
from meshwire.messages.link import AskMachine, MachineState
from meshwire.messages.local import Machines

log = logging.getLogger(__name__)

FRESH_S = 1.0  # however many ask: reading the sensors takes some milliseconds
ANSWER_S = 3.0


class MachineLook:
    """Looks at the sensors of this machine when it is asked, and asks others for theirs."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._reading = asyncio.Lock()
        self._state = MachineState()
        self._read_s = float("-inf")

    async def own(self) -> MachineState:
        """As it was within the last second."""
        async with self._reading:
            if time.monotonic() - self._read_s >= FRESH_S:
                self._state = await in_thread(lambda _: self._node.settings.sensors.state())
                self._read_s = time.monotonic()
            return self._state

    async def all(self) -> Machines:
        """This one, and all that are linked and answer in time."""
        links = list(self._node.links.values())
        own = await self.own()
        theirs = await asyncio.gather(*map(self._of, links))
        told = [(link.device, state) for link, state in zip(links, theirs, strict=True) if state is not None]
        return Machines(machines=((self._node.device, own), *told))

    async def _of(self, link: Link) -> MachineState | None:
        name = link.hello.name
        try:
            reply = await link.connection.request(AskMachine(), timeout_s=ANSWER_S, name=f"the machine of {name}")
        except (RequestFailed, ConnectionEnded, TimeoutError) as error:
            log.debug("how the machine of %s is now is not known: %s", name, error)
            return None
        return reply if isinstance(reply, MachineState) else None
