"""What must not grow, however many faults there are. `settle` sees to sessions, promises, blocks and handoffs."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from pathlib import Path

from load_tests.control_plane import InProcess

SETTLE_S = 40.0


def held(cluster: InProcess) -> dict[str, int]:
    """What this process holds now. The threads of asyncio's own pool, a handful, are kept by it and not counted."""
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate()),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "shared_memory": len(set(re.findall(r"/dev/shm/.*", Path("/proc/self/maps").read_text()))),
        "replicas": len(cluster.replicas),
    }


async def leaked(cluster: InProcess, before: dict[str, int]) -> dict[str, int]:
    """What there is more of than before, once nothing goes away any more or `SETTLE_S` are over."""
    deadline_s = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        now = held(cluster)
        more = {name: count - before[name] for name, count in now.items() if count > before[name]}
        if not more or asyncio.get_running_loop().time() > deadline_s:
            return more
        await asyncio.sleep(0.5)
