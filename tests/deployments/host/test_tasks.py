"""The cluster core's tasks: their context is private, and none fails unseen."""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar

import pytest

from deployments.host.tasks import OwnTasks

client: ContextVar[str] = ContextVar("client", default="")


async def test_a_task_runs_in_the_context_of_the_beginning_and_changes_it_for_no_other() -> None:
    tasks, heard = OwnTasks(), list[str]()

    async def work() -> None:
        heard.append(client.get())
        client.set("a task")

    client.set("a request")
    for _ in range(2):
        await tasks.own(work(), "work")
    assert (heard, client.get()) == (["", ""], "a request")


async def test_an_error_is_logged_with_the_task_s_name_and_a_cancellation_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks = OwnTasks()

    async def fails() -> None:
        raise ValueError("a mistake")

    async def waits() -> None:
        await asyncio.Event().wait()

    waiting = [tasks.own(waits(), "waits") for _ in range(2)]
    with caplog.at_level(logging.ERROR, "baton.tasks"):
        await asyncio.wait([tasks.own(fails(), "fails")])
        tasks.cancel()
        await asyncio.wait(waiting)
    assert all(task.cancelled() for task in waiting)
    assert [record.getMessage() for record in caplog.records] == ["baton-fails ended: ValueError('a mistake')"]
