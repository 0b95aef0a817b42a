"""Which of the devices that mDNS shows as pairing is the one whose code was typed: all are tried.

Anybody on the network can announce any number of them, at addresses where nobody answers or somebody false does. So
they are dialled beside each other, in an order that nobody outside chooses; a false one costs its own attempt and no
more; and of those that answer, PAIRING_GUESSES_MAX may guess the code, few of them at one IP address.
"""

import asyncio
import heapq
import random
from collections.abc import Callable, Mapping

from meshtraind.peers.mdns import Sighting
from meshtraind.runtime.tasks import TaskSet, told_elsewhere
from meshtraind.trust.pairing_guest import Guest, Target, pair_with
from meshtraind.trust.pairing_host import NotAskedError, PairedDevice, PairingError, UnreachableError
from meshwire import limits
from meshwire.text import printable

POLL_S = 0.1
SAY_AFTER_S = 1.0  # what is quicker needs no word
TOLD_MAX = 3  # of the devices that did not have the code

AnnouncedAddress = tuple[str, int]  # IP address, port; whose they are is announced, too, and nothing to go by


class PairingSearch:
    """One search for the device that shows a code.

    Args:
        guest: what this device brings along, with the code.
        announced: the devices that mDNS shows, pairing or not, by any key; live.
        say: tells the person what is going on.
    """

    def __init__(self, guest: Guest, announced: Mapping[str, Sighting], say: Callable[[str], None]) -> None:
        self._guest = guest
        self._announced = announced
        self._say = say
        self._known: set[AnnouncedAddress] = set()
        self._waiting: list[
            tuple[int, float, AnnouncedAddress, str]
        ] = []  # heap: each device's first address before any second
        self._guessed: dict[str, str] = {}  # device id -> IP address
        self._not_asked = 0
        self._wrong: list[str] = []  # what was said of those that had their guess
        self._others: list[str] = []  # of those that answered otherwise
        self._unreachable: list[str] = []
        self._answered_s: float | None = None  # when the last of the first two kinds did

    async def run(self) -> PairedDevice:
        """The device whose code it was. Raises PairingError, which tells of all that were asked."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        said = False
        running: set[asyncio.Task[PairedDevice | None]] = set()
        tasks = TaskSet("pairing", told_elsewhere)
        try:
            while True:
                now_s = loop.time()
                looking = now_s < began_s + limits.PAIRING_SEARCH_S and not self._has_answer(now_s)
                if looking:
                    self._look()
                    while self._waiting and len(running) < limits.PAIRING_DIALS_MAX:
                        _, _, place, name = heapq.heappop(self._waiting)
                        running.add(tasks.spawn(self._try(place, name), f"ask {place[0]}"))
                elif not running:
                    raise self._nobody()
                if not said and now_s >= began_s + SAY_AFTER_S:
                    said = True
                    self._say_what_goes_on(began_s + limits.PAIRING_SEARCH_S - now_s)
                await asyncio.wait(running, timeout=POLL_S) if running else await asyncio.sleep(POLL_S)
                done = {task for task in running if task.done()}
                running -= done
                for task in done:
                    if (device := task.result()) is not None:
                        self._tell_of_false_ones()
                        return device
        finally:
            await tasks.close()

    def _look(self) -> None:
        for sighting in [sighting for sighting in self._announced.values() if sighting.pairing]:
            for number, host in enumerate(sighting.addresses[: limits.PAIRING_ADDRESSES_MAX]):
                place = (host, sighting.port)
                if place not in self._known and len(self._known) < limits.PAIRING_PLACES_MAX:
                    self._known.add(place)
                    heapq.heappush(self._waiting, (number, random.random(), place, printable(sighting.name)))

    def _has_answer(self, now_s: float) -> bool:
        """Whether some device has said that the code is not its own, and others had their time since."""
        return (
            self._answered_s is not None
            and not self._waiting
            and now_s >= self._answered_s + limits.PAIRING_SEARCH_MORE_S
        )

    async def _try(self, place: AnnouncedAddress, name: str) -> PairedDevice | None:
        host, port = place
        asked = False

        def admit(device: str) -> None:
            nonlocal asked
            self._admit(device, host)
            asked = True

        try:
            return await pair_with(self._guest, Target(host, port, name, admit))
        except NotAskedError:
            return None
        except UnreachableError as error:
            self._unreachable.append(str(error))
            return None
        except PairingError as error:
            (self._wrong if asked else self._others).append(str(error))
        self._answered_s = asyncio.get_running_loop().time()
        return None

    def _admit(self, device: str, host: str) -> None:
        """Whether the device that showed its certificate at this host may guess. Raises NotAskedError."""
        if device in self._guessed:
            raise NotAskedError
        at_host = sum(there == host for there in self._guessed.values())
        if at_host >= limits.PAIRING_GUESSES_PER_HOST_MAX or len(self._guessed) >= limits.PAIRING_GUESSES_MAX:
            self._not_asked += 1
            raise NotAskedError
        self._guessed[device] = host

    # What the person is told

    def _say_what_goes_on(self, left_s: float) -> None:
        if not self._guessed and not self._others:
            self._say(f"Looking for the device that shows this code, for up to {left_s:.0f} s more.")
        elif self._answered_s is not None:
            self._say("The device that answered has another code. Looking for others that show one.")

    def _tell_of_false_ones(self) -> None:
        if self._wrong:
            self._say(
                f"{_devices(len(self._wrong))} besides it said to show a code, and could not prove to have this one. "
                "Unless you are pairing others at this moment, somebody on this network pretends to; they got nothing."
            )

    def _nobody(self) -> PairingError:
        answers = list(dict.fromkeys(self._wrong + self._others))
        if not answers and not self._unreachable:
            return PairingError(
                f"no device on this network shows a pairing code (looked for {limits.PAIRING_SEARCH_S:.0f} s): run "
                "`meshtrain pair` on the other device first. If it does show a code, this network hides devices from "
                "each other: add --at ADDRESS, as the screen of the other device says"
            )
        if not answers:
            answers = list(dict.fromkeys(self._unreachable))
        if len(answers) == 1 and not self._not_asked:
            return PairingError(answers[0])
        lines = [f"{_devices(len(answers) + self._not_asked)} said to show a code, and none has this one:"]
        lines += [f"- {answer}" for answer in answers[:TOLD_MAX]]
        if len(answers) > TOLD_MAX:
            lines.append(f"- and {len(answers) - TOLD_MAX} more")
        if self._not_asked:
            lines.append(f"- {self._not_asked} were not asked: each that is asked may guess the code once")
        lines.append("Name the one that you mean: add --at ADDRESS, as its screen says")
        return PairingError("\n".join(lines))


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"
