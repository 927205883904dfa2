"""How a replica leaves in order: nothing new comes, what runs ends or moves, and KV that a peer uses is waited for.

Where all of the application leaves there is nowhere to move to, and what runs has all of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

logger = logging.getLogger("baton.drain")

RUN_SHARE = 0.75
"""The part of the time in which sessions may end by themselves; in the rest they move, and KV is waited for."""
LOOK_S = 0.1
QUIET_LOOKS = 10
"""The session manager must hear of it first, and a peer may begin to read a moved session's KV after it ended here."""
STOP_S = 10.0
"""After a replica has drained, its engine's processes have so long to end; then Serve kills it."""
OPEN_KV = ("open_receiving", "open_writing")


class Draining(Protocol):
    """A replica, see `replica.Replica`."""

    @property
    def open_runs(self) -> int: ...

    def begin_drain(self) -> None: ...

    def move_out(self, session_ids: Collection[str] | None = None) -> int: ...

    async def counters(self) -> dict[str, float]: ...


async def drain(replica: Draining, timeout_s: float, do_all_leave: Callable[[], Awaitable[bool]]) -> None:
    """Let a replica's sessions end, then move those that are left, then wait until nobody uses its KV.

    `do_all_leave`: whether there is nowhere to move to. Returns when all that is done, at the latest after `timeout_s`.
    Raises EngineError when the engine dies.
    """
    began_s = time.monotonic()
    replica.begin_drain()
    while replica.open_runs and time.monotonic() - began_s < RUN_SHARE * timeout_s:  # noqa: ASYNC110 - looked at seldom
        await asyncio.sleep(LOOK_S)
    if replica.open_runs and not await do_all_leave():
        open_runs = replica.open_runs
        logger.info("%d of %d sessions move: the replica is being stopped", replica.move_out(), open_runs)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(began_s + timeout_s - time.monotonic()):
            await _until_quiet(replica)
            return
    logger.warning("out of time, with %d sessions open, or KV that a peer still uses", replica.open_runs)


async def _until_quiet(replica: Draining) -> None:
    """Nothing runs and no peer reads or writes, several looks in a row."""
    quiet = 0
    while (quiet := quiet + 1 if await _is_quiet(replica) else 0) < QUIET_LOOKS:  # noqa: ASYNC110 - nothing tells us
        await asyncio.sleep(LOOK_S)


async def _is_quiet(replica: Draining) -> bool:
    try:
        counters = await replica.counters()
    except TimeoutError:  # its engine is in a long step
        return False
    return not replica.open_runs and not any(counters.get(name) for name in OPEN_KV)
