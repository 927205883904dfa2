"""How long the session manager and its callers wait."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """All in seconds. The client, the server and the stand-in take one; tests give shorter times.

    `locate_s`: the longest time to find a manager and connect to it. `locate_again_s`: the pause before asking again
    where it is, while one retires and its successor is not known.
    `last_answers_s`: the longest time that a retired manager's callers have to hang up. The longest call that they wait
    for is a view, `view_every_s`.
    `view_every_s`: the time from one view of the fleet to the next. `view_late_s`: a view that is later than that
    does not come, and the manager counts as away. `again_s`: the pause before an ingress asks again while it is away.
    `view_oldest_s`: an older view is not placed by: replicas come and go.
    """

    locate_s: float = 10.0
    locate_again_s: float = 0.1
    last_answers_s: float = 5.0
    view_every_s: float = 1.0
    view_late_s: float = 2.0
    again_s: float = 0.25
    view_oldest_s: float = 60.0


TIMINGS = Timings()
"""As in production."""
