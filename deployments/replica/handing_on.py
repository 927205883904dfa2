"""What a leaving replica hands on, and what this one brings from another that leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable

from deployments.engine.protocol import Engine, Output, RequestRefused
from deployments.errors import Unavailable
from deployments.manager.calls import Brought, HandOn, Manager
from deployments.messages import Bring, CachedPrompt, SessionTask

logger = logging.getLogger("baton.drain")

GRACE_S = 1.0
"""How much longer the session manager's answer may take."""
KEPT, KEPT_BYTES = 64, 16 << 20
"""The most requests that a replica remembers, and the most bytes of them."""
TOLD_BLOCKS = 8192
"""The most blocks that it tells of: they bound what the session manager spends on them."""
_BLOCKS = "blocks_fetched"


class Recent:
    """The requests that this replica was asked lately, for the time when it leaves. `keeps`: False: it keeps none."""

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._requests: deque[tuple[bytes, ...]] = deque()
        self._bytes = 0

    def note(self, task: SessionTask) -> None:
        """A part has begun to give outputs, so all of its prompt is in the cache."""
        if not self._keeps or (size := _size(task.request)) > KEPT_BYTES:
            return
        self._requests.append(task.request)
        self._bytes += size
        while len(self._requests) > KEPT or self._bytes > KEPT_BYTES:
            self._bytes -= _size(self._requests.popleft())

    async def prompts(self, engine: Engine) -> tuple[CachedPrompt, ...]:
        """Those of at least one full block, the newest first, up to `TOLD_BLOCKS`. Others may run between two."""
        found, left = list[CachedPrompt](), TOLD_BLOCKS
        for request in reversed(tuple(self._requests)):
            await asyncio.sleep(0)
            if hashes := _hashes(engine, request)[:left]:
                found.append(CachedPrompt(request, hashes))
                left -= len(hashes)
        return tuple(found)


def _size(request: Iterable[bytes]) -> int:
    return sum(map(len, request))


def _hashes(engine: Engine, request: tuple[bytes, ...]) -> tuple[int, ...]:
    try:
        return engine.hashes(request)
    except RequestRefused:
        return ()


class HandingOn:
    """Both sides of it, of one replica. `keeps`: whether replicas fetch from each other."""

    def __init__(self, engine: Engine, manager: Manager, replica_id: str, keeps: bool) -> None:
        self._engine, self._manager, self._replica_id = engine, manager, replica_id
        self.recent = Recent(keeps)
        self._due: asyncio.Queue[Bring] = asyncio.Queue()
        self._running: dict[str, asyncio.Event] = {}

    async def hand_on(self, left_s: float) -> None:
        """This replica leaves: have others fetch from it. Returns when they have, soon after `left_s` at the latest."""
        if not (prompts := await self.recent.prompts(self._engine)):
            return
        try:
            async with asyncio.timeout(left_s + GRACE_S):
                blocks = await self._manager.ask(HandOn(self._replica_id, prompts, left_s))
        except (TimeoutError, Unavailable) as error:
            logger.warning("the cache is not handed on: %r", error)
        else:
            logger.info("%d blocks of the cache went to other replicas", blocks)

    def take(self, brings: Iterable[Bring]) -> None:
        """The session manager asks for these."""
        for bring in brings:
            self._due.put_nowait(bring)

    async def bring_loop(self) -> None:
        """Bring one prompt after the other, so that few blocks are taken at once. Raises EngineError."""
        while True:
            bring = await self._due.get()
            before = await self._fetched_blocks()
            blocks = await self._fetched_blocks() - before if await self._bring(bring) else None
            with contextlib.suppress(Unavailable):
                await self._manager.ask(Brought(self._replica_id, bring.id, blocks))

    async def _bring(self, bring: Bring) -> bool:
        """Whether it is over in its time."""
        over = self._running[bring.id] = asyncio.Event()
        try:
            async with asyncio.timeout(bring.timeout_s):
                await self._engine.bring(bring)
                await over.wait()
                return True
        except RequestRefused as error:
            logger.warning("%s was not brought: %s", bring.id, error)
        except TimeoutError:
            await self._engine.abort([bring.id])
        finally:
            del self._running[bring.id]
        return False

    async def _fetched_blocks(self) -> int:
        with contextlib.suppress(TimeoutError):
            return int((await self._engine.counters()).get(_BLOCKS, 0))
        return 0

    def heard(self, output: Output) -> None:
        """An output that is no part's."""
        if output.finished and (over := self._running.get(output.request_id)) is not None:
            over.set()
