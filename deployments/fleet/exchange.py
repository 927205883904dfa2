"""Which replicas exchange KV with each other, and when a starting replica waits for its partner. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from deployments.messages import Peers, Phase, ReplicaInfo, ReplicaSnapshot, Role


def peers_of(info: ReplicaInfo, others: Iterable[ReplicaInfo | None], fetches: bool = False) -> Peers:
    """The replicas with the same fingerprint as `info` that it may exchange KV with.

    A replica that may decode gets all replicas, itself among them: any of them may write to it, and it may give a
    session up to any other that decodes. One that never decodes gets those that do. `fetches`: replicas fetch from each
    other's caches, so it gets all, too.
    """
    equal = (other for other in others if other and other.endpoints and other.fingerprint == info.fingerprint)
    endpoints = sorted(other.endpoints for other in equal if fetches or other.decodes or info.decodes)
    return Peers(zlib.crc32(repr(tuple(endpoints)).encode()), tuple(endpoints))


def is_ahead_of_partners(info: ReplicaInfo, phase: Phase, fresh: Iterable[ReplicaSnapshot]) -> bool:
    """Whether a starting replica must wait for a partner, because a pair of the old engine still serves.

    A partner has the other role and the same fingerprint. If the replica went on, Serve would stop one of the old pair
    before the new pair is whole. A replica that has loaded waits until a partner has loaded; one that is ready waits
    until a partner is ready. A mixed replica needs no partner. `fresh`: the newest snapshots of the replicas that still
    report.
    """
    if info.role is Role.MIXED:
        return False
    loaded, serving = set(), set()
    for snapshot in fresh:
        other = snapshot.info
        if other is None or snapshot.phase is Phase.DRAINING:
            continue
        loaded.add((other.role, other.fingerprint))
        if snapshot.phase is Phase.READY:
            serving.add((other.role, other.fingerprint))
    partner = Role.DECODE if info.role is Role.PREFILL else Role.PREFILL
    if (partner, info.fingerprint) in (serving if phase is Phase.READY else loaded):
        return False
    return any(role is info.role and (partner, engine) in serving for role, engine in serving)
