"""Peers: the replicas of one engine, told to each other by their control addresses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.fleet.exchange import is_ahead_of_partners, peers_of
from deployments.messages import Phase, ReplicaInfo, ReplicaSnapshot, Role


def info(name: str, fingerprint: str = "engine", endpoints: tuple[str, ...] | None = None) -> ReplicaInfo:
    role = Role.PREFILL if name.startswith("p") else Role.DECODE
    shown = (f"tcp://{name}",) if endpoints is None else endpoints
    strict = name == "p0"
    return ReplicaInfo(name, role.value, role, "node", fingerprint, 16, 100, 8, 2048, shown, strict=strict)


ALL = [info("d1"), info("d0"), info("p0"), info("p1"), info("d2", "other"), info("d3", endpoints=()), None]


@pytest.mark.parametrize(
    ("asking", "expected"),
    [
        ("p0", ["tcp://d0", "tcp://d1", "tcp://p1"]),
        ("p1", ["tcp://d0", "tcp://d1", "tcp://p0", "tcp://p1"]),
        ("d0", ["tcp://d0", "tcp://d1", "tcp://p0", "tcp://p1"]),
    ],
)
def test_what_decodes_gets_all_and_what_never_does_gets_those_that_do(asking: str, expected: list[str]) -> None:
    assert [endpoint for (endpoint,) in peers_of(info(asking), ALL).endpoints] == expected


def test_where_replicas_fetch_from_each_other_all_get_all() -> None:
    found = peers_of(info("p0"), ALL, fetches=True)
    assert found == peers_of(info("d0"), ALL)


def test_the_version_is_of_the_addresses_and_not_of_their_order() -> None:
    assert peers_of(info("p1"), ALL) == peers_of(info("p9"), reversed(ALL))
    assert peers_of(info("p0"), ALL).version != peers_of(info("p0"), ALL[1:]).version


def test_a_replica_waits_for_its_partner_only_while_an_old_pair_serves() -> None:
    old = [ReplicaSnapshot(name, 1, Phase.READY, info(name, "old")) for name in ("p0", "d0")]
    partner = ReplicaSnapshot("d1", 1, Phase.LOADING, info("d1", "new"))
    new = info("p1", "new")
    assert is_ahead_of_partners(new, Phase.LOADING, old)
    assert not is_ahead_of_partners(new, Phase.LOADING, old[:1])
    assert not is_ahead_of_partners(new, Phase.LOADING, [*old, partner])
    assert is_ahead_of_partners(new, Phase.READY, [*old, partner])
    assert not is_ahead_of_partners(replace(new, role=Role.MIXED), Phase.LOADING, old), "it needs no partner"
