"""How long the cluster core waits for what, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Every wait of the cluster core that the configuration does not set.

    `notice_timeout_s`: the longest time a notice to the session manager takes before it is given up.
    `quiet_s`: after so long without an output of a session, the core asks the manager about the session's replicas,
    every `watch_s`. A replica that the manager calls silent `silent_times` times in a row is lost. A living replica
    reports every second, also to a manager that has restarted.
    `budget_wait_s`: the longest time a lost session waits for the cluster's retry budget; it asks again as often as
    the manager's refusals say.
    `pause_s`: the pause before a session's third placement in a row. Each further pause is twice as long, and none is
    longer than `longest_pause_s`.
    """

    notice_timeout_s: float = 10.0
    quiet_s: float = 3.0
    watch_s: float = 1.0
    silent_times: int = 3
    budget_wait_s: float = 30.0
    pause_s: float = 0.1
    longest_pause_s: float = 5.0


DEFAULT_TIMINGS = Timings()
