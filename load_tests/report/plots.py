"""Draws runs of the serving benchmark.

`python -m load_tests.report.plots -o a.png .cache/bench/serving/*mixed-1.55.json`

The picture has three parts: time to first token, longest gap and end-to-end time. Each shows, for every time, the share
of requests that took at most that long, with a line for each run. Needs matplotlib (`.venv/bin/python -m pip install
matplotlib`), which nothing else here needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from load_tests.report.serving import e2e_s, max_gap_s, ttft_s
from load_tests.traffic.client import Answer

FIGURES: Mapping[str, Callable[[Answer], float]] = {
    "time to first token, s": ttft_s,
    "longest gap inside the answer, s": max_gap_s,
    "end to end, s": e2e_s,
}


class Run(msgspec.Struct):
    """One run, as the benchmark writes it."""

    run: str
    answers: list[Answer]


def read(file: Path) -> Run:
    """Reads the file of a run. Raises msgspec.ValidationError when it is not one."""
    return msgspec.json.decode(file.read_bytes(), type=Run)


def shares(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The values in order, and for each of them the share of all values that are not above it."""
    ordered = sorted(values)
    return ordered, [(number + 1) / len(ordered) for number in range(len(ordered))]


def draw(runs: Sequence[Run], kind: str | None, file: Path) -> None:
    """Draws one picture of these runs. `kind`: draw only requests of this kind; None: all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    for axes, (name, value) in zip(figure.subplots(1, len(FIGURES)), FIGURES.items(), strict=True):
        for run in runs:
            counted = [each for each in run.answers if not each.error and kind in (None, each.kind)]
            if counted:
                axes.step(*shares([value(answer) for answer in counted]), where="post", label=run.run)
        axes.set(xlabel=name, ylabel="share of requests", ylim=(0, 1))
        axes.set_xlim(left=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("serving.png"))
    parser.add_argument("--kind", help="of these requests only: short, long")
    options = parser.parse_args(arguments)
    try:
        draw([read(file) for file in options.files], options.kind, options.output)
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: install matplotlib first") from error
    print(options.output)


if __name__ == "__main__":
    main()
