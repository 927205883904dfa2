"""A control plane for a test, of which nothing may be left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from load_tests.harness.control_plane import InProcess, config, in_process, until


@pytest.fixture
async def launch(no_leaks: None) -> AsyncIterator[Callable[..., Any]]:
    """`launch(config, replica_ids, timings, limits)`: a control plane, ended with the test; no task may outlive it."""
    async with contextlib.AsyncExitStack() as stack:

        async def launch(*args: Any, **options: Any) -> InProcess:
            return await stack.enter_async_context(in_process(*args, **options))

        yield launch

    async def alone() -> bool:
        return asyncio.all_tasks() == {asyncio.current_task()}

    await until(alone)


@pytest.fixture
async def cluster(launch: Callable[..., Any]) -> InProcess:
    made: InProcess = await launch(config())
    return made
