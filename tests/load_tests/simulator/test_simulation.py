"""The whole simulation with the production allocator: nothing is lost, caches help, links and memory matter."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from configs.schema import BatonConfig
from deployments.messages import ReplicaSnapshot
from deployments.policy.allocator import Allocator
from deployments.policy.placement import fetch as fetch_costs
from deployments.policy.placement.baselines import POLICIES
from load_tests.simulator import synthetic
from load_tests.simulator.cluster import Options
from load_tests.simulator.metrics import Classes, Objectives, Record, summarise
from load_tests.simulator.profiles import Cluster, Pool, cpu_pair, heterogeneous
from load_tests.simulator.simulation import Result, Simulation
from load_tests.simulator.traces import Trace, TraceRequest

LOOSE: Classes = (Objectives("any", ttft_s=60.0, tpot_s=10.0),)
SHORT = synthetic.Lengths(400, 1.0, least=16, most=4000)


def allocator(config: BatonConfig, rng: random.Random) -> Allocator:
    return Allocator(config, rng)


def simulate(trace: Trace, cluster: Cluster | None = None, classes: Classes = LOOSE, **options: object) -> Result:
    chosen = replace(Options(), **options)  # type: ignore[arg-type]
    return Simulation(cluster or heterogeneous(6), trace, classes, chosen, allocator).run()


def starved(cluster: Cluster, tokens: int) -> Cluster:
    """The same fleet, with decode memory for so many tokens a replica."""

    def small(pool: Pool) -> Pool:
        profile = replace(pool.profile, kv_bytes=tokens * pool.profile.kv_bytes_per_token)
        return replace(pool, profile=profile) if pool.role.value == "decode" else pool

    return replace(cluster, pools=tuple(small(pool) for pool in cluster.pools))


def slow_links(cluster: Cluster, bytes_per_s: float) -> Cluster:
    pools = tuple(replace(pool, profile=replace(pool.profile, nic_bytes_per_s=bytes_per_s)) for pool in cluster.pools)
    return replace(cluster, pools=pools)


class Restless(Allocator):
    """At every report of a replica that writes answers, one of them moves. Costs do not count."""

    def copy_to(self, snapshot: ReplicaSnapshot, now_s: float) -> None:
        """Spreads nothing."""

    def sessions_to_move(self, snapshot: ReplicaSnapshot, now_s: float) -> tuple[str, ...]:
        able = [each for each, held in zip(snapshot.sessions, snapshot.held_tokens, strict=True) if held]
        return tuple(able[:1])


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@pytest.mark.parametrize("call_s", [0.0, 0.01])
def test_sessions_that_move_are_answered_to_the_end_once_and_all_memory_is_free(call_s: float) -> None:
    trace = synthetic.conversations(30.0, 80, seed=2, pause_s=1.0)
    options = replace(Options(), call_s=call_s)
    result = Simulation(heterogeneous(6), trace, LOOSE, options, Restless).run()
    still = simulate(trace, placement=(("rebalance", False),))
    assert result.moves > 80
    assert still.moves == 0
    assert not any(record.refused for record in result.records)
    assert (len(result.records), result.blocks_in_use) == (80, 0)
    told = [[record.output_tokens for record in each.records] for each in (result, still)]
    assert told[0] == told[1]
    times = [median([record.tpot_s for record in each.records]) for each in (result, still)]
    assert times[0] > times[1], "a move takes time"


def cached_blocks(result: Result) -> int:
    """How many blocks of all prompts were found and not computed. Every request was served, and no memory is held."""
    assert not any(record.refused for record in result.records)
    assert result.blocks_in_use == 0
    return sum(record.cached_blocks for record in result.records)


def test_what_a_replica_fetches_is_computed_once_and_all_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_costs, "DISPLACED", 0.0)  # so that much is fetched
    trace = synthetic.agents(3.0, 150, seed=2)
    with_it, without = (simulate(trace, placement=(("fetch", fetch),)) for fetch in (True, False))
    assert cached_blocks(with_it) > cached_blocks(without)


def test_what_memory_has_no_room_for_is_loaded_from_the_tier_and_not_computed() -> None:
    trace = synthetic.agents(3.0, 150, seed=2)
    small = [
        replace(pool, profile=replace(pool.profile, kv_bytes=150_000 * pool.profile.kv_bytes_per_token))
        for pool in heterogeneous(6).pools
    ]
    with_it, without = (
        simulate(trace, replace(heterogeneous(6), pools=tuple(replace(pool, tier_bytes=tier) for pool in small)))
        for tier in (500e9, 0.0)
    )
    assert cached_blocks(with_it) > cached_blocks(without)


def test_answers_that_crowd_on_one_replica_move_and_all_end_sooner() -> None:
    """A prompt a second: some answers go where no prompt is, until all prompts are computed."""
    trace = Trace("herd", 128, tuple(TraceRequest(number, 200, 400) for number in range(12)))
    cluster = cpu_pair(noise_sigma=0.0)
    moving, still = (simulate(trace, cluster, placement=(("rebalance", each),)) for each in (True, False))
    assert (moving.blocks_in_use, still.moves) == (0, 0)
    assert 0 < moving.moves < 2 * 12
    assert moving.simulated_s < 0.95 * still.simulated_s


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("ingresses", "allocators"), [(1, 1), (3, 1), (3, 3)])
def test_every_request_is_served_or_refused_once_and_all_memory_is_free(
    policy: str, ingresses: int, allocators: int
) -> None:
    trace = synthetic.conversations(60.0, 120, seed=2, pause_s=1.0)
    many: dict[str, Any] = {"ingresses": ingresses, "allocators": allocators, "call_s": 0.002}
    result = simulate(trace, policy=policy, snapshot_delay_s=0.05, **many)
    assert len(result.records) == len(trace.requests)
    assert result.blocks_in_use == 0
    for record, request in zip(result.records, trace.requests, strict=True):
        assert (record.at_s, record.output_tokens) == (request.at_s, request.output_tokens)
        assert bool(record.refused) != (record.ttft_s > 0.0)
    assert sum(not record.refused for record in result.records) > 100


def test_the_same_seed_gives_the_same_run_and_another_another() -> None:
    trace = synthetic.burst(60.0, 96, seed=2, prompts=SHORT)
    first, again, other = (simulate(trace, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_cached_prefix_shortens_the_time_to_the_first_token() -> None:
    prompts = [TraceRequest(5.0 * index, 8000, 20, tuple(range(1, 63))) for index in range(6)]
    strangers = [replace(each, hashes=tuple(h + 1000 * i for h in each.hashes)) for i, each in enumerate(prompts)]
    same, unlike = (simulate(Trace("t", 128, tuple(requests))) for requests in (prompts, strangers))
    assert all(record.cached_blocks == 62 for record in same.records[1:])
    assert all(record.cached_blocks == 0 for record in unlike.records)
    assert max(record.ttft_s for record in same.records[1:]) < 0.5 * min(record.ttft_s for record in unlike.records)


def test_a_slow_link_delays_decode_and_not_the_first_token_which_does_not_take_it() -> None:
    trace = Trace("t", 128, tuple(TraceRequest(2.0 * index, 8000, 20) for index in range(5)))
    fast, slow = (simulate(trace, slow_links(heterogeneous(6), rate), policy="round_robin") for rate in (50e9, 1e9))
    size_s = 8000 * 131072 / 1e9
    assert median([record.tpot_s for record in slow.records]) * 19 > 0.5 * size_s
    assert median([record.tpot_s for record in fast.records]) * 19 < 0.5 * size_s
    ttft_s = median([record.ttft_s for record in fast.records])
    assert median([record.ttft_s for record in slow.records]) == pytest.approx(ttft_s, rel=0.2)


@pytest.mark.parametrize("policy", POLICIES)
def test_decode_memory_is_never_overrun_by_one_manager_that_promises_what_there_is(policy: str) -> None:
    trace = synthetic.poisson(80.0, 60, seed=3, prompts=SHORT)
    result = simulate(trace, starved(heterogeneous(6), 8192), policy=policy, admission=False)
    assert result.preemptions == 0
    assert sum(not record.refused for record in result.records) > 50


def test_a_call_to_the_manager_delays_the_first_token_by_its_way_there_and_back() -> None:
    trace = Trace("t", 128, tuple(TraceRequest(2.0 * index, 800, 20) for index in range(5)))
    near, far = (simulate(trace, policy="round_robin", call_s=call_s) for call_s in (0.0, 0.1))
    for one, other in zip(near.records, far.records, strict=True):
        assert other.ttft_s == pytest.approx(one.ttft_s + 0.2, abs=0.02)


def test_ingresses_that_share_a_manager_never_overrun_memory_with_old_snapshots() -> None:
    answers = synthetic.Lengths(700, 0.3, most=1000)
    trace = synthetic.poisson(80.0, 60, seed=3, prompts=SHORT, answers=answers)
    cluster = starved(heterogeneous(6), 8192)
    old: dict[str, Any] = {"ingresses": 8, "call_s": 0.001, "snapshot_delay_s": 0.1}
    assert simulate(trace, cluster, admission=False, **old).preemptions == 0


def test_memory_promised_three_times_over_makes_engines_preempt() -> None:
    answers = synthetic.Lengths(700, 0.3, most=1000)
    trace = synthetic.poisson(80.0, 60, seed=3, prompts=SHORT, answers=answers)
    cluster = starved(heterogeneous(6), 8192)
    assert simulate(trace, cluster, admission=False, overcommit=1.0).preemptions == 0
    result = simulate(trace, cluster, admission=False, overcommit=3.0, split="always")
    assert result.preemptions > 0
    assert result.blocks_in_use == 0


def test_a_request_that_no_replica_can_hold_is_refused() -> None:
    trace = Trace("t", 128, (TraceRequest(0.0, 500, 10), TraceRequest(0.1, 200_000, 10)))
    records = simulate(trace).records
    assert [bool(record.refused) for record in records] == [False, True]


def test_figures_count_what_met_both_objectives_after_the_warm_up() -> None:
    goals = (Objectives("short", 1.0, 0.1, most_prompt_tokens=100), Objectives("long", 2.0, 0.1))
    good = Record(2.0, 100, 10, ttft_s=0.5, tpot_s=0.05, cached_blocks=1, prompt_blocks=4, pool="a")
    records = [
        replace(good, at_s=1.0, ttft_s=9.0),  # warm-up
        good,
        replace(good, at_s=4.0, ttft_s=1.5),
        replace(good, at_s=6.0, tpot_s=0.2, pool="b"),
        replace(good, at_s=8.0, ttft_s=1.5, prompt_tokens=200),  # long ones may take longer
        replace(good, at_s=10.0, refused="predicted_ttft"),
    ]
    figures = summarise(records, goals, warmup_share=0.2)
    assert (figures["counted"], figures["refused"]) == (5, 1)
    assert (figures["warmup_s"], figures["counted_s"]) == (2.0, 8.0)
    assert figures["offered"] == pytest.approx(5 / 8)
    assert figures["goodput"] == pytest.approx(2 / 8)
    assert (figures["whole_goodput"], figures["whole_refused"]) == (pytest.approx(2 / 10), 1)
    assert figures["hit_rate"] == 0.25
    assert figures["pool_share"] == {"a": 0.75, "b": 0.25}
    assert figures["refusals"] == {"predicted_ttft": 1}
