"""Waits end by what they wait for, or by what ends them, and leave no task behind."""

from __future__ import annotations

import asyncio

import pytest

from deployments.host.waits import Stop, set_within

LONG_S = 60.0


async def none_is_left() -> bool:
    await asyncio.sleep(0)  # what was cancelled ends
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_wait_ends_when_the_event_comes() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(set_within(event, LONG_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    event.set()
    async with asyncio.timeout(LONG_S / 2):
        await waiting


async def test_a_wait_ends_without_an_error_when_the_time_is_over() -> None:
    event = asyncio.Event()
    async with asyncio.timeout(LONG_S):
        await set_within(event, 0.0)
    assert not event.is_set()


async def test_the_result_of_a_call_that_ends_first_is_given_and_the_event_is_waited_for_no_more() -> None:
    async def call() -> str:
        await asyncio.sleep(0)
        return "answer"

    assert await Stop().unless_set(call()) == "answer"
    assert await none_is_left()


async def test_the_error_of_a_call_is_raised() -> None:
    async def call() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await Stop().unless_set(call())
    assert await none_is_left()


async def test_a_call_is_cancelled_when_the_event_comes_first() -> None:
    event, began, ended = Stop(), asyncio.Event(), asyncio.Event()

    async def call() -> str:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "answer"

    waiting = asyncio.create_task(event.unless_set(call()))
    await began.wait()
    event.set()
    async with asyncio.timeout(LONG_S):
        assert await waiting is None
        await ended.wait()
    assert await none_is_left()


async def test_a_call_is_cancelled_with_its_caller() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def call() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(Stop().unless_set(call()))
    await began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(LONG_S):
        await ended.wait()
    assert await none_is_left()


async def test_a_call_is_not_begun_when_the_event_has_come_and_the_event_comes_once() -> None:
    event = Stop()
    event.set()
    event.set()

    async def call() -> None:
        pytest.fail("it has begun")

    await event.unless_set(call())


async def test_a_timeout_of_the_call_s_own_is_its_error() -> None:
    async def call() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await Stop().unless_set(call())
