"""One ingress for all tests with clients of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.app.clients.baton import Baton, running


@pytest.fixture(scope="package")
def server() -> Iterator[Baton]:
    with running() as made:
        yield made


@pytest.fixture
def baton(server: Baton, only_loopback: None) -> Iterator[Baton]:
    """The ingress. At the end of the test nothing of its requests is open."""
    yield server
    server.reset()
