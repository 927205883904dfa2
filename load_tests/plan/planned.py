"""What a plan is: the search's result, its confirmation, and all that was simulated on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

from load_tests.plan.demand import Demand, Room
from load_tests.plan.judge import Verdict
from load_tests.plan.search import Search


@dataclass(slots=True)
class Planned:
    """`confirmed`: the plan with a seed of its own. `fewer`: so the fleets with one replica fewer of a pool.

    `verdicts`: of all that was simulated. `is_cut`: the time was over before the search was.
    """

    demand: Demand
    rooms: list[Room]
    search: Search
    confirmed: Verdict | None = None
    fewer: list[Verdict] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    is_cut: bool = False
