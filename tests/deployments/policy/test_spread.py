"""How many replicas are to have a hot prefix, and which replica gets a copy next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from deployments.fleet.columns import Columns, ReplicaView
from deployments.fleet.flow import WINDOW_S
from deployments.messages import ReplicaInfo, Role
from deployments.policy.spread import COMES_S, LEAST_TOKENS, MOST, PLAN_S, SHARE, WARM_LOAD, Copy, Spread

HOT, TOKENS, KV_BYTES = tuple(range(100, 164)), 1024, 100_000
"""A copy takes half of the time from one plan to the next, on a link of 1e9 bytes/s."""


def info(name: str, role: Role = Role.MIXED, fingerprint: str = "engine", **shape: Any) -> ReplicaInfo:
    return ReplicaInfo(
        name,
        role.value,
        role,
        "node",
        fingerprint,
        16,
        1000,
        8,
        4096,
        (f"tcp://{name}",),
        kv_bytes_per_token=KV_BYTES,
        **shape,
    )


class Fleet:
    """Replicas of which each has some prefixes, by the hash of their last block."""

    def __init__(self, *infos: ReplicaInfo, **has: Sequence[tuple[int, ...]]) -> None:
        self.infos, self.has = infos, {name: list(prefixes) for name, prefixes in has.items()}
        self.views: dict[str, dict[str, Any]] = {}

    def find(self, hashes: Sequence[int]) -> tuple[Mapping[str, int], Mapping[str, int]]:
        return {name: len(hashes) for name, prefixes in self.has.items() if tuple(hashes) in prefixes}, {}

    def plan(self, spread: Spread, now_s: float, empty: Sequence[str] = ()) -> dict[str, Copy]:
        """Make a plan, and tell every replica of it."""
        columns = Columns()
        for each in self.infos:
            load = {"free_blocks": 900, "sessions": 0, "backlog_tokens": 0, **self.views.get(each.replica_id, {})}
            columns.put(ReplicaView(each, **load))
        spread.plan(columns, self.find, empty, now_s)
        told = {each.replica_id: spread.next_for(each.replica_id, now_s) for each in self.infos}
        return {name: copy for name, copy in told.items() if copy is not None}


def busy(load: float, hashes: tuple[int, ...] = HOT, spread: Spread | None = None, now_s: float = 0.0) -> Spread:
    """Prompts with a prefix keep so many replicas busy."""
    made = spread or Spread(1e9)
    made.note(hashes, TOKENS, 0.0, now_s - 1000.0)  # it is not new
    made.note(hashes, TOKENS, load * WINDOW_S, now_s)
    return made


A, B, C = info("a"), info("b"), info("c")


@pytest.mark.parametrize(("load", "copies"), [(0.9 * SHARE, 0), (1.5 * SHARE, 1), (2.5 * SHARE, 1), (100.0, 1)])
def test_copies_are_offered_load_over_a_share_of_a_replica_and_a_source_writes_one_at_a_time(
    load: float, copies: int
) -> None:
    fleet, spread = Fleet(A, B, C, a=[HOT]), busy(load)
    told = fleet.plan(spread, 0.0)
    assert len(told) == copies
    assert all((copy.source, copy.hashes, copy.tokens) == (A, HOT, TOKENS) for copy in told.values())
    assert spread.told == copies


def test_what_is_coming_counts_as_a_copy_until_it_should_be_there() -> None:
    fleet, spread = Fleet(A, B, C, a=[HOT]), busy(2.5 * SHARE)
    (first,) = fleet.plan(spread, 0.0)
    (second,) = fleet.plan(spread, PLAN_S)
    assert {first, second} == {"b", "c"}
    busy(2.5 * SHARE, spread=spread, now_s=2 * PLAN_S)
    assert fleet.plan(spread, 2 * PLAN_S) == {}
    busy(2.5 * SHARE, spread=spread, now_s=COMES_S + 1.0)
    assert len(fleet.plan(spread, COMES_S + 1.0)) == 1, "it has not come"


def test_what_a_port_has_time_for_is_copied_in_one_plan() -> None:
    small = [replace(each, kv_bytes_per_token=KV_BYTES // 10) for each in (A, B, C, info("d"), info("e"))]
    fleet, spread = Fleet(*small, a=[HOT]), busy(10.0)
    assert list(fleet.plan(spread, 0.0)) == ["b", "c", "d", "e"]
    fleet, spread = Fleet(*small, a=[HOT]), busy(10.0)
    fleet.views = {"a": {"flow_bytes": 0.2e9 * WINDOW_S}}
    assert list(fleet.plan(spread, 0.0)) == ["b", "c"]


def test_a_prefix_that_is_new_counts_by_the_time_since_it_came() -> None:
    spread = Spread(1e9)
    for now_s in (0.0, 0.5, 1.0):
        spread.note(HOT, TOKENS, 0.5 * SHARE, now_s)
    (prefix,) = spread._prefixes.values()
    assert prefix.load(1.0) == pytest.approx(1.5 * SHARE, rel=0.1)
    assert len(Fleet(A, B, a=[HOT]).plan(spread, 1.0)) == 1


def test_a_prefix_that_nothing_asks_for_any_more_is_copied_no_more() -> None:
    fleet, spread = Fleet(A, B, a=[HOT]), busy(2.0)
    assert fleet.plan(spread, 10 * WINDOW_S) == {}


def test_only_replicas_with_time_and_room_and_the_same_engine_copy() -> None:
    other = info("d", fingerprint="another")
    fleet, spread = Fleet(A, B, C, other, a=[HOT]), busy(10.0)
    fleet.views = {"b": {"flow_bytes": 0.5e9 * WINDOW_S}, "c": {"free_blocks": 63}}
    assert fleet.plan(spread, 0.0) == {}
    fleet.views = {"a": {"flow_bytes": 0.5e9 * WINDOW_S}}
    assert fleet.plan(spread, 0.0) == {}, "the source has no time"
    fleet.views = {"b": {"flow_s": 0.5 * WINDOW_S}}
    assert list(fleet.plan(spread, 0.0)) == ["c"], "it computes least"


def test_where_prompts_have_replicas_of_their_own_these_get_the_copies() -> None:
    decode, prefill = info("d", Role.DECODE), info("p", Role.PREFILL)
    fleet, spread = Fleet(decode, prefill, info("q", Role.DECODE), d=[HOT]), busy(2.0)
    told = fleet.plan(spread, 0.0)
    assert list(told) == ["p"]
    assert told["p"].source == decode


def test_a_replica_that_comes_up_empty_is_warmed_with_what_is_hottest_one_after_the_other() -> None:
    cold, warm = tuple(range(500, 564)), tuple(range(700, 764))
    fleet = Fleet(A, B, a=[HOT, cold, warm])
    spread = busy(0.9 * SHARE)
    busy(0.5 * SHARE, warm, spread)
    busy(0.5 * WARM_LOAD, cold, spread)
    assert fleet.plan(spread, 0.0) == {}
    told = fleet.plan(spread, 0.0, empty=["b"])
    assert [copy.hashes for copy in told.values()] == [HOT]
    assert fleet.plan(spread, PLAN_S, empty=["b"]) == {}, "one at a time"
    fleet.has["b"] = [HOT]
    for prefix, load in ((HOT, 0.9), (warm, 0.5)):
        busy(load * SHARE, prefix, spread, COMES_S + 1.0)
    told = fleet.plan(spread, COMES_S + 1.0, empty=["b"])
    assert [copy.hashes for copy in told.values()] == [warm]
    fleet.has["b"] = [HOT, warm]
    assert fleet.plan(spread, 2 * COMES_S + 2.0, empty=["b"]) == {}, "the cold one is not worth it"


def test_what_is_remembered_is_bounded_and_the_hottest_stay() -> None:
    spread = busy(2.0)
    for number in range(5 * MOST):
        spread.note((10_000 + number,), LEAST_TOKENS, 0.001, 0.0)
        busy(2.0, spread=spread)
    assert len(spread) <= 2 * MOST
    assert len(Fleet(A, B, a=[HOT]).plan(spread, 0.0)) == 1


def test_a_plan_is_due_from_time_to_time_and_where_there_is_something() -> None:
    assert not Spread().is_due(0.0)
    spread = busy(1.0)
    assert spread.is_due(0.0)
    Fleet(A).plan(spread, 0.0)
    assert not spread.is_due(0.9 * PLAN_S)
    assert spread.is_due(PLAN_S)
