"""Peers that come and go leave nothing behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from transfer.control.messages import Seal

SEAL = Seal("a secret of the tests")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only their number is wanted


@pytest.mark.slow
def test_200_peers_leave_a_channel_as_it_was(prefill: Any, make_side: Callable[..., Any]) -> None:
    """Each decode replica is met, gets a handoff and goes: every second with its process, the others by name only."""
    at_start = None
    for number in range(200):
        decode = make_side(f"decode-{number}", plane=None)
        address, name = decode.channel.address, str(number)
        decode.channel.meet([[prefill.channel.address]])
        prefill.channel.keep([[address]])
        decode.channel.offer((name, 1), name, [prefill.channel.address], 0, [1], False)
        prefill.save((name, 1), name, 4, 4, [2])
        prefill.channel.ended((name, 1), name, True)
        assert decode.wait("received", name) is None
        assert prefill.wait("released", name)
        if number % 2:
            decode.channel.close()
        else:
            decode.channel.meet([])
            decode.until(lambda decode=decode: not decode.channel._endpoint.peers)
        prefill.channel.keep([])
        prefill.until(lambda: not prefill.channel._prefill.peers.agents)
        decode.channel.close()
        if number == 9:
            at_start = threading.active_count(), descriptors()
    assert at_start is not None
    prefill.until(lambda: threading.active_count() <= at_start[0] and descriptors() <= at_start[1])
    assert not prefill.channel._prefill.peers._plane._peers
    assert not prefill.channel._prefill._handoffs


def test_200_meetings_of_one_pair_leave_it_as_it_was(prefill: Any, decode: Any) -> None:
    peers, at_start = [[prefill.channel.address]], 0
    for number in range(200):
        known = set(prefill.channel._prefill.peers.agents)
        decode.channel.meet(peers)
        prefill.until(lambda known=known: set(prefill.channel._prefill.peers.agents) - known)
        assert len(prefill.channel._prefill.peers.agents) == 1
        decode.channel.meet([])
        decode.until(lambda: not decode.channel._endpoint.peers)
        at_start = at_start or descriptors()
        if number % 2:  # otherwise it comes back before it is forgotten
            prefill.channel.keep([[decode.channel.address]])
            prefill.channel.keep([])
            prefill.until(lambda: not prefill.channel._prefill.peers.agents)
    prefill.until(lambda: descriptors() <= at_start)
    assert len(prefill.channel._prefill.peers._plane._peers) <= 1
