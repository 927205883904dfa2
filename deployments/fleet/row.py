"""A replica's row for policy, from its newest snapshot and from what the ledger has reserved on it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.fleet.columns import ReplicaView
from deployments.fleet.flow import Flow
from deployments.fleet.ledger import Share
from deployments.messages import Phase, ReplicaInfo, ReplicaSnapshot

EMPTY_SHARE = 0.1
"""A replica with KV in fewer of its blocks counts as empty."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A snapshot and when it came. `listed`: its sessions as a set, to look one up."""

    snapshot: ReplicaSnapshot
    at_s: float
    listed: frozenset[str]

    @property
    def is_placeable(self) -> bool:
        """Whether the replica takes sessions, as far as it has said itself."""
        return self.snapshot.info is not None and self.snapshot.phase is Phase.READY

    @property
    def is_empty(self) -> bool:
        """Whether hardly any of its blocks have KV."""
        info, held = self.snapshot.info, self.snapshot.used_blocks + self.snapshot.cached_blocks
        return info is not None and held < EMPTY_SHARE * info.total_blocks


def row_of(arrival: Arrival, share: Share, overcommit: float, flow: Flow, set_aside: int = 0) -> ReplicaView:
    """A replica's load: the larger of what is reserved and what it reports.

    `set_aside`: blocks for prefixes that are pinned there, or are to be. They are promised to no session.
    """
    snapshot, info = arrival.snapshot, arrival.snapshot.info
    assert info is not None, "only a replica that has reported its shape gets a row"
    reserved, sessions = share.blocks, share.sessions
    for promise in share.released.values():  # closed, but the engine has not freed its blocks
        if not promise.finished and promise.placement.session_id in arrival.listed:
            reserved += promise.reservation(info.replica_id).blocks
            sessions += 1
    pinned = max(set_aside, snapshot.pinned_blocks)
    taken = max(reserved + pinned, snapshot.used_blocks)
    head_s = next(iter(share.prompts.values()), None)
    return ReplicaView(
        info=info,
        free_blocks=max(0, reservable(info, overcommit) - taken),
        sessions=max(sessions, snapshot.running + snapshot.waiting),
        backlog_tokens=share.backlog_tokens,
        busy_until_s=0.0 if head_s is None else share.begun_s + share.work_s,
        behind_s=0.0 if head_s is None else max(0.0, share.work_s - head_s),
        expected_blocks=max(share.expected_blocks + pinned, snapshot.used_blocks),
        held_tokens=float(max(share.held_tokens, snapshot.running_tokens)),
        pending=share.pending,
        prompts=len(share.prompts),
        tpot_s=min(share.objectives, default=0.0),
        flow_prompts=flow.prompts,
        flow_s=flow.seconds,
        flow_moves=flow.moves,
        flow_bytes=flow.bytes,
        flow_at_s=flow.at_s,
        loaded_bytes=snapshot.counters.get("tier_loaded_bytes", 0.0),
        load_s=snapshot.counters.get("tier_load_s", 0.0),
        fetched_bytes=snapshot.counters.get("blocks_fetched", 0.0) * info.block_size * info.kv_bytes_per_token,
        fetch_s=snapshot.counters.get("fetch_s", 0.0),
    )


def reservable(info: ReplicaInfo, overcommit: float) -> int:
    """The blocks of a replica that may be reserved."""
    return int(info.total_blocks * overcommit) if info.decodes else info.total_blocks
