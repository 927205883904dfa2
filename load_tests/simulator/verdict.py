"""The result of a sweep of policies: how the default one compares where the others begin to miss their objectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OURS = "joint"
MISSES = 0.95
"""A policy misses its objectives where its goodput is less than this share of the offered load."""
LEVEL = 0.98
"""Goodputs count as equal where the smaller is at least this share of the larger."""
TWOFOLD = 2.0
FORMS = (("with_admission", True), ("without_admission", False))

Row = Mapping[str, Any]


def knee(rows: Sequence[Row]) -> float | None:
    """The first load at which even the best other policy misses its objectives; None when it never does."""
    others = [row for row in rows if row["policy"] != OURS and not row["admission"]]
    for load in sorted({row["load"] for row in others}):
        shares = [row["goodput"] / row["offered"] for row in others if row["load"] == load]
        if max(shares) < MISSES:
            return float(load)
    return None


def compare(rows: Sequence[Row]) -> dict[str, Any]:
    """One trace and fleet: our goodput at the knee over that of each other policy, and under twofold overload.

    `goodput_ratio` compares like with like: both with admission, or both without. `whole_goodput_ratio` does so with
    the warm-up included. `admission_ratio` compares our policy with admission to every policy without it.
    """
    at = knee(rows)
    found: dict[str, Any] = {"knee_load": at}
    if at is not None:
        here = {(row["policy"], row["admission"]): row for row in rows if row["load"] == at}
        ours = here.get((OURS, True))
        if ours is not None:
            found["knee_rate"] = ours["rate"]
            found["goodput"] = ours["goodput"]
            for figure in ("goodput", "whole_goodput"):
                found[f"{figure}_ratio"] = {
                    name: _ratios(here.get((OURS, admission)), here, admission, OURS, figure)
                    for name, admission in FORMS
                }
            found["admission_ratio"] = _ratios(ours, here, admission=False)
    return found | {"overload": overload(rows)}


def _ratios(
    ours: Row | None,
    here: Mapping[tuple[str, bool], Row],
    admission: bool,
    but: str = "",
    figure: str = "goodput",
) -> dict[str, float | None]:
    """Our goodput divided by that of each policy that ran in that form."""
    others = {policy: row for (policy, form), row in sorted(here.items()) if form is admission and policy != but}
    return {policy: _ratio(ours, row, figure) for policy, row in others.items()} if ours is not None else {}


def peak_load(rows: Sequence[Row], admission: bool = True) -> float | None:
    """The lowest load at which the default policy's goodput reaches `LEVEL` of its highest; None without rows."""
    mine = _ours(rows, admission)
    if not mine:
        return None
    most = max(row["goodput"] for row in mine)
    return float(next(row["load"] for row in mine if row["goodput"] >= LEVEL * most))


def overload(rows: Sequence[Row]) -> dict[str, Any]:
    """Goodput at twice the peak load, as a share of the highest goodput, with admission and without.

    The peak load is the one found with admission. Where twice that load was not run, the result has no figures.
    """
    peak_at = peak_load(rows)
    found: dict[str, Any] = {"peak_load": peak_at}
    for name, admission in FORMS:
        mine = _ours(rows, admission)
        at = next((row for row in mine if peak_at is not None and row["load"] == TWOFOLD * peak_at), None)
        if at is not None:
            peak = max(mine, key=lambda row: float(row["goodput"]))
            found[name] = {"peak": peak["goodput"], "goodput": at["goodput"], "share_of_peak": _ratio(at, peak)}
    return found


def _ours(rows: Sequence[Row], admission: bool) -> list[Row]:
    mine = [row for row in rows if row["policy"] == OURS and row["admission"] is admission]
    return sorted(mine, key=lambda row: float(row["load"]))


def _ratio(row: Row, to: Row, figure: str = "goodput") -> float | None:
    return round(row[figure] / to[figure], 4) if to[figure] else None
