"""`joint` takes the way that a sweep of all of them finds cheapest."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import WeightsConfig
from deployments.fleet.columns import Flags, ReplicaView
from deployments.fleet.flow import WINDOW_S
from deployments.fleet.view import FleetView, LiveView
from deployments.messages import ReplicaInfo, Role, SessionRequest
from deployments.policy.placement import joint
from deployments.policy.placement.choice import Choice, near_s
from deployments.policy.placement.costs import Costs
from deployments.policy.placement.estimates import MANY, Outlook
from deployments.policy.placement.field import Field, PlacementSettings
from deployments.policy.placement.joint import CANDIDATES, Joint, has_spare_steps
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.split import ANY
from deployments.step_cost import Coefficients
from load_tests.bench.placement import Cluster

DECISIONS = 400


class Asking(Cluster):
    """Prompts of many lengths, some of conversations that have been there."""

    def request(self) -> SessionRequest:
        request = super().request()
        affinity = f"conversation-{self.rng.randrange(20)}" if self.rng.random() < 0.3 else ""
        tokens = self.rng.randint(len(request.hashes) * 128, 100_000)
        return replace(request, affinity=affinity, prompt_tokens=tokens, max_tokens=self.rng.randint(2, 2000))


class Swept(Joint):
    """Compares each choice with a sweep of all ways, one replica and one pair at a time."""

    def __init__(self) -> None:
        self.ways = Counter[bool]()

    def choose(self, here: Field) -> Choice | None:
        choice = super().choose(here)
        assert choice is not None
        by_cost = sorted(sweep(here).items(), key=lambda each: each[1])
        least_s = by_cost[0][1]
        near = {way for way, cost_s in by_cost if cost_s <= least_s + near_s(least_s, here.settings.weights) + 1e-9}
        assert (choice.owner, choice.helper) in near
        self.ways[choice.helper is None] += 1
        return choice


def sweep(here: Field) -> dict[tuple[int, int | None], float]:
    """What every way costs, in seconds."""
    costs, link = Costs(here), here.knowledge.link_bytes_per_s
    found: dict[tuple[int, int | None], float] = {}
    for owner in np.flatnonzero(here.alone).tolist():
        loading_s = here.settings.weights.ttft * here.outlook.loading_s[owner]  # once on one replica
        found[owner, None] = float(costs.prefill_s[owner] + costs.decode_s[owner] - loading_s)
    for owner in np.flatnonzero(here.pair_owners).tolist():
        for helper in np.flatnonzero(here.helpers).tolist():
            if owner == helper or here.columns.fingerprint[owner] != here.columns.fingerprint[helper]:
                continue
            moving_s = float(costs.moving_s(np.array([owner]), np.array([helper]))[0, 0]) if link else 0.0
            own_s = costs.decode_s[owner] + costs.between_prompts_s[owner]
            found[owner, helper] = float(own_s + costs.prefill_s[helper]) + moving_s
    return found


@pytest.mark.parametrize("shared_blocks", [0, 4])
def test_the_choice_is_the_cheapest_of_all_ways(shared_blocks: int) -> None:
    cluster, policy = Asking(CANDIDATES, 2000, 50, seed=3, shared=shared_blocks), Swept()
    cluster.allocator.decider.policy = policy
    for _ in range(DECISIONS):
        cluster.decide()
        for _ in range(2 if len(cluster.flying) > 40 else 1):
            cluster.turn()
    assert min(policy.ways[True], policy.ways[False]) > 0, "both kinds of ways were taken"


KINDS = ("p", Role.PREFILL), ("d", Role.DECODE), ("m", Role.MIXED)
STEPS = {"pool": Coefficients(1e-2, 1e-4, 1e-9, 1e-4, 1e-8)}


def idle_field(prompt_tokens: int, answer_tokens: int, cached: dict[str, int], strict: bool = False) -> Field:
    """One replica of each kind, without load. `cached`: blocks of the prompt, by replica."""
    rows = []
    for name, role in KINDS:
        walls = strict and role is not Role.MIXED
        info = ReplicaInfo(name, "pool", role, "node", "engine", 16, 10_000, 64, 32_768, (), 2048, 1000, strict=walls)
        rows.append(ReplicaView(info, 10_000, 0, 0))
    view = FleetView(tuple(rows))
    columns = view.columns
    columns.learn(STEPS)
    live = LiveView(columns, view.known, (), 0.0)
    request = SessionRequest("a", prompt_tokens, answer_tokens, ANY)
    knowledge = Knowledge(hits=cached, output_tokens=answer_tokens, link_bytes_per_s=1e9)
    return Field(request, live, PlacementSettings(), knowledge, random.Random(0), (1.0, 0.05))


BLOCKS = st.integers(0, 100)
CACHED = st.fixed_dictionaries({name: BLOCKS for name, _ in KINDS})


@settings(deadline=None)
@given(st.integers(2, 10_000), st.integers(2, 2000), CACHED)
def test_without_load_the_choice_is_the_cheapest_of_all_ways(prompt: int, answer: int, cached: dict[str, int]) -> None:
    Swept().choose(idle_field(prompt, answer, cached))


@pytest.mark.parametrize("holder", [name for name, _ in KINDS])
def test_a_replica_that_has_the_adapter_is_worth_the_seconds_of_a_load(holder: str) -> None:
    here = idle_field(1000, 100, {})
    here.knowledge = replace(here.knowledge, adapter_on=frozenset({holder, "gone"}), adapter_s=2.0)
    here.outlook.knowledge = here.knowledge
    plain, tuned = Costs(idle_field(1000, 100, {})), Costs(here)
    for row, (name, _) in enumerate(KINDS):
        more_s = 0.0 if name == holder else 2.0
        assert tuned.alone_s[row] - plain.alone_s[row] == pytest.approx(more_s, abs=1e-6), "one load"
        assert tuned.decode_s[row] - plain.decode_s[row] == pytest.approx(more_s, abs=1e-6)
        assert tuned.prefill_s[row] - plain.prefill_s[row] >= more_s - 1e-6
    choice = Swept().choose(here)
    assert choice is not None
    assert holder in {KINDS[row][0] for row in (choice.owner, choice.helper) if row is not None}


@settings(deadline=None)
@given(st.integers(2, 10_000), st.integers(2, 2000), CACHED)
def test_no_request_gains_by_a_wall(prompt: int, answer: int, cached: dict[str, int]) -> None:
    free, walled = (sweep(idle_field(prompt, answer, cached, strict)) for strict in (False, True))
    assert walled.keys() < free.keys()
    assert min(free.values()) <= min(walled.values())


@pytest.mark.parametrize("shared_blocks", [0, 4])
def test_hits_on_few_replicas_and_on_all_are_predicted_as_one_by_one(shared_blocks: int) -> None:
    cluster = Cluster(60, 2000, 20, seed=3, shared=shared_blocks)
    sizes = set()
    for _ in range(20):
        request, view = cluster.request(), cluster.allocator.live(cluster.now_s)
        columns = view.columns
        knowledge = cluster.allocator.predictors.knowledge(request)
        outlook = Outlook(request, columns, knowledge, cluster.now_s)
        for row, cached in zip(outlook.hit_rows, outlook.hit_tokens, strict=True):
            steps, _ = columns.of_kind(int(columns.kind[row]))
            assert outlook.beside_s[row] == steps.beside_s(request.prompt_tokens, int(cached))
            assert outlook.cached_on(row) == cached
        sizes.add(len(outlook.hit_rows) > MANY)
    assert sizes == {shared_blocks > 0}


def costs_of(field: Field, **load: float) -> Costs:
    """The costs where the replica "m" has this load."""
    columns = field.columns
    for name, value in load.items():
        columns[name][columns.rows["m"]] = value
    return Costs(field)


def test_an_answer_of_few_tokens_costs_more_where_its_kv_cache_would_land_between_prompts() -> None:
    short, long = (costs_of(idle_field(1000, answer, {}), prompts=1.0, busy_until_s=0.1) for answer in (4, 400))
    owner = short._columns.rows["m"]
    other = short._columns.rows["d"]
    assert short.between_prompts_s[owner] > 5 * short.between_prompts_s[other]
    assert short.between_prompts_s[owner] > 5 * long.between_prompts_s[owner], "a long answer makes up for it"


def test_a_prompt_costs_more_where_answers_keep_arriving() -> None:
    still, busy = costs_of(idle_field(1000, 10, {})), costs_of(idle_field(1000, 10, {}), flow_moves=50.0)
    row = still._columns.rows["m"]
    assert busy.prefill_s[row] > still.prefill_s[row]


def test_a_move_waits_for_the_moves_of_other_answers_on_the_link() -> None:
    still, busy = (
        costs_of(idle_field(8000, 10, {})),
        costs_of(idle_field(8000, 10, {}), flow_bytes=0.9 * WINDOW_S * 1e9),
    )
    rows, owner = still._columns.rows, np.array([still._columns.rows["m"]])
    assert busy.moving_s(owner, np.array([rows["p"]]))[0, 0] > still.moving_s(owner, np.array([rows["p"]]))[0, 0]


def test_answers_go_beside_prompts_only_where_all_others_are_as_busy_or_their_links_are() -> None:
    def may_answer(**load: float) -> set[str]:
        field = idle_field(8000, 10, {})
        columns = field.columns
        for name in ("p", "m"):
            columns["flow_s"][columns.rows[name]] = 0.8 * WINDOW_S
        for name, value in load.items():
            columns[name][columns.rows["d"]] = value
        spare = has_spare_steps(field)
        return {name for name, row in columns.rows.items() if spare[row]}

    assert may_answer() == {"d"}
    assert may_answer(flow_s=0.8 * WINDOW_S) == {"p", "d", "m"}
    assert may_answer(flow_bytes=0.5 * WINDOW_S * 1e9) == {"p", "d", "m"}


def test_an_answer_without_a_tpot_objective_goes_anywhere() -> None:
    field = idle_field(8000, 10, {})
    columns = field.columns
    for name in ("p", "m"):
        columns["flow_s"][columns.rows[name]] = 0.8 * WINDOW_S
    field.objectives = (field.objectives[0], math.inf)
    assert has_spare_steps(field).all()


def test_a_step_that_is_far_from_the_objective_may_grow_for_others_at_little_cost() -> None:
    slow, fast = (Costs(idle_field(1000, 100, {})) for _ in range(2))
    fast._here.objectives = (1.0, 0.5)
    assert fast.strain == pytest.approx(slow.strain / 100)


def test_what_slows_answers_down_costs_more_the_more_requests_wait_for_their_ends() -> None:
    def costs(waiting: int) -> Costs:
        here = idle_field(1000, 100, {})
        here.columns["sessions"][here.columns.rows["d"]] = 10.0
        assert isinstance(here.view, LiveView)
        here.view = replace(here.view, waiting=waiting)
        return Costs(here)

    calm, crowded = costs(0), costs(50)
    rows = calm._columns.rows
    for number in ("prefill_s", "decode_s"):
        more = getattr(crowded, number) - getattr(calm, number)
        assert more[rows["d"]] > 0
        assert more[rows["p"]] == 0, "it writes no answer"


class Unpruned(Costs):
    """Costs by which every pair is weighed."""

    def are_pairs_over(self, most_s: float, owners: Flags, helpers: Flags) -> bool:
        return False


class Compared(Joint):
    """Compares each choice with the one by all pairs, for unlike objectives and bounds of what counts as near.

    `found`: whether the pairs were left out, and whether the choice was a pair.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.found = patch, set[tuple[bool, bool]]()

    def choose(self, here: Field) -> Choice | None:
        for objectives, near_share in product(((math.inf, math.inf), (9.0, 0.2), (0.5, 0.005)), (0.0, 0.01, 0.5)):
            changed = replace(here.settings, weights=WeightsConfig(near_s=0, near_share=near_share))
            one, other = (
                Field(here.request, here.view, changed, here.knowledge, random.Random(5), objectives) for _ in range(2)
            )
            choice = super().choose(one)
            with self.patch.context() as patch:
                patch.setattr(joint, "Costs", Unpruned)
                assert super().choose(other) == choice
            self.found.add((_leaves_pairs_out(one), choice is not None and choice.helper is not None))
        return super().choose(here)


