"""How a replica drains: it takes nothing new, its sessions end or move, and it waits for peers that still use its KV.

Meanwhile other replicas fetch what is hottest in its cache, and its KV tiers take what they get. Both have the time
that the replica has, and no session waits for them.

Where the whole application stops, there is no replica to move to, and the sessions have all of the time to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from deployments.replica.readings import OPEN_KV, OPEN_TIERS
from deployments.replica.timings import TIMINGS, Timings

logger = logging.getLogger("baton.drain")

RUN_SHARE = 0.75
"""The share of the time in which sessions may end by themselves. In the rest, they move, and the replica waits for
peers that use its KV."""
QUIET_LOOKS = 10
"""The replica counts as drained after it has found nothing running so many times in a row. The session manager must
hear of a moved session first, and a peer may begin to read its KV only after its part has ended here."""
HAND_SHARE = 0.75
"""The share of the time in which other replicas may fetch from its cache; KV of moved sessions has the rest."""
STOP_S = 25.0
"""The longest time that the engine's processes have to end after the drain; then Serve kills the replica."""


class Draining(Protocol):
    """A replica, see `replica.Replica`."""

    @property
    def open_runs(self) -> int: ...

    def begin_drain(self) -> None: ...

    def move_out(self, session_ids: Collection[str] | None = None) -> int: ...

    async def counters(self) -> dict[str, float]: ...

    async def hand_on(self, left_s: float) -> None: ...


async def drain(
    replica: Draining, timeout_s: float, do_all_stop: Callable[[], Awaitable[bool]], timings: Timings = TIMINGS
) -> None:
    """Let a replica's sessions end, then move those that are left, then wait until no peer uses its KV.

    Its cache is handed on at the same time.

    `do_all_stop`: whether the whole application stops, so that there is no replica to move to. Returns when all that is
    done, at the latest after `timeout_s`. Raises EngineError when the engine dies.
    """
    began_s = time.monotonic()
    replica.begin_drain()
    handing_on = asyncio.create_task(replica.hand_on(HAND_SHARE * timeout_s), name="baton-hand-on")
    try:
        await _sessions_end(replica, began_s, timeout_s, do_all_stop, timings)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(began_s + timeout_s - time.monotonic()):
                await handing_on
                await _until_quiet(replica, timings.look_s)
                return
        logger.warning("out of time, with %d sessions open, or KV that a peer or a tier still uses", replica.open_runs)
    finally:
        handing_on.cancel()
        await asyncio.wait([handing_on])


async def _sessions_end(
    replica: Draining, began_s: float, timeout_s: float, do_all_stop: Callable[[], Awaitable[bool]], timings: Timings
) -> None:
    """Wait until the sessions have ended, or let those move that have not."""
    while replica.open_runs and time.monotonic() - began_s < RUN_SHARE * timeout_s:  # noqa: ASYNC110 - checked seldom
        await asyncio.sleep(timings.look_s)
    if replica.open_runs and not await do_all_stop():
        open_runs = replica.open_runs
        logger.info("%d of %d sessions move: the replica is being stopped", replica.move_out(), open_runs)


async def _until_quiet(replica: Draining, look_s: float) -> None:
    """Wait until nothing runs, no peer reads or writes, and no tier stores, in `QUIET_LOOKS` checks in a row."""
    quiet = 0
    while (quiet := quiet + 1 if await _is_quiet(replica) else 0) < QUIET_LOOKS:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(look_s)


async def _is_quiet(replica: Draining) -> bool:
    try:
        counters = await replica.counters()
    except TimeoutError:  # the engine is in a long step
        return False
    return not replica.open_runs and not any(counters.get(name) for name in (*OPEN_KV, OPEN_TIERS))
