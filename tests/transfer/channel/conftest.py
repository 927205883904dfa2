"""Peers of a channel that have no channel themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.transfer.channel.wire_peer import FakePrefill, Peer
from transfer.control.messages import Welcome


@pytest.fixture
def make_peer(prefill: Any) -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(**unlike: Any) -> Peer:
        made.append(Peer(prefill.channel.address, prefill.layout, **unlike))
        return made[-1]

    yield make
    for peer in made:
        peer.assert_guards()
        peer.close()


@pytest.fixture
def peer(make_peer: Callable[..., Peer]) -> Peer:
    introduced = make_peer()
    assert introduced.ask(introduced.hello) == Welcome()
    return introduced


@pytest.fixture
def fake_prefill() -> Iterator[FakePrefill]:
    fake = FakePrefill()
    yield fake
    fake.context.destroy(0)
