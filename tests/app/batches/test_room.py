"""How many lines run at once."""

from __future__ import annotations

import asyncio

from app.batches.room import FIRST, FIRST_PAUSE_S, HOLD_S, LONGEST_PAUSE_S, Room
from app.batches.slots import Slots
from tests.app.batches.toys import Clock, seen


def test_a_window_of_answers_adds_one_place_up_to_the_most() -> None:
    room = Room(6)
    assert room.places == FIRST
    for _ in range(FIRST + 1):
        room.answered()
    assert room.places == FIRST + 1
    for _ in range(100):
        room.answered()
    assert room.places == 6


def test_a_refusal_takes_half_of_the_places_and_others_of_its_time_count_with_it() -> None:
    room = Room(64, first=32)
    for _ in range(5):
        room.refused(10.0)
    assert room.places == 16
    assert room.shut_until_s == 10.0 + FIRST_PAUSE_S
    room.refused(room.shut_until_s + HOLD_S)
    assert room.places == 8


def test_one_place_is_left_and_pauses_grow_until_a_line_is_let_in() -> None:
    room, now_s, pauses = Room(64), 0.0, []
    for _ in range(10):
        room.refused(now_s)
        pauses.append(room.shut_until_s - now_s)
        now_s = room.shut_until_s + HOLD_S
    assert room.places == 1
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    room.answered()
    room.refused(now_s)
    assert room.shut_until_s - now_s == FIRST_PAUSE_S
    room.refused(now_s + 100, retry_after_s=7.0)
    assert room.shut_until_s - now_s - 100 == 7.0


class Line:
    def __init__(self, slots: Slots) -> None:
        self.slots, self.is_in, self.out = slots, False, asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self.slots.place():
            self.is_in = True
            await self.out.wait()

    async def leave(self) -> None:
        self.out.set()
        await self.task


async def test_places_go_to_lines_in_the_order_in_which_they_ask() -> None:
    slots = Slots(2)
    lines = [Line(slots) for _ in range(4)]
    await seen(lambda: [each.is_in for each in lines] == [True, True, False, False])
    await lines[1].leave()
    await seen(lambda: [each.is_in for each in lines] == [True, True, True, False])
    lines[3].task.cancel()
    await asyncio.wait([lines[3].task])
    await lines[0].leave()
    late = Line(slots)
    await seen(lambda: late.is_in)
    for each in (lines[2], late):
        await each.leave()


async def test_a_line_that_is_cancelled_with_its_place_gives_it_back() -> None:
    slots = Slots(1)
    held = Line(slots)
    await seen(lambda: held.is_in)
    waits = Line(slots)
    await asyncio.sleep(0)
    held.out.set()
    await held.task  # the other line has its place now, and has not run
    waits.task.cancel()
    await asyncio.wait([waits.task])
    last = Line(slots)
    await seen(lambda: last.is_in)
    await last.leave()


async def test_after_a_refusal_no_line_is_tried_for_a_while() -> None:
    clock = Clock(50.0)
    slots = Slots(4, clock)
    slots.refused(0.0)
    line = Line(slots)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not line.is_in
    clock.now_s = slots.room.shut_until_s
    await seen(lambda: line.is_in)  # the alarm rings by the real clock
    await line.leave()
    slots.close()
