"""The replicas that an operator drains: they get nothing new, and their sessions move to others with room. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from deployments.messages import Phase, ReplicaInfo, ReplicaSnapshot


class Cordon:
    """Who drains, and what a replica is told of it. A drained replica keeps to it by itself when a manager restarts."""

    def __init__(self) -> None:
        self._drained: set[str] = set()
        self._untold: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._drained)

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._drained

    def __iter__(self) -> Iterator[str]:
        return iter(self._drained)

    def drain(self, replica_id: str) -> None:
        """Place nothing there any more; idempotent."""
        self._drained.add(replica_id)
        self._untold[replica_id] = True

    def resume(self, replica_id: str) -> None:
        """Place sessions there again; idempotent."""
        self._drained.discard(replica_id)
        self._untold[replica_id] = False

    def told(self, snapshot: ReplicaSnapshot) -> bool | None:
        """Whether a replica that reports this must drain (True) or resume (False); None: it stays as it is."""
        wish = self._untold.get(snapshot.replica_id)
        if wish is not None and wish == (snapshot.phase is Phase.DRAINING):
            del self._untold[snapshot.replica_id]
            return None
        return wish

    def forget(self, replica_id: str) -> None:
        """The replica is gone."""
        self._drained.discard(replica_id)
        self._untold.pop(replica_id, None)

    def refusal(self, replica: ReplicaInfo, ready: Collection[ReplicaInfo]) -> str:
        """Why this replica cannot be drained: no other that is ready does what it does; "" where it can."""
        others = [each for each in ready if each.replica_id != replica.replica_id and each.replica_id not in self]
        if replica.decodes and not any(each.decodes for each in others):
            return "no other replica is ready that writes answers"
        if replica.prefills and not any(each.prefills for each in others):
            return "no other replica is ready that computes prompts"
        return ""
