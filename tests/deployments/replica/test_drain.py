"""Draining: sessions end, or move when time is short, and KV that a peer uses is waited for."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Collection

import pytest
from ray._private.worker import Worker
from ray.serve._private import replica as serve_replica

from deployments.replica.drain import HAND_SHARE, QUIET_LOOKS, drain
from deployments.replica.timings import Timings

LONG_S, WAIT_S = 1000.0, 60.0
QUICK = Timings(look_s=0.001)


class Replica:
    """A replica that drains: it notes what is asked of it. Runs and open KV are what the test says."""

    def __init__(self) -> None:
        self.open_runs = self.cannot_move = 0
        self.kv: dict[str, float] = {}
        self.done: list[str] = []
        self.is_busy = False
        self.looked = asyncio.Event()
        self.hands_on = asyncio.Event()
        self.hands_on.set()
        self.hand_on_s = 0.0

    def begin_drain(self) -> None:
        self.done.append("drain")

    def move_out(self, session_ids: Collection[str] | None = None) -> int:
        assert session_ids is None
        self.done.append("move")
        moved, self.open_runs = self.open_runs - self.cannot_move, self.cannot_move
        return moved

    async def hand_on(self, left_s: float) -> None:
        self.hand_on_s = left_s
        await self.hands_on.wait()

    async def counters(self) -> dict[str, float]:
        self.looked.set()
        if self.is_busy:
            self.is_busy = False
            raise TimeoutError
        return self.kv

    async def seen(self) -> None:
        """Its counters were looked at once more."""
        self.looked.clear()
        await asyncio.wait_for(self.looked.wait(), WAIT_S)


async def no() -> bool:
    return False


async def yes() -> bool:
    return True


@pytest.fixture
def moves_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions move early in the time that a replica has to stop."""
    monkeypatch.setattr("deployments.replica.drain.RUN_SHARE", 0.1 / LONG_S)


async def test_sessions_end_by_themselves_and_then_it_is_over() -> None:
    replica = Replica()
    replica.open_runs = 2
    drained = asyncio.create_task(drain(replica, LONG_S, no, QUICK))
    await asyncio.sleep(0.02)
    assert not drained.done()
    replica.open_runs = 0
    await asyncio.wait_for(drained, WAIT_S)
    assert replica.done == ["drain"], "nothing had to move"


async def test_the_cache_is_handed_on_while_sessions_end_and_is_waited_for() -> None:
    replica = Replica()
    replica.open_runs = 1
    replica.hands_on.clear()
    drained = asyncio.create_task(drain(replica, LONG_S, no, QUICK))
    await asyncio.sleep(0.02)
    assert replica.hand_on_s == HAND_SHARE * LONG_S
    replica.open_runs = 0
    await asyncio.sleep(0.02)
    assert not drained.done()
    replica.hands_on.set()
    await asyncio.wait_for(drained, WAIT_S)
    assert replica.done == ["drain"], "no session had to move for it"


async def test_handing_on_takes_no_more_than_the_time_there_is() -> None:
    replica = Replica()
    replica.hands_on.clear()
    await asyncio.wait_for(drain(replica, 0.1, no, QUICK), WAIT_S)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "baton-hand-on"]


@pytest.mark.parametrize("name", ["open_receiving", "open_writing", "tier_open_jobs"])
async def test_kv_that_a_peer_or_a_tier_uses_is_waited_for(name: str) -> None:
    replica = Replica()
    replica.kv = {name: 1.0, "bytes_written": 7.0}
    replica.is_busy = True
    drained = asyncio.create_task(drain(replica, LONG_S, no, QUICK))
    for _ in range(3):
        await replica.seen()
    assert not drained.done()
    replica.kv = {name: 0.0, "bytes_written": 7.0}
    await asyncio.wait_for(drained, WAIT_S)


async def test_what_is_left_late_in_the_time_moves_and_a_reader_that_comes_then_is_waited_for(
    moves_soon: None,
) -> None:
    replica = Replica()
    replica.open_runs = 1
    drained = asyncio.create_task(drain(replica, LONG_S, no, QUICK))
    await replica.seen()
    assert replica.done == ["drain", "move"]
    replica.kv = {"open_writing": 1.0}
    for _ in range(QUIET_LOOKS + 2):
        await replica.seen()
    assert not drained.done()
    replica.kv = {}
    await asyncio.wait_for(drained, WAIT_S)


async def test_a_session_that_cannot_move_has_the_rest_of_the_time(moves_soon: None) -> None:
    replica = Replica()
    replica.open_runs, replica.cannot_move = 2, 1
    drained = asyncio.create_task(drain(replica, LONG_S, no, QUICK))
    await replica.seen()
    assert (replica.done, drained.done()) == (["drain", "move"], False)
    replica.open_runs = 0
    await asyncio.wait_for(drained, WAIT_S)


@pytest.mark.slow
async def test_where_all_leave_nothing_moves_and_what_runs_has_all_of_the_time() -> None:
    replica, began_s = Replica(), time.monotonic()
    replica.open_runs = 1
    await asyncio.wait_for(drain(replica, 2.0, yes, QUICK), WAIT_S)
    assert replica.done == ["drain"]
    assert time.monotonic() - began_s >= 2.0


async def test_it_ends_in_its_time_with_runs_still_open() -> None:
    replica, began_s = Replica(), time.monotonic()
    replica.kv = {"open_receiving": 1.0}
    await asyncio.wait_for(drain(replica, 0.1, no, QUICK), WAIT_S)
    assert time.monotonic() - began_s >= 0.1


def test_serve_keeps_the_flag_that_says_that_a_replica_is_being_stopped() -> None:
    """`deployments/serve/leaving.py` reads it; Serve has no public hook."""
    stopping = inspect.getsource(serve_replica.Replica._perform_graceful_shutdown)
    assert "self._shutting_down = True" in stopping.split("await")[0], "it is set before anything is waited for"
    assert "_replica_impl" in inspect.getsource(serve_replica.ReplicaActor.__init__)
    assert "self.actors = {}" in inspect.getsource(Worker.__init__)
