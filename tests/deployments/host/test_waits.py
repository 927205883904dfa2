"""Waits end by what they wait for, or by what ends them, and leave no task behind."""

from __future__ import annotations

import asyncio

import pytest

from deployments.host.waits import set_within, unless

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

    assert await unless(asyncio.Event(), call()) == "answer"
    assert await none_is_left()


async def test_the_error_of_a_call_is_raised() -> None:
    async def call() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await unless(asyncio.Event(), call())
    assert await none_is_left()


async def test_a_call_is_cancelled_when_the_event_comes_first() -> None:
    event, began, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def call() -> str:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "answer"

    waiting = asyncio.create_task(unless(event, call()))
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

    waiting = asyncio.create_task(unless(asyncio.Event(), call()))
    await began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(LONG_S):
        await ended.wait()
    assert await none_is_left()
