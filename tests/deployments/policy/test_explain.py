"""What would become of a request: the decision that `open` would take, and no book changes."""

from __future__ import annotations

import pickle

from configs.schema import ClassConfig
from deployments.messages import Admit
from deployments.policy.admission.poison import POISON
from deployments.policy.allocator import Allocator
from deployments.policy.explain import explain
from tests.deployments.policy.test_allocator import allocator_of, ask, info


def books(allocator: Allocator) -> bytes:
    """All that is remembered, without the generator that decides between equals."""
    rng, allocator.decider._rng = allocator.decider._rng, None  # type: ignore[assignment]
    try:
        return pickle.dumps(
            (
                [promise.placement for promise in allocator.fleet.promises()],
                allocator._sessions,
                allocator.room.queued(),
                allocator.predictors.lengths._pending,
                allocator.predictors.demand.__dict__,
                allocator.predictors._affinities,
                allocator.entry._withdrawn,
            )
        )
    finally:
        allocator.decider._rng = rng


def test_it_takes_the_decision_that_opening_takes_and_changes_nothing() -> None:
    allocator = allocator_of(info("p0"), info("d0"))
    request = ask("a", affinity="talk", hashes=(1, 2))
    before = books(allocator)
    found = explain(allocator, request, 0.0)
    assert books(allocator) == before
    opened = allocator.open(request, 0.0)
    assert isinstance(opened, Admit)
    assert books(allocator) != before, "the books show an opening"
    placement = opened.placement
    equals = [
        (each["mode"], each["prefill"], each["decode"])
        for each in found["candidates"]
        if each["cost_s"] <= found["candidates"][0]["cost_s"] + found["near_s"]
    ]
    named = [each.replica_id if each else None for each in (placement.prefill, placement.decode)]
    assert (placement.mode.value, *named) in equals, "one of the equal ways is drawn, each time anew"
    decision = found["decision"]
    assert (decision["mode"], decision["prefill"], decision["decode"]) in equals
    assert (decision["outcome"], decision["reserved_blocks"]) == ("placed", placement.reserved_blocks)
    assert (found["policy"], found["request"]["class"]) == ("joint", "default")


def test_behind_others_it_waits_as_they_do() -> None:
    allocator = allocator_of(info("p0"), info("d0", total_blocks=20))
    assert isinstance(allocator.open(ask("a"), 0.0), Admit)
    found = explain(allocator, ask("b"), 0.0)
    assert found["decision"]["outcome"] == "waits"
    assert "20 needed, at most 0 free" in found["decision"]["reason"]
    assert found["passed_over"], "and the replicas say why"
    assert allocator.open(ask("b"), 0.0) is None
    assert explain(allocator, ask("c", answer=16), 0.0)["decision"]["reason"] == "1 requests wait before it"


def test_what_is_refused_is_refused_here_too() -> None:
    allocator = allocator_of(info("p0"), info("d0"), classes={"fast": ClassConfig(ttft_s=1.0)}, default_class="fast")
    unknown = explain(allocator, ask("a", priority="none"), 0.0)
    assert set(unknown) == {"decision"}
    assert (unknown["decision"]["outcome"], unknown["decision"]["code"]) == ("refused", "unknown_class")
    never = explain(allocator, ask("b", prompt=100_000), 0.0)
    assert never["decision"]["outcome"] == "refused"
    assert "the largest replica holds" in never["decision"]["reason"]
    assert never["request"]["ttft_s"] == 1.0
    allocator.entry._poison._refused[7] = 60.0
    assert explain(allocator, ask("c", digest=7), 0.0)["decision"]["code"] == POISON


def test_other_policies_give_their_decision_without_a_price() -> None:
    allocator = allocator_of(info("p0"), info("d0"), policy="round_robin")
    found = explain(allocator, ask("a"), 0.0)
    assert found["decision"]["outcome"] == "placed"
    assert "candidates" not in found
