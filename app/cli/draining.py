"""What `baton drain` waits for, and what it prints for people."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from app.cli.client import CliError, fetch_status

LOOK_S = 1.0
HEARS_WITHIN = 30
"""The looks after which a replica that does not drain yet has not heard of it. It reports every second."""


def until_empty(
    url: str,
    replica: str,
    fetch: Callable[[str], Mapping[str, Any]] = fetch_status,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until a drained replica has no session, or is gone. Raises CliError where it serves again."""
    unheard = 0
    while (phase := _phase(state := fetch(url), replica)) is not None:
        if phase == "draining":
            unheard = HEARS_WITHIN
            if not sessions_on(state, replica):
                return
        elif (unheard := unheard + 1) >= HEARS_WITHIN:
            raise CliError(f"{replica} is {phase}, and does not drain")
        pause(LOOK_S)


def sessions_on(state: Mapping[str, Any], replica: str) -> int:
    """The sessions with a part on a replica, by what is promised and by what it reports."""
    promised = sum(replica in (each["prefill"], each["decode"]) for each in state.get("promises", ()))
    return max(promised, int((state.get("replicas") or {}).get(replica, {}).get("sessions", 0)))


def drained_text(found: Mapping[str, Any]) -> str:
    """One line for people."""
    if not found["draining"]:
        return f"{found['replica']} is back in service"
    left = f"{found['sessions']} sessions are there" if found["sessions"] else "no session is there"
    return f"{found['replica']} takes nothing new; {left}"


def _phase(state: Mapping[str, Any], replica: str) -> str | None:
    rows = (pool["replicas"].get(replica) for pool in state["pools"].values())
    return next((str(each["phase"]) for each in rows if each is not None), None)
