"""Any message with any values, under a right seal: nothing of it ends the channel or another's handoff."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.transfer.channel.wire_peer import BLOCKS, FakePrefill, Peer, prefill_all, sealed
from transfer.control import messages as control
from transfer.control.messages import Hello

BLOCK = st.integers(0, BLOCKS - 1)
ODD_NUMBER = st.sampled_from([-1, 0, 1, 2, 63, 64, 2**31, 2**60, 2**63 - 1, 2**64 - 1, -(2**63)])
ODD = st.one_of(
    ODD_NUMBER,
    st.none(),
    st.booleans(),
    st.sampled_from([math.nan, math.inf, -math.inf, -1.0, "", "x" * 1_000_000, b"\x00", [0] * 100_000, [[]], {}]),
    st.text(max_size=5),
    st.lists(BLOCK | ODD_NUMBER, max_size=5),
)
SESSIONS = {"session": st.sampled_from(["a", "b"]), "epoch": st.integers(0, 2)}
MINE = {**SESSIONS, "rank": st.just(0)}
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "Welcome": {},
    "Nudge": {},
    "Refused": {"reason": st.text(max_size=3)},
    "Offer": {
        **MINE,
        "first_block": st.integers(0, 3),
        "blocks": st.lists(BLOCK, max_size=9),
        "timeout_s": st.floats(0, 1),
    },
    "Cancel": {**MINE, "reason": st.text(max_size=3)},
    "Landed": SESSIONS,
    "Failed": {**SESSIONS, "reason": st.text(max_size=3)},
    "FirstToken": {**SESSIONS, "token": st.integers(0, 9)},
    "Fetch": {
        **MINE,
        "blocks": st.lists(BLOCK, max_size=3),
        "hashes": st.lists(st.binary(max_size=3), max_size=3),
        "timeout_s": st.floats(0, 1),
    },
    "Found": {**SESSIONS, "blocks": st.integers(0, 3)},
}


@st.composite
def bodies(draw: st.DrawFn, hello: Hello) -> bytes:
    """A message with odd values in some fields; sometimes some of its bytes are others."""
    kind = draw(st.sampled_from(sorted(kind.__name__ for kind in control.AnyMessage.__args__)))
    if kind == "Hello":
        fields = msgspec.to_builtins(hello, builtin_types=(bytes,))
        layout = fields["layout"]
        for name in draw(st.lists(st.sampled_from(sorted(layout)), max_size=2)):
            layout[name] = draw(ODD)
    else:
        fields = {"type": kind} | {name: draw(values) for name, values in FIELDS[kind].items()}
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=2)):
        if name != "layout":
            fields[name] = draw(ODD)
    body = bytearray(msgspec.msgpack.encode(fields))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body)


@pytest.mark.slow
def test_no_message_ends_the_channel_or_a_handoff(
    prefill: Any, decode: Any, make_peer: Callable[..., Peer], fake_prefill: FakePrefill
) -> None:
    peer = make_peer()
    decode.channel.meet([[fake_prefill.address], [prefill.channel.address]])
    identity = fake_prefill.accept()
    examples = 0

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
    @given(st.lists(bodies(peer.hello), min_size=1, max_size=10))
    def goes_on(messages: list[bytes]) -> None:
        nonlocal examples
        examples += 1
        for number, body in enumerate(messages):
            peer.socket.send(sealed(body))
            if b"Refused" not in body:  # that ends the connection, as it should: see below
                fake_prefill.say(identity, sealed(body))
            if number == len(messages) // 2:
                prefill.save((f"a{examples}", 1), f"stray{examples}", 4, 8, [7, 8])
        key, request_id = (f"good {examples}", 1), str(examples)
        decode.memory[:] = 0
        decode.channel.offer(key, request_id, [prefill.channel.address], 0, [3, 1], False)
        prefill_all(prefill, key, request_id)
        prefill.channel.ended((f"a{examples}", 1), f"stray{examples}", False)
        assert decode.wait("received", request_id) is None
        assert prefill.wait("released", request_id)
        assert np.array_equal(decode.memory[:, :, [3, 1]], prefill.memory[:, :, [5, 6]])
        assert not np.delete(decode.memory, [1, 3], axis=2).any()
        peer.assert_guards()

    goes_on()
    assert prefill.counter("bad_messages") > 10
    assert prefill.counter("messages_refused") > 10
    assert decode.counter("bad_messages") > 10
    assert decode.counter("messages_refused") > 10
    assert len(prefill.channel._prefill.peers.agents) <= 2
