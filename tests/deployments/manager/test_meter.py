"""What the session manager tells for Prometheus: promises against use, and what was decided."""

from __future__ import annotations

import random

from configs.schema import BatonConfig, ClassConfig, MockEngineConfig, PlacementConfig, PoolConfig, ScalingConfig
from deployments.manager.meter import ManagerMeter
from deployments.manager.scaling import Scaling
from deployments.manager.status import Counts
from deployments.messages import (
    Admit,
    Mode,
    Phase,
    Placement,
    Reject,
    ReplicaInfo,
    ReplicaSnapshot,
    Role,
    SessionRequest,
)
from deployments.metrics.registry import Registry
from deployments.policy.allocator import Allocator
from deployments.policy.scaling.reasons import Reason

CLASSES = PlacementConfig(classes={"hurried": ClassConfig(), "patient": ClassConfig()}, default_class="hurried")
DECODE = ReplicaInfo("d0", "decode-main", Role.DECODE, "node", "engine", 16, 100, 8, 1000)


def placed(session_id: str, reason: str) -> Admit:
    return Admit(Placement(session_id, 1, Mode.DECODE_LOCAL, reason, DECODE, None, 10, 60.0, 600.0))


async def test_promises_stand_beside_use_and_decisions_are_counted_once() -> None:
    pool = PoolConfig(engine=MockEngineConfig(block_size=16))
    allocator = Allocator(BatonConfig(prefill=pool, decode={"main": pool}, placement=CLASSES), random.Random(1))
    allocator.report(ReplicaSnapshot("d0", 1, Phase.READY, DECODE, used_blocks=3), 0.0)
    counts, registry = Counts(), Registry(model_name="m", policy="joint")
    for decision in (placed("a", "short prompt"), placed("b", "KV blocks are short: 9 needed, at most 3 free")):
        allocator.fleet.reserve(decision.placement, 100, 0.0)
        counts.decided(decision)
    counts.decided(Reject("full", 1.0, code="queue_full"))
    counts.closed("length", 4)
    allocator.lost("d1", 0.0)
    allocator.room.enter(SessionRequest("c", 10, 1, (Mode.DECODE_LOCAL,), priority="patient"), 0.0)
    meter = ManagerMeter(registry, allocator, counts, {"came": 3, "failed": 1, "blocks": 40}, None, lambda: 0.0)
    for _ in range(2):
        await meter.collect()
    found = {(each.name, *(value for _, value in each.labels[1:])): each.value for each in registry.samples()}
    expected = {
        ("baton_promised_blocks", "decode-main"): 20,
        ("baton_prompts_handed_on", "came"): 3,
        ("baton_prompts_handed_on", "failed"): 1,
        ("baton_blocks_handed_on",): 40,
        ("baton_used_blocks", "decode-main"): 3,
        ("baton_total_blocks", "decode-main"): 100,
        ("baton_replicas_ready", "decode-main"): 1,
        ("baton_replicas_ready", "prefill"): 0,
        ("baton_placements", "joint", "decode_local", "short prompt"): 1,
        ("baton_placements", "joint", "decode_local", "cannot be split now"): 1,
        ("baton_refusals", "queue_full"): 1,
        ("baton_placements_closed", "length"): 4,
        ("baton_sessions_open",): 2,
        ("baton_sessions_queued", "hurried"): 0,
        ("baton_sessions_queued", "patient"): 1,
        ("baton_breakers_open",): 1,
    }
    assert {key: found.get(key) for key in expected} == expected


async def test_the_plans_reasons_and_failures_are_counted() -> None:
    pool = PoolConfig(engine=MockEngineConfig(block_size=16))
    config = BatonConfig(prefill=pool, decode={"main": pool})
    allocator, registry = Allocator(config, random.Random(1)), Registry(model_name="m", policy="joint")
    scaling = Scaling(config, ScalingConfig(), allocator, lambda: 0.0)
    scaling.decisions["decode-main", "up", Reason.DECODE_TPOT] += 1
    scaling.reasons["decode-main", Reason.HOLD] += 5
    scaling.failures = 2
    meter = ManagerMeter(registry, allocator, Counts(), {}, scaling, lambda: 0.0)
    for _ in range(2):
        await meter.collect()
    found = {(each.name, *(value for _, value in each.labels[1:])): each.value for each in registry.samples()}
    assert found["baton_scaling_decisions", "decode-main", "up", "decode_tpot"] == 1
    assert found["baton_scaling_plans", "decode-main", "hold"] == 5
    assert found["baton_scaling_failures",] == 2
