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
from deployments.policy.placement.estimates import Knowledge
from deployments.policy.placement.explain import decision_of
from deployments.policy.placement.fetch import FETCH_S, LEAST_TIMEOUT_S
from deployments.policy.placement.field import Field
from deployments.policy.placement.joint import Joint
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


def placed(hits: dict[str, int], *views: ReplicaView, settings: Any = FETCHES, link: float = 1e9) -> Placement:
    """`hits`: blocks of 16 tokens."""
    request = ask(PROMPT, 96)
    known = Knowledge(hits=hits, link_bytes_per_s=link)
    view = fleet_of(*(view if view.info.endpoints else with_address(view) for view in views))
    columns = view.columns
    columns.learn({each.info.pool: STEPS for each in view.ready})
    live = LiveView(columns, view.known, (), 0.0)
    decision = place(Field(request, live, settings, known, random.Random(0), (math.inf, math.inf)), Joint())
    assert isinstance(decision, Admit), decision
    return decision.placement


def test_what_decode_has_is_fetched_by_prefill() -> None:
    without = placed({}, prefill(total=1000), decode())
    fetching = placed({"d0": 200}, prefill(total=1000), decode())
    assert fetching.prefill is not None
    assert fetching.fetch is not None
    assert (fetching.fetch.source.replica_id, fetching.fetch.tokens) == ("d0", 3200)
    assert fetching.cached_tokens == 3200
    saved_s = 0.8 * without.forecast.prefill_s - FETCH_S - 3200 * 1000 / 1e9
    assert fetching.fetch.saved_s == pytest.approx(saved_s)
    assert fetching.forecast.prefill_s == pytest.approx(without.forecast.prefill_s - saved_s)
    assert fetching.fetch.timeout_s == pytest.approx(max(LEAST_TIMEOUT_S, 0.8 * without.forecast.prefill_s))


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
        ({"d0": 200}, (strict_prefill(total=1000), decode()), {}),
        ({"d0": 200}, (prefill(total=1000), with_address(decode(), "tcp://1", "tcp://2")), {}),
        ({"d9": 200}, (prefill(total=1000), decode(), with_address(decode("d9"), fingerprint="another")), {}),
    ],
    ids=["off", "a slow link", "too little", "here already", "strict", "several workers", "another engine"],
)
def test_nothing_is_fetched(hits: dict[str, int], views: tuple[ReplicaView, ...], more: dict[str, Any]) -> None:
    assert placed(hits, *views, **more).fetch is None


def test_the_longest_part_counts() -> None:
    hits = {"d0": 100, "d1": 220, "d2": 150}
    fetching = placed(hits, prefill(total=1000), *(decode(name) for name in hits))
    assert fetching.fetch is not None
    assert fetching.fetch.source.replica_id == "d1"


def test_explain_names_the_source() -> None:
    placement = placed({"d0": 200}, prefill(total=1000), decode())
    told = decision_of(Admit(placement))["fetch"]
    assert placement.fetch is not None
    assert (told["source"], told["tokens"], told["saved_s"]) == ("d0", 3200, placement.fetch.saved_s)
    assert "fetch" not in decision_of(Admit(replace(placement, fetch=None)))
