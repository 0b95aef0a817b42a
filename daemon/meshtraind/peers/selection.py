"""Chooses the devices that take part in a job that is submitted."""

from collections.abc import Iterable

from meshtraind.peers.node import Node
from meshtraind.transport.connection import RequestFailed
from meshwire import limits
from meshwire.messages.job import Member
from meshwire.messages.link import Software


def choose_members(
    node: Node, on: Iterable[str], count: int | None, count_max: int | None = None
) -> tuple[tuple[Member, ...], list[str]]:
    """The members, in ring order, and notes for the person. Raises RequestFailed naming who cannot take part.

    Args:
        on: exactly these, by names or ids; empty: all that are linked, or as many as the counts say.
        count: how many; with `count_max` at least so many, and at most that.
    """
    devices = {node.device: (node.member, node.software)}
    for device, link in sorted(node.links.items(), key=lambda item: item[1].hello.name):
        member = Member(device=device, incarnation=link.hello.incarnation, name=link.hello.name)
        devices[device] = (member, link.hello.software)
    wanted = tuple(on)
    if wanted:
        chosen = [_one_named(name, devices) for name in wanted]
        if len(set(chosen)) < len(chosen):
            raise RequestFailed(f"--on names a device twice: {', '.join(wanted)}")
    else:
        chosen = [device for device, (_, software) in devices.items() if software.torch is not None]
        if count is not None:
            if count > len(chosen):
                raise RequestFailed(
                    f"--peers {count}: only {len(chosen)} devices with torch are linked, this one included; "
                    "see `meshtrain peers`, add one with `meshtrain pair`"
                )
            chosen = chosen[: count_max or count]
    notes = []
    for device in chosen:
        member, software = devices[device]
        if software.torch is None:
            raise RequestFailed(f"{member.name} has no torch: run `pip install '.[torch]'` there, or leave it out")
        notes += _differences(devices[chosen[0]], (member, software))
    if not chosen:
        raise RequestFailed("no linked device has torch: run `pip install '.[torch]'` on at least one")
    if len(chosen) > limits.MEMBERS_MAX:
        raise RequestFailed(f"{len(chosen)} devices; a job takes at most {limits.MEMBERS_MAX}")
    if len(devices) == 1:
        notes.append("no other device is linked: running on this one alone. Add one with `meshtrain pair`.")
    return tuple(devices[device][0] for device in chosen), notes


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
                "replicas may drift apart or the script may fail on one of them"
            )
    return notes


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
