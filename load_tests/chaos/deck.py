"""Which faults the real cluster gets, and what its processes hold."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from load_tests.harness.processes import marked

KILLS = ("kill decode-large", "kill prefill", "kill decode-small", "kill engine decode-large", "kill ingress")
"""Each of these, and the kill of the session manager, comes once in forty faults: a restart takes most of a minute."""
KILL_MANAGER = "kill session-manager"
EACH_KILL = 40
OFTEN = (
    "stop engine prefill",
    "stop engine decode-small",
    "stop engine decode-large",
    "stop prefill",
    "stop decode-small",
    "stop decode-large",
    "stop session-manager",
    "stop ingress",
    "leave",
    "leave",
    "leave",
)

GRPC_POOLS = ("event_engine", "default-executo", "resolver-execut")
"""The names of the threads of gRPC's pools, shortened as the kernel shortens them."""


def deck(faults: int, draw: random.Random) -> list[str]:
    """`faults` faults in random order. At least one kills a decode replica."""
    kills = [kill for kill in (*KILLS, KILL_MANAGER) for _ in range(round(faults / EACH_KILL))] or [KILLS[0]]
    lesser = [OFTEN[number % len(OFTEN)] for number in range(max(0, faults - len(kills)))]
    cards = kills[:faults] + lesser
    draw.shuffle(cards)
    return cards


def held(marker: str) -> Counter[str]:
    """The number of processes, and the total threads and descriptors of those processes that serve.

    The threads of gRPC's pools, under Ray, come and go with its load and do not count.
    """
    count = Counter[str]()
    for pid, line in marked(marker).items():
        count["processes"] += not line.startswith("ray::IDLE")
        if line.startswith(("ray::ServeReplica:baton", "VLLM::")):
            try:
                names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
                count["threads"] += sum(name not in GRPC_POOLS for name in names)
                count["descriptors"] += len(list(Path(f"/proc/{pid}/fd").iterdir()))
            except OSError:  # the process has just ended
                continue
    return count
