"""The quick bound that keeps `joint` from weighing one replica against a pair when that cannot win."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.fleet.columns import Flags
from deployments.messages import Mode, Role, SessionRequest
from deployments.policy.placement.estimates import MANY, Outlook
from deployments.policy.placement.field import Field
from deployments.policy.placement.joint import Joint
from load_tests.bench.placement import Cluster

DECISIONS = 400


class Checked(Joint):
    """Weighs in any case, and compares."""

    def __init__(self) -> None:
        self.closest_s = float("inf")

    def at_least(self, here: Field, role: Role, owners: Flags) -> float:
        bound_s = super().at_least(here, role, owners)
        cost_s = self.alone(here, role, owners).cost_s
        assert bound_s <= cost_s + 1e-12
        self.closest_s = min(self.closest_s, cost_s - bound_s)
        return bound_s


class Asking(Cluster):
    """Prompts of many lengths, some of conversations that have been there."""

    def request(self) -> SessionRequest:
        request = super().request()
        affinity = f"conversation-{self.rng.randrange(20)}" if self.rng.random() < 0.3 else ""
        tokens = self.rng.randint(len(request.hashes) * 128, 100_000)
        return replace(request, affinity=affinity, prompt_tokens=tokens, max_tokens=self.rng.randint(2, 2000))


@pytest.mark.parametrize("shared_blocks", [0, 4])
def test_it_is_never_more_than_what_one_replica_costs(shared_blocks: int) -> None:
    cluster, policy = Asking(24, 2000, 50, seed=3, shared=shared_blocks), Checked()
    cluster.allocator.decider.policy = policy
    modes = set()
    for _ in range(DECISIONS):
        cluster.decide()
        (promise,) = cluster.allocator.fleet.promises_of(cluster.flying[-1][0])
        modes.add(promise.placement.mode)
        for _ in range(2 if len(cluster.flying) > 40 else 1):
            cluster.turn()
    assert modes == {Mode.DISAGGREGATED, Mode.DECODE_LOCAL}
    assert policy.closest_s < 1e-3, "it is near what it bounds"


@pytest.mark.parametrize("shared_blocks", [0, 4])
def test_hits_on_few_replicas_and_on_all_are_predicted_as_one_by_one(shared_blocks: int) -> None:
    cluster = Cluster(60, 2000, 20, seed=3, shared=shared_blocks)
    sizes = set()
    for _ in range(20):
        request, view = cluster.request(), cluster.allocator._live(cluster.now_s)
        columns = view.columns(Role.DECODE)
        outlook = Outlook(request, columns, cluster.allocator.predictors.knowledge(request), cluster.now_s)
        found = zip(outlook.hit_rows, outlook.hit_tokens, outlook.hit_prefill_s, outlook.hit_beside_s, strict=True)
        for row, cached, prefill_s, beside_s in found:
            steps, kind = columns.of_kind(int(columns.kind[row]))
            assert prefill_s == outlook.prefill_s[row]
            assert prefill_s == steps.prefill_s(request.prompt_tokens, int(cached), kind.chunk_tokens)
            assert beside_s == outlook.beside_s[row] == steps.beside_s(request.prompt_tokens, int(cached))
            assert outlook.cached_on(row) == cached
        sizes.add(len(outlook.hit_rows) > MANY)
    assert sizes == {shared_blocks > 0}
