"""A replica's row: the larger of what is reserved and what it reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.fleet.flow import Flow
from deployments.fleet.ledger import Ledger
from deployments.fleet.row import Arrival, reservable, row_of
from deployments.messages import Phase, ReplicaInfo, ReplicaSnapshot, Role

INFO = ReplicaInfo("d0", "pool", Role.DECODE, "node", "engine", 16, 60, 8, 4096)
SNAPSHOT = ReplicaSnapshot("d0", 1, Phase.READY, INFO, used_blocks=7, running=2, waiting=1)


def test_only_a_ready_replica_that_has_told_its_shape_takes_sessions() -> None:
    assert Arrival(SNAPSHOT, 0.0, frozenset()).is_placeable
    assert not Arrival(replace(SNAPSHOT, phase=Phase.DRAINING), 0.0, frozenset()).is_placeable
    assert not Arrival(replace(SNAPSHOT, info=None), 0.0, frozenset()).is_placeable


def test_what_a_replica_reports_counts_where_less_is_reserved() -> None:
    share = Ledger({}, 30.0, 30.0).share("d0")
    row = row_of(Arrival(SNAPSHOT, 0.0, frozenset()), share, 1.0, Flow(prompts=3.0))
    assert (row.free_blocks, row.sessions, row.expected_blocks, row.flow_prompts) == (53, 3, 7, 3.0)


def test_what_is_pinned_or_set_aside_is_free_for_no_session() -> None:
    share = Ledger({}, 30.0, 30.0).share("d0")
    rows = [
        row_of(Arrival(replace(SNAPSHOT, pinned=pinned), 0.0, frozenset()), share, 1.0, Flow(), set_aside)
        for pinned, set_aside in (({}, 5), ({}, 9), ({"a": 6, "b": 5}, 0), ({"a": 6}, 20))
    ]
    assert [(row.free_blocks, row.expected_blocks) for row in rows] == [(53, 7), (51, 9), (49, 11), (40, 20)]


def test_what_a_replica_has_loaded_and_fetched_is_in_bytes_and_seconds() -> None:
    counters = {"tier_loaded_bytes": 5e6, "tier_load_s": 0.5, "blocks_fetched": 3.0, "fetch_s": 0.25}
    snapshot = replace(SNAPSHOT, info=replace(INFO, kv_bytes_per_token=100), counters=counters)
    row = row_of(Arrival(snapshot, 0.0, frozenset()), Ledger({}, 30.0, 30.0).share("d0"), 1.0, Flow())
    assert (row.loaded_bytes, row.load_s, row.fetched_bytes, row.fetch_s) == (5e6, 0.5, 3 * 16 * 100, 0.25)


@pytest.mark.parametrize(("info", "blocks"), [(INFO, 90), (replace(INFO, role=Role.PREFILL, strict=True), 60)])
def test_only_a_replica_that_decodes_may_be_promised_more_than_it_has(info: ReplicaInfo, blocks: int) -> None:
    assert reservable(info, 1.5) == blocks
