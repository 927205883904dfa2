"""What is bought first when not all that is needed may be paid for. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def within(
    wanted: Mapping[str, int], least: Mapping[str, int], costs: Mapping[str, float], most_cost: float
) -> dict[str, int]:
    """The wanted sizes as far as they may cost. One replica after the other goes to the pool that has the smallest part
    of what it wants, so that pools that work together shrink together. The least sizes are always there.
    """
    found = {name: min(wanted[name], least[name]) for name in wanted}
    while True:
        left = most_cost - sum(costs[name] * size for name, size in found.items())
        able = [name for name in found if found[name] < wanted[name] and costs[name] <= left + 1e-9]
        if not able:
            return found
        found[min(able, key=lambda name: (found[name] / wanted[name], name))] += 1
