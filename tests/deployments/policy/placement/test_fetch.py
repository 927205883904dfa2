"""What a replica fetches from another one's cache before it computes a prompt."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from deployments.fleet.columns import ReplicaView
from deployments.fleet.view import LiveView
from deployments.messages import Admit, Placement, Role
from deployments.policy.placement.explain import decision_of
from deployments.policy.placement.fetch import FETCH_S, LEAST_TIMEOUT_S, LOAD_BYTES_PER_S
from deployments.policy.placement.field import Field
from deployments.policy.placement.joint import Joint
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.place import place
from deployments.step_cost import Coefficients
from tests.deployments.policy.placement.test_place import SETTINGS, ask, fleet_of, prefill, replica, strict_prefill

FETCHES = replace(SETTINGS, fetches=True, split_always=True)
PROMPT = 4000
STEPS = Coefficients(1e-2, 1e-4, 1e-9, 1e-4, 1e-8)


def with_address(view: ReplicaView, *endpoints: str, **unlike: Any) -> ReplicaView:
    told = {"endpoints": endpoints or ("tcp://1",), "kv_bytes_per_token": 1000, "chunk_tokens": 2048, **unlike}
    return view._replace(info=replace(view.info, **told))


def decode(name: str = "d0") -> ReplicaView:
    return replica(name, Role.DECODE, total=1000)


def placed(
    hits: dict[str, int], *views: ReplicaView, settings: Any = FETCHES, link: float = 1e9, **known: Any
) -> Placement:
    """`hits`: blocks of 16 tokens."""
    request = ask(PROMPT, 96)
    knowledge = Knowledge(hits=hits, link_bytes_per_s=link, **known)
    view = fleet_of(*(view if view.info.endpoints else with_address(view) for view in views))
    columns = view.columns
    columns.learn({each.info.pool: STEPS for each in view.ready})
    live = LiveView(columns, view.known, (), 0.0)
    decision = place(Field(request, live, settings, knowledge, random.Random(0), (math.inf, math.inf)), Joint())
    assert isinstance(decision, Admit), decision
    return decision.placement


@pytest.mark.parametrize("target", [prefill(total=1000), strict_prefill(total=1000)])
def test_what_decode_has_is_fetched_by_prefill(target: ReplicaView) -> None:
    without = placed({}, target, decode())
    fetching = placed({"d0": 200}, target, decode())
    assert fetching.prefill is not None
    assert fetching.fetch is not None
    assert (fetching.fetch.source.replica_id, fetching.fetch.tokens) == ("d0", 3200)
    assert fetching.cached_tokens == 3200
    spares_s, takes_s = STEPS.beside_s(PROMPT, 0) - STEPS.beside_s(PROMPT, 3200), FETCH_S + 3200 * 1000 / 1e9
    assert fetching.fetch.saved_s == pytest.approx(spares_s - takes_s)
    assert without.forecast.prefill_s - fetching.forecast.prefill_s == pytest.approx(spares_s, rel=0.05)
    assert fetching.forecast.queue_s == pytest.approx(takes_s), "it is fetched before it is computed"
    assert max(LEAST_TIMEOUT_S, spares_s) <= fetching.fetch.timeout_s < 1.5 * spares_s


def test_a_prompt_that_is_cached_to_its_end_leaves_the_last_token() -> None:
    fetching = placed({"d0": PROMPT // 16}, prefill(total=1000), decode())
    assert fetching.fetch is not None
    assert fetching.fetch.tokens == PROMPT - 1


@pytest.mark.parametrize(
    ("hits", "views", "more"),
    [
        ({"d0": 200}, (prefill(total=1000), decode()), {"settings": replace(FETCHES, fetches=False)}),
        ({"d0": 200}, (prefill(total=1000), decode()), {"link": 1e3}),
        ({"d0": 1}, (prefill(total=1000), decode()), {}),
        ({"p0": 200, "d0": 200}, (prefill(total=1000), decode()), {}),
        ({"d9": 200}, (prefill(total=1000), decode(), with_address(decode("d9"), fingerprint="another")), {}),
    ],
    ids=["off", "a slow link", "too little", "here already", "another engine"],
)
def test_nothing_is_fetched(hits: dict[str, int], views: tuple[ReplicaView, ...], more: dict[str, Any]) -> None:
    assert placed(hits, *views, **more).fetch is None


def test_the_longest_part_counts() -> None:
    hits = {"d0": 100, "d1": 220, "d2": 150}
    fetching = placed(hits, prefill(total=1000), *(decode(name) for name in hits))
    assert fetching.fetch is not None
    assert fetching.fetch.source.replica_id == "d1"


@pytest.mark.parametrize(
    ("backlog_tokens", "fetches", "chosen", "source"),
    [
        (10, True, "p0", None),
        (1000, True, "p0", None),
        (1000, False, "p1", None),
        (2000, True, "p1", "p0"),
    ],
    ids=["nearly idle", "a queue", "a queue, off", "a long queue"],
)
def test_a_fetch_counts_where_the_replica_is_chosen(
    backlog_tokens: int, fetches: bool, chosen: str, source: str | None
) -> None:
    """One of two prefill replicas has most of the prompt, and prompts wait there: 1,000 tokens for a second.

    A copy costs more than the shorter queue. Without fetches, no cost of a copy is known.
    """
    behind = prefill("p0", total=1000, backlog_tokens=backlog_tokens)
    settings = replace(FETCHES, fetches=fetches)
    placement = placed({"p0": 200}, behind, prefill("p1", total=1000), decode(), settings=settings)
    assert placement.prefill is not None
    assert placement.prefill.replica_id == chosen
    assert (placement.fetch.source.replica_id if placement.fetch else None) == source


def test_a_fetch_takes_no_time_behind_prompts_that_take_longer() -> None:
    queue = prefill(total=1000, backlog_tokens=500)
    fetching = placed({"d0": 200}, queue, decode())
    assert fetching.fetch is not None
    assert fetching.forecast.queue_s == pytest.approx(0.5)
    assert fetching.forecast.ttft_s == pytest.approx(0.5 + fetching.forecast.prefill_s)


def test_each_engine_has_a_source_of_its_own() -> None:
    other = {"fingerprint": "another"}
    views = (
        prefill("p0", total=1000),
        decode("d0"),
        with_address(prefill("p1", total=1000, backlog_tokens=9000), **other),
        with_address(decode("d1"), **other),
    )
    fetching = placed({"d0": 150, "d1": 220}, *views)
    assert fetching.prefill is not None
    assert fetching.fetch is not None
    assert (fetching.prefill.replica_id, fetching.fetch.source.replica_id) == ("p0", "d0")


def test_explain_names_the_source() -> None:
    placement = placed({"d0": 200}, prefill(total=1000), decode())
    told = decision_of(Admit(placement))["fetch"]
    assert placement.fetch is not None
    assert (told["source"], told["tokens"], told["saved_s"]) == ("d0", 3200, placement.fetch.saved_s)
    assert "fetch" not in decision_of(Admit(replace(placement, fetch=None)))


def test_a_load_from_a_tier_takes_time_by_what_the_tier_has_given_so_far() -> None:
    alone = replace(SETTINGS, split_always=False)
    for seen_s in (0.0, 1.0, 1e4):
        rate = (LOAD_BYTES_PER_S + 1e6 * seen_s) / (1 + seen_s)
        view = with_address(decode()._replace(loaded_bytes=1e6 * seen_s, load_s=seen_s))
        loading = placed({"d0": 200}, view, settings=alone, resident={"d0": 50})
        assert loading.cached_tokens == 3200
        assert loading.forecast.queue_s == pytest.approx(FETCH_S + 150 * 16 * 1000 / rate)
        assert placed({"d0": 200}, view, settings=alone).forecast.queue_s == 0


def test_what_is_in_memory_counts_for_more_than_what_a_tier_has() -> None:
    both = [with_address(decode(name)._replace(loaded_bytes=1e9, load_s=1e3)) for name in ("d0", "d1")]
    for here, there in (("d0", "d1"), ("d1", "d0")):
        alone = replace(SETTINGS, split_always=False)
        chosen = placed({"d0": 200, "d1": 200}, *both, settings=alone, resident={there: 0})
        assert chosen.owner.replica_id == here


def test_what_only_a_tier_has_is_not_fetched() -> None:
    assert placed({"d0": 200}, prefill(total=1000), decode(), resident={"d0": 0}).fetch is None
    fetching = placed({"d0": 200}, prefill(total=1000), decode(), resident={"d0": 150})
    assert fetching.fetch is not None
    assert fetching.fetch.tokens == 2400


def test_a_fetch_takes_time_by_what_the_replica_has_fetched_so_far() -> None:
    for seen_s in (0.0, 1.0, 1e4):
        rate = (1e9 + 1e8 * seen_s) / (1 + seen_s)
        target = prefill(total=1000)._replace(fetched_bytes=1e8 * seen_s, fetch_s=seen_s)
        fetching = placed({"d0": 200}, target, decode())
        assert fetching.forecast.queue_s == pytest.approx(FETCH_S + 3200 * 1000 / rate)
