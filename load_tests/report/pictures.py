"""Takes the pictures of the live page that the documents show.

`python -m load_tests.report.pictures` starts a Baton with mock engines and sessions for some minutes, kills a replica,
and writes the pictures into `docs/assets`: at three widths, light and dark. Needs Chromium.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import os
import random
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from PIL import Image

from load_tests.harness.application import ROOT, Application
from load_tests.harness.browser import Page, browser
from load_tests.harness.processes import marked

PHONE, TABLET, DESKTOP = (390, 844), (820, 1180), (1280, 900)
WITHIN_S = 300.0
CLIENTS = 10
MARKER, KILLED = "BATON_PICTURES_RUN", "decode-large"
COLOURS, MARGIN = 256, 12
ARGUMENTS: dict[str, Any] = {
    "prefill": {"replicas": 2, "engine": {"kind": "mock", "prefill_tokens_per_s": 1500, "max_num_batched_tokens": 256}},
    "decode": {
        "small": {"engine": {"kind": "mock", "num_blocks": 256, "max_num_seqs": 16, "step_s": 0.02}},
        "large": {"replicas": 2, "engine": {"kind": "mock", "num_blocks": 512, "max_num_seqs": 32, "step_s": 0.02}},
    },
}
READY = "document.getElementById('state').textContent === 'ready'"
RUNNING = "document.querySelectorAll('#flows tbody tr').length > 0"
HOUR = "document.querySelectorAll('#hour polyline').length > 0"
LOST = "[...document.querySelectorAll('#counts td')].some((cell) => cell.textContent === 'lost')"
STEPS = "document.querySelectorAll('#session .step').length > 0"


class Crowd:
    """Clients that ask in turn. `names`: the request ids of the answers that run."""

    def __init__(self, url: str) -> None:
        self._url, self._random = url, random.Random(7)
        self._numbers = itertools.count(1)
        self.names: list[str] = []

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Crowd]:
        """Ask until the end of the block."""
        async with httpx.AsyncClient(base_url=self._url, timeout=WITHIN_S) as client:
            tasks = [asyncio.create_task(self._ask(client)) for _ in range(CLIENTS)]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        while True:
            name = f"question-{next(self._numbers)}"
            prompt = [self._random.randrange(100, 40_000) for _ in range(self._random.randrange(60, 1200))]
            asked = {"model": "mock", "prompt": prompt, "max_tokens": self._random.randrange(100, 700)}
            self.names.append(name)
            await client.post("/v1/completions", json=asked | {"ignore_eos": True}, headers={"x-request-id": name})
            self.names.remove(name)
            await asyncio.sleep(self._random.uniform(0.1, 2.0))


async def moved(url: str, names: list[str]) -> str:
    """Wait until one of these requests has been placed again and is over; its id."""
    async with httpx.AsyncClient(base_url=url, timeout=WITHIN_S) as client, asyncio.timeout(WITHIN_S):
        while True:
            for name in names:
                answer = await client.get(f"/status/sessions/{name}")
                sessions = answer.json()["sessions"] if answer.status_code == 200 else []
                if any(each["outcome"] == "length" and len(each["placements"]) > 1 for each in sessions):
                    return name
            await asyncio.sleep(0.5)


def kill_one(marker: str) -> None:
    """Kill the process of one replica."""
    title = f"ray::ServeReplica:baton:{KILLED}"
    os.kill(min(pid for pid, name in marked(f"{MARKER}={marker}").items() if name.startswith(title)), signal.SIGKILL)


def small(png: bytes) -> bytes:
    """The same picture in few colours, which is all that the page has."""
    packed = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(
        COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    ).save(packed, "PNG", optimize=True)
    return packed.getvalue()


async def pictures(url: str, marker: str, minutes: float, page: Page) -> dict[str, bytes]:
    """The pictures by name, in the order of what happens."""
    found = {}
    live = f"{url}/status"
    async with Crowd(url).asking() as crowd:
        await asyncio.sleep(60 * minutes)  # the page draws a point a minute
        await page.open(live, *DESKTOP)
        for shows in (READY, RUNNING, HOUR):
            await page.until(shows, WITHIN_S)
        found["status-desktop-light"] = await page.picture()
        hit = list(crowd.names)
        kill_one(marker)
        await page.open(live, *TABLET, dark=True)
        await page.until(f"{LOST} && {HOUR}", WITHIN_S)
        found["status-tablet-dark"] = await page.picture()
        name = await moved(url, hit)
        for picture, size, dark in (("session-tablet-light", TABLET, False), ("session-phone-dark", PHONE, True)):
            await page.open(f"{live}#{name}", *size, dark=dark)
            await page.until(STEPS, WITHIN_S)
            longest = PHONE[1] if size is PHONE else None
            found[picture] = await page.picture("section[aria-labelledby=session-title]", MARGIN, longest)
    return found


async def take(folder: Path, to: Path, minutes: float) -> None:
    """Start all of it, and write the pictures into `to`. `folder`: for what the application writes."""
    serve = yaml.safe_load((ROOT / "configs" / "mock.yaml").read_text())
    arguments = serve["applications"][0]["args"]
    arguments["prefill"] |= ARGUMENTS["prefill"]
    for name, changes in ARGUMENTS["decode"].items():
        arguments["decode"][name] |= changes
    marker = uuid.uuid4().hex
    application = Application(serve, folder, {MARKER: marker})
    try:
        await asyncio.to_thread(application.wait)
        async with browser() as page:
            found = await pictures(application.url, marker, minutes, page)
    finally:
        await asyncio.to_thread(application.stop)
    for name, png in found.items():
        file = to / f"{name}.png"
        file.write_bytes(small(png))
        print(f"{file}: {file.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "assets", help="the folder for the pictures")
    parser.add_argument("--minutes", type=float, default=4.0, help="how long sessions run before the first picture")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-pictures-") as folder:
        asyncio.run(take(Path(folder), options.to, options.minutes))


if __name__ == "__main__":
    main()
