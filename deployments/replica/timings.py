"""How long a replica waits, and how often it checks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """All in seconds. `Replica` and `drain` take one; tests give shorter or longer times.

    `heartbeat_s`: the longest time between two reports. `report_timeout_s`: the longest wait for the answer to one.
    `turn_timeout_s`: the longest wait of a loaded replica for its turn to be ready. `pair_timeout_s`: the longest wait
    of a ready replica for a partner. Serve does not know the replica yet, so what is placed on it waits too, and the
    router waits at most `router.APPEAR_S`. `cancel_again_s`: a task that has not ended so long after it was cancelled
    is cancelled again. `look_s`: the pause between two checks of what still runs on a draining replica.
    `pin_timeout_s`: the longest that the engine takes to pin a prefix. `pin_again_s`: the pause after that has failed.
    """

    heartbeat_s: float = 1.0
    report_timeout_s: float = 5.0
    turn_timeout_s: float = 600.0
    pair_timeout_s: float = 2.0
    cancel_again_s: float = 0.5
    look_s: float = 0.1
    pin_timeout_s: float = 120.0
    pin_again_s: float = 10.0


TIMINGS = Timings()
"""As in production."""
