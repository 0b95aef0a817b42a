"""A browser's part in HTTP, by hand: what a test sends is what arrives."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 15.0


@dataclass
class HttpAnswer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        return next((value for each, value in self.headers if each == name), None)


async def exchange(port: int, raw: bytes) -> HttpAnswer:
    """Sends these bytes on a connection of their own, and reads the answer to its end."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(raw)
            return await read_answer(reader)
        finally:
            writer.close()
            await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> HttpAnswer:
    status, headers = await read_head(reader)
    length = int(next(value for name, value in headers if name == "content-length"))
    return HttpAnswer(status, headers, await reader.readexactly(length))


async def read_head(reader: asyncio.StreamReader) -> tuple[int, list[tuple[str, str]]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return int(first.split()[1]), headers


def request(method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    head = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*head, "", ""]).encode() + body


@dataclass
class HttpClient:
    """A page of the dashboard."""

    url: str
    key: str = ""
    cookie: str = ""
    port: int = field(init=False)
    token: str = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        assert parts.port is not None
        assert parts.hostname == "127.0.0.1"
        self.port, self.token = parts.port, parts.fragment.removeprefix("token=")

    @property
    def own_headers(self) -> dict[str, str]:
        shown = {"cookie": self.cookie, "x-meshtrain-key": self.key}
        return {"host": f"127.0.0.1:{self.port}", "sec-fetch-site": "same-origin"} | {
            k: v for k, v in shown.items() if v
        }

    async def get(self, path: str) -> HttpAnswer:
        return await exchange(self.port, request("GET", path, self.own_headers))

    async def post(self, path: str, body: Any, **changes: str) -> HttpAnswer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = self.own_headers | {
            "origin": f"http://127.0.0.1:{self.port}",
            "content-type": "application/json",
            "content-length": str(len(data)),
        }
        return await exchange(self.port, request("POST", path, headers | changes, data))

    async def enter(self) -> HttpAnswer:
        """Makes a session of the token."""
        reply = await self.post("/api/session", {"token": self.token})
        if reply.status == 200:
            self.key = reply.json["key"]
            self.cookie = (reply.header("set-cookie") or "").partition(";")[0]
        return reply


class Refused(Exception):
    """No event stream."""


class EventStream:
    """What an event stream tells, as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.parts: dict[str, Any] = {}
        self.told: list[str] = []

    @classmethod
    async def open(cls, client: HttpClient) -> "EventStream":
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port, limit=2**24)
        writer.write(request("GET", "/api/events", client.own_headers | {"connection": "close"}))
        async with asyncio.timeout(DEADLINE_S):
            status, headers = await read_head(reader)
        if status != 200:
            writer.close()
            await writer.wait_closed()
            raise Refused(status)
        assert dict(headers)["content-type"].startswith("text/event-stream")
        return cls(reader, writer)

    async def until(self, name: str) -> Any:
        """The next part of this name."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                line = (await self._reader.readuntil(b"\n")).decode().strip()
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                    data = (await self._reader.readuntil(b"\n")).decode().removeprefix("data: ")
                    self.parts[event] = json.loads(data)
                    self.told.append(event)
                    if event == name:
                        return self.parts[event]

    async def ended(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self._reader.read(2**16):
                pass

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
