"""Which faults the real cluster gets, and what its processes hold."""

from __future__ import annotations

import contextlib
import random
import re
from collections import Counter
from pathlib import Path

from load_tests.harness.processes import marked

KILLS = ("kill decode-large", "kill prefill", "kill decode-small", "kill engine decode-large", "kill ingress")
"""Each of these, and the kill of the session manager, comes once in forty faults: a restart takes most of a minute."""
KILL_MANAGER = "kill session-manager"
EACH_KILL = 40
DAMAGE = "damage tiers"
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
    DAMAGE,
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
    processes = sum(not line.startswith("ray::IDLE") for line in marked(marker).values())
    kinds = Counter[str]({"processes": processes})
    for name, count in named(marker).items():
        kinds[f"{name.split()[0]}s"] += count
    return kinds


def named(marker: str) -> Counter[str]:
    """The threads and descriptors of the processes that serve, by name; those of gRPC's pools are left out."""
    count = Counter[str]()
    for pid, line in marked(marker).items():
        if line.startswith(("ray::ServeReplica:baton", "VLLM::")):
            whose = line.split(":")[-1].split()[0]
            with contextlib.suppress(OSError):  # the process has just ended
                threads = [(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
                open_now = list(map(_target, Path(f"/proc/{pid}/fd").iterdir()))
                count.update(f"thread {name} of {whose}" for name in threads if name not in GRPC_POOLS)
                count.update(f"descriptor {name} of {whose}" for name in open_now)
    return count


def _target(descriptor: Path) -> str:
    """What a descriptor is open for, with N for each number."""
    try:
        return re.sub(r"[0-9]+", "N", str(descriptor.readlink()))
    except FileNotFoundError:
        return "closed just now"
