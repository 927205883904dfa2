"""What a control plane counts as open: in the core, at the manager and in the engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from deployments.cluster.core import ClusterCore
from deployments.manager.calls import Status
from deployments.manager.manager import SessionManager
from deployments.replica.replica import Replica
from load_tests.harness.control_plane.gates import GatedEngine


async def open_sessions(core: ClusterCore, manager: SessionManager) -> dict[str, Any]:
    """What is open in the core and at the manager, by name; empty when nothing is."""
    status = await manager.ask(Status())
    found = {"core": core.open_sessions, **status["sessions"], "promises": status["promises"]}
    del found["closed"]
    return {name: value for name, value in found.items() if value}


async def held_by_replicas(
    replicas: Mapping[str, Replica],
    engines: Mapping[str, GatedEngine],
    manager: SessionManager,
    overcommit: float,
    dead: Collection[str],
) -> dict[str, Any]:
    """What the replicas hold, as they and the manager count it; empty when nothing is held."""
    found: dict[str, Any] = {}
    status = await manager.ask(Status())
    loads = {name: each["load"] for pool in status["pools"].values() for name, each in pool["replicas"].items()}
    for name, replica in replicas.items():
        if name in dead:
            continue
        if not loads.get(name):
            found[name] = "has not reported again since it was called lost"
            continue
        numbers, load = status["replicas"][name], loads[name]
        counters = await replica.counters()
        each = {key: numbers[key] for key in ("used_blocks", "running", "waiting", "sessions")}
        each |= {key: counters[key] for key in ("open_receiving", "open_writing")}
        capacity = int(load["total_blocks"] * overcommit)
        each |= {"reserved": capacity - load["free_blocks"], "engine": engines[name].used_blocks}
        found |= {f"{name} {key}": value for key, value in each.items() if value}
    return found
