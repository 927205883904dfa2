"""How often the replicas of a fleet report. Pure."""

from __future__ import annotations

MOST_REPORTS_PER_S, LONGEST_INTERVAL_S = 500, 1.0
"""A report costs the manager a third to half a millisecond. So the replicas of a large fleet report less often than the
configuration allows. The manager knows what is promised on a replica without reports. But a replica whose blocks are
promised more than once reports what its sessions hold, and the manager needs that as early as possible."""


def interval_s(replicas: int, overcommit: float) -> float:
    """The shortest time between two reports of one of so many replicas. `overcommit`: as in the configuration."""
    return 0.0 if overcommit > 1 else min(replicas / MOST_REPORTS_PER_S, LONGEST_INTERVAL_S)
