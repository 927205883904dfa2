"""What the session manager shows of itself, for `/ready` and `/baton/status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from deployments.fleet.columns import ReplicaView
from deployments.fleet.flow import per_s
from deployments.fleet.promise import Promise
from deployments.manager.scaling import Scaling
from deployments.messages import MOVED, Admit, Phase, Reject, ReplicaSnapshot
from deployments.policy.allocator import Allocator
from deployments.policy.placement.place import HANDOFF_FAILED

REASONS = ("split", MOVED, HANDOFF_FAILED, "short prompt", "one replica", "cheaper on one replica")
"""Those that `policy.placement.place` gives; any other is the name of a rule, or a sentence."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Sessions since the manager began: placed, by mode, also with reason; rejected, by code; closed, by outcome."""

    modes: Counter[str] = field(default_factory=Counter)
    placements: Counter[tuple[str, str]] = field(default_factory=Counter)
    rejects: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def decided(self, decision: Admit | Reject) -> None:
        """Count a session that was placed or rejected."""
        if isinstance(decision, Admit):
            mode = decision.placement.mode.value
            self.modes[mode] += 1
            self.placements[mode, _label(decision.placement.reason)] += 1
        else:
            self.rejects[decision.code or "never_fits"] += 1

    def closed(self, outcome: str, sessions: int) -> None:
        """Count `sessions` sessions that were closed."""
        if sessions:
            self.outcomes[outcome] += sessions


def _label(reason: str) -> str:
    """The reason of a placement as a label. A sentence, which may hold numbers, says why it could not be split."""
    return reason if reason in REASONS or reason.isidentifier() else "cannot be split now"


def ready(allocator: Allocator, now_s: float, may_be_empty: Collection[str] = ()) -> dict[str, Any]:
    """See `calls.Ready`. `may_be_empty`: pools that may have no replica, so they are always ready."""
    loads = {view.info.replica_id: _load(view, now_s) for view in allocator.fleet.view(now_s).ready}
    pools = {
        pool: {
            "ready": pool in may_be_empty
            or any(replica.fresh and replica.phase is Phase.READY for replica in replicas.values()),
            "replicas": {
                replica_id: {
                    "phase": replica.phase.value,
                    "age_s": round(replica.age_s, 3),
                    "fresh": replica.fresh,
                    "load": loads.get(replica_id, {}),
                }
                for replica_id, replica in replicas.items()
            },
        }
        for pool, replicas in allocator.fleet.phases(now_s).items()
    }
    return {"ready": all(pool["ready"] for pool in pools.values()), "pools": pools}


def status(
    allocator: Allocator,
    counts: Counts,
    now_s: float,
    may_be_empty: Collection[str] = (),
    scaling: Scaling | None = None,
) -> dict[str, Any]:
    """See `calls.Status`."""
    return {
        **overview(allocator, counts, now_s, may_be_empty, scaling),
        "predictions": allocator.predictors.describe(),
        "promises": [_promise(promise, now_s) for promise in allocator.fleet.promises()],
        "replicas": {name: _numbers(each) for name, each in allocator.fleet.snapshots().items()},
    }


def overview(
    allocator: Allocator,
    counts: Counts,
    now_s: float,
    may_be_empty: Collection[str] = (),
    scaling: Scaling | None = None,
) -> dict[str, Any]:
    """See `calls.Overview`."""
    return {
        **ready(allocator, now_s, may_be_empty),
        "scaling": None if scaling is None else scaling.explain(),
        "sessions": {
            "open": len(allocator.fleet.promises()),
            "queued": len(allocator.room),
            "closed": dict(counts.outcomes),
        },
        "modes": dict(counts.modes),
        "rejects": dict(counts.rejects),
        "breakers": {name: round(left_s, 3) for name, left_s in allocator.breakers.shut(now_s).items()},
        "waiting": allocator.room.queued(),
        "flows": _flows(allocator.fleet.promises()),
    }


def _flows(promises: Collection[Promise]) -> list[dict[str, Any]]:
    """Sessions by the pools of the replicas that compute the prompt and write the answer."""
    found = Counter(
        (promise.placement.prefiller.pool, promise.placement.owner.pool, promise.prefilling) for promise in promises
    )
    pairs = sorted({(prefill, decode) for prefill, decode, _ in found})
    return [
        {"prefill": each[0], "decode": each[1], "prefilling": found[(*each, True)], "writing": found[(*each, False)]}
        for each in pairs
    ]


def _load(view: ReplicaView, now_s: float) -> dict[str, Any]:
    """What placement sees of a replica.

    `prompts`, `answers`: what it computes and writes now. `prefill_load`: the share of its time that it has computed
    prompts lately. So it shows what a replica of any role has become.
    """
    info = view.info
    return {
        "total_blocks": info.total_blocks,
        "free_blocks": view.free_blocks,
        "sessions": view.sessions,
        "max_sessions": info.max_sessions,
        "backlog_tokens": view.backlog_tokens,
        "prompts": view.prompts,
        "answers": view.answers,
        "prefill_load": round(per_s(view.flow_s, view.flow_at_s, now_s), 3),
    }


def _numbers(snapshot: ReplicaSnapshot) -> dict[str, Any]:
    """What a replica says of itself."""
    info = snapshot.info
    return {
        "pool": info.pool if info else snapshot.pool,
        "role": info.role.value if info else None,
        "node_id": info.node_id if info else None,
        "phase": snapshot.phase.value,
        "version": snapshot.version,
        "total_blocks": info.total_blocks if info else 0,
        "used_blocks": snapshot.used_blocks,
        "pinned_blocks": snapshot.pinned_blocks,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "backlog_tokens": snapshot.backlog_tokens,
        "sessions": len(snapshot.sessions),
        "counters": dict(snapshot.counters),
    }


def _promise(promise: Promise, now_s: float) -> dict[str, Any]:
    placement = promise.placement
    return {
        "session_id": placement.session_id,
        "epoch": placement.epoch,
        "mode": placement.mode.value,
        "reason": placement.reason,
        "decode": placement.decode.replica_id if placement.decode else None,
        "prefill": placement.prefill.replica_id if placement.prefill else None,
        "reserved_blocks": placement.reserved_blocks,
        "prompt_tokens": promise.prompt_tokens,
        "prefilling": promise.prefilling,
        "cached_tokens": placement.cached_tokens,
        "forecast": asdict(placement.forecast),
        "age_s": round(now_s - promise.at_s, 3),
    }
