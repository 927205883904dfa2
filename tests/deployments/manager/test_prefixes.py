"""Prefixes are pinned at the session manager: what replicas are told, what is promised beside them, and restarts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deployments.manager import prefixes
from deployments.manager.calls import Close, Open, Prefixes, Report, Status
from deployments.manager.manager import SessionManager
from deployments.messages import (
    Admit,
    BeginPin,
    Mode,
    Phase,
    Pin,
    ReplicaSnapshot,
    ReportAnswer,
    Reservation,
    SessionRequest,
)
from tests.deployments.manager.test_manager import D0, P0, Clock, config

SMALL = replace(P0, max_model_len=640)
"""Of its 100 blocks the longest request takes 40, and a quarter may be pinned."""
ONE = Pin("one", tuple(range(16 * 20 + 5)), 20)


class Managed:
    """A session manager, and replicas that report what the test says."""

    def __init__(self, listen_s: float = 0.0, **placement: Any) -> None:
        self.clock = Clock()
        self.manager = SessionManager(config(**placement), self.clock, listen_s=listen_s)
        self._version = 0

    async def report(self, info: Any = SMALL, **load: Any) -> ReportAnswer:
        self._version += 1
        snapshot = ReplicaSnapshot(info.replica_id, self._version, load.pop("phase", Phase.READY), info, **load)
        return await self.manager.ask(Report(snapshot))

    async def change(self, call: Prefixes) -> dict[str, Any]:
        """Ask for a change, and let the replica hear of it."""
        asked = asyncio.create_task(self.manager.ask(call))
        while not asked.done():
            answer = await self.report()
            if answer.pins is not None:
                await self.report(pins_version=answer.pins.version)
            await asyncio.sleep(0.001)
        return await asked

    async def free(self) -> int:
        status = await self.manager.ask(Status())
        return int(status["pools"]["prefill"]["replicas"][SMALL.replica_id]["load"]["free_blocks"])


async def test_a_replica_is_told_the_list_once_and_what_to_pin_until_it_stands() -> None:
    managed = Managed()
    await managed.report()
    found = await managed.change(Prefixes(ONE))
    (entry,) = found["prefixes"]
    assert entry == {"id": "one", "tokens": 325, "blocks": 20, "replicas": [], "missing": [SMALL.replica_id]}
    told = await managed.report()
    assert told.pins is not None
    assert (told.pins.pins, told.begin_pin) == ((ONE,), BeginPin("one"))
    known = await managed.report(pins_version=told.pins.version)
    assert (known.pins, known.begin_pin) == (None, BeginPin("one"))
    done = await managed.report(pins_version=told.pins.version, pinned={"one": 20}, used_blocks=20)
    assert (done.pins, done.begin_pin) == (None, None)
    (entry,) = (await managed.manager.ask(Prefixes()))["prefixes"]
    assert (entry["replicas"], entry["missing"]) == ([SMALL.replica_id], [])


async def test_what_is_pinned_is_promised_to_no_session() -> None:
    managed = Managed()
    await managed.report()
    assert await managed.free() == 100
    await managed.change(Prefixes(ONE))
    assert await managed.free() == 100 - 21, "from the moment on at which it is wanted"
    await managed.report(pins_version=1 << 40, pinned={"one": 20}, used_blocks=20)
    assert await managed.free() == 100 - 21
    await managed.change(Prefixes(unpin="one"))
    await managed.report(pinned={"one": 20}, used_blocks=20)
    assert await managed.free() == 80, "until the replica says that they are free"
    await managed.report()
    assert await managed.free() == 100
    status = await managed.manager.ask(Status())
    assert status["replicas"][SMALL.replica_id]["pinned_blocks"] == 0


async def test_a_replica_that_has_promised_its_blocks_pins_once_it_has_room_again() -> None:
    managed = Managed()
    await managed.report()
    await managed.report(replace(D0, total_blocks=200, strict=True))
    admits = [
        await managed.manager.ask(Open(SessionRequest(name, 16 * 30, 1, (Mode.DISAGGREGATED,)))) for name in "abc"
    ]
    await managed.change(Prefixes(ONE))
    held = {"sessions": ("a", "b", "c"), "reservations": (Reservation(31),) * 3, "used_blocks": 93}
    assert (await managed.report(**held)).begin_pin is None
    assert isinstance(admits[0], Admit)
    await managed.manager.ask(Close("a", admits[0].placement.epoch, "stop"))
    held = {"sessions": ("b", "c"), "reservations": (Reservation(31),) * 2, "used_blocks": 62}
    assert (await managed.report(**held)).begin_pin == BeginPin("one")


async def test_a_prefix_that_is_too_large_is_refused_and_nothing_changes() -> None:
    managed = Managed()
    await managed.report()
    refused = await managed.manager.ask(Prefixes(Pin("large", tuple(range(16 * 26)), 26)))
    assert "would take 26 blocks, and a replica of prefill has 25 for them" in refused["refused"]
    assert await managed.manager.ask(Prefixes(unpin="large")) == {"refused": "no prefix large is pinned"}
    assert await managed.manager.ask(Prefixes()) == {"prefixes": []}
    assert (await managed.report()).pins is None
    assert await managed.free() == 100


async def test_a_manager_that_has_restarted_knows_what_replicas_have() -> None:
    before = Managed()
    await before.report()
    await before.change(Prefixes(ONE))
    known = (await before.report()).pins
    assert known is not None
    after = Managed(listen_s=0.2)
    asked = await after.report(pins_version=known.version, pinned={"one": 20}, used_blocks=20)
    assert asked.resync
    told = await after.report(pins_version=known.version, pinned={"one": 20}, used_blocks=20, pins=known)
    assert not told.resync or told.pins is None
    listed = asyncio.create_task(after.manager.ask(Prefixes()))
    await asyncio.sleep(0)
    after.clock.now_s += 1.0
    (entry,) = (await listed)["prefixes"]
    assert (entry["id"], entry["replicas"]) == ("one", [SMALL.replica_id])
    assert (await after.report(pins_version=known.version)).begin_pin == BeginPin("one"), "a replica that has lost it"


async def test_a_change_that_no_replica_hears_of_is_answered_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "HEARD_S", 0.01)
    managed = Managed()
    await managed.report()
    (entry,) = (await managed.manager.ask(Prefixes(ONE)))["prefixes"]
    assert entry["missing"] == [SMALL.replica_id]
    await managed.report()
    assert (await managed.manager.ask(Prefixes(ONE)))["prefixes"] == [entry], "twice is once"
