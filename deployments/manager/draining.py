"""Drains replicas for an operator, puts them back, and hands on what leaving ones have cached."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from deployments.fleet.columns import ReplicaView
from deployments.manager.calls import Brought, Drain, HandOn, Leaving
from deployments.messages import Bring, CachedPrompt, Mode, Placement, ReplicaInfo
from deployments.policy.allocator import Allocator
from deployments.policy.handing_on import Handed, Target, hand_on
from deployments.policy.placement.fetch import block_s

logger = logging.getLogger("baton.drain")

HANDED_ON = "handed on"
"""The reason of the promises for prompts that replicas fetch from one that leaves."""


def drain(allocator: Allocator, call: Drain, now_s: float) -> dict[str, Any]:
    """See `calls.Drain`."""
    replica_id, snapshot = call.replica_id, allocator.fleet.snapshots().get(call.replica_id)
    if snapshot is None or snapshot.info is None:
        return {"replica": replica_id, "refused": "no such replica is up", "known": False}
    if call.resume:
        allocator.cordon.resume(replica_id)
    elif replica_id not in allocator.cordon:
        ready = [view.info for view in allocator.fleet.view(now_s).ready]
        if why := allocator.cordon.refusal(snapshot.info, ready):
            return {"replica": replica_id, "refused": why, "known": True}
        allocator.cordon.drain(replica_id)
    sessions = sum(replica_id in promise.replica_ids for promise in allocator.fleet.promises())
    return {"replica": replica_id, "draining": not call.resume, "sessions": sessions}


@dataclass(slots=True)
class _Open:
    """What a replica is to bring. `is_told`: its report was answered with it. `came`: the blocks that have come."""

    bring: Bring
    is_told: bool
    came: asyncio.Future[int | None]


class Draining:
    """`link_bytes_per_s`: between replicas, as configured. `clock`: the session manager's.

    `counts`: of the beginnings that were to be handed on, how many `came` and how many `failed`, and the `blocks` that
    came.
    """

    def __init__(self, allocator: Allocator, link_bytes_per_s: float, clock: Callable[[], float]) -> None:
        self._allocator, self._link_bytes_per_s, self._clock = allocator, link_bytes_per_s, clock
        self._open: dict[str, dict[str, _Open]] = {}  # by the replica that brings it, and by its id
        self._numbers = itertools.count(1)
        self.counts = Counter[str]()

    async def answer(self, call: Leaving) -> dict[str, Any] | int | None:
        """The answer to one of these calls."""
        match call:
            case Drain():
                return drain(self._allocator, call, self._clock())
            case HandOn():
                return await self._hand_on(call)
            case Brought(replica_id, bring_id, blocks):
                each = self._open.get(replica_id, {}).get(bring_id)
                if each is not None and not each.came.done():
                    most = each.bring.tokens // each.bring.source.block_size
                    each.came.set_result(None if blocks is None else min(blocks, most))
                return None
            case _:
                assert_never(call)

    def due(self, replica_id: str) -> tuple[Bring, ...]:
        """What a replica that reports is to bring, each once."""
        untold = [each for each in self._open.get(replica_id, {}).values() if not each.is_told]
        for each in untold:
            each.is_told = True
        return tuple(each.bring for each in untold)

    async def _hand_on(self, call: HandOn) -> int:
        """Returns the number of blocks that have come to other replicas."""
        snapshot = self._allocator.fleet.snapshots().get(call.replica_id)
        if snapshot is None or snapshot.info is None:
            return 0
        source, views = snapshot.info, self._others(snapshot.info)
        prompts, found = [prompt.hashes for prompt in call.prompts], self._allocator.predictors.index.hits
        plan = hand_on(prompts, found, self._targets(views.values()), call.left_s)
        begun = [
            self._begin(source, views[each.replica_id].info, call.prompts[each.prompt], each, call.left_s)
            for each in plan
        ]
        try:
            if begun:
                await asyncio.wait([each.came for each in begun], timeout=call.left_s)
            return self._count(source, call.prompts, plan, begun)
        finally:
            for handed, each in zip(plan, begun, strict=True):
                self._end(handed.replica_id, each.bring.id)

    def _others(self, source: ReplicaInfo) -> dict[str, ReplicaView]:
        """The replicas of the same engine that stay, by id."""
        now_s, allocator = self._clock(), self._allocator
        shut = {source.replica_id, *allocator.cordon, *allocator.breakers.shut(now_s)}
        return {
            view.info.replica_id: view
            for view in allocator.fleet.view(now_s).ready
            if view.info.fingerprint == source.fingerprint and view.info.replica_id not in shut
        }

    def _targets(self, views: Iterable[ReplicaView]) -> list[Target]:
        snapshots = self._allocator.fleet.snapshots()
        return [self._target(view, snapshots[view.info.replica_id].cached_blocks) for view in views]

    def _target(self, view: ReplicaView, cached: int) -> Target:
        empty = max(0, view.free_blocks - cached)
        return Target(view.info.replica_id, view.free_blocks, empty, block_s(view, self._link_bytes_per_s))

    def _begin(
        self, source: ReplicaInfo, target: ReplicaInfo, prompt: CachedPrompt, handed: Handed, left_s: float
    ) -> _Open:
        """Reserve the blocks, so that no session is promised them meanwhile."""
        bring_id, tokens = f"handed-on-{next(self._numbers)}", handed.blocks * source.block_size
        bring = Bring(bring_id, prompt.request, tokens, source, left_s)
        made = _promise(bring_id, target, tokens, handed.new + 1, left_s)
        self._allocator.fleet.reserve(made, tokens, self._clock())
        each = _Open(bring, False, asyncio.get_running_loop().create_future())
        self._open.setdefault(handed.replica_id, {})[bring_id] = each
        return each

    def _end(self, replica_id: str, bring_id: str) -> None:
        self._allocator.fleet.release(bring_id, 1, self._clock(), ended=True)
        mine = self._open.get(replica_id, {})
        mine.pop(bring_id, None)
        if not mine:
            self._open.pop(replica_id, None)

    def _count(
        self, source: ReplicaInfo, prompts: Sequence[CachedPrompt], plan: Sequence[Handed], begun: Sequence[_Open]
    ) -> int:
        came = [blocks for each in begun if each.came.done() and (blocks := each.came.result()) is not None]
        self.counts.update(came=len(came), failed=len(begun) - len(came), blocks=sum(came))
        text = "%s leaves: of %d prompts, %d beginnings were to go to other replicas; %d did, with %d blocks"
        logger.info(text, source.replica_id, len(prompts), len(plan), len(came), sum(came))
        return sum(came)


def _promise(session_id: str, info: ReplicaInfo, tokens: int, blocks: int, left_s: float) -> Placement:
    mode = Mode.DECODE_LOCAL if info.decodes else Mode.PREFILL_LOCAL
    decode, prefill = (info, None) if info.decodes else (None, info)
    return Placement(session_id, 1, mode, HANDED_ON, decode, prefill, blocks, left_s, left_s, cached_tokens=tokens)
