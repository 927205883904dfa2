"""What the ingress measures of a session: every time once, and parts that add up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from deployments.cluster import meter
from deployments.cluster.meter import QUEUED, SCHEDULED, Meter, SessionMeter
from deployments.errors import Moved
from deployments.messages import Forecast, Mode, Placement, ReplicaInfo, Role
from deployments.metrics.registry import Registry

FORECAST = Forecast(ttft_s=1.0, tpot_s=0.5)


@dataclass
class Event:
    type: int
    timestamp: float


@dataclass
class Stats:
    num_prompt_tokens: int = 40
    num_computed_tokens: int = 24
    num_cached_tokens: int = 16
    num_local_cached_tokens: int = 16
    num_external_cached_tokens: int = 0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meter, "monotonic", clock)
    return clock


def replica(pool: str) -> ReplicaInfo:
    return ReplicaInfo(pool + "-0", pool, Role.DECODE, "node", "print", 16, 10, 4, 512, ())


def placement(pool: str) -> Placement:
    return Placement("s", 1, Mode.DECODE_LOCAL, "split", replica(pool), None, 4, 1.0, 1.0, forecast=FORECAST)


def shown(registry: Registry, name: str) -> dict[tuple[str, ...], float]:
    """The values of a name by its labels' values, without those of the model; a bucket's are left out."""
    return {
        tuple(value for _, value in each.labels[1:]): each.value for each in registry.samples() if each.name == name
    }


def answered(clock: Clock) -> Registry:
    """A session that waits, is computed, moves and ends: 2 s to its first token, then gaps of 0.25, 1 and 0.25 s."""
    registry = Registry(model_name="m")
    session = SessionMeter(Meter(registry), 40, arrived_s=clock.now_s)
    clock.now_s += 0.5
    session.placed(placement("decode-a"), "")
    clock.now_s += 1.5
    session.took(Role.DECODE, [Event(QUEUED, 7.0), Event(SCHEDULED, 7.25)], 8.0)
    session.gave(1, Stats())
    clock.now_s += 0.25
    session.gave(1, None)
    session.again("move", Moved("it goes elsewhere"))
    clock.now_s += 0.5
    session.placed(placement("decode-b"), "")
    clock.now_s += 0.5
    session.took(Role.DECODE, [Event(QUEUED, 1.0), Event(SCHEDULED, 2.0)], 3.0)
    session.gave(1, Stats())
    clock.now_s += 0.25
    session.gave(2, None)
    session.ended("disaggregated", "length")
    return registry


def test_a_session_that_moves_has_one_first_token_and_one_end(clock: Clock) -> None:
    registry = answered(clock)
    assert shown(registry, "vllm_time_to_first_token_seconds_count") == {("decode-a",): 1}
    assert shown(registry, "vllm_time_to_first_token_seconds_sum") == {("decode-a",): 2.0}
    assert shown(registry, "vllm_e2e_request_latency_seconds_sum") == {("decode-b",): 3.5}
    assert shown(registry, "vllm_request_success") == {("decode-b", "length"): 1}
    assert shown(registry, "vllm_generation_tokens") == {("decode-a",): 2, ("decode-b",): 3}
    assert shown(registry, "vllm_prompt_tokens") == {("decode-a",): 40}
    assert shown(registry, "vllm_request_prefill_kv_computed_tokens_sum") == {("decode-b",): 24}
    assert shown(registry, "baton_sessions_placed_again") == {("decode-a", "move", "Moved"): 1}


def test_the_parts_of_the_first_token_add_up(clock: Clock) -> None:
    registry = answered(clock)
    parts = {part: seconds for (_, part), seconds in shown(registry, "baton_ttft_seconds").items()}
    assert parts == {
        "frontend": 0.0,
        "placement": 0.5,
        "queue": 0.25,
        "prefill": 0.75,
        "handoff": 0.0,
        "delivery": 0.5,
    }
    assert sum(parts.values()) == sum(shown(registry, "vllm_time_to_first_token_seconds_sum").values())


def test_gaps_count_over_a_move_and_the_mean_is_over_the_whole_answer(clock: Clock) -> None:
    registry = answered(clock)
    assert sum(shown(registry, "vllm_inter_token_latency_seconds_sum").values()) == 1.5
    assert sum(shown(registry, "vllm_inter_token_latency_seconds_count").values()) == 3
    assert shown(registry, "vllm_request_time_per_output_token_seconds_sum") == {("decode-b",): 1.5 / 4}
    assert shown(registry, "vllm_request_decode_time_seconds_sum") == {("decode-b",): 1.5}
    assert shown(registry, "baton_ttft_prediction_ratio_sum") == {("decode-a",): 1.5}


def test_where_decode_pulls_the_handoff_is_a_part_of_the_first_token(clock: Clock) -> None:
    registry = Registry(model_name="m")
    session = SessionMeter(Meter(registry), 40)
    session.placed(replace(placement("a"), forecast=Forecast()), "")
    clock.now_s += 1.0
    session.prefilled()
    clock.now_s += 0.5
    session.gave(1, None)
    parts = {part: seconds for (_, part), seconds in shown(registry, "baton_ttft_seconds").items()}
    assert (parts["prefill"], parts["handoff"], parts["delivery"]) == (1.0, 0.5, 0.0)
    assert shown(registry, "baton_ttft_prediction_ratio_count") == {}, "nothing was predicted"
    session.ended("disaggregated", "length")
    assert shown(registry, "vllm_request_prompt_tokens_count") == {("a",): 1}
    assert shown(registry, "vllm_request_prefill_kv_computed_tokens_count") == {}, "its engine did not say"


@pytest.mark.parametrize(("overtakes", "gaps"), [(False, {("a",): 0.5}), (True, {})])
def test_the_gap_of_a_handoff_counts_once(clock: Clock, overtakes: bool, gaps: dict[tuple[str, ...], float]) -> None:
    registry = Registry(model_name="m")
    session = SessionMeter(Meter(registry), 40)
    session.placed(replace(placement("a"), prefill=replica("prefill")), "")
    if overtakes:
        session.took(Role.DECODE, None, 1.0)
    session.took(Role.PREFILL, None, 1.0)
    session.gave(1, None)
    for _ in range(2):
        clock.now_s += 0.5
        session.took(Role.DECODE, None, 1.0)
        session.gave(1, None)
    assert shown(registry, "baton_handoff_gap_seconds_sum") == gaps


def test_what_never_had_a_place_is_no_answer(clock: Clock) -> None:
    del clock
    registry = Registry(model_name="m")
    session = SessionMeter(Meter(registry), 40)
    session.gave(1, None)
    session.ended("", "failed")
    assert list(registry.samples()) == []
