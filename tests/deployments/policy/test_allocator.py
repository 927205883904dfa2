"""The allocator: the same decisions for the session manager and the simulator, and books that balance."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from configs.schema import BatonConfig, ClassConfig, MockEngineConfig, PlacementConfig, PoolConfig, WeightsConfig
from deployments.messages import (
    Admit,
    CacheChange,
    Finished,
    Mode,
    Phase,
    Placement,
    Reject,
    ReplicaInfo,
    ReplicaSnapshot,
    Reservation,
    Role,
    SessionRequest,
    StepSample,
)
from deployments.policy.admission.breakers import FIRST_S
from deployments.policy.admission.retry_budget import LEAST, RETRY_BUDGET
from deployments.policy.allocator import Allocator
from deployments.policy.placement.split import ANY, ONE_ENGINE
from deployments.policy.predictors import TRUSTED_STEPS

BLOCK = 16
PRIOR = (5e-3, 1e-4, 0.0, 1e-4, 1e-7)


def info(replica_id: str, total_blocks: int = 1000, pool: str = "", **more: Any) -> ReplicaInfo:
    role = Role.PREFILL if replica_id.startswith("p") else Role.DECODE
    pool = pool or ("prefill" if role is Role.PREFILL else "decode-small")
    strict = role is Role.PREFILL  # so that what d0 has no room for has none
    shape = {"chunk_tokens": 512, "kv_bytes_per_token": 1000, "prior": PRIOR, "strict": strict, **more}
    return ReplicaInfo(replica_id, pool, role, "node", "engine", BLOCK, total_blocks, 64, 16_384, **shape)


def allocator_of(*infos: ReplicaInfo, pools: dict[str, Any] | None = None, **placement: Any) -> Allocator:
    pool = PoolConfig(engine=MockEngineConfig(block_size=BLOCK))
    decode = {name: pool.model_copy(update=more) for name, more in (pools or {"small": {}}).items()}
    config = BatonConfig(prefill=pool, decode=decode, placement=PlacementConfig(**placement))
    allocator = Allocator(config, random.Random(1))
    for each in infos:
        allocator.report(ReplicaSnapshot(each.replica_id, 1, Phase.READY, each), 0.0)
    return allocator


def ask(session_id: str, prompt: int = 160, answer: int = 160, **more: Any) -> SessionRequest:
    return SessionRequest(session_id, prompt, answer, more.pop("allowed", ANY), **more)


def admitted(allocator: Allocator, request: SessionRequest, now_s: float = 0.0) -> Placement:
    decision = allocator.open(request, now_s)
    assert isinstance(decision, Admit), decision
    return decision.placement


def report(allocator: Allocator, replica: ReplicaInfo, version: int, now_s: float = 0.0, **load: Any) -> bool:
    return allocator.report(ReplicaSnapshot(replica.replica_id, version, Phase.READY, replica, **load), now_s)


def steps(count: int, slower: float = 1.0) -> tuple[StepSample, ...]:
    """As the prior has them, or slower."""
    rng = random.Random(3)
    samples = []
    for _ in range(count):
        prefill, sequences = rng.randrange(512), rng.randrange(20)
        seconds = PRIOR[0] + prefill * PRIOR[1] + sequences * PRIOR[3] + sequences * 200 * PRIOR[4]
        samples.append(StepSample(seconds * slower, prefill, 0, sequences, sequences * 200))
    return tuple(samples)


def test_a_waiter_is_answered_when_another_closes() -> None:
    allocator = allocator_of(info("p0"), info("d0", total_blocks=20))
    first = admitted(allocator, ask("a"))
    assert allocator.open(ask("b"), 0.0) is None
    assert allocator.answers(0.0) == []
    assert allocator.close("a", first.epoch, "stop", 1.0, 5)
    assert not allocator.close("a", first.epoch, "stop", 1.0, 5)
    ((session_id, decision),) = allocator.answers(1.0)
    assert session_id == "b"
    assert isinstance(decision, Admit)
    assert allocator.answers(1.0) == []


def test_whoever_waits_too_long_is_told_what_was_short() -> None:
    allocator = allocator_of(info("p0"), info("d0", total_blocks=20), queue_timeout_s=2.0, snapshot_stale_s=60.0)
    admitted(allocator, ask("a"))
    assert allocator.open(ask("b"), 0.0) is None
    assert allocator.room.next_deadline_s() == 2.0
    ((session_id, decision),) = allocator.answers(2.0)
    assert session_id == "b"
    assert isinstance(decision, Reject)
    assert "KV blocks are short: 20 needed, at most 0 free" in decision.reason
    assert decision.code == "queue_timeout"


def test_the_prefill_replica_that_has_the_prompt_cached_is_chosen_until_it_is_too_busy() -> None:
    p0, p1 = info("p0"), info("p1")
    allocator = allocator_of(p0, p1, info("d0", total_blocks=100_000))
    hashes = tuple(range(1, 101))
    report(allocator, p1, 2, cache=CacheChange(1, hashes, (), True))
    placement = admitted(allocator, ask("a", 1616, hashes=hashes, allowed=(Mode.DISAGGREGATED,)))
    assert placement.prefill == p1
    assert placement.cached_tokens == 1600
    assert placement.forecast.prefill_s == pytest.approx(PRIOR[0] + 16 * PRIOR[1])
    busy = [admitted(allocator, ask(f"b{i}", 1616, hashes=hashes, allowed=(Mode.DISAGGREGATED,))) for i in range(60)]
    assert {each.prefill.replica_id for each in busy if each.prefill} == {"p0", "p1"}


def test_what_is_placed_is_expected_in_the_cache_so_that_the_next_turn_goes_there() -> None:
    replicas = [info(f"p{i}") for i in range(8)]
    allocator = allocator_of(*replicas, info("d0", total_blocks=100_000))
    hashes = tuple(range(1, 65))
    first = admitted(allocator, ask("a", 1024, hashes=hashes, allowed=(Mode.DISAGGREGATED,)))
    allocator.prefill_done("a", first.epoch, 0.1)
    again = admitted(allocator, ask("b", 1100, hashes=(*hashes, 99), allowed=(Mode.DISAGGREGATED,)), 0.1)
    assert again.prefill == first.prefill
    assert again.cached_tokens == 1024


@pytest.mark.parametrize("end", ["computed", "closed", "expired"])
def test_what_is_expected_in_a_cache_lasts_as_long_as_the_prompt_and_no_longer(end: str) -> None:
    allocator = allocator_of(info("p0"), info("d0"), snapshot_stale_s=1e9)
    index = allocator.predictors.index
    placement = admitted(allocator, ask("a", hashes=tuple(range(1, 11))))
    allocator.sweep(25.0)
    assert index.expected, "its prompt waits for others"
    match end:
        case "computed":
            allocator.prefill_done("a", placement.epoch, 25.0)
        case "closed":
            allocator.close("a", placement.epoch, "stop", 25.0)
        case _:
            allocator.sweep(1e6)
    allocator.sweep(2e6)
    assert not index.expected


def test_what_a_replica_has_cached_is_not_expected_of_it_again() -> None:
    p0, d0 = info("p0"), info("d0", total_blocks=100_000)
    allocator = allocator_of(p0, d0)
    hashes = tuple(range(1, 101))
    report(allocator, p0, 2, cache=CacheChange(1, hashes[:60], (), True))
    report(allocator, d0, 2, cache=CacheChange(1, hashes[:50], (), True))
    placement = admitted(allocator, ask("a", 1616, hashes=hashes, allowed=(Mode.DISAGGREGATED,)))
    assert placement.cached_tokens == 960
    assert allocator.predictors.index.expected == 2 * 50, "what both have"


def test_an_affinity_goes_back_to_its_replicas() -> None:
    allocator = allocator_of(*(info(f"p{i}") for i in range(8)), *(info(f"d{i}", 100_000) for i in range(8)))
    first = admitted(allocator, ask("a", affinity="conversation"))
    for number in range(20):
        placement = admitted(allocator, ask(f"b{number}", affinity="conversation"))
        assert placement.decode == first.decode
    others = {admitted(allocator, ask(f"c{i}")).owner.replica_id for i in range(40)}
    assert len(others) > 1


@pytest.mark.parametrize("strict", [True, False])
def test_a_herd_spreads_over_all_that_prefill(strict: bool) -> None:
    prefill = [info(f"p{i}") for i in range(10)]
    decode = [info(f"d{i}", 100_000, strict=strict) for i in range(10)]
    allocator = allocator_of(*prefill, *decode)
    herd = [admitted(allocator, ask(f"a{i}", 1000, allowed=(Mode.DISAGGREGATED,))) for i in range(100)]
    helpers = prefill if strict else [*prefill, *decode]
    shares = [sum(each.prefill == replica for each in herd) for replica in helpers]
    assert sum(shares) == 100
    assert min(shares) >= 80 / len(helpers)
    assert max(shares) <= 120 / len(helpers)


def test_a_short_prompt_is_prefilled_on_an_idle_decode_replica_when_prefill_is_busy() -> None:
    allocator = allocator_of(info("p0"), info("d0", total_blocks=100_000))
    assert admitted(allocator, ask("long", 8000)).mode is Mode.DISAGGREGATED
    short = admitted(allocator, ask("short", 20))
    assert (short.mode, short.reason) == (Mode.DECODE_LOCAL, "cheaper on one replica")
    for number in range(30):
        admitted(allocator, ask(f"busy{number}", 20, allowed=(Mode.DECODE_LOCAL,)))
    allocator.prefill_done("long", 1, 1.0)
    long = admitted(allocator, ask("long again", 8000), 1.0)
    assert long.mode is Mode.DISAGGREGATED, "thirty others would wait for it"


def beside_sessions(prior: tuple[float, ...], sessions: int, busy_tokens: int, **weights: float) -> Allocator:
    """So many sessions decode on `d0`, and `p0` has a prompt of `busy_tokens` to compute, from 60 s on."""
    replicas = info("p0", prior=prior), info("d0", total_blocks=100_000, prior=prior)
    allocator = allocator_of(*replicas, weights=WeightsConfig(**weights), snapshot_stale_s=600.0)
    for number in range(sessions):
        admitted(allocator, ask(f"decodes{number}", 20, allowed=(Mode.DECODE_LOCAL,)))
        allocator.prefill_done(f"decodes{number}", 1, 1.0)
    admitted(allocator, ask("computed", busy_tokens, allowed=(Mode.DISAGGREGATED,)), 60.0)
    return allocator


def test_a_prompt_beside_others_costs_them_what_it_adds_to_their_steps_which_they_take_anyway() -> None:
    slow_steps, slow_tokens = (0.1, 1e-4, 0.0, 0.0, 0.0), (0.0, 0.1 / 20, 0.0, 0.0, 0.0)
    for prior, mode in ((slow_steps, Mode.DECODE_LOCAL), (slow_tokens, Mode.DISAGGREGATED)):
        allocator = beside_sessions(prior, sessions=20, busy_tokens=100, later=0.0)
        assert admitted(allocator, ask("short", 20, 8), 60.0).mode is mode, "20 tokens take 0.1 s by themselves in both"


def test_a_prefill_queue_costs_those_who_come_later_as_well() -> None:
    for later, mode in ((0.0, Mode.DISAGGREGATED), (1.0, Mode.DECODE_LOCAL)):
        allocator = beside_sessions(PRIOR, sessions=12, busy_tokens=100, later=later)
        for number in range(45):
            admitted(allocator, ask(f"computed too {number}", 140, 8, allowed=(Mode.DISAGGREGATED,)), 60.0)
        # A queue of 0.9 s, and five prompts come in a second; on decode twelve others would lose 0.1 s each.
        assert admitted(allocator, ask("next", 1000), 60.0).mode is mode


def test_steps_that_are_slower_than_the_prior_lengthen_the_forecast_and_are_trusted_after_some() -> None:
    d0, p0 = info("d0", 100_000), info("p0")
    allocator = allocator_of(p0, d0)
    before = admitted(allocator, ask("a"))
    assert not before.forecast.trusted
    for replica in (p0, d0):
        for number in range(8):
            report(allocator, replica, 2 + number, steps=steps(TRUSTED_STEPS, slower=3.0))
    allocator.prefill_done("a", 1, 1.0)
    after = admitted(allocator, ask("b"), 1.0)
    assert after.forecast.trusted
    assert after.forecast.prefill_s == pytest.approx(3 * before.forecast.prefill_s, rel=0.2)


def objectives(**more: Any) -> dict[str, Any]:
    return {"classes": {"chat": ClassConfig(ttft_s=0.5, **more)}, "default_class": "chat"}


def test_what_would_miss_its_class_is_refused_at_once_and_costs_nothing() -> None:
    p0, d0 = info("p0"), info("d0", 100_000)
    allocator = allocator_of(p0, d0, **objectives())
    for replica in (p0, d0):
        report(allocator, replica, 2, steps=steps(4 * TRUSTED_STEPS))
    decision = allocator.open(ask("long", 8000), 0.0)
    assert isinstance(decision, Reject), "it takes 0.8 s"
    assert decision.code == "predicted_ttft"
    assert decision.retry_after_s
    assert allocator.fleet.promises() == ()
    without = allocator_of(p0, d0, admission=False, **objectives())
    for replica in (p0, d0):
        report(without, replica, 2, steps=steps(4 * TRUSTED_STEPS))
    assert isinstance(without.open(ask("long", 8000), 0.0), Admit)


def test_no_more_prompts_than_half_a_ttft_objective_queue_where_they_are_computed() -> None:
    """What waits here is ordered by class and objective; an engine serves prompts in the order of arrival."""
    allocator = allocator_of(info("p0"), info("d0", 100_000), **objectives())
    split: dict[str, Any] = {"allowed": (Mode.DISAGGREGATED,)}
    decisions = [allocator.open(ask(f"a{i}", 1000, **split), 0.0) for i in range(6)]
    assert [type(each) for each in decisions] == [Admit, Admit, Admit, type(None), type(None), type(None)]
    assert allocator.answers(0.05) == []
    allocator.prefill_done("a0", 1, 0.1)
    assert [session_id for session_id, _ in allocator.answers(0.1)] == ["a3"]


def test_one_who_has_waited_longer_than_its_class_allows_is_refused_then() -> None:
    p0, d0 = info("p0"), info("d0", total_blocks=20)
    answers: dict[tuple[bool, int], list[tuple[str, Admit | Reject]]] = {}
    for admission, seen in ((True, 4 * TRUSTED_STEPS), (True, 0), (False, 4 * TRUSTED_STEPS)):
        allocator = allocator_of(p0, d0, admission=admission, **objectives())
        for replica in (p0, d0):
            report(allocator, replica, 2, steps=steps(seen))
        admitted(allocator, ask("a"))
        assert allocator.open(ask("b"), 0.0) is None
        assert allocator.open(ask("again", attempt=2), 0.0) is None
        assert allocator.answers(0.47) == []
        answers[admission, seen] = allocator.answers(0.6)
    ((session_id, decision),) = answers.pop((True, 4 * TRUSTED_STEPS))
    assert isinstance(decision, Reject)
    assert (session_id, decision.code, decision.retry_after_s) == ("b", "predicted_ttft", 1.0)
    assert decision.reason.startswith(
        "waited 0.6 s, over 0.95 times the 0.5 s TTFT of class chat: KV blocks are short: 20 needed"
    )
    assert list(answers.values()) == [[], []], "no trust yet, no admission; and none placed again"


def test_what_gave_tokens_before_it_was_lost_goes_on_without_budget() -> None:
    allocator = allocator_of(info("p0"), info("d0"))

    def again(session_id: str, progressed: bool = False) -> Admit | Reject | None:
        decision = allocator.open(ask(session_id, 16, 16, attempt=2, progressed=progressed), 0.0)
        if isinstance(decision, Admit):
            allocator.close(session_id, decision.placement.epoch, "failed", 0.0)
        return decision

    for number in range(2 * LEAST):
        assert isinstance(again(f"a{number}", progressed=True), Admit)
    for number in range(LEAST):
        assert isinstance(again(f"b{number}"), Admit)
    refused = again("c")
    assert isinstance(refused, Reject)
    assert refused.code == RETRY_BUDGET
    assert isinstance(again("d", progressed=True), Admit)


def test_overcommit_promises_more_than_there_is_and_without_it_nothing_is() -> None:
    for overcommit, expected in ((1.0, 5), (2.0, 10)):
        allocator = allocator_of(info("p0"), info("d0", 100), overcommit=overcommit)
        opened = [allocator.open(ask(f"a{i}"), 0.0) for i in range(12)]
        assert sum(isinstance(each, Admit) for each in opened) == expected


def test_a_pool_s_limits_are_kept_and_named() -> None:
    pools = {"short": {"max_prompt_tokens": 100}, "long": {"min_prompt_tokens": 101}}
    infos = (info("p0"), info("d0", pool="decode-short"), info("d1", pool="decode-long"))
    allocator = allocator_of(*infos, pools=pools)
    for number in range(10):
        assert admitted(allocator, ask(f"s{number}", 50)).owner.replica_id == "d0"
        assert admitted(allocator, ask(f"l{number}", 500)).owner.replica_id == "d1"
    gap = allocator_of(*infos[:2], pools={"short": {"max_prompt_tokens": 100}})
    decision = gap.open(ask("l", 500, allowed=(Mode.DECODE_LOCAL,)), 0.0)
    assert isinstance(decision, Reject)
    assert "limits" in decision.reason


def test_the_finished_log_gives_blocks_back_before_anybody_closes() -> None:
    d0 = info("d0", total_blocks=20)
    allocator = allocator_of(info("p0"), d0)
    first = admitted(allocator, ask("a"))
    report(allocator, d0, 2, used_blocks=15, sessions=("a",))
    assert allocator.open(ask("b"), 0.5) is None
    report(allocator, d0, 3, finished=(Finished("a", first.epoch, 9),), finished_version=1)
    ((session_id, decision),) = allocator.answers(1.0)
    assert (session_id, type(decision)) == ("b", Admit)
    report(allocator, d0, 4, finished=(Finished("a", first.epoch, 9),), finished_version=1)
    assert allocator.close("a", first.epoch, "stop", 1.0, 9), "a close is still news to the counts of sessions"


def test_answers_that_end_teach_how_long_the_next_will_be() -> None:
    allocator = allocator_of(info("p0"), info("d0", total_blocks=100_000))
    assert admitted(allocator, ask("first", 100, 4000)).forecast.output_tokens == pytest.approx(4000, rel=0.1)
    for number in range(200):
        placement = admitted(allocator, ask(f"a{number}", 100, 4000))
        allocator.close(placement.session_id, placement.epoch, "stop", float(number), 40)
    assert admitted(allocator, ask("last", 100, 4000)).forecast.output_tokens == pytest.approx(40, rel=0.3)


def test_answers_that_moved_teach_their_whole_length() -> None:
    allocator = allocator_of(info("p0"), info("d0", total_blocks=100_000))
    for number in range(200):
        rest = ask(f"a{number}", 100 + 300, 4000 - 300, attempt=2, progressed=True, answered_tokens=300)
        placement = admitted(allocator, rest)
        allocator.close(placement.session_id, placement.epoch, "stop", float(number), 40)
    assert admitted(allocator, ask("last", 100, 4000)).forecast.output_tokens == pytest.approx(340, rel=0.1)


def test_a_lost_replica_takes_its_cache_along() -> None:
    p0, p1 = info("p0"), info("p1")
    allocator = allocator_of(p0, p1, info("d0", total_blocks=100_000))
    hashes = tuple(range(1, 65))
    report(allocator, p1, 2, cache=CacheChange(1, hashes, (), True))
    allocator.lost("p1", 0.0)
    report(allocator, p1, 3)
    assert admitted(allocator, ask("a", 1100, hashes=hashes)).cached_tokens == 0
    assert report(allocator, p1, 4, cache=CacheChange(9, (1,), ())), "it has to tell all of it again"


def test_a_replica_that_lost_a_session_is_tried_with_one_before_it_gets_more() -> None:
    decoded = (Mode.DISAGGREGATED, Mode.DECODE_LOCAL)
    d0 = info("d0", total_blocks=100_000)
    allocator = allocator_of(info("p0"), d0)
    allocator.lost("d0", 0.0)
    report(allocator, d0, 2)
    assert allocator.open(ask("a", allowed=decoded), 0.0) is None
    assert allocator.open(ask("b", allowed=decoded), 0.0) is None
    ((session_id, first),) = allocator.answers(FIRST_S)
    assert isinstance(first, Admit)
    assert session_id == "a"
    allocator.close("a", first.placement.epoch, "stop", FIRST_S, 4)
    ((session_id, second),) = allocator.answers(FIRST_S)
    assert isinstance(second, Admit)
    assert admitted(allocator, ask("c", allowed=decoded))


def test_a_replica_that_serve_has_taken_out_gets_nothing_though_it_reports() -> None:
    d0, d1 = info("d0", total_blocks=100_000), info("d1", total_blocks=100)
    allocator = allocator_of(info("p0"), d0, d1)
    allocator.lost("d0", 0.0, gone=True)
    report(allocator, d0, 2)
    assert admitted(allocator, ask("a")).owner == d1


@pytest.mark.parametrize("policy", ["round_robin", "weighted_round_robin", "power_of_two", "least_tokens"])
def test_the_others_spread_too_and_never_overfill(policy: str) -> None:
    replicas = [info(f"d{i}", total_blocks=200) for i in range(4)]
    allocator = allocator_of(info("p0"), info("p1"), *replicas, policy=policy)
    opened = [allocator.open(ask(f"a{i}"), 0.0) for i in range(50)]
    owners = [each.placement.owner for each in opened if isinstance(each, Admit)]
    assert [owners.count(replica) for replica in replicas] == [10] * 4


def test_prefix_affinity_and_overlap_cost_go_where_the_prefix_is() -> None:
    hashes = tuple(range(1, 65))
    for policy in ("prefix_affinity", "overlap_cost"):
        p1 = info("p1")
        allocator = allocator_of(info("p0"), p1, info("p2"), info("d0", total_blocks=100_000), policy=policy)
        report(allocator, p1, 2, cache=CacheChange(1, hashes, (), True))
        assert admitted(allocator, ask("a", 1100, hashes=hashes)).prefill == p1


def test_engines_that_differ_are_never_paired() -> None:
    odd = replace(info("d0", total_blocks=100_000), fingerprint="odd")
    for policy in ("joint", "round_robin", "overlap_cost"):
        allocator = allocator_of(info("p0"), odd, info("d1"), policy=policy)
        for number in range(20):
            placement = admitted(allocator, ask(f"a{number}", 64, 8, allowed=(Mode.DISAGGREGATED,)))
            assert placement.owner.replica_id == "d1"


def test_what_is_learned_while_somebody_waits_counts_for_them_too() -> None:
    p0, d0 = info("p0"), info("d0", total_blocks=20)
    allocator = allocator_of(p0, d0)
    first = admitted(allocator, ask("a"))
    assert allocator.open(ask("b", allowed=(Mode.DISAGGREGATED,)), 0.0) is None
    for number in range(8):
        report(allocator, p0, 2 + number, steps=steps(TRUSTED_STEPS, slower=3.0))
    allocator.close("a", first.epoch, "stop", 1.0, 5)
    ((_, decision),) = allocator.answers(1.0)
    assert isinstance(decision, Admit)
    assert decision.placement.forecast.prefill_s == pytest.approx(3 * first.forecast.prefill_s, rel=0.2)
    columns = allocator.fleet.live(1.0, allocator.predictors.coefficients(1.0)).columns
    assert columns.coefficients["prefill"] == allocator.predictors.models["prefill"].coefficients


# ---- moves


def leaving(allocator: Allocator, session_id: str, replica_id: str, **more: Any) -> Placement:
    return admitted(allocator, ask(session_id, 200, 120, attempt=2, moved_from=replica_id, **more))


@pytest.mark.parametrize("phase", [Phase.READY, Phase.DRAINING])
def test_whoever_lets_a_session_go_hands_it_over(phase: Phase) -> None:
    allocator = allocator_of(info("p0"), info("d0"), info("d1", total_blocks=30), info("d2"))
    allocator.report(ReplicaSnapshot("d0", 2, phase, info("d0")), 0.0)
    report(allocator, info("d2"), 2, sessions=("x", "y"), running=2, running_tokens=4000, used_blocks=990)
    placement = leaving(allocator, "a", "d0")
    assert (placement.mode, placement.reason, placement.reserved_blocks) == (Mode.DISAGGREGATED, "moved", 20)
    assert placement.decode == info("d1", total_blocks=30)
    assert placement.prefill == info("d0")
    assert placement.reservation("d0", 200).blocks == 13


def test_who_is_moved_stands_in_no_line_and_takes_no_retry_budget() -> None:
    allocator = allocator_of(info("p0"), info("d0", total_blocks=20), info("d1", total_blocks=60))
    for name in ("a", "b"):
        admitted(allocator, ask(name))
    assert allocator.open(ask("c", 360, 360), 0.0) is None
    for number in range(100):
        placement = leaving(allocator, f"m{number}", "d0")
        assert (placement.owner.replica_id, placement.reason) == ("d1", "moved")
        allocator.close(placement.session_id, placement.epoch, "moved", 0.0)


def test_where_no_replica_has_room_for_it_the_remainder_waits_like_any_other() -> None:
    allocator = allocator_of(info("p0"), info("d0", total_blocks=20), info("d1", total_blocks=20))
    for name in ("a", "b"):
        admitted(allocator, ask(name))
    assert allocator.open(ask("a", 200, 120, attempt=2, moved_from="d0"), 0.0) is None
    allocator.close("b", 1, "length", 0.0)
    ((_, answer),) = allocator.answers(0.0)
    assert isinstance(answer, Admit)
    assert answer.placement.reason != "moved", "what it left behind has not waited for it"


@pytest.mark.parametrize(
    ("allowed", "source", "engine"), [(ONE_ENGINE, "d0", "engine"), (ANY, "unknown", "engine"), (ANY, "d0", "another")]
)
def test_what_cannot_be_handed_over_is_placed_like_any_other(allowed: Any, source: str, engine: str) -> None:
    allocator = allocator_of(info("p0"), info("d1"), replace(info("d0"), fingerprint=engine))
    assert leaving(allocator, "a", source, allowed=allowed).reason != "moved"


def pressed(replica: ReplicaInfo, version: int = 9, **more: Any) -> ReplicaSnapshot:
    """It has two long answers and one free block."""
    listed = {"sessions": ("a", "b"), "reservations": (Reservation(40, 40, 400),) * 2, "held_tokens": (160, 320)}
    load = {**listed, "movable": frozenset("ab"), "used_blocks": replica.total_blocks - 1, "running": 2, **more}
    return ReplicaSnapshot(replica.replica_id, version, Phase.READY, replica, **load)


def test_a_pressed_replica_lets_go_what_others_have_room_for_and_gets_nothing_new() -> None:
    allocator = allocator_of(info("p0"), info("d0", total_blocks=60), info("d1", total_blocks=60), overcommit=2.0)
    allocator.report(pressed(info("d0", total_blocks=60)), 1.0)
    assert allocator.sessions_to_move(allocator.fleet.snapshots()["d0"], 1.0) == ("b",)
    assert allocator.sessions_to_move(allocator.fleet.snapshots()["d0"], 1.1) == (), "it has just been told"
    assert allocator.open(ask("new", 16, 16), 1.1) is None, "the other's room is kept for what was let go"
    move = allocator.open(ask("b", 320, 320, attempt=2, moved_from="d0"), 1.1)
    assert isinstance(move, Admit)
    assert (move.placement.owner.replica_id, move.placement.reason) == ("d1", "moved")
    allocator.report(pressed(info("d1", total_blocks=60)), 1.2)
    assert allocator.sessions_to_move(allocator.fleet.snapshots()["d1"], 1.2) == (), "the other is pressed, too"


def test_a_replica_that_runs_low_lets_nothing_go_where_no_other_can_take_it() -> None:
    few = info("d0", total_blocks=60)
    for others in ([], [replace(info("d1"), fingerprint="another")], [info("d1", total_blocks=30)]):
        allocator = allocator_of(info("p0"), few, *others, overcommit=2.0)
        allocator.report(pressed(few), 1.0)
        assert allocator.sessions_to_move(allocator.fleet.snapshots()["d0"], 1.0) == ()


NIGHT: dict[str, Any] = {
    "classes": {"chat": ClassConfig(), "night": ClassConfig(rank=1, yields=True)},
    "default_class": "chat",
}


def test_what_yields_takes_what_is_left_and_others_go_at_once() -> None:
    allocator = allocator_of(info("p0"), info("d0", total_blocks=100), **NIGHT)
    lines = []
    for number in range(6):
        lines.append(allocator.open(ask(f"n{number}", priority="night", allowed=ONE_ENGINE), 0.0))
        allocator.prefill_done(f"n{number}", 1, 0.0)
    assert [isinstance(each, Admit) for each in lines] == [True] * 4 + [False] * 2, "20 of 100 blocks are left"
    assert allocator.answers(0.0) == []
    assert isinstance(allocator.open(ask("chat"), 0.0), Admit), "it does not wait behind those that yield"
    assert allocator.open(ask("waits"), 0.0) is None
    first, second = (each.placement.epoch for each in lines[:2] if isinstance(each, Admit))
    allocator.close("n0", first, "stop", 1.0, 5)
    assert [session_id for session_id, _ in allocator.answers(1.0)] == ["waits"]
    allocator.prefill_done("waits", 1, 1.0)
    allocator.close("n1", second, "stop", 2.0, 5)
    assert allocator.answers(2.0) == [], "what is free now is above the mark"
    allocator.close("chat", 1, "stop", 3.0, 5)
    assert [session_id for session_id, _ in allocator.answers(3.0)] == ["n4"]
