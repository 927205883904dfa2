"""What the manager counts. What it shows of replicas and promises is tested with the manager."""

from __future__ import annotations

from deployments.manager.status import Counts
from deployments.messages import Admit, Mode, Placement, Reject, ReplicaInfo, Role

DECODE = ReplicaInfo("d0", "decode-main", Role.DECODE, "node", "engine", 16, 100, 8, 1000)


def test_decisions_are_counted_by_mode_and_by_code() -> None:
    counts = Counts()
    counts.decided(Admit(Placement("a", 1, Mode.DECODE_LOCAL, "", DECODE, None, 10, 60.0, 600.0)))
    counts.decided(Reject("too long"))
    for _ in range(2):
        counts.decided(Reject("full", 1.0, code="queue_full"))
    assert counts.modes == {"decode_local": 1}
    assert counts.rejects == {"never_fits": 1, "queue_full": 2}


def test_a_close_that_closed_nothing_is_not_counted() -> None:
    counts = Counts()
    counts.closed("finished", 0)
    assert counts.outcomes == {}
    counts.closed("cancelled", 2)
    counts.closed("cancelled", 1)
    assert counts.outcomes == {"cancelled": 3}
