"""A decode worker's endpoint, under many addresses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq


@pytest.fixture
def inbox() -> Iterator[zmq.Socket[bytes]]:
    """A decode worker's endpoint, under many addresses: every port of 127.0.0.0/8 leads to it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        bound.setsockopt(zmq.RCVTIMEO, 10_000)
        bound.bind_to_random_port("tcp://0.0.0.0")
        yield bound
