"""The hostile client, a process of its own: it sends as fast as it is answered, over several connections at a time.

`python -m load_tests.hostile.attack URL MODEL CONNECTIONS` begins when it is told `{"attack": true}`. When it is told
`{"attack": false}`, it stops and says what came of its requests.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import aiohttp

from load_tests.harness.child import Parent
from load_tests.hostile.bodies import Sent, requests

KEY = "hostile"
ANSWERED_S = 60.0


class Attack:
    """Requests, and what came of them."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url
        self._outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._slowest_ms: Counter[str] = Counter()

    def take(self) -> dict[str, Any]:
        """By kind, how often each status came, or the name of an error; and the slowest request in ms.

        Of the time since the last call.
        """
        outcomes, self._outcomes = self._outcomes, defaultdict(Counter)
        slowest_ms, self._slowest_ms = self._slowest_ms, Counter()
        return {"outcomes": outcomes, "slowest_ms": slowest_ms}

    async def run(self, turns: Iterator[Sent]) -> None:
        """Send one after the other until cancelled."""
        for sent in turns:
            began_s = time.monotonic()
            outcome = await self._send(sent)
            self._outcomes[sent.kind][outcome] += 1
            took_ms = round((time.monotonic() - began_s) * 1e3)
            self._slowest_ms[sent.kind] = max(self._slowest_ms[sent.kind], took_ms)

    async def _send(self, sent: Sent) -> str:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        try:
            async with self._http.post(self._url + sent.path, data=sent.body, headers=headers) as response:
                await response.read()
                return str(response.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            return type(error).__name__


async def _main(url: str, model: str, connections: int) -> None:
    turns, timeout = itertools.cycle(requests(model)), aiohttp.ClientTimeout(total=ANSWERED_S)
    running: list[asyncio.Task[None]] = []
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        attack = Attack(http, url)

        async def answering(message: dict[str, Any]) -> dict[str, Any] | None:
            if message["attack"]:
                running.extend(asyncio.create_task(attack.run(turns)) for _ in range(connections))
                return None
            for task in running:
                task.cancel()
            await asyncio.wait(running)
            running.clear()
            return attack.take()

        await Parent().answer(answering)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
