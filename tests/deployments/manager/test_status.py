"""What the manager counts. What it shows of replicas and promises is tested with the manager."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from configs.schema import BatonConfig, MockEngineConfig, PoolConfig
from deployments.fleet.flow import WINDOW_S
from deployments.manager.status import Counts, ready
from deployments.messages import (
    Admit,
    Forecast,
    Mode,
    Phase,
    Placement,
    Reject,
    ReplicaInfo,
    ReplicaSnapshot,
    Role,
)
from deployments.policy.allocator import Allocator

DECODE = ReplicaInfo("d0", "decode-main", Role.DECODE, "node", "engine", 16, 100, 8, 1000)


def test_decisions_are_counted_by_mode_and_by_code() -> None:
    counts = Counts()
    counts.decided(Admit(Placement("a", 1, Mode.DECODE_LOCAL, "", DECODE, None, 10, 60.0, 600.0)))
    counts.decided(Reject("too long"))
    for _ in range(2):
        counts.decided(Reject("full", 1.0, code="queue_full"))
    assert counts.modes == {"decode_local": 1}
    assert counts.rejects == {"never_fits": 1, "queue_full": 2}


def test_a_close_that_closed_nothing_is_not_counted() -> None:
    counts = Counts()
    counts.closed("finished", 0)
    assert counts.outcomes == {}
    counts.closed("cancelled", 2)
    counts.closed("cancelled", 1)
    assert counts.outcomes == {"cancelled": 3}


def test_a_replica_s_load_says_what_it_computes_writes_and_has_become() -> None:
    pool = PoolConfig(engine=MockEngineConfig(block_size=16))
    config = BatonConfig(prefill=pool, decode={"main": pool})
    allocator = Allocator(config, random.Random(1))
    allocator.report(ReplicaSnapshot("d0", 1, Phase.READY, DECODE), 0.0)
    for session_id in ("a", "b"):
        placement = Placement(session_id, 1, Mode.DECODE_LOCAL, "", DECODE, None, 10, 60.0, 600.0)
        allocator.fleet.reserve(replace(placement, forecast=Forecast(prefill_s=1.0)), 160, 0.0)
    allocator.prefill_done("a", 1, 0.0)
    load = ready(allocator, 0.0)["pools"]["decode-main"]["replicas"]["d0"]["load"]
    assert (load["prompts"], load["answers"], load["prefill_load"]) == (1, 1, 2.0 / WINDOW_S)
    load = ready(allocator, WINDOW_S)["pools"]["decode-main"]["replicas"]["d0"]["load"]
    assert load == {}, "it is stale"
    allocator.report(ReplicaSnapshot("d0", 2, Phase.READY, DECODE, sessions=("a", "b")), WINDOW_S)
    load = ready(allocator, WINDOW_S)["pools"]["decode-main"]["replicas"]["d0"]["load"]
    assert load["prefill_load"] == pytest.approx(2.0 / WINDOW_S / math.e, abs=1e-3)
