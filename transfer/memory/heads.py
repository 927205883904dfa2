"""The KV heads that each worker of a tensor-parallel replica holds, and the workers that exchange them.

Heads are split as vLLM splits them. With at least as many heads as workers, each worker holds an equal run of heads.
With fewer heads than workers, neighbouring workers hold the same head.
"""

from __future__ import annotations


def head_range(rank: int, workers: int, total_heads: int) -> range:
    """The heads that worker `rank` of `workers` holds."""
    if total_heads >= workers:
        count = total_heads // workers
        return range(rank * count, (rank + 1) * count)
    head = rank * total_heads // workers
    return range(head, head + 1)


def sources(rank: int, workers: int, peers: int, total_heads: int) -> list[int]:
    """The ranks of the prefill workers from which decode worker `rank` of `workers` takes its heads, each head once.

    `peers`: the number of prefill workers.
    """
    missing = set(head_range(rank, workers, total_heads))
    chosen: list[int] = []
    for peer in range(peers):
        if missing & (held := set(head_range(peer, peers, total_heads))):
            chosen.append(peer)
            missing -= held
    return chosen


def readers(rank: int, workers: int, peers: int, total_heads: int) -> list[int]:
    """The ranks of the decode workers that take heads from prefill worker `rank` of `workers`.

    `peers`: the number of decode workers.
    """
    return [peer for peer in range(peers) if rank in sources(peer, peers, workers, total_heads)]
