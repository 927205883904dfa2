"""A bar on a terminal, and lines everywhere else."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable

import pytest

from load_tests.report.progress import REDRAW_S, progress

LINE = "prefill {'engine': [bold]} :smile: " + "x" * 150


def test_without_a_terminal_there_are_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("measurements", 2, lines_only=False) as shown:
        assert shown.redraw_s is None, "nothing is to be drawn while one waits"
        shown.advance()
        shown.redraw()
        shown.say(LINE)
    assert capsys.readouterr() == ("", f"{LINE}\n")


def test_on_a_terminal_that_asks_for_lines_there_are_lines_only(on_terminal: Callable[[], io.StringIO]) -> None:
    terminal = on_terminal()
    with progress("measurements", 2, lines_only=True) as shown:
        shown.advance()
        shown.say(LINE)
    assert terminal.getvalue() == f"{LINE}\n"


def test_a_line_stands_above_the_bar_as_it_is_and_the_bar_goes(on_terminal: Callable[[], io.StringIO]) -> None:
    terminal = on_terminal()
    before = threading.active_count()
    with progress("measurements", 3, lines_only=False) as shown:
        assert threading.active_count() == before, "a process that is forked now could hang"
        assert "0/3" in terminal.getvalue()
        shown.advance(2)
        shown.say(LINE)
        assert terminal.getvalue().index("2/3") < terminal.getvalue().index(LINE + "\n")
    erases_the_line, shows_the_cursor = "\x1b[2K", "\x1b[?25h"
    assert terminal.getvalue().endswith(erases_the_line)
    assert shows_the_cursor in terminal.getvalue()


def test_a_search_without_a_known_end_shows_a_count_and_that_it_is_alive(
    on_terminal: Callable[[], io.StringIO],
) -> None:
    terminal = on_terminal()
    with progress("fleets simulated", None, lines_only=False) as shown:
        assert shown.redraw_s == REDRAW_S
        shown.advance()
        shown.advance()
        drawn = terminal.getvalue()
        assert "2 fleets simulated," in drawn
        shown.redraw()
        assert terminal.getvalue().count("2 fleets simulated") == drawn.count("2 fleets simulated") + 1


def test_the_cursor_comes_back_when_the_work_fails(on_terminal: Callable[[], io.StringIO]) -> None:
    terminal = on_terminal()
    with pytest.raises(ValueError, match="no engine"), progress("measurements", 3, lines_only=False):
        raise ValueError("no engine")
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1
