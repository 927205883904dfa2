"""The field: which replicas could take a request now, later, or by claim."""

from __future__ import annotations

import random

from deployments.fleet.columns import ReplicaView
from deployments.fleet.view import FleetView
from deployments.messages import ReplicaInfo, Role, SessionRequest
from deployments.policy.placement.field import Field, PlacementSettings, claimed, takes
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.limits import Limits

REQUEST = SessionRequest("a", 160, 160)


def row(name: str, free_blocks: int, total_blocks: int = 100, busy_until_s: float = 0.0) -> ReplicaView:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    info = ReplicaInfo(name, f"{role.value}-{name}", role, "node", "engine", 16, total_blocks, 8, 2048)
    return ReplicaView(info, free_blocks, 0, 0, busy_until_s=busy_until_s)


VIEW = FleetView((row("d0", 30), row("d1", 10), row("d2", 15, 15), row("p0", 0), row("p1", 0, busy_until_s=9.0)))


def here(**settings: object) -> Field:
    made = PlacementSettings(**settings)  # type: ignore[arg-type]
    return Field(REQUEST, VIEW, made, Knowledge(), random.Random(0), (1e9, 1e9))


def names(field: Field, able: object) -> set[str]:
    return {name for name, at in field.columns.rows.items() if able[at]}  # type: ignore[index]


def test_an_owner_has_room_for_the_whole_answer_and_a_helper_needs_none() -> None:
    assert names(here(), here().owners) == {"d0"}
    assert names(here(), here().helpers) == {"d0", "d1", "d2", "p0", "p1"}
    assert names(here(), here(prefill_queue_s=1.0).helpers) == {"d0", "d1", "d2", "p0"}


def test_a_pool_with_other_limits_takes_no_such_request() -> None:
    limits = {"decode-d0": Limits(max_prompt_tokens=100)}
    field = here(limits=limits)
    assert names(field, field.can_hold(160)) == {"d1", "d2", "p0", "p1"}
    assert not takes(REQUEST, VIEW.ready[0].info, limits)
    assert takes(REQUEST, VIEW.ready[1].info, limits)


def test_a_claim_is_on_the_replica_nearest_to_room_of_those_large_enough() -> None:
    assert claimed(REQUEST, VIEW) == "d0"
    assert claimed(REQUEST, VIEW.without_room_on(["d0"])) == "d1", "d2 is too small"
    assert claimed(SessionRequest("b", 2000, 2000), VIEW) is None
