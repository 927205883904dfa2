"""Chromium without a window, by its own debugging protocol: it waits for what a page shows, and takes pictures.

Debian's package `chromium` is enough. `installed` says whether there is one.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S, CALL_S, END_S = 120.0, 60.0, 20.0
LOOK_S = 0.1
# The sandbox does not work as root or in a container; the pages are our own. Chromium asks no other machine.
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
PORT_FILE = "DevToolsActivePort"


class BrowserError(Exception):
    """Chromium does not start, or refuses a call."""


def installed() -> str | None:
    """The path of a Chromium of this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol. Raises BrowserError."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(CALL_S):
            while True:
                came = await self._socket.receive_json()
                if came.get("id") == number:
                    break
        if "error" in came:
            raise BrowserError(f"{method}: {came['error']}")
        result: dict[str, Any] = came["result"]
        return result

    async def open(self, url: str, width: int, height: int, dark: bool = False) -> None:
        """Load a page anew, as a screen of this size in CSS pixels shows it."""
        await self.call("Page.navigate", url="about:blank")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        if error := (await self.call("Page.navigate", url=url)).get("errorText"):
            raise BrowserError(f"{url}: {error}")
        await self._loaded()

    async def _loaded(self) -> None:
        """Wait until the new page takes the place of the old one. What is asked in between may fail."""
        async with asyncio.timeout(CALL_S):
            while True:
                with suppress(BrowserError):
                    if await self.value("location.href !== 'about:blank' && document.readyState === 'complete'"):
                        return
                await asyncio.sleep(LOOK_S)

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression gives. Raises BrowserError where it throws."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, expression: str, within_s: float) -> None:
        """Wait until a JavaScript expression holds. Raises BrowserError, with the page's text, when it does not."""
        deadline_s = asyncio.get_running_loop().time() + within_s
        while not await self.value(expression):
            if asyncio.get_running_loop().time() > deadline_s:
                text = await self.value("document.body.innerText")
                raise BrowserError(f"not within {within_s:g} s: {expression}\n{text}")
            await asyncio.sleep(LOOK_S)

    async def press(self, key: str, text: str = "") -> None:
        """Press a key on the keyboard. `text`: what it types."""
        code = {"Tab": 9, "Enter": 13}.get(key, 0)
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def type(self, text: str) -> None:
        """Type a text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def picture(self, of: str = "body", margin: int = 0, longest: int | None = None) -> bytes:
        """A PNG of the first element of a CSS selector with a margin, or of its upper `longest` pixels."""
        found = await self.value(
            "(({x, y, width, height}) => [x + scrollX, y + scrollY, width, height])"
            f"(document.querySelector({of!r}).getBoundingClientRect())"
        )
        x, y, width, height = map(float, found)
        height = height + 2 * margin if longest is None else min(height + 2 * margin, longest)
        box = {"x": x - margin, "y": y - margin, "width": width + 2 * margin, "height": height, "scale": 1}
        taken = await self.call("Page.captureScreenshot", format="png", clip=box, captureBeyondViewport=True)
        return base64.b64decode(taken["data"])


@asynccontextmanager
async def browser(program: str | None = None) -> AsyncIterator[Page]:
    """Start Chromium with one page, and end it. `program`: its path. Raises BrowserError."""
    program = program or installed()
    if program is None:
        raise BrowserError("there is no Chromium here: apt install chromium")
    # Its last processes may still write into the folder while it is removed.
    with tempfile.TemporaryDirectory(prefix="baton-browser-", ignore_cleanup_errors=True) as folder:
        command = [program, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        try:
            port = await _port(process, Path(folder), log)
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(await _address(session, port), max_msg_size=0) as socket,
            ):
                yield Page(socket)
        finally:
            await _end(process)


async def _port(process: asyncio.subprocess.Process, folder: Path, log: Path) -> int:
    """Where it listens: it writes that into a file."""
    file = folder / PORT_FILE
    try:
        async with asyncio.timeout(START_S):
            while process.returncode is None:
                lines = file.read_text().splitlines() if file.exists() else []
                if len(lines) > 1:
                    return int(lines[0])
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        pass
    raise BrowserError(f"Chromium did not start: {_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


async def _address(session: aiohttp.ClientSession, port: int) -> str:
    """The address of its first page."""
    async with asyncio.timeout(START_S):
        while True:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                pages = [each for each in await response.json(content_type=None) if each["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(LOOK_S)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End it with all the processes that it started, which are its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
