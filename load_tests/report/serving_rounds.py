"""The results of the serving benchmark: a row of figures for each run, and the summary over the rounds."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from load_tests.report.serving import Objective, by_kind, figures, over_rounds, rounded
from load_tests.traffic.client import Answer

OBJECTIVES = {"short": Objective(0.5, 0.05), "long": Objective(4.0, 0.05)}
CLOSED_FIGURES = (
    *("output_tokens_per_s", "ttft_p50_s", "tpot_p50_s", "e2e_p50_s"),
    *("ttft_p99_s", "itl_p99_s", "max_gap_p99_s", "requests", "failed"),
)
TRACE_FIGURES = ("e2e_mean_s", "ttft_p99_s", *CLOSED_FIGURES[:3], "max_gap_p99_s", "requests", "failed", "late_p99_s")
UNITS = ("_s", "_rps")

Row = dict[str, Any]
Rows = dict[str, dict[str, list[Row]]]
"""By load, by peer: a row of figures for each round."""


class Results:
    """The results of the runs so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: dict[str, Rows] = {"mixed": {}, "closed": {}}
        self._ready: dict[str, list[Row]] = {}
        self.answers: list[list[str]] = []
        self.failures: list[Row] = []

    def started(self, peer: str, row: Row) -> None:
        """Notes how long a peer took to be ready."""
        self._ready.setdefault(peer, []).append(row)

    def add(self, number: int, peer: str, work: str, load: str, row: Row, answers: Sequence[Answer]) -> None:
        """Adds one run. Its figures are kept, and its answers are written to a file with every token's arrival."""
        self._rows.setdefault(work, {}).setdefault(load, {}).setdefault(peer, []).append(row)
        print(f"  {work} {load}: {row}", file=sys.stderr, flush=True)
        name = f"{number + 1}-{peer}-{work}-{load}"
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"{name}.json").write_bytes(msgspec.json.encode({"run": name, "answers": answers}))

    def summary(self) -> dict[str, Any]:
        """Medians, spreads and ratios."""
        tables = {name: _medians(rows) for name, rows in self._rows.items()}
        ready = {peer: over_rounds(rows) for peer, rows in self._ready.items()}
        return {
            **tables,
            "ready_s": ready,
            "ratios": {name: {load: _ratios(peers) for load, peers in table.items()} for name, table in tables.items()}
            | {"ready_s": {peer: row["ready_s"] for peer, row in _ratios(ready).items()}},
            "paired": {
                name: {load: _paired(peers) for load, peers in rows.items()} for name, rows in self._rows.items()
            },
            "answers_equal": all(answers == self.answers[0] for answers in self.answers) if self.answers else None,
            "failures": self.failures,
        }


def _medians(rows: Rows) -> dict[str, dict[str, Any]]:
    return {load: {peer: over_rounds(each) for peer, each in peers.items()} for load, peers in rows.items()}


def _ratios(peers: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """Baton's figure over that of each other peer, where both exist."""
    ours = peers.get("baton", {})
    return {
        peer: {
            name: rounded(ours[name] / row[name]) for name in row if name.endswith(UNITS) and ours[name] and row[name]
        }
        for peer, row in peers.items()
        if ours and peer != "baton"
    }


def _paired(peers: dict[str, list[Row]]) -> dict[str, dict[str, list[float]]]:
    """Baton's figure over the other peer's of the same round: the median, the least and the greatest of the rounds."""
    ours = peers.get("baton", [])
    found: dict[str, dict[str, list[float]]] = {}
    for peer, rows in peers.items():
        if peer == "baton" or len(rows) != len(ours):
            continue
        for name in (name for name in ours[0] if name.endswith(UNITS)):
            if each := sorted(
                mine[name] / row[name] for mine, row in zip(ours, rows, strict=True) if mine[name] and row[name]
            ):
                found.setdefault(peer, {})[name] = [statistics.median(each), each[0], each[-1]]
    return found


def objectives_for(slower: float) -> dict[str, Objective]:
    """The objectives for a machine that is `slower` times slower than the one that they were stated for."""
    return {kind: Objective(each.ttft_s * slower, each.tpot_s * slower) for kind, each in OBJECTIVES.items()}


def mixed_row(answers: Sequence[Answer], seconds: float, objectives: Mapping[str, Objective] = OBJECTIVES) -> Row:
    """The figures of one mixed run."""
    kinds = by_kind(answers)
    every = figures(answers, 0.0, seconds, objectives)
    short = figures(kinds.get("short", []), 0.0, seconds, objectives)
    long = figures(kinds.get("long", []), 0.0, seconds, objectives)
    return {
        "short_ttft_p99_s": short["ttft_p99_s"],
        "short_max_gap_p99_s": short["max_gap_p99_s"],
        "e2e_mean_s": every["e2e_mean_s"],
        "goodput_rps": every["goodput_rps"],
        "output_tokens_per_s": every["output_tokens_per_s"],
        "short_ttft_p50_s": short["ttft_p50_s"],
        "short_tpot_p50_s": short["tpot_p50_s"],
        "short_e2e_mean_s": short["e2e_mean_s"],
        "long_ttft_p50_s": long["ttft_p50_s"],
        "long_ttft_p99_s": long["ttft_p99_s"],
        "requests": every["requests"],
        "failed": every["failed"],
        "late_p99_s": every["late_p99_s"],
    }


def trace_row(answers: Sequence[Answer], seconds: float) -> Row:
    """The figures of one trace. A trace has no objectives."""
    return _some(figures(answers, 0.0, seconds), *TRACE_FIGURES)


def closed_row(answers: Sequence[Answer], begin_s: float, end_s: float) -> Row:
    """The figures of one closed loop."""
    return _some(figures(answers, begin_s, end_s), *CLOSED_FIGURES)


def _some(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: found[name] for name in names}
