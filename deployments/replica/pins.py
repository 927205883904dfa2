"""The prefixes that the session manager wants pinned here, and the work of pinning them in the engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time

from deployments.engine.protocol import Engine, RequestRefused
from deployments.messages import BeginCopy, BeginPin, Pin, PinList, ReportAnswer
from deployments.replica.readings import Readings
from deployments.replica.timings import Timings

logger = logging.getLogger("baton.replica")


class Pins:
    """Pins one prefix at a time, and unpins what is not wanted any more. The reporter passes on what is wanted.

    `list`: the newest list that the session manager has sent.
    """

    def __init__(self, replica_id: str, engine: Engine, readings: Readings, timings: Timings) -> None:
        self.list = PinList()
        self._replica_id, self._engine, self._readings, self._timings = replica_id, engine, readings, timings
        self._asked: BeginPin | None = None
        self._copy: BeginCopy | None = None
        self._has_news, self._is_over = asyncio.Event(), asyncio.Event()
        self._running, self._number, self._rests_until_s = "", itertools.count(1), 0.0

    def learn(self, answer: ReportAnswer) -> None:
        """Take what the manager says. It asks again for what does not stand, so a question may wait after a failure."""
        if answer.pins is not None:
            self.list = answer.pins
            self._has_news.set()
        if answer.begin_pin is not None and not self._running and time.monotonic() >= self._rests_until_s:
            self._asked = answer.begin_pin
            self._has_news.set()
        if answer.copy is not None:
            self._copy = answer.copy
            self._has_news.set()

    def over(self, request_id: str) -> None:
        """The engine is done with a request. Its load has been read."""
        if request_id == self._running:
            self._is_over.set()

    async def pin_loop(self) -> None:
        """Do what is asked, without end. Raises EngineError when the engine is dead."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            asked, self._asked = self._asked, None
            copy, self._copy = self._copy, None
            wanted = {pin.id: pin for pin in self.list.pins}
            if pin := wanted.get(asked.id) if asked else None:
                await self._pin(pin, asked)
            elif self._readings.load.pinned.keys() - wanted.keys():
                await self._run()
                logger.info("%d prefixes are pinned here", len(self._readings.load.pinned))
            elif copy is not None and (why := await self._run(copy.prefix, BeginPin("", copy.source))):
                logger.warning("a prefix of %d tokens was not fetched: %s", len(copy.prefix.tokens), why)

    async def _pin(self, pin: Pin, asked: BeginPin | None) -> None:
        began_s = time.monotonic()
        why = await self._run(pin, asked)
        blocks = self._readings.load.pinned.get(pin.id, 0)
        if why or blocks < pin.blocks:
            self._rests_until_s = time.monotonic() + self._timings.pin_again_s
            logger.warning(
                "the prefix %s is not pinned here: %s", pin.id, why or f"{blocks} of {pin.blocks} blocks are cached"
            )
        else:
            took_s, source = time.monotonic() - began_s, asked.source if asked else None
            origin = "computed" if source is None else f"from {source.replica_id}"
            logger.info("the prefix %s is pinned here: %d blocks, %s, in %.2f s", pin.id, blocks, origin, took_s)

    async def _run(self, pin: Pin | None = None, asked: BeginPin | None = None) -> str:
        """Let the engine pin and unpin. Returns why it did not; "": it did."""
        self._running = request_id = f"baton-pin-{self._replica_id}-{next(self._number)}"
        self._is_over.clear()
        keep = [each.id for each in self.list.pins]
        try:
            async with asyncio.timeout(self._timings.pin_timeout_s):
                await self._engine.pin(request_id, keep, pin, asked.source if asked else None)
                await self._is_over.wait()
        except RequestRefused as error:
            return str(error)
        except TimeoutError:
            await self._engine.abort([request_id])
            return f"not done within {self._timings.pin_timeout_s:g} s"
        finally:
            self._running = ""
        return ""
