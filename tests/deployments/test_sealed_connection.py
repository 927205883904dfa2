"""Frames on a connection: put together from any pieces, and never longer than they may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.sealed_connection import Frames, framed
from transfer.control.seal import BadMessage


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 50))
def test_frames_are_put_together_from_any_pieces(messages: list[bytes], piece: int) -> None:
    sent = b"".join(map(framed, messages))
    frames = Frames(99)
    found = [frame for at in range(0, len(sent), piece) for frame in frames.feed(sent[at : at + piece])]
    assert found == messages


def test_a_frame_that_is_too_long_is_refused_before_it_is_there() -> None:
    frames = Frames(10)
    assert list(frames.feed(framed(b"x" * 10))) == [b"x" * 10]
    with pytest.raises(BadMessage, match="a frame of 11 bytes"):
        list(frames.feed(framed(b"x" * 11)[:5]))
