"""Who places an ingress's sessions while the session manager is away: the ingress itself, by the last view it has.

`StandIn` goes between the cluster core and the manager. It keeps one call to the manager open, which brings a view of
the fleet every second and breaks when the manager dies. While the manager is away, a session manager in this process
takes its place, filled with that view and with this ingress's own sessions; it lives for that one absence. What it
places the replicas report with the rest, so the manager counts it when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from operator import add, sub
from typing import Any

from configs.schema import BatonConfig
from deployments.errors import Unavailable
from deployments.fleet.ledger import Promise
from deployments.host.waits import set_within, unless
from deployments.manager.manager import SessionManager
from deployments.manager.port import WholeManager
from deployments.messages import Admit, ManagerView, Reject, ReplicaSnapshot, Reservation, SessionRequest

logger = logging.getLogger("baton.stand_in")

VIEW_EVERY_S, LATE_S, AGAIN_S = 1.0, 2.0, 0.25
"""A view is asked for so often; one that is LATE_S late will not come; then it is asked for again every AGAIN_S."""
OLDEST_S = 60.0
"""On a view older than this nothing is placed: replicas come and go."""
TURNS = 8
"""So often at most one request goes from the manager to the stand-in, or back."""
UNTOLD = 1024
"""What a manager that does not die, but does not answer, has yet to be told; the oldest is forgotten."""


class StandIn:
    """The session manager to its callers, whether it is there or not. Create it in a running event loop.

    `counters`: `absences` of the manager, and sessions `placed` in them.
    """

    def __init__(self, manager: WholeManager, config: BatonConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = {"absences": 0, "placed": 0}
        self._manager, self._clock, self._ingresses = manager, clock, config.ingress.replicas
        # Nobody reports here: what was there when the view was made counts as there for as long as a view is used.
        placement = config.placement.model_copy(update={"snapshot_stale_s": 2 * OLDEST_S})
        self._config = config.model_copy(update={"placement": placement})
        self._view, self._viewed_s = ManagerView("", ()), -math.inf
        self._is_away, self._acting = False, SessionManager(self._config)
        self._turned = asyncio.Event()
        self._asks = itertools.count(1)
        self._own: dict[str, dict[int, Promise]] = {}  # of this ingress, whoever made them, by session and epoch
        self._viewed_own: tuple[Promise, ...] = ()  # when the view came
        self._untold: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=UNTOLD)
        self._following = asyncio.create_task(self._follow(), name="baton-manager-view")
        self._following.add_done_callback(_ended)

    def shutdown(self) -> None:
        """Follow the manager no more; idempotent."""
        self._following.cancel()

    # ---- what the cluster core says

    async def open(self, request: SessionRequest) -> Admit | Reject:
        """See `SessionManager.open`. Raises Unavailable when nobody can place it.

        Whoever is asked, each question has a number higher than all before, and the placement gets it as its epoch:
        no epoch comes twice, nor a lower one after a higher, also from a manager that has forgotten all.
        """
        why = Unavailable("the session manager comes and goes")
        for _ in range(TURNS):
            numbered = replace(request, least_epoch=next(self._asks))
            try:
                if (decision := await self._ask(numbered)) is not None:
                    return decision
            except Unavailable as error:  # its death is told by the view that does not come
                why = error
                await set_within(self._turned, AGAIN_S)
        raise why

    async def _ask(self, request: SessionRequest) -> Admit | Reject | None:
        """Ask whoever places now; None when that has changed before the answer."""
        is_away = self._is_away
        if is_away:
            self._check_view()
        decision = await unless(self._turned, (self._acting if is_away else self._manager).open(request))
        if decision is None and not is_away:  # it may have placed the session all the same
            self._untold.append(("close", (request.session_id, request.least_epoch, "abandoned")))
        if isinstance(decision, Admit):
            self.counters["placed"] += is_away
            placement = decision.placement
            promise = Promise(placement, request.prompt_tokens, self._clock(), self._clock())
            self._own.setdefault(placement.session_id, {})[placement.epoch] = promise
            if self._is_away and not is_away:  # its last answer: the stand-in was filled before it was heard
                await self._acting.adopt(placement, request.prompt_tokens, prefilling=True)
        return decision

    async def prefill_done(self, session_id: str, epoch: int) -> None:
        if (own := self._own.get(session_id, {})) and epoch in own:
            own[epoch] = replace(own[epoch], prefilling=False)
        await self._tell("prefill_done", session_id, epoch)

    async def close(
        self, session_id: str, epoch: int, outcome: str, output_tokens: int | None = None, ended: bool = False
    ) -> None:
        own = self._own.get(session_id, {})
        own.pop(epoch, None)
        if not epoch or not own:
            self._own.pop(session_id, None)
        await self._tell("close", session_id, epoch, outcome, output_tokens, ended)

    async def lost(self, replica_id: str, gone: bool = False) -> None:
        await self._tell("lost", replica_id, gone)

    async def silent(self, replica_ids: Sequence[str]) -> tuple[str, ...]:
        """See `SessionManager.silent`. While nobody hears the replicas, none is called silent."""
        return () if self._is_away else await self._manager.silent(replica_ids)

    async def ready(self) -> dict[str, Any]:
        """See `SessionManager.ready`; by the last view while the manager is away, and says so."""
        if not self._is_away:
            return await self._manager.ready()
        self._check_view()
        return {**await self._acting.ready(), "manager": "away"}

    async def status(self) -> dict[str, Any]:
        return await self._manager.status()

    async def _tell(self, name: str, *said: Any) -> None:
        """Tell whoever places now; what the manager does not hear now it is told later, unless it was restarted."""
        if self._is_away:
            await getattr(self._acting, name)(*said)
        else:
            with contextlib.suppress(Unavailable):
                if await unless(self._turned, _done(getattr(self._manager, name)(*said))):
                    return
        self._untold.append((name, said))

    # ---- the manager comes and goes

    async def _follow(self) -> None:
        """Keep the last view, with one call open all the time."""
        after_s = 0.0
        while True:
            try:
                async with asyncio.timeout(after_s + LATE_S):
                    view = await self._manager.view(after_s)
                    await self._has(view)
            except (Unavailable, TimeoutError) as error:
                await self._miss(error)
                after_s = 0.0
                await asyncio.sleep(AGAIN_S)
            else:
                after_s = VIEW_EVERY_S

    async def _has(self, view: ManagerView) -> None:
        """A view has come: the manager is there."""
        is_same, self._view, self._viewed_s = self._view.life == view.life, view, self._clock()
        self._viewed_own = self._promises()
        if self._is_away:
            self._is_away = False
            self._turn()
            logger.warning("the session manager is back")
        untold = list(self._untold) if is_same else []  # another one has its ledger from the replicas
        self._untold.clear()
        await asyncio.gather(*(getattr(self._manager, name)(*said) for name, said in untold))

    async def _miss(self, error: Exception) -> None:
        """The manager cannot be reached, or does not answer."""
        if self._is_away:
            return
        self._is_away, self._acting = True, SessionManager(self._config)
        for snapshot in self._others():
            await self._acting.report(snapshot)
        for own in self._promises():
            await self._acting.adopt(own.placement, own.prompt_tokens, own.prefilling)
        self._turn()
        if self._view.life:  # it has been there
            self.counters["absences"] += 1
            logger.warning("the session manager is away (%r): sessions are placed by its last view", error)

    def _turn(self) -> None:
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()

    def _promises(self) -> tuple[Promise, ...]:
        return tuple(promise for own in self._own.values() for promise in own.values())

    def _check_view(self) -> None:
        """Raises Unavailable when the last view is none, or too old."""
        age_s = self._clock() - self._viewed_s
        if age_s > OLDEST_S:
            raise Unavailable(f"the session manager is away, and what is known of the replicas is {age_s:.0f} s old")

    def _others(self) -> Iterator[ReplicaSnapshot]:
        """What others hold on each replica, and may come to: ingresses do not hear of each other, so each has its share
        of what is free.
        """
        mine: defaultdict[str, Reservation] = defaultdict(Reservation)
        sessions = Counter[str]()
        for promise in self._viewed_own:
            for replica_id in set(promise.replica_ids):
                mine[replica_id] = Reservation(*map(add, mine[replica_id], promise.reservation(replica_id)))
                sessions[replica_id] += 1
        for snapshot in self._view.snapshots:
            name, info, (held,) = snapshot.replica_id, snapshot.info, snapshot.reservations
            assert info is not None, "the manager would place on it"
            theirs = Reservation(*(max(0, left) for left in map(sub, held, mine[name])))
            free = max(0, info.total_blocks - held.blocks)
            theirs = theirs._replace(blocks=theirs.blocks + free * (self._ingresses - 1) // self._ingresses)
            sums = (theirs,) if any(theirs) else ()
            running = max(0, snapshot.running - sessions[name])
            yield replace(snapshot, running=running, sessions=("",) * len(sums), reservations=sums)


async def _done(call: Coroutine[Any, Any, None]) -> bool:
    await call
    return True


def _ended(following: asyncio.Task[None]) -> None:
    if not following.cancelled() and (error := following.exception()) is not None:
        logger.error("the session manager is followed no more: %r", error, exc_info=error)
