"""Why a request goes where it goes: every way that was weighed, with what it costs and the parts of that. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from deployments.fleet.columns import Codes
from deployments.messages import Admit, Decision, Queue
from deployments.policy.placement.choice import Choice, near_s
from deployments.policy.placement.costs import ADAPTER, Costs
from deployments.policy.placement.field import Field, most_tokens
from deployments.policy.placement.joint import ways_of
from deployments.policy.placement.place import mode_of
from transfer.memory.blocks import blocks_for

MOST = 16
"""The most ways that are told, the cheapest first, and the most replicas that are not among them."""

_DIGITS = 6


def decision_of(decision: Decision) -> dict[str, Any]:
    """A decision, for people and programs."""
    if not isinstance(decision, Admit):
        outcome = "waits" if isinstance(decision, Queue) else "refused"
        return {"outcome": outcome, **asdict(decision)}
    placement = decision.placement
    return {
        "outcome": "placed",
        "mode": placement.mode.value,
        "reason": placement.reason,
        "prefill": placement.prefill.replica_id if placement.prefill else None,
        "decode": placement.decode.replica_id if placement.decode else None,
        "reserved_blocks": placement.reserved_blocks,
        "cached_tokens": placement.cached_tokens,
        **({"fetch": {**asdict(fetch), "source": fetch.source.replica_id}} if (fetch := placement.fetch) else {}),
        "forecast": asdict(placement.forecast),
    }


def request_of(here: Field) -> dict[str, Any]:
    """What placement knows of a request, with the objectives of its class; None for one that the class lacks."""
    request, (ttft_s, tpot_s) = here.request, here.objectives
    return {
        "prompt_tokens": request.prompt_tokens,
        "max_tokens": request.max_tokens,
        "expected_tokens": round(here.knowledge.output_tokens, 1),
        "ttft_s": ttft_s if ttft_s < np.inf else None,
        "tpot_s": tpot_s if tpot_s < np.inf else None,
        "adapter": request.adapter,
        "modes": [mode.value for mode in here.modes],
        "rule": request.rule,
    }


def candidates(here: Field) -> dict[str, Any]:
    """The ways that `joint` weighs, the cheapest first, and the replicas that are part of none.

    `{"ways", "near_s", "candidates": [{"mode", "prefill", "decode", "cost_s", "cached_tokens", "parts": {name: s}}],
    "passed_over": [{"replica", "why"}]}`. `ways`: how many there are. `near_s`: a way that costs so much more than the
    cheapest counts as equal to it, and one of the equal ways is drawn. The parts of a cost add up to it.
    """
    costs = Costs(here)
    ways = next(filter(None, ways_of(here, costs, all_pairs=True)), None) or []
    bill, found = _Bill(here, costs), []
    for owners, helpers, cost_s in ways:
        for at in range(owners.size):
            helper = None if helpers[at] < 0 else int(helpers[at])
            found.append((float(cost_s[at]), Choice(int(owners[at]), helper)))
    found.sort(key=lambda each: each[0])
    used = {row for _, choice in found for row in (choice.owner, choice.helper)}
    return {
        "ways": len(found),
        "near_s": round(near_s(found[0][0], here.settings.weights), _DIGITS) if found else 0.0,
        "candidates": [_way(here, bill, choice, cost_s) for cost_s, choice in found[:MOST]],
        "passed_over": list(_passed_over(here, used))[:MOST],
    }


def _way(here: Field, bill: _Bill, choice: Choice, cost_s: float) -> dict[str, Any]:
    mode = mode_of(here, choice)
    prefiller = choice.owner if choice.helper is None else choice.helper
    owner, helper = (here.columns.info(row).replica_id for row in (choice.owner, prefiller))
    is_split, is_on_prefill = choice.helper is not None, mode.value == "prefill_local"
    return {
        "mode": mode.value,
        "prefill": helper if is_split or is_on_prefill else None,
        "decode": None if is_on_prefill else owner,
        "cost_s": round(cost_s, _DIGITS),
        "cached_tokens": here.outlook.cached_on(prefiller),
        "parts": {name: round(part_s, _DIGITS) for name, part_s in bill.of(choice).items() if part_s},
    }


class _Bill:
    """The parts of what each way costs."""

    def __init__(self, here: Field, costs: Costs) -> None:
        self._here, self._costs = here, costs
        self._prefill, self._decode = dict(costs.prefill_parts()), dict(costs.decode_parts())

    def of(self, choice: Choice) -> dict[str, float]:
        """Seconds by name. Equal names of both sides are one part."""
        owner, helper = choice.owner, choice.helper
        prefiller = owner if helper is None else helper
        parts = defaultdict(float, {name: float(column[owner]) for name, column in self._decode.items()})
        for name, column in self._prefill.items():
            if helper is not None or name != ADAPTER:
                parts[name] += float(column[prefiller])
        if helper is not None:
            parts["prompts_there"] += float(self._costs.between_prompts_s[owner])
            if self._here.knowledge.link_bytes_per_s:
                parts["transfer"] += float(self._costs.moving_s(_one(owner), _one(helper))[0, 0])
        return dict(parts)


def _one(row: int) -> Codes:
    return np.array([row], np.int64)


def _passed_over(here: Field, used: set[int | None]) -> Iterator[dict[str, str]]:
    """The replicas that are part of no way, with the reason. `used`: the rows of the others."""
    for replica_id, row in here.columns.rows.items():
        if row not in used:
            yield {"replica": replica_id, "why": _why_not(here, row)}


def _why_not(here: Field, row: int) -> str:
    columns, tokens = here.columns, most_tokens(here.request)
    info = columns.info(row)
    if not columns.ready[row]:
        return "it takes no sessions now"
    if not here.can_hold(tokens)[row]:
        return f"it cannot hold {tokens} tokens, or its pool does not take such a request"
    if columns["room_blocks"][row] < 0:
        return f"it runs its {info.max_sessions} sessions"
    need = blocks_for(tokens, info.block_size)
    if columns["free_blocks"][row] < need:
        return f"it has {int(columns['free_blocks'][row])} free blocks, and {need} are needed"
    if not here.has_turn[row]:
        return f"its prompts take {here.outlook.queue_s[row]:.2f} s, over {here.longest_queue_s:.2f} s"
    if here.alone[row]:
        return "it computes prompts nearly all the time"
    if here.helpers[row] and not here.pair_owners.any():
        return "it computes prompts, and no other replica can write the answer now"
    if here.pair_owners[row] and not here.helpers.any():
        return "it writes answers, and no other replica can compute the prompt now"
    if here.pair_owners[row] or here.helpers[row]:
        return "others cost less on their side"
    return f"its role, {info.role.value}, does not serve this request"
