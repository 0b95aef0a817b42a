"""Chooses the devices that take part in a job that is submitted: those that are all linked with each other."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from meshtraind.peers.links import Link
from meshtraind.peers.node import Node
from meshtraind.transport.connection import ConnectionEnded, RequestFailed
from meshwire import limits
from meshwire.messages.job import Member
from meshwire.messages.link import AskLinked, LinkedDevices, Software
from meshwire.text import printable

log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0  # what a device may take to say whom it is linked with
NAMED_MAX = 5  # of those that are away


async def ask_who_is_linked(node: Node) -> dict[str, frozenset[str]]:
    """With whom each device has a link now, this one included; who does not answer in time is not among them."""
    links = dict(node.links)
    answers = await asyncio.gather(*(_ask_linked(link) for link in links.values()))
    heard = {device: answer for device, answer in zip(links, answers, strict=True) if answer is not None}
    # Who has answered is linked with this device, whatever it has said of that.
    return {node.device: frozenset(heard)} | {device: answer | {node.device} for device, answer in heard.items()}


async def _ask_linked(link: Link) -> frozenset[str] | None:
    name = f"links of {link.hello.name}"
    try:
        answer = await link.connection.request(AskLinked(), timeout_s=ASK_TIMEOUT_S, name=name)
    except (RequestFailed, ConnectionEnded, TimeoutError) as error:
        log.info("%s does not say whom it is linked with: %s", printable(link.hello.name), error)
        return None
    return frozenset(answer.devices) if isinstance(answer, LinkedDevices) else None


def linked_together(
    devices: Sequence[str], linked: Mapping[str, Collection[str]]
) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Those of the devices that are all linked with each other, in order, and whom each of the others has no link with.

    The one that lacks most links is left out first, of several the last; the first device, where it can be helped,
    never. A link that only one of its ends has is being made or has just been lost, and is none.
    """
    kept, left_out = list(devices), dict[str, tuple[str, ...]]()
    while True:
        lacks = {
            one: tuple(other for other in kept if other != one and not _is_link(one, other, linked)) for one in kept
        }
        most = max((len(lacks[one]) for one in kept), default=0)
        if not most:
            return tuple(kept), left_out
        worst = next(one for one in reversed(kept) if len(lacks[one]) == most)
        left_out[worst] = lacks[worst]
        kept.remove(worst)


def _is_link(one: str, other: str, linked: Mapping[str, Collection[str]]) -> bool:
    return other in linked.get(one, ()) and one in linked.get(other, ())


async def devices_together(node: Node) -> tuple[str, ...]:
    """The devices that `submit` takes where nobody is named: those that train, with torch and all linked with each
    other, then the hubs that are linked with all of them."""
    devices, linked = _devices(node), await ask_who_is_linked(node)
    able = [device for device, (member, software) in devices.items() if _trains(member, software)]
    together, _ = linked_together(able, linked)
    hubs = hubs_for(node, [devices[device][0] for device in together], linked)
    return (*together, *(hub.device for hub in hubs))


def _devices(node: Node) -> dict[str, tuple[Member, Software]]:
    """This one, then those that are linked, by name."""
    links = sorted(node.links.values(), key=lambda link: link.hello.name)
    return {node.device: (node.member, node.software)} | {
        link.device: (link.member, link.hello.software) for link in links
    }


def _trains(member: Member, software: Software) -> bool:
    return software.torch is not None and not member.hub


def hubs_for(node: Node, members: Sequence[Member], linked: Mapping[str, Collection[str]]) -> tuple[Member, ...]:
    """The hubs that could be in a job beside these members: they are linked with all of them, and with each other."""
    hubs = [member for member, _ in _devices(node).values() if member.hub and member not in members]
    chosen: list[Member] = []
    for hub in hubs:
        if all(_is_link(hub.device, other.device, linked) for other in (*members, *chosen)):
            chosen.append(hub)
    return tuple(chosen)


def absences(away: Mapping[str, str], unlinkable: Mapping[str, str]) -> list[str]:
    """Notes on the paired devices that are not linked with this one, and so not in the job."""
    if not away:
        return []
    silent = sorted(name for device, name in away.items() if device not in unlinkable)
    notes = [f"{name} is left out: {unlinkable[device]}" for device, name in away.items() if device in unlinkable]
    if silent:
        names = ", ".join(silent[:NAMED_MAX]) + (
            f" and {len(silent) - NAMED_MAX} more" if len(silent) > NAMED_MAX else ""
        )
        notes.append(
            f"left out, for there is no link: {names}. Asleep, elsewhere, or this device waits there for a word: "
            "`meshtrain peers` there says"
        )
    return notes


