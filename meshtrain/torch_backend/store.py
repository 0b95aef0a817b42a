"""torch's `Store` over the daemons: where the ranks of a process group find each other, without a port of their own."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshtrain.torch_backend.relay import GroupError, GroupTimeout, Relay
from meshwire.messages.group import StoreAnswer, StoreAsk

TIMEOUT = timedelta(minutes=30)  # as torch's own stores
_Store: Any = dist.Store  # type: ignore[attr-defined]  # as of MeshProcessGroup


class DaemonStore(_Store):  # type: ignore[misc]
    """The job's store, on the daemon of its first rank. Raises dist.DistStoreError."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay
        self._timeout = TIMEOUT

    def _ask(
        self,
        op: str,
        keys: Sequence[str],
        value: str | bytes = b"",
        expected: str | bytes = b"",
        amount: int = 0,
        timeout: timedelta | None = None,
    ) -> StoreAnswer:
        asked = StoreAsk.load(
            {
                "job": self._relay.welcome.spec.job,
                "op": op,
                "keys": tuple(keys),
                "value": _bytes(value),
                "expected": _bytes(expected),
                "amount": amount,
                "timeout_s": (timeout or self._timeout).total_seconds(),
            }
        )
        try:
            return self._relay.ask_store(asked)
        except GroupTimeout as error:
            raise dist.DistStoreError(f"wait timeout: {error}") from error
        except GroupError as error:
            raise dist.DistStoreError(str(error)) from error

    def set(self, key: str, value: str | bytes) -> None:
        """Sets a value."""
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        """Waits until the key is there."""
        return self._ask("get", [key]).values[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Waits until all are there."""
        return list(self._ask("get", keys).values)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Sets them one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, 0 where there is none, and returns the sum."""
        return self._ask("add", [key], amount=amount).number

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to a value."""
        self._ask("append", [key], value)

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Sets the value if it is as expected; returns what is there then."""
        return self._ask("compare_set", [key], value, expected).values[0]

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return bool(self._ask("check", keys).number)

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        return bool(self._ask("delete", [key]).number)

    def num_keys(self) -> int:
        """How many there are."""
        return self._ask("count", []).number

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until all are there."""
        self._ask("wait", keys, timeout=timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """For all that waits from now on."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """For all that waits."""
        return self._timeout

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set are there."""
        return True

    def clone(self) -> "DaemonStore":
        """The same store."""
        return self


def _bytes(value: str | bytes | list[int]) -> bytes:
    """torch's prefix stores hand values over as lists of numbers."""
    return value.encode() if isinstance(value, str) else bytes(value)
