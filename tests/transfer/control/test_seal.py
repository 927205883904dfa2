"""Sealed frames: what is refused, and with which reason."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.control import messages as control
from transfer.control.messages import Seal
from transfer.control.seal import DIGEST_BYTES, BadMessage, SealOf

SEAL = Seal("secret")
MESSAGES = [control.Welcome(), control.Offer("session", 1, 0, 2, [5, 4, 9], 60.0), control.FirstToken("session", 1, 42)]


def sealed(body: bytes) -> bytes:
    """Bytes under a right seal: what a peer with a bug could send."""
    key = hashlib.blake2b(b"secret", digest_size=32).digest()
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES, key=key).digest() + body


@pytest.mark.parametrize(
    "body",
    [
        b"\x82\xa4type\xa7Welcome\xa1x" + b"\x91" * 1_000_000 + b"\xc0",
        b"\x82\xa1x" + b"\x91" * 1_000_000 + b"\xc0\xa4type\xa7Welcome",
        b"\x82\xa4type\xa5Offer\xa6blocks\xdd\xff\xff\xff\xff\x00",
        b"\xc1",
    ],
    ids=["deep", "deep before its type", "four billion blocks", "reserved"],
)
def test_a_body_that_is_hard_to_read_is_a_bad_message(body: bytes) -> None:
    with pytest.raises(BadMessage, match="fits no message"):
        SEAL.unpack(sealed(body))


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


@given(st.binary(min_size=1, max_size=100))
def test_sealed_nonsense_fits_no_message(body: bytes) -> None:
    with pytest.raises(BadMessage):
        SEAL.unpack(sealed(body))


def test_a_message_sealed_for_one_purpose_is_refused_for_another() -> None:
    one, another = (SealOf[int]("secret", int, 100, purpose) for purpose in (b"one", b"another"))
    assert one.unpack(one.pack(7)) == 7
    with pytest.raises(BadMessage, match="wrong seal"):
        another.unpack(one.pack(7))


def test_a_frame_of_the_longest_length_is_taken() -> None:
    frame = SealOf[str]("secret", str, 100).pack("text")
    assert SealOf[str]("secret", str, len(frame)).unpack(frame) == "text"
    with pytest.raises(BadMessage, match=f"a frame of {len(frame)} bytes"):
        SealOf[str]("secret", str, len(frame) - 1).unpack(frame)