def choose_members(
    node: Node,
    on: Iterable[str],
    count: int | None,
    count_max: int | None,
    linked: Mapping[str, Collection[str]],
) -> tuple[tuple[Member, ...], list[str]]:
    """The members in order, hubs last, and notes for the person. Raises RequestFailed naming who cannot take part.

    Args:
        on: exactly these, by names or ids; empty: all that are linked with each other, or as many as the counts say.
        count: how many that train; with `count_max` at least so many, and at most that.
        linked: with whom each of them has a link.
    """
    devices = _devices(node)
    wanted = tuple(on)
    notes: list[str] = []
    if wanted:
        chosen = [_one_named(name, devices) for name in wanted]
        if len(set(chosen)) < len(chosen):
            raise RequestFailed(f"--on names a device twice: {', '.join(wanted)}")
        _, left_out = linked_together(chosen, linked)
        if left_out:
            raise RequestFailed("--on: " + "; ".join(_unlinked_notes(devices, linked, left_out)))
        chosen.sort(key=lambda device: devices[device][0].hub)  # the scripts' ranks begin at 0
    else:
        with_torch = [device for device, (member, software) in devices.items() if _trains(member, software)]
        together, left_out = linked_together(with_torch, linked)
        chosen, notes = list(together), _unlinked_notes(devices, linked, left_out)
        if count is not None:
            if count > len(chosen):
                raise RequestFailed(
                    f"--peers {count}: only {len(chosen)} devices with torch are linked with each other, this one "
                    f"included{''.join(f'; {note}' for note in notes)}; see `meshtrain peers`, add one with "
                    "`meshtrain pair`"
                )
            chosen = chosen[: count_max or count]
    for device in chosen:
        member, software = devices[device]
        if member.hub:
            continue
        if software.torch is None:
            raise RequestFailed(
                f"{member.name} has no torch: run `pip install '.[torch]'` there, leave it out, or let it be a hub: "
                "meshtrain down, then meshtrain up --hub, there"
            )
        notes += _differences(devices[chosen[0]], (member, software))
    if chosen and devices[chosen[0]][0].hub:
        raise RequestFailed("--on names hubs alone, which train nothing: name a laptop, too")
    if not chosen:
        raise RequestFailed("no linked device has torch: run `pip install '.[torch]'` on at least one")
    if len(chosen) > limits.MEMBERS_MAX:
        raise RequestFailed(f"{len(chosen)} devices; a job takes at most {limits.MEMBERS_MAX}")
    if len(devices) == 1:
        notes.append("no other device is linked: running on this one alone. Add one with `meshtrain pair`.")
    return tuple(devices[device][0] for device in chosen), notes


def _unlinked_notes(
    devices: Mapping[str, tuple[Member, Software]],
    linked: Mapping[str, Collection[str]],
    left_out: Mapping[str, Collection[str]],
) -> list[str]:
    """Who is left out and why, a line each."""
    notes = []
    for device, others in left_out.items():
        name = printable(devices[device][0].name)
        names = ", ".join(printable(devices[other][0].name) for other in others)
        if device not in linked:
            why = f"it did not say within {ASK_TIMEOUT_S:.0f} s whom it is linked with; try again"
        else:
            why = f"it has no link to {names}: `meshtrain peers` on it says why; `meshtrain pair` joins two of them"
        notes.append(f"{name} is left out: {why}")
    return notes


def _one_named(name: str, devices: dict[str, tuple[Member, Software]]) -> str:
    found = [device for device, (member, _) in devices.items() if member.name == name]
    if not found and len(name) >= 4:
        found = [device for device in devices if device.startswith(name)]
    if not found:
        linked = ", ".join(member.name for member, _ in devices.values())
        raise RequestFailed(f"no linked device is called {name!r}; linked are: {linked}. See `meshtrain peers`.")
    if len(found) > 1:
        ids = ", ".join(device[:8] for device in found)
        raise RequestFailed(f"several devices are called {name!r}; use an id: {ids}")
    return found[0]


def _differences(first: tuple[Member, Software], other: tuple[Member, Software]) -> list[str]:
    """Notes on what can break a run: other torch or Python versions."""
    notes = []
    for what, ours, theirs in (
        ("torch", first[1].torch, other[1].torch),
        ("Python", _minor(first[1].python), _minor(other[1].python)),
    ):
        if ours != theirs:
            notes.append(
                f"{what} differs: {ours} on {first[0].name}, {theirs} on {other[0].name}; "
                "install the same on both, for the script may fail on one, or replicas drift apart, which mt.prepare "
                "mends at a cost, and torch.distributed does not notice"
            )
    return notes


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
