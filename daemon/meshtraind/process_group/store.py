"""The key-value store by which the ranks of a process group find each other; one a job, on its first rank's daemon."""

import asyncio

from meshtraind.transport.requests import RequestFailed
from meshwire import limits
from meshwire.messages.group import StoreAnswer, StoreAsk


class KeyValueStore:
    """Values by name, for which one can wait; what torch calls a Store (torch.distributed, "Distributed Key-Value
    Store").

    It holds at most STORE_BYTES_MAX, and answers in the order in which it is asked.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._changed: set[asyncio.Future[None]] = set()

    async def answer(self, asked: StoreAsk) -> StoreAnswer:
        """Does what is asked. Raises RequestFailed (a key that does not come in time, a store that is full)."""
        match asked.op:
            case "set":
                self._set(_one(asked), asked.value)
            case "append":
                self._set(_one(asked), self._values.get(_one(asked), b"") + asked.value)
            case "add":
                total = self._number(_one(asked)) + asked.amount
                self._set(_one(asked), str(total).encode())
                return StoreAnswer(number=total)
            case "compare_set":
                return StoreAnswer(values=(self._compare_set(_one(asked), asked.expected, asked.value),))
            case "check":
                return StoreAnswer(number=int(self._all(asked.keys)))
            case "delete":
                return StoreAnswer(number=int(self._delete(_one(asked))))
            case "count":
                return StoreAnswer(number=len(self._values))
            case "get":
                await self._wait_for(asked)
                return StoreAnswer(values=tuple(self._values[key] for key in asked.keys))
            case "wait":
                await self._wait_for(asked)
        return StoreAnswer()

    def close(self) -> None:
        """Whoever waits waits no more."""
        for waiting in tuple(self._changed):
            if not waiting.done():
                waiting.set_exception(RequestFailed("the job has ended"))

    def _all(self, keys: tuple[str, ...]) -> bool:
        return all(key in self._values for key in keys)

    def _number(self, key: str) -> int:
        text = self._values.get(key, b"0")
        try:
            return int(text)
        except ValueError:
            raise RequestFailed(f"the store's {key!r} is no number, so nothing can be added to it") from None

    def _compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """As torch's stores: a key that is not there is set if nothing is expected."""
        before = self._values.get(key)
        if before is None:
            if expected:
                return expected
        elif before != expected:
            return before
        self._set(key, value)
        return value

    def _set(self, key: str, value: bytes) -> None:
        grown = self._bytes + len(value) - len(self._values[key]) if key in self._values else None
        after = self._bytes + len(key) + len(value) if grown is None else grown
        full = key not in self._values and len(self._values) >= limits.STORE_KEYS_MAX
        if full or after > limits.STORE_BYTES_MAX or len(value) > limits.STORE_VALUE_BYTES_MAX:
            raise RequestFailed(
                f"the job's store is full ({len(self._values)} keys, {self._bytes} bytes): delete_key() what was read; "
                "tensors travel by collectives"
            )
        self._values[key] = value
        self._bytes = after
        for waiting in tuple(self._changed):
            if not waiting.done():
                waiting.set_result(None)

    def _delete(self, key: str) -> bool:
        if key not in self._values:
            return False
        self._bytes -= len(key) + len(self._values.pop(key))
        return True

    async def _wait_for(self, asked: StoreAsk) -> None:
        try:
            async with asyncio.timeout(asked.timeout_s):
                while not self._all(asked.keys):
                    changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._changed.add(changed)
                    try:
                        await changed
                    finally:
                        self._changed.discard(changed)
        except TimeoutError:
            missing = ", ".join(key for key in asked.keys if key not in self._values)
            raise RequestFailed(f"nobody has set {missing} in the job's store within {asked.timeout_s:g} s") from None


def _one(asked: StoreAsk) -> str:
    if len(asked.keys) != 1:
        raise RequestFailed(f"{asked.op} of {len(asked.keys)} keys; it takes one")
    return asked.keys[0]
