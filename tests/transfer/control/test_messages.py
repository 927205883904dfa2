"""Sealed control messages."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.control import messages as control
from transfer.control.messages import Seal
from transfer.control.seal import DIGEST_BYTES, BadMessage
from transfer.memory.layout import KVLayout

SEAL = Seal("secret")
LAYOUT = KVLayout(1, 1, 4, 16, 64, (2**47,), "cuda", 1, {"model": "m"})
MESSAGES = [
    control.Hello("tcp://127.0.0.1:1", "agent", b"\x00\xff", LAYOUT),
    control.Welcome(),
    control.Refused("block_size differs"),
    control.Offer("session", 1, 0, 2, [5, 4, 9], 60.0),
    control.Cancel("session", 1, 0, "aborted"),
    control.Landed("session", 1),
    control.Failed("session", 1, "a write failed"),
    control.FirstToken("session", 1, 42),
    control.Nudge(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: control.AnyMessage) -> None:
    assert SEAL.unpack(SEAL.pack(message)) == message


def test_every_message_type_is_tested() -> None:
    assert {type(m) for m in MESSAGES} == set(control.AnyMessage.__args__)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_bad_messages(frame: bytes) -> None:
    with pytest.raises(BadMessage):
        SEAL.unpack(frame)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_changed_bit_breaks_the_seal(message: control.AnyMessage, data: st.DataObject) -> None:
    frame = bytearray(SEAL.pack(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadMessage, match="wrong seal"):
        SEAL.unpack(bytes(frame))


@given(st.sampled_from(MESSAGES), st.data())
def test_a_cut_frame_is_bad(message: control.AnyMessage, data: st.DataObject) -> None:
    frame = SEAL.pack(message)
    with pytest.raises(BadMessage):
        SEAL.unpack(frame[: data.draw(st.integers(0, len(frame) - 1))])


def test_another_secret_is_refused() -> None:
    with pytest.raises(BadMessage, match="wrong seal"):
        SEAL.unpack(Seal("other").pack(control.FirstToken("s", 1, 2)))


def test_an_oversize_frame_is_refused_before_it_is_hashed() -> None:
    with pytest.raises(BadMessage, match="a frame of"):
        SEAL.unpack(bytes(control.MAX_BYTES + 1))


def sealed(body: bytes) -> bytes:
    """Bytes under a right seal: what a peer with a bug could send."""
    key = hashlib.blake2b(b"secret", digest_size=32).digest()
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES, key=key).digest() + body


@given(st.binary(min_size=1, max_size=100))
def test_sealed_nonsense_fits_no_message(body: bytes) -> None:
    with pytest.raises(BadMessage):
        SEAL.unpack(sealed(body))


@pytest.mark.parametrize(
    "body",
    [
        {"type": "Offer", "session": 1, "epoch": 1},
        {"type": "Landed"},
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
