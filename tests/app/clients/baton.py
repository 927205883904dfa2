"""Baton as a client sees it, over HTTP: the real ingress over a control plane in one process, with mock engines.

It runs on a thread of its own, so that blocking clients can ask it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

from app.access.gate import Gate
from app.access.keys import Keys, parse
from configs.schema import BatonConfig
from load_tests.harness.control_plane import PATIENCE_S, InProcess, config, in_process
from load_tests.harness.control_plane.server import Served, served
from tests.app.access.test_keys import entry
from tests.load_tests.traffic.servers import serving

KEY, LIMITED, COUNTED = "for-tests", "with-limits", "whose-use-is-told"
MODEL = "smollm2-135m-instruct"
MAX_BODY_BYTES, MAX_CLIENT_PARTS = 32 * 1024, 8
SLOW_STEP_S = 0.1
START_S = 240.0


class Baton:
    """A running ingress. `url`: where it listens. `gated_url`: where it asks for the API keys of `keys`."""

    def __init__(self, url: str, gated_url: str, plane: InProcess, server: Served) -> None:
        self.url, self.gated_url, self._plane, self._server = url, gated_url, plane, server
        self.loop = asyncio.get_running_loop()

    def says(self, text: str) -> None:
        """Every answer is this text."""
        tokenizer = self._server.llm.get_tokenizer()
        script = [*tokenizer.encode(text), tokenizer.eos_token_id]
        for engine in self._plane.engines.values():
            engine.script = script

    def settle(self) -> None:
        """Wait until no session is open and no engine holds a block."""
        self._wait(self._server.settle(self._plane))

    def slowly(self) -> None:
        """Answers come slowly: a long one outlives what a test does meanwhile."""
        for engine in self._plane.engines.values():
            engine.slower_s = SLOW_STEP_S

    @contextmanager
    def left(self) -> Iterator[None]:
        """A client leaves a long answer in this block: then its session is cancelled, and nothing stays open."""
        before = self._sessions()["closed"].get("cancelled", 0)
        self.slowly()
        yield
        self.settle()
        assert self._sessions()["closed"]["cancelled"] == before + 1

    @asynccontextmanager
    async def left_async(self) -> AsyncIterator[None]:
        """The same for a client that is async."""
        block = self.left()
        await asyncio.to_thread(block.__enter__)
        yield
        await asyncio.to_thread(block.__exit__, None, None, None)

    async def opened(self) -> None:
        """Wait until a session is open."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not (await asyncio.to_thread(self._sessions))["open"]:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.01)

    def _sessions(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/baton/status", timeout=PATIENCE_S).json()["sessions"]
        return found

    def reset(self) -> None:
        """Wait until nothing is open, and forget what answers say."""
        for engine in self._plane.engines.values():
            engine.script, engine.slower_s = (), 0.0
        self.settle()

    def _wait(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self.loop).result(PATIENCE_S)


def settings() -> BatonConfig:
    made = config(scale=4)
    args = {"api_key": [KEY, LIMITED, COUNTED], "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    bounds = {"max_body_bytes": MAX_BODY_BYTES, "max_client_parts": MAX_CLIENT_PARTS}
    ingress = made.ingress.model_copy(update={"default_max_tokens": 64, "server_args": args, **bounds})
    return made.model_copy(update={"ingress": ingress})


def keys() -> Keys:
    """An administrator's, and two with limits."""
    limits = {"requests_per_minute": 1, "tokens_per_minute": 2000, "classes": "[default]"}
    counted = entry("counted", COUNTED, requests_per_minute=2, tokens_per_minute=2000)
    entries = entry("root", KEY, admin="true") + entry("limited", LIMITED, **limits) + counted
    return parse("keys:\n" + entries, ("default",))


async def _run(started: Future[tuple[Baton, asyncio.Event]]) -> None:
    made, over = settings(), asyncio.Event()
    known, at_once = keys(), made.ingress.model_copy(update={"refusals_per_s": 0.0})
    async with in_process(made) as plane, served(plane, made) as server:
        gated = server.gated(Gate(lambda: known), at_once)
        async with serving(server.gateway) as url, serving(gated) as gated_url:
            started.set_result((Baton(url, gated_url, plane, server), over))
            await over.wait()


@contextmanager
def running() -> Iterator[Baton]:
    started: Future[tuple[Baton, asyncio.Event]] = Future()

    def run() -> None:
        try:
            asyncio.run(_run(started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="clients-server")
    thread.start()
    made, over = started.result(START_S)
    try:
        yield made
    finally:
        made.loop.call_soon_threadsafe(over.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
