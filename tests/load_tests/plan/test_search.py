"""The search for the cheapest fleet, against fleets whose answers are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deployments.messages import Role
from load_tests.plan.demand import Room
from load_tests.plan.devices import Device, known_devices
from load_tests.plan.fleets import Fleet, Kind, cluster, kinds
from load_tests.plan.search import Search
from load_tests.simulator.cluster import Options, configuration
from load_tests.simulator.metrics import Objectives

H100, H200 = known_devices().values()
SPLIT, MIXED = Kind((Role.PREFILL, Role.DECODE), (H100, H200)), Kind((Role.MIXED,), (H100,))
Truth = Callable[[Fleet], bool]


def searched(rooms: list[Room], truth: Truth, most: int = 20, lanes: int = 1) -> tuple[Search, list[Fleet]]:
    """The search when it has nothing more to ask, and what it asked. Of what runs, the newest is told first."""
    search, asked, running = Search(rooms, most), list[Fleet](), list[Fleet]()
    while True:
        while len(running) < lanes and (fleet := search.ask(running)) is not None:
            running.append(fleet)
            asked.append(fleet)
        if not running:
            return search, asked
        fleet = running.pop()
        search.tell(fleet, truth(fleet))


def cheapest(rooms: list[Room], truth: Truth, most: int = 20) -> float:
    """By trying all."""
    every = [Fleet(room.kind, (a, b)) for room in rooms for a in range(1, most) for b in range(1, most - a + 1)]
    return min(fleet.cost for fleet in every if truth(fleet))


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("guess", [(1, 1), (3, 4), (9, 2), (2, 15)])
@pytest.mark.parametrize("need", [(3, 4), (1, 1), (7, 2), (2, 11)])
def test_the_cheapest_fleet_is_found_with_far_fewer_simulations_than_there_are_fleets(
    need: tuple[int, int], guess: tuple[int, int], lanes: int
) -> None:
    def truth(fleet: Fleet) -> bool:
        """A part of what one pool lacks can be done by the other."""
        a, b = fleet.counts
        return a + b >= sum(need) and a >= need[0] - 1 and b >= need[1] - 1

    rooms = [Room(SPLIT, 2, guess)]
    search, asked = searched(rooms, truth, lanes=lanes)
    assert search.best is not None
    assert truth(search.best)
    assert search.best.cost == cheapest(rooms, truth)
    assert not any(truth(fewer) for fewer in search.best.fewer())
    assert len(asked) == len(set(asked)) < 45 < 190


def test_a_cheaper_kind_is_found_after_a_dear_one_and_a_hopeless_one_is_given_up() -> None:
    hopeless = Kind((Role.MIXED,), (H200,))
    rooms = [Room(hopeless, 1, (1,)), Room(SPLIT, 2, (5, 5)), Room(MIXED, 1, (9,))]
    search, asked = searched(
        rooms, lambda fleet: fleet.kind != hopeless and sum(fleet.counts) >= (10 if fleet.kind == SPLIT else 8)
    )
    assert search.best == Fleet(MIXED, (8,))
    assert search.best_of(hopeless) is None
    assert len(asked) < 30


def test_fleets_under_the_bound_are_not_simulated_and_none_is_over_the_limit() -> None:
    search, asked = searched([Room(MIXED, 4, (5,))], lambda fleet: False, most=10)
    assert search.best is None
    assert asked
    assert {4 <= fleet.counts[0] <= 10 for fleet in asked} == {True}
    assert Fleet(MIXED, (10,)) in asked


def test_a_fleet_that_fails_later_gives_way_to_the_next() -> None:
    search, _ = searched([Room(MIXED, 1, (5,))], lambda fleet: fleet.counts[0] >= 4)
    best = search.best
    assert best == Fleet(MIXED, (4,))
    search.tell(best, meets=False)
    assert search.best == Fleet(MIXED, (5,))
    assert search.ask() is None


def test_kinds_are_every_pair_of_devices_and_every_device_alone() -> None:
    names = [kind.name for kind in kinds((H100, H200))]
    assert names[:2] == ["prefill h100 + decode h100", "prefill h100 + decode h200"]
    assert names[-2:] == ["mixed h100", "mixed h200"]
    assert len(names) == 6
    assert [kind.name for kind in kinds((H100,), split=False)] == ["mixed h100"]


@pytest.mark.parametrize(("kind", "counts"), [(SPLIT, (2, 3)), (MIXED, (4,))])
def test_a_fleet_is_a_valid_application(kind: Kind, counts: tuple[int, ...]) -> None:
    made = cluster(Fleet(kind, counts), 32768)
    config = configuration(made, 128, (Objectives("chat", 1.0, 0.05),), Options())
    assert tuple(pool.replicas for pool in config.pools.values()) == counts
    assert Fleet(kind, counts).cost == pytest.approx(2 * 2.5 + 3 * 3.5 if kind is SPLIT else 10.0)


def test_one_fewer_leaves_no_pool_empty() -> None:
    assert [fleet.counts for fleet in Fleet(SPLIT, (2, 1)).fewer()] == [(1, 1)]
    assert Fleet(MIXED, (1,)).fewer() == ()


def test_devices_are_those_that_data_sheets_describe() -> None:
    assert isinstance(H100, Device)
    assert 300_000 < H100.kv_tokens < H200.kv_tokens
