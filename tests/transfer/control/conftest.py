"""A decode worker's endpoint, under many addresses."""

from __future__ import annotations

import socket
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


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request: pytest.FixtureRequest) -> str:
    """The loopback address of either family. Skipped where this machine has none."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((request.param, 0))
    except OSError as error:
        pytest.skip(f"no loopback at {request.param}: {error}")
    return str(request.param)
