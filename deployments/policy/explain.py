"""What would become of a request that came now, and why. Pure."""

from __future__ import annotations

from typing import Any

from deployments.messages import SessionRequest
from deployments.policy.allocator import Allocator
from deployments.policy.decider import OpenSession
from deployments.policy.placement.explain import decision_of


def explain(allocator: Allocator, request: SessionRequest, now_s: float) -> dict[str, Any]:
    """The decision, and what `Decider.explain` gives. No book changes, and nothing is reserved."""
    if refusal := allocator.entry.refusal(request, now_s):
        return {"decision": decision_of(refusal)}
    session = OpenSession(request, allocator.predictors.look(request), now_s)
    ahead = allocator.room.ahead_of(request, now_s) if allocator.room.holds_up(request) else 0
    return allocator.decider.explain(session, allocator.live(now_s), ahead, now_s)
