"""Which replicas get no placements for a while, because sessions were lost on them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FIRST_S = 0.25
"""How long a replica stays shut after its first loss."""

LONGEST_S = 30.0
"""The longest time that a replica stays shut after a loss."""


@dataclass(slots=True)
class _Breaker:
    """`until_s`: it is shut until then, and half open after it. `probe_s`: when its one session was placed."""

    until_s: float
    span_s: float
    probe_s: float | None = None


class Breakers:
    """A circuit breaker per replica.

    A loss shuts a replica, and each further loss shuts it for twice as long. Then it is half open: it takes one
    session, and no other until this one has ended well, or until the same time has passed again. A session that ends
    well opens the replica. Losses while it is shut concern sessions from before, and do not count.
    """

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._breakers: dict[str, _Breaker] = {}

    def __bool__(self) -> bool:
        return bool(self._breakers)

    def lost(self, replica_id: str, now_s: float, gone: bool = False) -> None:
        """A session was lost on a replica. `gone`: Serve has taken the replica out, so it is shut for long."""
        breaker = self._breakers.get(replica_id)
        if gone:
            span_s = self._longest_s
        elif breaker is None:
            span_s = self._first_s
        elif now_s < breaker.until_s:
            return
        else:
            span_s = min(2 * breaker.span_s, self._longest_s)
        self._breakers[replica_id] = _Breaker(now_s + span_s, span_s)

    def placed(self, replica_id: str, now_s: float) -> None:
        """A session was placed on the replica. If it is half open, this is the one session that it takes."""
        if (breaker := self._breakers.get(replica_id)) is not None:
            breaker.probe_s = now_s

    def succeeded(self, replica_id: str) -> None:
        """A session ended well on the replica."""
        breaker = self._breakers.get(replica_id)
        if breaker is not None and breaker.probe_s is not None:
            del self._breakers[replica_id]

    def shut(self, now_s: float) -> Mapping[str, float]:
        """The replicas that take nothing now, with the seconds for which that is certain. Forgets old breakers."""
        shut = {}
        for replica_id, breaker in list(self._breakers.items()):
            until_s = breaker.until_s if breaker.probe_s is None else breaker.probe_s + breaker.span_s
            if now_s < until_s:
                shut[replica_id] = until_s - now_s
            elif now_s > until_s + 2 * self._longest_s:
                del self._breakers[replica_id]
        return shut
