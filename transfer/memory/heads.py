"""Which KV heads a worker of a tensor-parallel replica holds, and who hands them to whom.

As vLLM does: with as many heads as workers or more, each holds an equal run of them; with fewer, neighbours hold the
same head.
"""

from __future__ import annotations


def head_range(rank: int, workers: int, total_heads: int) -> range:
    """The heads of worker `rank` of `workers`."""
    if total_heads >= workers:
        count = total_heads // workers
        return range(rank * count, (rank + 1) * count)
    head = rank * total_heads // workers
    return range(head, head + 1)


def sources(rank: int, workers: int, peers: int, total_heads: int) -> list[int]:
    """The prefill workers, of `peers`, from which decode worker `rank` of `workers` takes its heads: each head once."""
    missing = set(head_range(rank, workers, total_heads))
    chosen: list[int] = []
    for peer in range(peers):
        if missing & (held := set(head_range(peer, peers, total_heads))):
            chosen.append(peer)
            missing -= held
    return chosen


def readers(rank: int, workers: int, peers: int, total_heads: int) -> list[int]:
    """The decode workers, of `peers`, that take heads from prefill worker `rank` of `workers`."""
    return [peer for peer in range(peers) if rank in sources(peer, peers, workers, total_heads)]
