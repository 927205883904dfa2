"""What a command that takes minutes shows on stderr: lines, and on a terminal a bar below them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich import progress as rich

REDRAW_S = 0.1


class Progress:
    """Lines for people, and a count that a bar shows where there is one.

    No thread draws the bar: a process that is forked while a thread draws would inherit a lock that nothing releases.
    So the bar changes when it is told of something. `redraw_s`: how often a wait should be interrupted to `redraw`,
    None without a bar.
    """

    def __init__(self, bar: rich.Progress | None = None) -> None:
        self._bar = bar
        self.redraw_s = None if bar is None else REDRAW_S

    def say(self, text: str) -> None:
        """A line, above the bar."""
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], count)
            self.redraw()

    def redraw(self) -> None:
        """Shows that the command is alive."""
        if self._bar is not None:
            self._bar.refresh()


@contextlib.contextmanager
def progress(what: str, total: int | None, lines_only: bool) -> Iterator[Progress]:
    """Counts `what`, as "fleets simulated". `total`: None for a search whose end is unknown, which gets a spinner.

    The bar is there until the end, where stderr is a terminal and `lines_only` is false. Nothing of it stays.
    """
    if lines_only or not sys.stderr.isatty():
        yield Progress()
        return
    with _bar(total) as bar:
        bar.add_task(what, total=total)
        shown = Progress(bar)
        shown.redraw()
        yield shown


def _bar(total: int | None) -> rich.Progress:
    from rich import progress as rich
    from rich.console import Console

    if total is None:
        columns: tuple[rich.ProgressColumn, ...] = (
            rich.SpinnerColumn(),
            rich.TextColumn("{task.completed} {task.description},"),
            rich.TimeElapsedColumn(),
        )
    else:
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn())
    return rich.Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
