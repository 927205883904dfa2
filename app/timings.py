"""How long an ingress waits for what is not its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """All in seconds. `Gateway` and `Exchange` take one; tests give shorter times.

    `control_s`: the longest wait for what the session manager says to `/ready` and `/baton/status`. `body_s`: the
    longest wait for a whole request body. `close_s`: how long vLLM's server has to end by itself once its client is
    gone, and again once its call is cancelled. `report_s`: from one report of background responses to the store to the
    next; they are cancelled that much later than asked. `store_s`: how long a background response that is over waits
    for a store that is away, and a reader of its events.
    """

    control_s: float = 2.0
    body_s: float = 60.0
    close_s: float = 1.0
    report_s: float = 0.5
    store_s: float = 5.0


TIMINGS = Timings()
"""As in production."""
