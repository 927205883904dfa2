"""What caches give to placement: the forms of an experiment that are compared, and the verdict on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from load_tests.simulator.experiment import Experiment

AFFINITY, PLAIN, FETCH, ALWAYS = "affinity", "joint", "fetch", "always"
SAME_RUN = ("trace", "replicas", "load")


def forms(one: Experiment) -> dict[str, Experiment]:
    """An experiment with `joint` in each form, by its name.

    `affinity`: `overlap_cost`, which goes to the cache and fetches nothing. `joint`: it fetches nothing either.
    `fetch`: `joint` with `placement.fetch`. `always`: the same with fetches that have no price.
    """
    fetches = replace(one, placement=(*one.placement, ("fetch", True)))
    return {
        AFFINITY: replace(one, policy="overlap_cost"),
        PLAIN: one,
        FETCH: fetches,
        ALWAYS: replace(fetches, always_fetch=True),
    }


def compare(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """By trace and fleet, and by load: the goodput of `fetch` over that of each other form. None where that is 0."""
    ours = {_run(row): row["goodput"] for row in rows if row["caches"] == FETCH}
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for row in rows:
        if row["caches"] != FETCH:
            ratio = round(ours[_run(row)] / row["goodput"], 4) if row["goodput"] else None
            of_trace = found.setdefault(f"{row['trace']}-{row['replicas']}", {})
            of_trace.setdefault(str(row["load"]), {})[row["caches"]] = ratio
    return found


def _run(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in SAME_RUN)
