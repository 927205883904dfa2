"""A session's own timeline, by its request's id: from the ingress that has it, and the replicas that it was on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

from deployments.cluster.timeline import Timeline, Timelines, since
from deployments.engine.protocol import WorkerSpans
from deployments.errors import SessionError

SHOWN = 32
"""Sessions of one request that are shown, the newest."""
PATIENCE_S = 2.0
"""The longest wait for a replica, and for the other ingresses."""
AT_ONCE = 8
"""Questions to the other ingresses at once; more wait. Anything may ask where there are no API keys."""

AskReplica = Callable[[str, str, list[str]], Awaitable[list[WorkerSpans]]]
"""Pool, replica, sessions: what its KV channels did for them. Raises SessionError."""
AskIngresses = Callable[[str, float], Awaitable[list[Any]]]
"""A name and the longest wait in seconds: what each ingress has under it, as `Sessions.here`; or errors."""

logger = logging.getLogger(__name__)


class Sessions:
    """Finds timelines. `timelines`: of this ingress."""

    def __init__(self, timelines: Timelines, ask_replica: AskReplica, ask_ingresses: AskIngresses) -> None:
        self._timelines, self._ask_replica, self._ask_ingresses = timelines, ask_replica, ask_ingresses
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def find(self, name: str) -> dict[str, Any] | None:
        """The sessions of a request's id, or of a session's, wherever they are; None where no ingress knows them.

        `{"request_id", "sessions": [see Timeline.shown], "silent": [replica ids]}`. Spans of replicas are among those
        of the ingress. `silent`: replicas that do not answer, so their spans are missing.
        """
        found = await self.here(name)
        if found is not None:
            return found
        async with self._turns:
            answers = await self._ask_ingresses(name, PATIENCE_S + 1.0)
        for error in (each for each in answers if isinstance(each, BaseException)):
            logger.warning("an ingress does not say what it has of %r: %r", name, error)
        return next((each for each in answers if isinstance(each, dict)), None)

    async def here(self, name: str) -> dict[str, Any] | None:
        """See `find`; of this ingress alone."""
        timelines = self._timelines.find(name)[-SHOWN:]
        if not timelines:
            return None
        sessions: dict[tuple[str, str], list[str]] = {}
        for each in timelines:
            for replica, pool in each.replicas().items():
                sessions.setdefault((pool, replica), []).append(each.session_id)
        answers = await asyncio.gather(*(self._spans(*where, asked) for where, asked in sessions.items()))
        known = [spans for spans in answers if spans is not None]
        silent = [replica for (_, replica), spans in zip(sessions, answers, strict=True) if spans is None]
        shown = [
            _whole(each, [span for spans in known for span in spans.get(each.session_id, ())]) for each in timelines
        ]
        return {"request_id": timelines[-1].request_id, "sessions": shown, "silent": silent}

    async def _spans(self, pool: str, replica: str, asked: list[str]) -> dict[str, list[dict[str, Any]]] | None:
        """A replica's spans by session, by this process's clock; None where it does not answer."""
        asked_s = monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                workers = await self._ask_replica(pool, replica, asked)
        except (SessionError, TimeoutError) as error:
            logger.debug("replica %s does not say what it did: %r", replica, error)
            return None
        answered_s = monotonic()
        found: dict[str, list[dict[str, Any]]] = {}
        for rank, (now_s, spans) in enumerate(workers):
            ahead_s = clock_ahead_s(now_s, asked_s, answered_s)
            where = replica if len(workers) == 1 else f"{replica}, worker {rank}"
            for session, each in spans.items():
                found.setdefault(session, []).extend(_here(span, where, ahead_s) for span in each)
        return found


def clock_ahead_s(theirs_s: float, asked_s: float, answered_s: float) -> float:
    """How far the clock that said `theirs_s` is ahead of ours. We asked and were answered at these times of our clock.

    0 where it may be the same clock, as it is on one machine. Otherwise wrong by half of the wait, at most.
    """
    return 0.0 if asked_s <= theirs_s <= answered_s else theirs_s - (asked_s + answered_s) / 2


def _here(span: dict[str, Any], where: str, ahead_s: float) -> dict[str, Any]:
    to_s = span["to_s"]
    return span | {"where": where, "from_s": span["from_s"] - ahead_s, "to_s": None if to_s is None else to_s - ahead_s}


def _whole(timeline: Timeline, spans: list[dict[str, Any]]) -> dict[str, Any]:
    """A timeline with the spans of replicas. In the order in which they begin."""
    shown = timeline.shown()
    begin_s = timeline.arrived_s
    added = [span | {"from_s": since(begin_s, span["from_s"]), "to_s": since(begin_s, span["to_s"])} for span in spans]
    shown["spans"] = sorted([*shown["spans"], *added], key=lambda span: float(span["from_s"]))
    return shown
