"""The cordon: which replicas drain, what they are told until they say so, and which must stay."""

from __future__ import annotations

import pytest

from deployments.messages import Phase, ReplicaInfo, ReplicaSnapshot, Role
from deployments.policy.admission.cordon import Cordon


def says(phase: Phase, name: str = "d0") -> ReplicaSnapshot:
    return ReplicaSnapshot(name, 1, phase)


def info(name: str, role: Role = Role.DECODE, strict: bool = False) -> ReplicaInfo:
    return ReplicaInfo(name, "pool", role, "node", "engine", 16, 100, 8, 4096, strict=strict)


def test_a_replica_is_told_until_its_report_shows_that_it_has_heard() -> None:
    cordon = Cordon()
    cordon.drain("d0")
    assert "d0" in cordon
    assert [cordon.told(says(Phase.READY)) for _ in range(2)] == [True, True]
    assert cordon.told(says(Phase.READY, "d1")) is None
    assert [cordon.told(says(Phase.DRAINING)) for _ in range(2)] == [None, None]
    cordon.resume("d0")
    assert "d0" not in cordon
    assert not cordon
    assert cordon.told(says(Phase.DRAINING)) is False
    assert [cordon.told(says(Phase.READY)) for _ in range(2)] == [None, None]


def test_a_manager_that_has_restarted_puts_a_replica_back_that_another_life_has_drained() -> None:
    cordon = Cordon()
    assert cordon.told(says(Phase.DRAINING)) is None, "it leaves it as it is"
    cordon.resume("d0")
    assert cordon.told(says(Phase.DRAINING)) is False


def test_a_replica_that_is_gone_is_forgotten() -> None:
    cordon = Cordon()
    cordon.drain("d0")
    cordon.forget("d0")
    assert list(cordon) == []
    assert cordon.told(says(Phase.READY)) is None


STRICT_P, STRICT_D = info("p0", Role.PREFILL, strict=True), info("d0", strict=True)


@pytest.mark.parametrize(
    ("replica", "others", "why"),
    [
        (STRICT_D, [STRICT_P], "no other replica is ready that writes answers"),
        (STRICT_P, [STRICT_D], "no other replica is ready that computes prompts"),
        (STRICT_D, [STRICT_P, info("d1", strict=True)], ""),
        (STRICT_P, [info("p1", Role.PREFILL)], ""),
        (STRICT_D, [info("d1", Role.MIXED)], ""),
    ],
)
def test_the_last_replica_of_its_kind_cannot_drain(replica: ReplicaInfo, others: list[ReplicaInfo], why: str) -> None:
    assert Cordon().refusal(replica, [replica, *others]) == why


def test_another_that_drains_already_does_not_count() -> None:
    cordon, ready = Cordon(), [info("d0"), info("d1")]
    assert not cordon.refusal(ready[0], ready)
    cordon.drain("d1")
    assert cordon.refusal(ready[0], ready)
