"""What several tests of the load tests use."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], io.StringIO]:
    """Makes standard error a terminal of 120 columns, and returns what it gets. To be called by the test itself:
    pytest gives every phase of a test another standard error.
    """
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")

    def made() -> io.StringIO:
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        return terminal

    return made
