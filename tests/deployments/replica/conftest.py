"""A replica around a scripted engine, before and after its start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.deployments.replica.doubles import WAIT_S, Fixture, until


@pytest.fixture
async def idle(no_leaks: None, request: pytest.FixtureRequest) -> AsyncIterator[Fixture]:
    """A replica that is not started. A parameter: what the fixture is made with."""
    fixture = Fixture(**getattr(request, "param", {}))
    yield fixture
    await asyncio.wait_for(fixture.replica.stop(), WAIT_S)
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


@pytest.fixture
async def up(idle: Fixture) -> Fixture:
    await idle.replica.start()
    return idle
