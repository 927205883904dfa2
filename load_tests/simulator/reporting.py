"""What a simulated replica reports, in the messages of a real one."""

from __future__ import annotations

from deployments.messages import CacheChange, Phase, ReplicaSnapshot
from load_tests.simulator.replica import Replica

TIER_BYTES_PER_S = 40e9
"""What a load from main memory has of PCIe 5.0 x16, whose data sheet says 63e9."""
SEEN = {"tier_loaded_bytes": 100 * TIER_BYTES_PER_S, "tier_load_s": 100.0}
"""What a replica with a tier has loaded before."""


class Reporter:
    """Makes a replica's snapshots.

    `changed`: it has something new. `reported_s`: the time of the newest snapshot. `phase`: what it says that it does.
    """

    def __init__(self, replica: Replica) -> None:
        self.phase = Phase.READY
        self.changed = True
        self.reported_s = 0.0
        self._replica = replica
        self._version = 0
        self._changes = 0

    def snapshot(self, now_s: float) -> ReplicaSnapshot:
        """Its load now, and what has happened since the last snapshot."""
        replica = self._replica
        steps, growth = replica.decoded_now(now_s)
        batch, memory = replica.batch, replica.memory
        self._version += 1
        self.changed, self.reported_s = False, now_s
        return ReplicaSnapshot(
            replica_id=replica.info.replica_id,
            version=self._version,
            phase=self.phase,
            info=replica.info,
            used_blocks=memory.used + growth,
            running=replica.seats_taken,
            waiting=len(replica.waiting),
            backlog_tokens=replica.backlog_tokens,
            sessions=tuple(replica.sessions),
            reservations=tuple(work.reservation for work in replica.sessions.values()),
            pool=replica.info.pool,
            running_tokens=batch.context + steps * len(batch),
            cached_blocks=memory.idle,
            finished=tuple(replica.log.finished),
            finished_version=replica.log.finished_count,
            steps=replica.log.take_samples(),
            cache=self._cache(),
            held_tokens=tuple(batch.held_tokens(work, steps) for work in replica.sessions.values()),
            movable=frozenset(replica.sessions),
            counters=dict(SEEN) if memory.tier_blocks else {},
        )

    def _cache(self) -> CacheChange | None:
        stored, removed, left, returned = self._replica.memory.changes()
        whole = self._changes == 0
        if not (whole or stored or removed or left or returned):
            return None
        self._changes += 1
        return CacheChange(self._changes, stored, removed, whole, left, returned)
