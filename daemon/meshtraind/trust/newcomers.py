"""What becomes of a trusted device's word about another one: rules K1 to K4, for one word at a time."""

import time
from enum import StrEnum

from meshtraind.trust.identity import device_id_of
from meshtraind.trust.pins import Pin, PinsError, PinTable
from meshwire import limits
from meshwire.messages.link import Introduction, Introductions
from meshwire.messages.local import IntroductionPolicy


class Verdict(StrEnum):
    """What becomes of one word."""

    JOINS = "joins"
    WAITS = "waits"  # for a person's word
    KNOWN = "known"  # nothing new: trusted already, waiting at that word already, or this device itself
    REMOVED = "removed"  # by a person, here
    FULL = "full"  # one of the limits
    UNTRUSTED = "untrusted"  # who says it is not trusted (any more)
    NEVER = "never"  # the person wants no introductions


class Newcomers:
    """Devices that come by the words of others.

    Args:
        pins: whom this device trusts; changed by `take`.
        own_device: this device's id.
    """

    def __init__(self, pins: PinTable, own_device: str) -> None:
        self._pins = pins
        self._own_device = own_device

    def introduced_here(self) -> tuple[Pin, ...]:
        """Whom this device introduces to others: those that a code was typed for here, the newest first (K1)."""
        if self._pins.introductions is IntroductionPolicy.NEVER:
            return ()
        by_code = (pin for pin in self._pins.all() if pin.added_by == self._own_device)
        newest = sorted(by_code, key=lambda pin: (-pin.added_at, pin.device_id))
        return tuple(newest[: limits.INTRODUCTIONS_MAX])

    def judge(self, by: str, word: Introduction, *, doubted: bool) -> Verdict:
        """What becomes of this word. Changes nothing.

        Args:
            by: the device that has said it, over its own link.
            doubted: a trusted device has removed the one that is introduced (K5).
        """
        policy = self._pins.introductions
        if policy is IntroductionPolicy.NEVER:
            return Verdict.NEVER
        pins = {pin.device_id: pin for pin in self._pins.all()}
        if by not in pins:
            return Verdict.UNTRUSTED
        device = device_id_of(word.certificate_der)
        if device == self._own_device or device in pins:
            return Verdict.KNOWN
        if self._pins.is_removed(device):
            return Verdict.REMOVED
        waiting = self._pins.waiting()
        at_words_of = {pin.added_by for pin in waiting if pin.device_id == device}
        if by in at_words_of:
            return Verdict.KNOWN
        asks = doubted or bool(at_words_of) or policy is IntroductionPolicy.ASK
        introduced = [pin.added_by for pin in pins.values() if pin.added_by != self._own_device]
        by_it = introduced.count(by) + sum(pin.added_by == by for pin in waiting)
        places = limits.INTRODUCTIONS_MAX - len(waiting) if asks else limits.INTRODUCED_MAX - len(introduced)
        if by_it >= limits.INTRODUCTIONS_MAX or places <= 0:
            return Verdict.FULL
        return Verdict.WAITS if asks else Verdict.JOINS

    def take(self, by: str, word: Introduction, certificate_pem: str, *, doubted: bool) -> Verdict:
        """Does what `judge` says now, once the certificate was checked: a person may have decided meanwhile.

        Raises ValueError, PinsError.
        """
        verdict = self.judge(by, word, doubted=doubted)
        device = device_id_of(word.certificate_der)
        pin = Pin(device, word.name, certificate_pem, time.time(), by, word.addresses)
        match verdict:
            case Verdict.WAITS:
                self._pins.wait(pin)
            case Verdict.JOINS:
                self._pins.introduce(pin)
        return verdict

    def withdraw(self, by: str, said: Introductions) -> None:
        """Nobody waits at the word of a device that introduces it no more."""
        self._pins.withdraw(by, {device_id_of(word.certificate_der) for word in said.devices})

    def accept(self, text: str) -> Pin:
        """A person says yes to the device that waits under this name or id. Raises PinsError."""
        pin = self._pins.find_waiting(text)
        if sum(other.added_by != self._own_device for other in self._pins.all()) >= limits.INTRODUCED_MAX:
            raise PinsError(
                f"{limits.INTRODUCED_MAX} devices were introduced already: `meshtrain unpair` one first, or pair this "
                "one by a code"
            )
        self._pins.introduce(pin)
        return pin

    def came_by(self, device: str) -> tuple[Pin, ...]:
        """The trusted devices that joined by this one's word, or by theirs, and so on."""
        pins = self._pins.all()
        found = {device}
        while more := {pin.device_id for pin in pins if pin.added_by in found} - found:
            found |= more
        return tuple(pin for pin in pins if pin.device_id in found - {device})
