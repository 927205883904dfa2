"""What the tests of batches have in common."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.batches.stores import Stores
from tests.app.batches.toys import Clock, Ingress, ToyServer, running, stores_in


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def stores(no_leaks: None, tmp_path: Path, clock: Clock) -> AsyncIterator[Stores]:
    made = stores_in(tmp_path, clock)
    await made.prepare()
    yield made
    await made.close()


@pytest.fixture
def server() -> ToyServer:
    return ToyServer()


@pytest.fixture
async def ingress(stores: Stores, server: ToyServer) -> AsyncIterator[Ingress]:
    async with running(Ingress(stores, server)) as made, made.http:
        yield made
