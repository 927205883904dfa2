"""Drains replicas for an operator, and puts them back."""

from __future__ import annotations

from typing import Any

from deployments.manager.calls import Drain
from deployments.policy.allocator import Allocator


def drain(allocator: Allocator, call: Drain, now_s: float) -> dict[str, Any]:
    """See `calls.Drain`."""
    replica_id, snapshot = call.replica_id, allocator.fleet.snapshots().get(call.replica_id)
    if snapshot is None or snapshot.info is None:
        return {"replica": replica_id, "refused": "no such replica is up", "known": False}
    if call.resume:
        allocator.cordon.resume(replica_id)
    elif replica_id not in allocator.cordon:
        ready = [view.info for view in allocator.fleet.view(now_s).ready]
        if why := allocator.cordon.refusal(snapshot.info, ready):
            return {"replica": replica_id, "refused": why, "known": True}
        allocator.cordon.drain(replica_id)
    sessions = sum(replica_id in promise.replica_ids for promise in allocator.fleet.promises())
    return {"replica": replica_id, "draining": not call.resume, "sessions": sessions}
