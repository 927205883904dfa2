"""Block arithmetic: how many blocks tokens fill, and which pairs of blocks go in one write."""

from __future__ import annotations

from collections.abc import Sequence


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def writable_blocks(computed: int, prompt: int, block_size: int) -> int:
    """Leading blocks whose KV is final once `computed` of `prompt` tokens are: full ones, and the last at the end."""
    return blocks_for(computed, block_size) if computed >= prompt else computed // block_size


def runs(local: Sequence[int], remote: Sequence[int]) -> list[tuple[int, int, int]]:
    """Coalesce pairs of blocks into runs (local start, remote start, count) contiguous on both sides.

    The order of the pairs does not matter: they are sorted by the remote id first, so descending ids coalesce too.
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
