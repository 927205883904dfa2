"""Places an ingress's sessions while the session manager is away: the ingress does it itself, by the last view it has.

`StandIn` goes between the cluster core and the manager. It keeps one call to the manager open, which brings a view of
the fleet every second and breaks when the manager dies. While the manager is away, a session manager in this process
takes its place. It is filled with that view and with this ingress's own sessions, and lives for that one absence. The
replicas report what it places with the rest, so the manager counts it when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from configs.schema import BatonConfig
from deployments.errors import Unavailable
from deployments.host.waits import Stop, set_within
from deployments.manager.calls import (
    A,
    Adopt,
    Answer,
    AnyCall,
    Brought,
    Call,
    Close,
    Drain,
    Explain,
    HandOn,
    Lost,
    Manager,
    Notice,
    Open,
    Overview,
    PrefillDone,
    Prefixes,
    Ready,
    Report,
    ShareAdapters,
    Silent,
    Status,
    TellPrefix,
    View,
    Withdraw,
)
from deployments.manager.manager import SessionManager
from deployments.manager.own_sessions import OwnSessions, snapshots_of_others
from deployments.manager.timings import TIMINGS, Timings
from deployments.messages import Admit, ManagerView, Reject, SessionRequest

logger = logging.getLogger("baton.stand_in")

TURNS = 8
"""The manager may come or go so many times during one request; after that the request fails."""
UNTOLD = 1024
"""The most notices kept for a manager that is there but does not answer; the oldest are dropped."""


class StandIn:
    """The session manager to an ingress, whether it is there or away. Create it in a running event loop.

    `control`: the manager by another connection, for what must not wait behind sessions; by default the same.
    `counters`: `absences` of the manager, and sessions `placed` in them.
    """

    def __init__(
        self,
        manager: Manager,
        config: BatonConfig,
        timings: Timings = TIMINGS,
        clock: Callable[[], float] = time.monotonic,
        control: Manager | None = None,
    ) -> None:
        self.counters = {"absences": 0, "placed": 0}
        self._manager, self._control, self._timings, self._clock = manager, control or manager, timings, clock
        self._ingresses = config.ingress.replicas or 1
        # Nothing reports here: the replicas of a view count as there for as long as the view is used.
        placement = config.placement.model_copy(update={"snapshot_stale_s": 2 * timings.view_oldest_s})
        self._config = config.model_copy(update={"placement": placement})
        self._view, self._viewed_s = ManagerView("", ()), -math.inf
        self._is_away, self._acting = False, SessionManager(self._config)
        self._turned = Stop()
        self._asks = itertools.count(1)
        self._own = OwnSessions()
        self._untold: deque[Notice] = deque(maxlen=UNTOLD)
        self._following = asyncio.create_task(self._follow(), name="baton-manager-view")
        self._following.add_done_callback(_ended)

    def shutdown(self) -> None:
        """Stop following the manager; idempotent."""
        self._following.cancel()

    # ---- what the ingress asks

    async def ask(self, call: Call[A]) -> A:
        """The answer to a call, see `deployments.manager.calls`. Raises Unavailable when nothing can answer it."""
        # mypy cannot see that each case gives its own call's answer.
        return cast(A, await self._answer(cast(AnyCall, call)))

    async def _answer(self, call: AnyCall) -> Answer:
        match call:
            case Open(request):
                return await self._open(request)
            case PrefillDone() | Close() | Withdraw() | Lost():
                self._own.note(call)
                await self._tell(call)
                return None
            case Silent():  # while the manager is away, nothing hears the replicas, so none is called silent
                return () if self._is_away else await self._control.ask(call)
            case Ready():
                return await self._ready(call)
            case Status() | Overview() | Explain() | Drain() | Prefixes() | TellPrefix() | ShareAdapters():
                return await self._control.ask(call)
            case View() | Report() | Adopt() | HandOn() | Brought():
                raise ValueError(f"an ingress does not ask for {type(call).__name__}")

    async def _open(self, request: SessionRequest) -> Admit | Reject:
        """Have a session placed. Raises Unavailable when nothing can place it.

        Every question has a number higher than all before. Its placement gets that number as its epoch, from the
        manager and from the stand-in alike. So no epoch comes twice, nor a lower one after a higher, even from a
        manager that has forgotten all.
        """
        why = Unavailable("the session manager comes and goes")
        for _ in range(TURNS):
            numbered = replace(request, least_epoch=next(self._asks))
            try:
                if (decision := await self._place(numbered)) is not None:
                    return decision
            except Unavailable as error:  # if the manager has died, the view that does not come will tell
                why = error
                await set_within(self._turned, self._timings.again_s)
        raise why

    async def _place(self, request: SessionRequest) -> Admit | Reject | None:
        """Ask the one that places now, the manager or its stand-in. None when that changes before the answer."""
        is_away = self._is_away
        if is_away:
            self._check_view()
        asked: Manager = self._acting if is_away else self._manager
        decision = await self._turned.unless_set(asked.ask(Open(request)))
        if decision is None and not is_away:  # the manager may have placed the session anyway
            self._untold.append(Close(request.session_id, request.least_epoch, "abandoned"))
        if isinstance(decision, Admit):
            self.counters["placed"] += is_away
            placement = decision.placement
            self._own.add(placement, request.prompt_tokens, self._clock())
            if self._is_away and not is_away:  # its last answer: the stand-in was filled before this came
                await self._acting.ask(Adopt(placement, request.prompt_tokens, prefilling=True))
        return decision

    async def _ready(self, call: Ready) -> dict[str, Any]:
        """The answer to `Ready`. While the manager is away it comes from the last view, and says so."""
        if not self._is_away:
            return await self._control.ask(call)
        self._check_view()
        shown = await self._acting.ask(call)
        return {**shown, "manager": "away"}

    async def _tell(self, notice: Notice) -> None:
        """Tell the manager or its stand-in. What the manager does not hear now it is told later, unless it restarts."""
        if self._is_away:
            await self._acting.ask(notice)
        else:
            with contextlib.suppress(Unavailable):
                if await self._turned.unless_set(_told(self._manager, notice)):
                    return
        self._untold.append(notice)

    # ---- the manager comes and goes

    async def _follow(self) -> None:
        """Keep the last view, with one call open all the time."""
        after_s = 0.0
        while True:
            try:
                async with asyncio.timeout(after_s + self._timings.view_late_s):
                    await self._came(await self._control.ask(View(after_s)))
            except (Unavailable, TimeoutError) as error:
                await self._went(error)
                after_s = 0.0
                await asyncio.sleep(self._timings.again_s)
            else:
                after_s = self._timings.view_every_s

    async def _came(self, view: ManagerView) -> None:
        """A view has come: the manager is there."""
        is_same, self._view, self._viewed_s = self._view.life == view.life, view, self._clock()
        self._own.seen()
        if self._is_away:
            self._is_away = False
            self._turn()
            logger.warning("the session manager is back")
        untold = list(self._untold) if is_same else []  # a new manager builds its ledger from what replicas report
        self._untold.clear()
        await asyncio.gather(*(self._manager.ask(notice) for notice in untold))

    async def _went(self, error: Exception) -> None:
        """The manager cannot be reached, or does not answer."""
        if self._is_away:
            return
        self._is_away, self._acting = True, SessionManager(self._config)
        for snapshot in snapshots_of_others(self._view, self._own.by_replica(), self._ingresses):
            await self._acting.ask(Report(snapshot))
        for own in self._own.promises():
            await self._acting.ask(Adopt(own.placement, own.prompt_tokens, own.prefilling))
        self._turn()
        if self._view.life:  # it has been there
            self.counters["absences"] += 1
            logger.warning("the session manager is away (%r): sessions are placed by its last view", error)

    def _turn(self) -> None:
        turned, self._turned = self._turned, Stop()
        turned.set()

    def _check_view(self) -> None:
        """Raises Unavailable when there is no view, or the last one is too old."""
        age_s = self._clock() - self._viewed_s
        if age_s > self._timings.view_oldest_s:
            raise Unavailable(f"the session manager is away, and what is known of the replicas is {age_s:.0f} s old")


async def _told(manager: Manager, notice: Notice) -> bool:
    await manager.ask(notice)
    return True


def _ended(following: asyncio.Task[None]) -> None:
    if not following.cancelled() and (error := following.exception()) is not None:
        logger.error("the session manager is followed no more: %r", error, exc_info=error)
