"""Requests that end engines. Pure.

An engine that crashes takes all its sessions with it, and each of them is placed again. A request that makes engines
crash does so again on the next one. So the digests of a crashed engine's sessions are kept for a while. A digest that
two crashed engines have in common, and no other one, is refused for a while. Where several are in common, none is
refused yet: they part with the next placements, or with the limit of placements that a session may lose.

Only crashes count: an engine that was killed from outside says nothing of its sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from deployments.messages import Reject

REMEMBERED_S = 600.0
"""The longest time between two crashes that are compared."""
REFUSED_S = 600.0
"""How long a digest is refused."""
CRASHES = 64
"""The most crashes that are remembered."""
POISON = "ends_engines"
"""The code of such a refusal."""


@dataclass(frozen=True, slots=True)
class _Crash:
    replica_id: str
    at_s: float
    digests: frozenset[int]


class Poison:
    """Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._crashes: deque[_Crash] = deque(maxlen=CRASHES)
        self._refused: dict[int, float] = {}

    def crashed(self, replica_id: str, digests: Iterable[int], now_s: float) -> None:
        """A replica's engine has crashed; `digests`: of the requests on it. Only the first word of a crash counts."""
        recent = [crash for crash in self._crashes if now_s - crash.at_s < REMEMBERED_S]
        if any(crash.replica_id == replica_id for crash in recent):
            return
        new = _Crash(replica_id, now_s, frozenset(digests))
        for crash in recent:
            common = crash.digests & new.digests
            if len(common) == 1:
                self._refused[next(iter(common))] = now_s + REFUSED_S
        self._crashes.append(new)

    def refusal(self, digest: int, now_s: float) -> Reject | None:
        """Why a request is refused; None when it is not."""
        if not self._refused:
            return None
        self._refused = {each: until_s for each, until_s in self._refused.items() if now_s < until_s}
        if digest not in self._refused:
            return None
        left_s = self._refused[digest] - now_s
        return Reject(f"two engines have ended with this request; it is refused for {left_s:.0f} s", code=POISON)
