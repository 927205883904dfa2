"""Names of blocks."""

from __future__ import annotations

import pytest

from tests.transfer.store.conftest import keys_of
from transfer.store.refs import NO_PARENT, BlockRef, chain


def test_the_blocks_of_a_prompt_are_a_chain() -> None:
    keys = keys_of("a", 3)
    assert chain(keys) == [BlockRef(keys[0]), BlockRef(keys[1], 1, keys[0]), BlockRef(keys[2], 2, keys[1])]
    assert chain(keys[1:], first=1, parent=keys[0]) == chain(keys)[1:]
    assert chain([]) == []


@pytest.mark.parametrize(
    ("key", "position", "parent"),
    [
        (b"short", 0, NO_PARENT),
        (bytes(range(32)), -1, NO_PARENT),
        (bytes(range(32)), 0, b""),
        (NO_PARENT, 0, NO_PARENT),
    ],
)
def test_what_is_no_block_is_refused(key: bytes, position: int, parent: bytes) -> None:
    with pytest.raises(ValueError, match=r"block at position|two hashes"):
        BlockRef(key, position, parent)
