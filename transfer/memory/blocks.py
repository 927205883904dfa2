"""Block arithmetic: the number of blocks that tokens fill, and the pairs of blocks that go in one write."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def blocks_for(tokens: int, block_size: int) -> int:
    """The number of blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def writable_blocks(computed: int, prompt: int, block_size: int) -> int:
    """The number of leading blocks whose KV is final when `computed` of `prompt` tokens are computed.

    These are the full blocks. A last block that is not full counts once the whole prompt is computed.
    """
    return blocks_for(computed, block_size) if computed >= prompt else computed // block_size


def runs(local: Sequence[int], remote: Sequence[int]) -> list[tuple[int, int, int]]:
    """Join pairs of blocks into runs that are contiguous on both sides: (local start, remote start, count).

    The order of the pairs does not matter: they are sorted by the remote id first, so descending ids are joined too.
    Raises ValueError when the two lists differ in length.
    """
    if len(local) != len(remote):
        raise ValueError(f"{len(local)} local blocks for {len(remote)} remote ones")
    out: list[tuple[int, int, int]] = []
    for there, here in sorted(zip(remote, local, strict=True)):
        if out and (last := out[-1]) and here == last[0] + last[2] and there == last[1] + last[2]:
            out[-1] = (last[0], last[1], last[2] + 1)
        else:
            out.append((here, there, 1))
    return out


def salt_of(adapter: str = "", cache_salt: str | None = None) -> str:
    """The `salt` of the blocks of a request with this adapter and this cache salt; "" and None: it has none."""
    return f"{adapter}\0{cache_salt}" if cache_salt else adapter


def chained_hashes(tokens: Sequence[int], block_size: int, parent: int = 0, salt: str = "") -> tuple[int, ...]:
    """One 64-bit hash per full block of `tokens`. Each covers the block's tokens and the hash of the block before.

    Equal hashes mean equal prefixes, on every machine and in every process. `parent`: the hash of the block before
    the first, 0 at the start. `salt`: see `salt_of`.
    """
    hashes = []
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        digest = hashlib.blake2b(array("q", tokens[begin : begin + block_size]).tobytes(), digest_size=8)
        digest.update(parent.to_bytes(8, "little"))
        if parent == 0 and salt:
            digest.update(salt.encode())
        parent = int.from_bytes(digest.digest(), "little")
        hashes.append(parent)
    return tuple(hashes)
