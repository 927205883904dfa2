"""A prefill worker's writes: when they are posted, how they end, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from transfer.channel.decode_peers import Agent
from transfer.channel.outbox import Outbox
from transfer.channel.pacing import Job, Limits, Pacer
from transfer.channel.timings import Timings
from transfer.channel.writes import Writes
from transfer.control import messages as control
from transfer.control.handoff import Write
from transfer.memory.plane import PlaneError, WriteState

PEER = b"peer"
FAR = 1e6


class Rig:
    """Writes over a plane, an endpoint and peers that only note what they are asked. `state`: of every write."""

    def __init__(self, limits: Limits | None = None, timings: Timings | None = None) -> None:
        self.state = WriteState.BUSY
        self.posted: list[tuple[Any, ...]] = []
        self.sent: list[tuple[Any, Any]] = []
        self.ended: list[tuple[Job, bool]] = []
        self.events: list[str] = []
        self.fails = False
        self.agents = {PEER: Agent("agent", layout=None, address="")}  # type: ignore[arg-type]
        self.outbox = Outbox()
        rig: Any = self
        self.writes = Writes(
            rig,
            rig,
            rig,
            self.outbox,
            Pacer(limits or Limits()),
            lambda event, **_: self.events.append(event),
            timings or Timings(nudge_after_s=FAR),
            lambda job, ok: self.ended.append((job, ok)),
        )

    def write(self, *arguments: Any) -> int:
        if self.fails:
            raise PlaneError("no connection")
        self.posted.append(arguments)
        return len(self.posted)

    def check(self, handle: int) -> WriteState:
        return self.state

    def send(self, to: Any, message: Any) -> None:
        self.sent.append((to, message))


def job(name: str = "s", layer: int = 0, size: int = 100) -> Job:
    return Job(((name, 1), 0), PEER, size, 2, Write(layer, 0, (5, 6), (1, 2)))


@pytest.mark.parametrize("state", [WriteState.DONE, WriteState.FAILED])
def test_a_write_is_posted_looked_at_and_reported_once(state: WriteState) -> None:
    rig = Rig()
    rig.writes.push(job())
    rig.writes.progress()
    assert rig.posted == [("agent", 0, (5, 6), (1, 2))]
    rig.writes.progress()
    assert rig.ended == []
    rig.state = state
    rig.writes.progress()
    rig.writes.progress()
    is_ok = state is WriteState.DONE
    assert rig.ended == [(job(), is_ok)]
    counts = rig.outbox.counts
    assert (counts["writes"], counts["blocks_written"], counts["bytes_written"]) == (
        (1, 2, 100) if is_ok else (0, 0, 0)
    )
    assert rig.events == ["layer_write", "layer_written"]


def test_a_write_that_the_plane_refuses_ends_alone() -> None:
    rig = Rig()
    rig.fails = True
    rig.writes.push(job())
    rig.writes.progress()
    assert rig.ended == [(job(), False)]
    rig.fails = False
    rig.writes.push(job("next"))
    rig.writes.progress()
    assert len(rig.posted) == 1


def test_a_write_makes_room_for_the_next_when_it_has_ended() -> None:
    rig = Rig(Limits(peer_bytes=100))
    for layer in range(2):
        rig.writes.push(job(layer=layer))
    rig.writes.progress()
    rig.writes.progress()
    assert len(rig.posted) == 1
    rig.state = WriteState.DONE
    rig.writes.progress()
    assert len(rig.posted) == 2


def test_a_dropped_handoff_keeps_the_writes_in_flight_only() -> None:
    rig = Rig(Limits(peer_bytes=100))
    for layer in range(2):
        rig.writes.push(job(layer=layer))
    rig.writes.progress()
    assert rig.writes.drop((("s", 1), 0)) == [job(layer=1)]
    assert rig.writes.are_reading([("s", 1)])
    assert not rig.writes.are_reading([("s", 2), ("other", 1)])
    rig.state = WriteState.DONE
    rig.writes.progress()
    assert not rig.writes.are_reading([("s", 1)])
    assert len(rig.posted) == 1


def test_a_wait_is_told_only_while_a_write_waits() -> None:
    rig = Rig(Limits(bytes_per_s=1.0))
    assert rig.writes.wait_s(0.0) is None
    rig.writes.push(job())
    assert rig.writes.wait_s(0.0) == 0.0
    rig.writes.progress()
    assert rig.writes.wait_s(0.0) is None
    rig.writes.push(job())
    assert (rig.writes.wait_s(0.0) or 0) > 0


@pytest.mark.parametrize(
    ("timings", "nudges"),
    [
        (Timings(nudge_after_s=-1.0, nudge_again_s=-1.0), 3),
        (Timings(nudge_after_s=-1.0, nudge_again_s=FAR), 1),
        (Timings(nudge_after_s=FAR, nudge_again_s=-1.0), 0),
    ],
    ids=["each look", "once", "not slow"],
)
def test_the_worker_of_a_slow_write_is_nudged_after_a_pause(timings: Timings, nudges: int) -> None:
    rig = Rig(timings=timings)
    rig.agents[PEER].nudged_s = -2 * FAR
    rig.writes.push(job())
    rig.writes.progress()
    for _ in range(3):
        rig.writes.progress()
    assert rig.sent == [(PEER, control.Nudge())] * nudges


def test_a_slow_write_to_a_worker_that_is_forgotten_is_not_nudged() -> None:
    rig = Rig(timings=Timings(nudge_after_s=-1.0, nudge_again_s=-1.0))
    rig.writes.push(job())
    rig.writes.progress()
    rig.agents.clear()
    rig.writes.progress()
    assert rig.sent == []


@pytest.mark.parametrize(
    ("state", "timeout_s", "finished"),
    [(WriteState.DONE, 60.0, True), (WriteState.FAILED, 60.0, True), (WriteState.BUSY, 0.0, False)],
)
def test_finish_waits_for_writes_in_flight_and_begins_none(state: WriteState, timeout_s: float, finished: bool) -> None:
    rig = Rig(Limits(peer_bytes=100))
    for layer in range(2):
        rig.writes.push(job(layer=layer))
    rig.writes.progress()
    rig.state = state
    assert rig.writes.finish(timeout_s) is finished
    assert len(rig.posted) == 1
