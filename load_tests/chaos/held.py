"""What must not grow with the number of faults. `settle` checks sessions, promises, blocks and handoffs."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from pathlib import Path

from load_tests.harness.control_plane import InProcess

SETTLE_S, LOOKS, LOOK_S = 40.0, 8, 0.25
POOLS = ("asyncio_", "AnyIO worker")


def _held(cluster: InProcess) -> dict[str, int]:
    """An ingress has a link to each replica that it has used, so links are counted apart: those over one a replica."""
    gc.collect()
    links = cluster.fleet.links
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": sum(not thread.name.startswith(POOLS) for thread in threading.enumerate()),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())) - 2 * links,
        "links": max(0, links - len(cluster.replicas)),
        "shared_memory": len(set(re.findall(r"/dev/shm/.*", Path("/proc/self/maps").read_text()))),
        "replicas": len(cluster.replicas),
    }


def _least(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: min(count, other[name]) for name, count in one.items()}


def grown(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """By how much each count is above what it was before. Counts that are not above it are left out."""
    return {name: count - before[name] for name, count in now.items() if count > before[name]}


async def held(cluster: InProcess) -> dict[str, int]:
    """What this process holds when idle: the least of a few looks, as calls come and go between replicas and manager.

    The threads of asyncio's and AnyIO's own pools do not count: a pool keeps them, and they are only a handful.
    """
    least = _held(cluster)
    for _ in range(LOOKS):
        await asyncio.sleep(LOOK_S)
        least = _least(least, _held(cluster))
    return least


async def leaked(cluster: InProcess, before: dict[str, int], settle_s: float = SETTLE_S) -> dict[str, int]:
    """By how much each count is above what it was before, once none is or `settle_s` have passed."""
    deadline_s = asyncio.get_running_loop().time() + settle_s
    least = _held(cluster)
    while (more := grown(least, before)) and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(LOOK_S)
        least = _least(least, _held(cluster))
    return more
