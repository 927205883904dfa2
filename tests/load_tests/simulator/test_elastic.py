"""The simulation whose pools grow and shrink: nothing is lost, starts and drains take their time and are paid for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from load_tests.simulator import synthetic
from load_tests.simulator.cluster import Options
from load_tests.simulator.elastic import Elastic, Elasticity, ElasticSimulation, Scaler, Watched
from load_tests.simulator.experiment import make_allocator
from load_tests.simulator.metrics import Classes, Objectives
from load_tests.simulator.profiles import heterogeneous
from load_tests.simulator.scalers import Fixed
from load_tests.simulator.simulation import Simulation
from load_tests.simulator.traces import Trace
from load_tests.simulator.waves import larger, wave

LOOSE: Classes = (Objectives("any", ttft_s=60.0, tpot_s=10.0),)
TRACE = synthetic.poisson(4.0, 400, seed=3)


class Script:
    """Sizes by the time from which they are wanted."""

    def __init__(self, *sizes: tuple[float, dict[str, int]]) -> None:
        self._sizes = sizes
        self.seen: list[tuple[float, int, int, int]] = []

    def targets(self, watched: Watched) -> Mapping[str, int]:
        prefill = watched.pools["prefill"]
        self.seen.append((watched.at_s, len(prefill.nodes), len(prefill.starting), len(prefill.leaving)))
        return next((wanted for from_s, wanted in reversed(self._sizes) if watched.at_s >= from_s), {})


def simulate(scaler: Scaler, trace: Trace = TRACE, **elasticity: object) -> Elastic:
    chosen = replace(Elasticity(), **elasticity)  # type: ignore[arg-type]
    return ElasticSimulation(heterogeneous(6), trace, LOOSE, Options(), chosen, lambda _: scaler).run_elastic()


def test_a_fleet_that_stays_is_the_same_simulation() -> None:
    fixed = simulate(Fixed())
    plain = Simulation(heterogeneous(6), TRACE, LOOSE, Options(), make_allocator).run()
    assert fixed.result.records == plain.records
    assert fixed.replica_hours == pytest.approx(6 * fixed.length_s / 3600)
    assert fixed.reversals == 0


def test_a_start_takes_its_time_and_is_paid_for_from_its_begin() -> None:
    script = Script((20.0, {"prefill": 6}))
    done = simulate(script, start_s=30.0)
    ready = {at_s: (nodes, starting) for at_s, nodes, starting, _ in script.seen}
    grown = next(at_s for at_s, (nodes, _) in ready.items() if nodes == 6)
    assert 40.0 <= grown <= 70.0
    assert any(starting == 2 for _, starting in ready.values())
    begun_s = next(at_s for at_s, size in done.sizes["prefill"] if size == 6)
    assert done.replica_hours == pytest.approx((6 * done.length_s + 2 * (done.length_s - begun_s)) / 3600)


def test_replicas_that_leave_lose_nothing() -> None:
    script = Script((30.0, {"prefill": 1, "decode-h200": 0}), (60.0, {"prefill": 3, "decode-h200": 1}))
    done = simulate(script, start_s=10.0, drain_s=0.5)
    assert len(done.result.records) == 400
    assert not any(record.refused for record in done.result.records)
    assert done.result.blocks_in_use == 0
    assert done.result.moves > 0, "answers that do not end in time move"
    assert script.seen[-1][3] == 0
    assert done.reversals == 2


def test_a_cancelled_start_is_paid_for_until_then() -> None:
    script = Script((20.0, {"prefill": 5}), (40.0, {"prefill": 4}))
    done = simulate(script, start_s=1000.0)
    assert done.replica_hours == pytest.approx((6 * done.length_s + 20.0) / 3600, rel=0.01)


def test_a_start_without_room_never_ends() -> None:
    script = Script((20.0, {"prefill": 7}))
    simulate(script, start_s=5.0, stuck={"prefill": 5})
    assert script.seen[-1][1:3] == (5, 2)


def test_a_larger_trace_keeps_its_time_and_its_conversations() -> None:
    one = synthetic.conversations(2.0, 60, seed=1)
    many = larger(one, 3, 1e9, seed=1)
    assert len(many.requests) == 3 * len(one.requests)
    assert sorted(each.at_s for each in many.requests) == [each.at_s for each in many.requests]
    assert len({each.hashes[-1] for each in many.requests}) == 3 * len({each.hashes[-1] for each in one.requests})


def test_a_wave_has_four_times_as_much_at_its_high() -> None:
    requests = wave(20.0, 1200.0, 600.0, seed=1).requests
    low = sum(each.at_s % 600 < 60 or each.at_s % 600 > 540 for each in requests)
    high = sum(240 < each.at_s % 600 < 360 for each in requests)
    assert 3.0 < high / low < 5.0
