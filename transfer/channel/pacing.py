"""Chooses the write to post next: bounded per peer and per device, fair between handoffs, no faster than a rate.

Pure: time is an argument. Among the handoffs whose peer has room, the one that has had the fewest bytes goes first
(start-time fair queueing). So a long prompt does not starve a short one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

BURST_S = 0.01


@dataclass(frozen=True, slots=True)
class Limits:
    """The maximum amounts outstanding at once, and the bytes per second over all peers (None: no limit).

    A write that is larger than a limit goes alone.
    """

    peer_bytes: int = 64 * 1024 * 1024
    peer_descriptors: int = 8192
    device_bytes: int = 256 * 1024 * 1024
    device_descriptors: int = 32768
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A write that waits or is outstanding. `size`: in bytes. `yields`: it waits while any other write can go."""

    handoff: Any
    peer: Any
    size: int
    descriptors: int
    write: Any
    yields: bool = False


@dataclass(slots=True)
class _Waiting:
    served: int
    jobs: deque[Job] = field(default_factory=deque)


class Pacer:
    """`push` adds a write, `pop` takes one that may be posted now, `done` reports that it is complete or has failed."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[Hashable, _Waiting] = {}
        self._bytes: Counter[Hashable] = Counter()
        self._descriptors: Counter[Hashable] = Counter()
        self._total_bytes = self._total_descriptors = 0
        self._served = 0
        self._free_at = 0.0

    def __len__(self) -> int:
        """The number of waiting writes."""
        return sum(len(waiting.jobs) for waiting in self._waiting.values())

    def push(self, job: Job) -> None:
        """Add a write. The writes of a handoff keep their order."""
        if job.handoff not in self._waiting:
            self._waiting[job.handoff] = _Waiting(self._served)
        self._waiting[job.handoff].jobs.append(job)

    def pop(self, now: float) -> Job | None:
        """The next write to post, or None. The write is outstanding from now on."""
        if not self._waiting or self.wait_s(now):
            return None
        fitting = [waiting for waiting in self._waiting.values() if self._fits(waiting.jobs[0])]
        if not fitting:
            return None
        turn = min(fitting, key=lambda waiting: (waiting.jobs[0].yields, waiting.served))
        job = turn.jobs.popleft()
        self._served = turn.served
        turn.served += job.size
        if not turn.jobs:
            del self._waiting[job.handoff]
        self._count(job, 1)
        if self._limits.bytes_per_s is not None:
            self._free_at = max(self._free_at, now) + job.size / self._limits.bytes_per_s
        return job

    def done(self, job: Job) -> None:
        """A popped write is not outstanding any more."""
        self._count(job, -1)

    def drop(self, handoff: Hashable) -> list[Job]:
        """Forget a handoff's waiting writes, and return them."""
        waiting = self._waiting.pop(handoff, None)
        return list(waiting.jobs) if waiting else []

    def wait_s(self, now: float) -> float:
        """Seconds until the rate allows another write. 0 when it allows one now, or when no write waits."""
        wait = self._free_at - BURST_S - now
        return wait if self._waiting and wait > 0 else 0.0

    def _fits(self, job: Job) -> bool:
        limits = self._limits
        return (
            (not self._total_bytes or self._total_bytes + job.size <= limits.device_bytes)
            and (not self._total_descriptors or self._total_descriptors + job.descriptors <= limits.device_descriptors)
            and (not self._bytes[job.peer] or self._bytes[job.peer] + job.size <= limits.peer_bytes)
            and (
                not self._descriptors[job.peer]
                or self._descriptors[job.peer] + job.descriptors <= limits.peer_descriptors
            )
        )

    def _count(self, job: Job, sign: int) -> None:
        self._total_bytes += sign * job.size
        self._total_descriptors += sign * job.descriptors
        self._bytes[job.peer] += sign * job.size
        self._descriptors[job.peer] += sign * job.descriptors
        if not self._bytes[job.peer] and not self._descriptors[job.peer]:
            del self._bytes[job.peer], self._descriptors[job.peer]
