"""What is expected of one request on each replica, and the requests that a pool takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deployments.fleet.columns import Columns, ReplicaView
from deployments.messages import ReplicaInfo, Role, SessionRequest
from deployments.policy.placement.estimates import Outlook
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.limits import Limits
from deployments.step_cost import Coefficients

FAST = Coefficients(1e-2, 1e-4, 1e-8, 1e-3, 1e-6)
SLOW = Coefficients(*(3 * value for value in FAST))
REQUEST = SessionRequest("a", 100, 200)
NOW_S = 50.0


def info(name: str, pool: str = "fast", **more: Any) -> ReplicaInfo:
    shape = {"block_size": 16, "chunk_tokens": 64, "kv_bytes_per_token": 1000, **more}
    return ReplicaInfo(
        name, pool, Role.DECODE, "node", "engine", total_blocks=100, max_sessions=8, max_model_len=2048, **shape
    )


def outlook_of(
    *views: ReplicaView, hits: dict[str, int] | None = None, output_tokens: float = 0.0, prompt_tokens: int = 100
) -> Outlook:
    columns = Columns(capacity=1)
    columns.learn({"fast": FAST, "slow": SLOW})
    for view in views:
        columns.put(view)
    knowledge = Knowledge(hits=hits or {}, output_tokens=output_tokens)
    return Outlook(replace(REQUEST, prompt_tokens=prompt_tokens), columns, knowledge, NOW_S)


def idle(name: str, pool: str = "fast", **more: Any) -> ReplicaView:
    return ReplicaView(info(name, pool, **more), 100, 0, 0)


@pytest.mark.parametrize(
    ("limits", "taken"),
    [
        pytest.param(Limits(), True, id="none"),
        pytest.param(Limits(100, 100), True, id="just long enough, and not too long"),
        pytest.param(Limits(min_prompt_tokens=101), False, id="too short"),
        pytest.param(Limits(max_prompt_tokens=99), False, id="too long"),
        pytest.param(Limits(classes=frozenset({"batch", "chat"})), True, id="its class"),
        pytest.param(Limits(classes=frozenset({"batch"})), False, id="another class"),
        pytest.param(Limits(adapters=frozenset({"french", "law"})), True, id="its adapter"),
        pytest.param(Limits(adapters=frozenset({"french"})), False, id="another adapter"),
    ],
)
def test_a_pool_takes_the_requests_within_its_limits(limits: Limits, taken: bool) -> None:
    assert limits.take(replace(REQUEST, priority="chat", adapter="law")) is taken


def test_a_request_without_an_adapter_is_taken_where_adapters_are() -> None:
    assert Limits(adapters=frozenset({"french"})).take(REQUEST)


def test_hits_are_tokens_by_each_block_size_and_those_of_unknown_replicas_do_not_count() -> None:
    views = idle("d0"), idle("d1", block_size=32), idle("d2")
    outlook = outlook_of(*views, hits={"d1": 2, "gone": 5, "d0": 3})
    assert outlook.cached_tokens[:3].tolist() == [48.0, 64.0, 0.0]
    assert [outlook.cached_on(row) for row in range(3)] == [48, 64, 0]
    assert outlook.kv_bytes(np.arange(3)).tolist() == [52_000.0, 36_000.0, 100_000.0]


def test_the_last_position_is_computed_though_the_whole_prompt_is_cached() -> None:
    outlook = outlook_of(idle("d0"), hits={"d0": 50})
    assert outlook.cached_on(0) == 99
    assert outlook.prefill_s[0] == pytest.approx(FAST.prefill_s(100, 99, 64))
    assert outlook.kv_bytes(np.arange(1)).tolist() == [1000.0]


def test_where_nothing_is_cached_the_whole_prompt_is_computed_and_moves() -> None:
    outlook = outlook_of(idle("d0"), idle("d1", "slow"), idle("d2", chunk_tokens=25))
    assert outlook.prefill_s[:3].tolist() == pytest.approx(
        [FAST.prefill_s(100, 0, 64), SLOW.prefill_s(100, 0, 64), FAST.prefill_s(100, 0, 25)]
    )
    assert outlook.beside_s[:2].tolist() == pytest.approx([FAST.beside_s(100, 0), SLOW.beside_s(100, 0)])
    assert outlook.kv_bytes(np.arange(1)).tolist() == [100_000.0]


def test_a_queue_lasts_until_it_is_computed_and_at_least_as_long_as_the_prompts_behind_the_first() -> None:
    busy = idle("d1")._replace(busy_until_s=NOW_S + 4.0, behind_s=1.0)
    late = idle("d2")._replace(busy_until_s=NOW_S + 4.0, behind_s=6.0)
    assert outlook_of(idle("d0"), busy, late).queue_s[:3].tolist() == [0.0, 4.0, 6.0]


def test_a_step_grows_by_the_sequence_and_by_what_it_holds_halfway() -> None:
    outlook = outlook_of(idle("d0"), idle("d1", "slow")._replace(sessions=2, held_tokens=500.0), output_tokens=60.0)
    added = 1e-3 + 130 * 1e-6
    assert outlook.added_step_s[:2].tolist() == pytest.approx([added, 3 * added])
    assert outlook.step_s[:2].tolist() == pytest.approx([1e-2 + added, 3 * (1e-2 + 2e-3 + 5e-4 + added)])


def test_the_fill_counts_the_prompt_and_the_expected_answer_in_whole_blocks() -> None:
    outlook = outlook_of(idle("d0"), idle("d1")._replace(expected_blocks=40), output_tokens=61.0)
    assert outlook.fill[:2].tolist() == pytest.approx([0.11, 0.51])
