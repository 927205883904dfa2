"""How a block is named in the store: by its hash, with its place in the chain of blocks before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KEY_BYTES = 32
NO_PARENT = bytes(KEY_BYTES)


class StoreError(Exception):
    """The store cannot do what it was asked, or has died."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block of a prompt. `key`: its hash of 32 bytes, which covers the tokens of this block and of all before it.

    Equal keys mean equal prefixes. A tenant's salt is part of the hash of a first block, and so of every key after it:
    the namespaces of the store are in the keys. `position`: 0 for the first block of a prompt. `parent`: the key of the
    block before, or `NO_PARENT`. Raises ValueError for keys of another size and a negative position.
    """

    key: bytes
    position: int = 0
    parent: bytes = NO_PARENT

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES or len(self.parent) != KEY_BYTES or self.key == self.parent:
            raise ValueError(f"a key and its parent are two hashes of {KEY_BYTES} bytes")
        if not 0 <= self.position < 1 << 32:
            raise ValueError(f"a block at position {self.position}")


def chain(keys: Sequence[bytes], first: int = 0, parent: bytes = NO_PARENT) -> list[BlockRef]:
    """The consecutive blocks of one prompt from its block number `first` on. `parent`: the key before the first."""
    parents = [parent, *keys[:-1]]
    return [BlockRef(key, first + index, parents[index]) for index, key in enumerate(keys)]
