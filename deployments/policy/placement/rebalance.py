"""Which running answer would cost less on another replica, by so much that it moves. Pure.

Roles follow the load from request to request, and an answer need not stay where it began. When prompts come to its
replica, or another replica has nothing to do, the costs of placement (`joint`) say what the rest of the answer costs on
each replica: to itself, to the answers beside it and to prompts. A move costs the gap that its client sees. A replica
is looked at once in `LOOK_EVERY_S`, and gives up at most one answer each time. An answer moves at most twice so, and
stays for `REST_S` where it has come to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from deployments.policy.placement.costs import Costs
from deployments.policy.placement.field import Field, most_tokens
from deployments.policy.placement.joint import has_spare_steps
from deployments.policy.placement.relief import Running

GAP_STEPS = 4.0
"""The gap of a move, in decode steps, as measured (docs/benchmarks/moves.md), beside what the transfer takes."""

LEAST_SAVED_S = 0.5
"""The least seconds that a move must save, of all requests together."""

LEAST_SAVED_SHARE = 0.25
"""The least that a move must save, as a share of what the answer costs where it is."""

LOOK_EVERY_S = 1.0
"""The least time between two looks at a replica, in which what the last move changed is seen."""

LOOKS_PER_S = 50
"""The most looks at all replicas together in a second: they bound what the session manager spends on them."""

REST_S = 5.0
"""An answer that has come from another replica stays for so long at least."""

MOST_ATTEMPTS = 3
"""An answer that was placed so often stays where it is."""

ROOM = 2.0
"""The free blocks that a replica must have to take an answer over, as a multiple of what the answer may need."""


def candidate(running: Iterable[tuple[Running, float]]) -> tuple[Running, float] | None:
    """The answer to move, if any: the one with the most tokens left for each that would have to move.

    `running`: the answers on a replica, with the tokens that each is expected to write yet.
    """
    able = [(each, left) for each, left in running if each.movable and left > GAP_STEPS]
    return max(able, key=lambda each: each[1] / each[0].held_tokens, default=None)


def saved_s(here: Field, source: int) -> float:
    """The seconds that a move of this answer away from the replica in row `source` saves, to the best replica.

    `here`: what is left of the answer, as a request whose prompt is all that it holds, before the fleet without it. 0.0
    where no other replica takes it or none is better by enough.
    """
    columns, outlook = here.columns, here.outlook
    able = here.owners & has_spare_steps(here) & (columns.fingerprint == columns.fingerprint[source])
    able &= columns["room_blocks"] >= ROOM * columns.blocks_for(most_tokens(here.request))
    able[source] = False
    rows = np.flatnonzero(able)
    if not rows.size or not columns.coefficients:
        return 0.0
    costs = Costs(here)
    gap_s = GAP_STEPS * outlook.step_s[rows]
    if here.knowledge.link_bytes_per_s:
        gap_s = gap_s + outlook.kv_bytes(rows) / here.knowledge.link_bytes_per_s
    go_s = costs.decode_s[rows] + costs.between_prompts_s[rows]
    go_s += here.settings.weights.decode * gap_s + costs.late_s(gap_s, costs.spare_s[rows])
    stay_s = float(costs.decode_s[source] + costs.beside_prompts_s[source])
    saved = stay_s - float(go_s.min())
    return saved if saved > max(LEAST_SAVED_S, LEAST_SAVED_SHARE * stay_s) else 0.0


@dataclass(slots=True)
class Looks:
    """When each replica may be looked at again."""

    _next_s: float = 0.0
    _after_s: dict[str, float] = field(default_factory=dict)

    def is_due(self, replica_id: str, now_s: float) -> bool:
        """Whether to look at a replica now. That is then its look."""
        if now_s < self._next_s or now_s < self._after_s.get(replica_id, 0.0):
            return False
        self._after_s = {each: after_s for each, after_s in self._after_s.items() if now_s < after_s}
        self._after_s[replica_id] = now_s + LOOK_EVERY_S
        self._next_s = now_s + 1.0 / LOOKS_PER_S
        return True