def _leaves_pairs_out(here: Field) -> bool:
    costs, spare = Costs(here), has_spare_steps(here)
    alone = costs.alone_s[here.alone & spare]
    most_s = float(alone.min()) + near_s(float(alone.min()), here.settings.weights) if alone.size else math.inf
    return costs.are_pairs_over(most_s, here.pair_owners & spare, here.helpers)


@pytest.mark.parametrize(("replicas", "sessions"), [(2, 4), (9, 20), (3 * CANDIDATES, 300)])
def test_pairs_that_are_left_out_would_not_have_been_chosen(
    replicas: int, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Compared(monkeypatch)
    for seed in range(4):
        cluster = Asking(replicas, 500, sessions, seed=seed, shared=2 * (seed % 2))
        cluster.allocator.decider.policy = policy
        for _ in range(25):
            cluster.decide()
            cluster.turn()
    assert policy.found >= {(True, False), (False, True)}


def test_prompts_slow_an_answer_by_the_time_that_they_take_and_one_with_an_objective_keeps_away_from_them() -> None:
    """For half of its time a replica computes prompts, in steps ten times as long."""
    free, bound = idle_field(100, 400, {}), idle_field(100, 400, {})
    free.objectives = (math.inf, math.inf)
    for here in (free, bound):
        row = here.columns.rows["m"]
        here.columns["flow_s"][row], here.columns["flow_at_s"][row] = 0.5 * WINDOW_S, 0.0
        here.columns["sessions"][row] = 1.0
    costs = Costs(free)
    alone_s, beside_s = float(free.outlook.step_s[row]), float(costs.beside_s[row])
    assert beside_s > 5 * alone_s
    tokens_per_s = 0.5 / beside_s + 0.5 / alone_s
    assert costs.mixed_step_s[row] == pytest.approx(1.0 / tokens_per_s)
    assert costs.mixed_step_s[row] < 2 * alone_s, "half of the time is left to it"
    safe = Costs(bound)
    assert safe.mixed_step_s[row] == pytest.approx((alone_s + float(safe.beside_s[row])) / 2)
