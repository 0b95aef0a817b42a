"""Members that broke the protocol, as one daemon knows it: who is refused, on whose word, and how often (G10)."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwire import limits
from meshwire.timeouts import Timeouts


@dataclass(slots=True)
class Violations:
    """Of one device, for the job's life.

    Attributes:
        accuser: the device on whose word it is refused now; None: it is not.
        until_s: it may ask in again then.
    """

    count: int
    reason: str
    accuser: str | None
    until_s: float


class Refusals:
    """By device. Only members of all times come in here, so there are no more of them than a job can have."""

    def __init__(self, me: str, timeouts: Timeouts) -> None:
        self._me = me
        self._timeouts = timeouts
        self._known: dict[str, Violations] = {}
        self._against_me: dict[str, str] = {}  # reasons, by device
        self._words: dict[str, set[str]] = {}  # against whom each has spoken, of others

    def __contains__(self, device: str) -> bool:
        """Whether the device is refused now."""
        known = self._known.get(device)
        return known is not None and known.accuser is not None

    def __iter__(self) -> Iterator[str]:
        """Those that are."""
        return iter([device for device in self._known if device in self])

    def reason(self, device: str) -> str:
        """Why a device was refused last."""
        return self._known[device].reason

    def count(self, device: str) -> int:
        """How often it has broken the protocol."""
        known = self._known.get(device)
        return 0 if known is None else known.count

    def own(self) -> tuple[str, ...]:
        """Whom this device itself has refused."""
        return tuple(device for device in self if self._known[device].accuser == self._me)

    def accuser(self, device: str) -> str | None:
        """On whose word it is refused."""
        known = self._known.get(device)
        return None if known is None else known.accuser

    def refuse(self, device: str, reason: str, accuser: str, count: int, now_s: float) -> None:
        """It is refused on the word of `accuser`, who knows of so many violations. Nobody's word counts more than one
        that is new."""
        count = max(self.count(device), min(count, self.count(device) + 1))
        self._known[device] = Violations(count, reason, accuser, now_s + self._timeouts.pardon_s(count))

    def heard(self, accuser: str, device: str) -> None:
        """The word of another, whatever comes of it."""
        self._words.setdefault(accuser, set()).add(device)

    def speaks_alone(self, accuser: str, device: str) -> str | None:
        """Another that this accuser has spoken against, as nobody else has against either."""
        alone = [
            other
            for other in sorted(self._words.get(accuser, ()))
            if other != device and other not in self.own()
            if not any(other in words for who, words in self._words.items() if who != accuser)
        ]
        others = any(device in words for who, words in self._words.items() if who != accuser)
        return alone[0] if alone and not others and device not in self.own() else None

    def accused_by(self, device: str, reason: str) -> None:
        """A member says that this one broke the protocol."""
        self._against_me[device] = reason

    @property
    def against_me(self) -> dict[str, str]:
        """Why others refuse this device, by device; until it is taken in again."""
        return self._against_me

    def pardon(self, device: str, now_s: float) -> bool:
        """It wants to be taken in again. Returns whether it may: not before its time, nor after as many violations as
        are too many."""
        known = self._known.get(device)
        if known is None or known.accuser is None:
            return True
        if known.count >= limits.VIOLATIONS_MAX or now_s < known.until_s:
            return False
        known.accuser = None
        return True

    def acquit(self, device: str) -> None:
        """Its accuser's word does not count."""
        if (known := self._known.get(device)) is not None:
            known.accuser = None
            known.count = max(0, known.count - 1)
