"""Columns: one row per replica, kept up to date, used again, and shared between moments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deployments.fleet.columns import UNKNOWN, Columns, ReplicaView
from deployments.messages import ReplicaInfo, Role
from deployments.step_cost import Coefficients

STEPS = Coefficients(1e-2, 1e-4, 0.0, 1e-3, 1e-6)


def info(name: str, pool: str = "small", block_size: int = 16, fingerprint: str = "engine") -> ReplicaInfo:
    return ReplicaInfo(name, pool, Role.DECODE, "node", fingerprint, block_size, 100, 8, 2048)


def columns_of(*infos: ReplicaInfo) -> Columns:
    columns = Columns(capacity=1)
    for each in infos:
        columns.put(ReplicaView(each, 50, 2, 0, held_tokens=1000.0))
    return columns


def test_more_replicas_than_the_capacity_all_get_rows() -> None:
    columns = columns_of(*(info(f"d{number}") for number in range(9)))
    assert columns.rows == {f"d{number}": number for number in range(9)}
    assert columns.ready.sum() == 9
    assert columns["free_blocks"][:9].tolist() == [50.0] * 9
    assert columns["capacity_tokens"][8] == 1600.0


def test_a_dropped_row_does_not_count_and_is_used_again() -> None:
    columns = columns_of(info("d0"), info("d1", block_size=32))
    columns.drop("d1")
    columns.drop("unknown")
    assert columns.ready[:2].tolist() == [True, False]
    assert columns.sizes == {16: 1}
    columns.put(ReplicaView(info("d2"), 5, 0, 0))
    assert columns.rows == {"d0": 0, "d2": 1}
    assert columns.engines == {0: 2}


def test_no_room_is_left_where_every_seat_is_taken() -> None:
    columns = columns_of(info("d0"))
    columns.put(ReplicaView(info("d0"), 50, 8, 0))
    assert (columns["free_blocks"][0], columns["room_blocks"][0]) == (50.0, -1.0)


def test_step_times_follow_what_is_learned_of_each_pool() -> None:
    columns = columns_of(info("d0"), info("d1", pool="large"))
    assert columns["step_s"][:2].tolist() == [0.0, 0.0]
    columns.learn({"small": STEPS})
    assert columns["step_s"][:2].tolist() == pytest.approx([1e-2 + 2e-3 + 1e-3, 0.0])
    assert columns.of_kind(0)[0] == STEPS
    assert columns.of_kind(1)[0] == UNKNOWN
    assert columns.of_kinds(lambda steps, kind: steps.base_s)[:2].tolist() == [1e-2, 0.0]


def test_a_strict_replica_does_its_own_work_only() -> None:
    kinds = [(role, strict) for role in Role for strict in (False, True) if not (strict and role is Role.MIXED)]
    columns = columns_of(
        *(replace(info(f"r{number}"), role=role, strict=strict) for number, (role, strict) in enumerate(kinds))
    )
    does = {kind: (columns.prefills[row], columns.decodes[row]) for row, kind in enumerate(kinds)}
    assert does == {
        (Role.PREFILL, False): (True, True),
        (Role.PREFILL, True): (True, False),
        (Role.DECODE, False): (True, True),
        (Role.DECODE, True): (False, True),
        (Role.MIXED, False): (True, True),
    }
    assert columns.is_of(Role.PREFILL)[: len(kinds)].tolist() == [role is Role.PREFILL for role, _ in kinds]


def test_blocks_are_counted_by_each_replicas_block_size() -> None:
    assert columns_of(info("d0")).blocks_for(17) == 2.0
    blocks = columns_of(info("d0"), info("d1", block_size=32)).blocks_for(33)
    assert np.asarray(blocks)[:2].tolist() == [3.0, 2.0]


def test_a_moment_has_ready_only_what_reported_lately_and_leaves_the_columns_as_they_are() -> None:
    columns = columns_of(info("d0"), info("d1"))
    columns.put(ReplicaView(info("d1"), 50, 2, 0), seen_s=10.0)
    later = columns.at(12.0, stale_s=5.0)
    assert later.ready[:2].tolist() == [False, True]
    assert columns.ready[:2].tolist() == [True, True]
    barred = later.without_room_on(["d1", "unknown"])
    assert barred["room_blocks"][:2].tolist() == [50.0, 0.0]
    assert later["room_blocks"][:2].tolist() == [50.0, 50.0]


def test_a_replica_that_comes_back_with_another_engine_changes_its_row() -> None:
    columns = columns_of(info("d0"))
    columns.put(ReplicaView(info("d0", fingerprint="newer", block_size=32), 50, 2, 0))
    assert columns.info(0).fingerprint == "newer"
    assert (columns.sizes, columns.engines) == ({32: 1}, {columns.code("newer"): 1})
