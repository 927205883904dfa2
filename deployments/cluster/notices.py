"""What the cluster core tells and asks the session manager, apart from placement.

A notice is given up when the manager cannot be reached or takes too long. The manager learns the same later, from the
replicas' reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from vllm.v1.engine import EngineCoreRequest

from deployments.cluster.pinning import prefix_of
from deployments.cluster.timings import Timings
from deployments.errors import ReplicaCrashed, ReplicaGone, ReplicaLost, Unavailable
from deployments.host.tasks import OwnTasks
from deployments.manager import calls
from deployments.manager.calls import Manager
from deployments.messages import Placement

logger = logging.getLogger("baton.core")


class Notices:
    """Notices to the session manager. None of them raises."""

    def __init__(self, manager: Manager, tasks: OwnTasks, timings: Timings) -> None:
        self._manager, self._tasks, self._timeout_s = manager, tasks, timings.notice_timeout_s

    def prefill_done(self, placement: Placement) -> None:
        """The prompt is computed: the replica that did it has that much less to do."""
        told = self._manager.ask(calls.PrefillDone(placement.session_id, placement.epoch))
        self._tasks.own(self._tell(told), "prefill-done")

    def replica_lost(self, replica_id: str, why: ReplicaLost | None = None) -> asyncio.Task[None]:
        """A replica does not answer. `why`, where it is known. Await the task before placing again."""
        lost = calls.Lost(replica_id, isinstance(why, ReplicaGone), isinstance(why, ReplicaCrashed))
        return self._tasks.own(self._tell(self._manager.ask(lost)), "lost")

    def prefix(self, tokens: int, request: EngineCoreRequest, hashes: Sequence[int], block_size: int) -> None:
        """Tell the first `tokens` tokens of a prompt, by the `hashes` of its blocks; 0: nothing is asked for."""
        blocks = tokens // block_size
        if 0 < blocks <= len(hashes):
            told = self._manager.ask(calls.TellPrefix(hashes[blocks - 1], prefix_of(request, tokens, block_size)))
            self._tasks.own(self._tell(told), "prefix")

    async def close(self, placement: Placement, outcome: str, output_tokens: int, ended: bool) -> None:
        """A placement is over, and its reservations can be released.

        `ended`: its owner has said that it holds nothing of it any more.
        """
        key = (placement.session_id, placement.epoch)
        await self._tell(self._manager.ask(calls.Close(*key, outcome, output_tokens, ended)))

    async def withdraw(self, session_id: str, outcome: str) -> None:
        """Withdraw a session that ended before its last placement was known here: the manager may have placed it."""
        await self._tell(self._manager.ask(calls.Withdraw(session_id, outcome)))

    async def silent(self, replica_ids: Sequence[str]) -> tuple[str, ...]:
        """The replicas among these that the manager has not heard of for too long; none when it cannot be asked."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._manager.ask(calls.Silent(tuple(replica_ids)))
        except (Unavailable, TimeoutError) as error:
            logger.warning("the session manager cannot be asked: %r", error)
            return ()

    async def _tell(self, message: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await message
        except (Unavailable, TimeoutError) as error:
            logger.warning("the session manager was not told: %r", error)
