"""Makes torch know the backend `meshtrain`, and makes its groups."""

import atexit
import random
import weakref
from typing import Any

import torch.distributed as dist

from meshtrain.errors import UsageError
from meshtrain.torch_backend import bucket_hooks
from meshtrain.torch_backend.operation import Members
from meshtrain.torch_backend.process_group import BACKEND, MeshProcessGroup
from meshtrain.torch_backend.reconfigurable import ReconfigurableGroup
from meshtrain.torch_backend.relay import Relay
from meshtrain.torch_backend.store import DaemonStore
from meshtrain.train.link.environment import environment_of_job
from meshwire.codecs.registry import parse_codec
from meshwire.messages.group import GROUP_CODECS, GROUP_SETTINGS


class World:
    """What this process has of its job's process groups: one connection, from the first to the end of the last world.

    Attributes:
        ranks: of the job, by rank of the world; None without a world.
        groups: that may have threads.
    """

    def __init__(self) -> None:
        self._relay: Relay | None = None
        self._store: DaemonStore | None = None
        self.ranks: tuple[int, ...] | None = None
        self._has_hooks = False
        self.groups: weakref.WeakSet[MeshProcessGroup] = weakref.WeakSet()

    def relay(self) -> Relay:
        """The connection. Raises UsageError without a job, ConnectionLost, RequestError."""
        if self._relay is None:
            environment = environment_of_job("torch.distributed")
            if environment is None:
                raise UsageError(
                    "the meshtrain backend exchanges tensors through this device's daemon, in a job that it has "
                    "started: meshtrain submit train.py. Without one, use the gloo backend"
                )
            self._relay = Relay.connect(environment)
            self._check(self._relay)
        return self._relay

    def store(self) -> DaemonStore:
        """The job's; kept here, for torch holds its C++ half alone, which calls this one. Raises as `relay`."""
        if self._store is None:
            self._store = DaemonStore(self.relay())
        return self._store

    def _check(self, relay: Relay) -> None:
        """Settings of rounds would be promises that a process group does not keep."""
        spec = relay.welcome.spec
        codec = parse_codec(spec.codec)
        if codec.name not in GROUP_CODECS or spec.sync.text() != "bsp" or spec.masks or spec.scale_lr:
            self.close()
            raise UsageError(f"this script uses torch.distributed: {GROUP_SETTINGS}")
        if not self._has_hooks:
            self._has_hooks = True
            bucket_hooks.install(codec)

    def enter(self, store: Any, rank: int, size: int) -> tuple[int, ...]:
        """Makes the default group's world: all ranks agree on its number, and on who is who."""
        relay = self.relay()
        own = relay.welcome.rank
        if size > len(relay.welcome.members):
            raise UsageError(_too_many(size, relay))
        life = (store.add("meshtrain/entries", 1) - 1) // size
        if rank == 0:
            store.set(f"meshtrain/{life}/instance", str(random.SystemRandom().randrange(1, 2**32)))
        store.set(f"meshtrain/{life}/rank/{rank}", str(own))
        instance = int(store.get(f"meshtrain/{life}/instance"))
        ranks = tuple(int(store.get(f"meshtrain/{life}/rank/{each}")) for each in range(size))
        if len(set(ranks)) != size:
            raise UsageError(f"two ranks of one world on one device: {ranks}")
        relay.begin(instance)
        self.ranks = ranks
        return ranks

    def open(self, options: Any) -> ReconfigurableGroup:
        """Makes the default group of a script that says itself who its members are, again and again."""
        if options.group_size > len(self.relay().welcome.members):
            raise UsageError(_too_many(options.group_size, self.relay()))
        self.ranks = ()
        group = ReconfigurableGroup(self.relay(), options, self)
        self.groups.add(group)
        return group

    def members_changed(self, ranks: tuple[int, ...]) -> None:
        """The default group's are others now."""
        self.ranks = ranks

    def leave(self) -> None:
        """Another world begins: one of before has ended, whether torch has said so or not."""
        if self.ranks is not None:
            self.close()

    def close(self) -> None:
        """The default group was destroyed, and all others with it; or the process ends."""
        relay, self._relay, self._store, self.ranks = self._relay, None, None, None
        if relay is not None:
            relay.close()
        for group in tuple(self.groups):
            group.end_threads()


WORLD = World()
atexit.register(WORLD.close)


def make_group(options: Any, _backend_options: Any) -> MeshProcessGroup:
    """What torch calls for `init_process_group` and `new_group`."""
    if not options.global_ranks_in_group:  # the default group
        WORLD.leave()
        if getattr(options, "enable_reconfigure", False):
            return WORLD.open(options)
        ranks = WORLD.enter(options.store, options.group_rank, options.group_size)
        on_shutdown = WORLD.close
    else:
        assert WORLD.ranks is not None
        ranks = tuple(WORLD.ranks[each] for each in options.global_ranks_in_group)
        on_shutdown = _nothing
    relay = WORLD.relay()
    members = Members(relay, options.group_id, ranks, options.group_rank, relay.instance)
    group = MeshProcessGroup(members, options.timeout, on_shutdown)
    WORLD.groups.add(group)
    return group


def _too_many(size: int, relay: Relay) -> str:
    return f"a world of {size} ranks on {len(relay.welcome.members)} devices: the job has one rank a device"


def _nothing() -> None:
    """A subgroup has nothing of its own to end."""


def register() -> None:
    """Once in a process."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, make_group, extended_api=True, devices=["cpu"])


def rendezvous(_url: str, **_options: Any) -> Any:
    """Takes the place of torch's `env://`: the store lies in the daemons, ranks are those of the job."""
    WORLD.leave()
    relay = WORLD.relay()
    yield WORLD.store(), relay.welcome.rank, len(relay.welcome.members)
