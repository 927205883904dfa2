"""Sealed control messages."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec
import pytest

from transfer.control import messages as control
from transfer.control.messages import Seal
from transfer.control.seal import DIGEST_BYTES, BadMessage
from transfer.memory.layout import KVLayout

SEAL, KEY = Seal("secret"), ("session", 1)
LAYOUT = KVLayout(1, 1, 4, 16, 64, (2**47,), "cuda", 1, {"model": "m"})
MESSAGES = [
    control.Hello("tcp://127.0.0.1:1", "agent", b"\x00\xff", LAYOUT),
    control.Welcome(),
    control.Refused("block_size differs"),
    control.Offer("session", 1, 0, 2, [5, 4, 9], 60.0),
    control.Cancel("session", 1, 0, "aborted"),
    control.Landed("session", 1, (bytes(16), bytes(range(16)))),
    control.Failed("session", 1, "a write failed"),
    control.FirstToken("session", 1, 42),
    control.Fetch("session", 1, 0, [5, 4], [bytes(32), b"\xff"], 60.0),
    control.Found("session", 1, 2),
    control.Nudge(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: control.AnyMessage) -> None:
    assert SEAL.unpack(SEAL.pack(message)) == message


def test_every_message_type_is_tested() -> None:
    assert {type(m) for m in MESSAGES} == set(control.AnyMessage.__args__)


def sealed(body: bytes) -> bytes:
    """Bytes under a right seal: what a peer with a bug could send."""
    key = hashlib.blake2b(b"secret", digest_size=32).digest()
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES, key=key).digest() + body


@pytest.mark.parametrize(
    "body",
    [
        {"type": "Offer", "session": 1, "epoch": 1},
        {"type": "Landed"},
        {"type": "Landed", "session": "s", "epoch": 1, "digests": [b"15 bytes or less"[:15]]},
        {"type": "Nothing"},
        {"type": "Hello", "agent": "a", "agent_metadata": b"", "layout": {"num_layers": 1}},
        {
            "type": "Hello",
            "agent": "a",
            "agent_metadata": b"",
            "layout": {**msgspec.to_builtins(LAYOUT), "bases": []},
        },
        [],
        None,
    ],
    ids=str,
)
def test_a_sealed_message_of_a_wrong_shape_is_bad(body: object) -> None:
    with pytest.raises(BadMessage, match="fits no message"):
        SEAL.unpack(sealed(msgspec.msgpack.encode(body)))


@pytest.mark.parametrize(
    "message",
    [
        control.Offer(*KEY, 0, 0, [1], math.nan),
        control.Offer(*KEY, 0, 0, [1], -1),
        control.Offer("x" * 257, 1, 0, 0, [1], 10),
        control.Cancel(*KEY, 0, "x" * 1_000_000),
        control.Failed(*KEY, "x" * 1_000_000),
        control.Fetch(*KEY, 0, [1], [b""], 10),
        control.Fetch(*KEY, 0, [1], [bytes(65)], 10),
        control.Fetch(*KEY, 0, [1], [b"1"], -1),
        control.Found(*KEY, -1),
        control.FirstToken(*KEY, -1),
        control.FirstToken(*KEY, 2**40),
    ],
    ids=lambda message: f"{str(message)[:60]}",
)
def test_a_value_out_of_range_is_a_bad_message(message: control.AnyMessage) -> None:
    with pytest.raises(BadMessage, match="fits no message"):
        SEAL.unpack(SEAL.pack(message))


@pytest.mark.parametrize(
    "change",
    [
        {"workers": 0},
        {"total_heads": 2**63},
        {"rank": 1},
        {"rank": -1},
        {"num_blocks": 2**60},
        {"num_blocks": 2**31},
        {"num_blocks": 0},
        {"num_blocks": -1},
        {"block_bytes": 0},
        {"block_size": 0},
        {"num_layers": 0, "bases": ()},
        {"bases": (-1,)},
        {"bases": (2**64 - 1,)},
        {"stages": (2,)},
        {"stages": (1, 1)},
        {"workers": 2, "stages": (1, 0)},
        {"workers": 2, "rank": 1, "stages": (1, 2)},
        {"workers": 2, "stages": (1, 2**62)},
        {"device_id": -1},
        {"device_id": 2**40},
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_a_bad_message(change: dict[str, Any]) -> None:
    layout = msgspec.to_builtins(KVLayout(1, 1, 4, 16, 64, (2**47,)))
    body = {"type": "Hello", "address": "", "agent": "", "agent_metadata": b"", "layout": {**layout, **change}}
    with pytest.raises(BadMessage, match="fits no message"):
        SEAL.unpack(sealed(msgspec.msgpack.encode(body)))
    body["layout"] = layout
    assert isinstance(SEAL.unpack(sealed(msgspec.msgpack.encode(body))), control.Hello)
