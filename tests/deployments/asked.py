"""Puts a test between a session manager and one kind of its calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from deployments.manager.calls import A, Call
from deployments.manager.manager import SessionManager


def intercept(
    monkeypatch: pytest.MonkeyPatch, manager: SessionManager, kind: Any, answer: Callable[[Any], Awaitable[Any]]
) -> None:
    """From now on `answer` answers the calls of this kind, and the manager answers all others."""
    original = manager.ask

    async def ask(call: Call[A]) -> Any:
        return await (answer if isinstance(call, kind) else original)(call)

    monkeypatch.setattr(manager, "ask", ask)
