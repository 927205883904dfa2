"""Whether a fleet carries a demand, by the simulator: it stops as soon as more requests miss than may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from load_tests.plan.demand import WARMUP_SHARE, Demand
from load_tests.plan.fleets import Fleet, cluster
from load_tests.simulator.cluster import Options
from load_tests.simulator.experiment import make_allocator
from load_tests.simulator.metrics import Record, summarise
from load_tests.simulator.simulation import Simulation, SimulationError


@dataclass(frozen=True, slots=True)
class Verdict:
    """`attained`: the share of requests within their objectives; an upper bound where it was stopped early.

    `figures`: those of `metrics.summarise`; empty where it was stopped early.
    """

    fleet: Fleet
    seed: int
    meets: bool
    attained: float
    figures: dict[str, Any]


class _Enough(Exception):
    """More requests have missed than may."""


class _Counting(Simulation):
    """Stops when more than `most` requests miss, of those that count."""

    def __init__(self, demand: Demand, fleet: Fleet, seed: int, most: int) -> None:
        fleet_made = cluster(fleet, demand.max_model_len)
        super().__init__(fleet_made, demand.trace, demand.classes, Options(seed=seed), make_allocator)
        self.misses, self._most, self._from_s = 0, most, demand.counted_from_s

    def _end(self, session_id: str, record: Record) -> None:
        super()._end(session_id, record)
        self.misses += record.at_s >= self._from_s and not record.meets(self._classes)
        if self.misses > self._most:
            raise _Enough


def judge(demand: Demand, fleet: Fleet, seed: int, whole: bool = False) -> Verdict:
    """Simulate a fleet once. `whole`: to the end, also where it misses."""
    simulation = _Counting(demand, fleet, seed, demand.counted if whole else demand.misses_allowed)
    figures: dict[str, Any] = {}
    try:
        figures = summarise(simulation.run().records, demand.classes, WARMUP_SHARE)
    except _Enough:
        pass
    except SimulationError:  # requests that are never served nor refused have missed
        simulation.misses = demand.counted
    attained = 1.0 - simulation.misses / demand.counted
    return Verdict(fleet, seed, simulation.misses <= demand.misses_allowed, attained, figures)


def judge_all(demand: Demand, fleet: Fleet, seeds: tuple[int, ...]) -> Verdict:
    """The first verdict that the fleet does not meet the objectives; else the worst."""
    verdicts = []
    for seed in seeds:
        verdicts.append(judge(demand, fleet, seed))
        if not verdicts[-1].meets:
            return verdicts[-1]
    return min(verdicts, key=lambda verdict: verdict.attained)
