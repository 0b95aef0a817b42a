"""Headless Chromium, driven over its DevTools protocol by a pair of pipes."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

DEADLINE_S = 60.0
POLL_S = 0.02
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)


def chromium() -> str | None:
    """Where it is, if it is."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One process of it, with an empty profile."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.events: list[dict[str, Any]] = []

    async def read(self) -> None:
        """Takes what it says until it ends."""
        while True:
            try:
                said = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                return
            answer = self._waiting.pop(said.get("id", 0), None)
            if answer is None:
                self.events.append(said)
            elif not answer.done():
                answer.set_result(said)

    async def send(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        said = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._writer.write(json.dumps(said).encode() + b"\0")
        reply = await asyncio.wait_for(answer, DEADLINE_S)
        assert "error" not in reply, (method, reply["error"])
        return reply["result"]

    async def page(self, *, width: int = 1280, height: int = 1000, dark: bool = False) -> "Page":
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = (await self.send("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.send(f"{domain}.enable")
        await page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.send(
            "Emulation.setEmulatedMedia", features=[scheme, {"name": "prefers-reduced-motion", "value": "reduce"}]
        )
        return page


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    async def send(self, method: str, **params: Any) -> Any:
        return await self._browser.send(method, self._session, **params)

    async def resize(self, width: int, height: int) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def go(self, url: str) -> Self:
        await self.send("Page.navigate", url=url)
        return self

    async def eval(self, expression: str) -> Any:
        reply = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    async def until(self, expression: str, timeout_s: float = DEADLINE_S) -> None:
        """Waits until it is true."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    if await self.eval(f"Boolean({expression})"):
                        return
                except AssertionError:  # the page is not there yet
                    pass
                await asyncio.sleep(POLL_S)

    async def text(self, selector: str) -> str:
        return str(await self.eval(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def click(self, selector: str) -> None:
        await self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    async def key(self, name: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    async def screenshot(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Errors of scripts, of the policy, and failed requests."""
        own = [event for event in self._browser.events if event.get("sessionId") == self._session]
        thrown = [json.dumps(event["params"]) for event in own if event["method"] == "Runtime.exceptionThrown"]
        logged = [event["params"]["entry"] for event in own if event["method"] == "Log.entryAdded"]
        return thrown + [entry["text"] for entry in logged if entry["level"] in ("error", "warning")]

    def asked(self) -> list[str]:
        """Addresses that were asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"
        ]


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A new one, ended with the block."""
    program = chromium()
    assert program is not None
    loop = asyncio.get_running_loop()
    to_read, to_write = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", f'exec "$@" 3<&{to_read[0]} 4>&{to_write[1]}', "-", program, *FLAGS),
            f"--user-data-dir={profile}",
            pass_fds=(to_read[0], to_write[1]),
            stderr=asyncio.subprocess.DEVNULL,
        )
        os.close(to_read[0])
        os.close(to_write[1])
        reader = asyncio.StreamReader(limit=64 * 2**20)
        reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(to_write[0], "rb")
        )
        writing, _ = await loop.connect_write_pipe(asyncio.Protocol, os.fdopen(to_read[1], "wb"))
        made = Browser(reader, writing)
        listening = loop.create_task(made.read(), name="browser")
        try:
            yield made
        finally:
            try:
                await made.send("Browser.close")
                await asyncio.wait_for(process.wait(), DEADLINE_S)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                await listening
                writing.close()
                reading.close()
