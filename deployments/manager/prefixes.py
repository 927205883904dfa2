"""Pins prefixes for administrators, and tells replicas of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from deployments.manager.calls import Prefixes
from deployments.messages import BeginPin, Phase, Pin, PinList, ReplicaSnapshot
from deployments.policy.allocator import Allocator
from deployments.policy.pins import stands

HEARD_S = 1.5
"""The longest that the answer to a change waits until a replica has heard of it. A replica reports every second."""

logger = logging.getLogger("baton.manager")


class PinnedPrefixes:
    """The list is the replicas' too: a manager that has restarted takes the newest that one of them has."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._heard = asyncio.Event()

    async def ask(self, call: Prefixes) -> dict[str, Any]:
        """See the call."""
        pins, fleet = self._allocator.pins, self._allocator.fleet
        before = pins.now.version
        if call.pin is not None:
            infos = [each.info for each in fleet.snapshots().values() if each.info is not None]
            if why := pins.add(call.pin, infos):
                logger.warning("the prefix %s of %d blocks is not pinned: %s", call.pin.id, call.pin.blocks, why)
                return {"refused": why}
        elif call.unpin and not pins.remove(call.unpin):
            return {"refused": f"no prefix {call.unpin} is pinned"}
        if pins.now.version != before:
            logger.info("%s: %d prefixes are pinned", call.unpin or f"+{call.pin and call.pin.id}", len(pins.now.pins))
            fleet.set_aside_changed()
            await self._until_heard()
        return {"prefixes": [self._shown(pin) for pin in pins.now.pins]}

    async def _until_heard(self) -> None:
        self._heard.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S):
                await self._heard.wait()

    def _shown(self, pin: Pin) -> dict[str, Any]:
        """`replicas`: where it stands. `missing`: those that are ready, and are to pin it."""
        up = self._allocator.fleet.snapshots().values()
        wanting = [each for each in up if each.info is not None and each.phase is Phase.READY and each.info.prefills]
        return {
            "id": pin.id,
            "tokens": len(pin.tokens),
            "blocks": pin.blocks,
            "replicas": sorted(each.replica_id for each in up if stands(pin, each)),
            "missing": sorted(each.replica_id for each in wanting if not stands(pin, each)),
        }

    def took(self, snapshot: ReplicaSnapshot) -> bool:
        """A report has come. Whether the next one must have the replica's list, because it is newer than this one."""
        pins, fleet = self._allocator.pins, self._allocator.fleet
        if pins.learn(snapshot.pins):
            logger.info("%d prefixes are pinned, as %s knows", len(pins.now.pins), snapshot.replica_id)
            fleet.set_aside_changed()
        if snapshot.pins_version == pins.now.version:
            self._heard.set()
        return snapshot.pins_version > pins.now.version

    def told(self, snapshot: ReplicaSnapshot, now_s: float) -> tuple[PinList | None, BeginPin | None]:
        """What a replica that reports this is told: the list, where it has an older one, and what it pins now."""
        pins, fleet = self._allocator.pins, self._allocator.fleet
        news = pins.now if snapshot.pins_version < pins.now.version else None
        if not pins.now.pins or not fleet.has_room_to_pin(snapshot):
            return news, None
        return news, pins.next_on(snapshot, fleet.snapshots().values(), now_s)
