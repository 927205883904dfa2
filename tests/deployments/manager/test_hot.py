"""Hot prefixes at the session manager: it asks for the tokens of a prefix, and has replicas fetch it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from deployments.manager import hot
from deployments.manager.calls import Open, Report, TellPrefix
from deployments.manager.hot import HotPrefixes
from deployments.manager.manager import SessionManager
from deployments.messages import (
    Admit,
    BeginCopy,
    CacheChange,
    Mode,
    Phase,
    Pin,
    ReplicaInfo,
    ReplicaSnapshot,
    ReportAnswer,
    Role,
    SessionRequest,
)
from deployments.policy.allocator import Allocator
from deployments.policy.spread import PLAN_S
from tests.deployments.manager.test_manager import BLOCK, Clock, config

HASHES = tuple(range(1000, 1032))
A = ReplicaInfo(
    "a", "prefill", Role.PREFILL, "node", "engine", BLOCK, 500, 64, 2048, ("tcp://a",), prior=(0.0, 0.01, 0.0, 0.0, 0.0)
)
B = replace(A, replica_id="b", endpoints=("tcp://b",), max_sessions=0)
"""It takes no session, so that all prompts go to `a`."""
PREFIX = Pin("", tuple(range(BLOCK * 32)), 32)


class Managed:
    """A session manager that spreads, and replicas of which `a` has the prefix."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.manager = SessionManager(config(fetch=True, spread=True, admission=False), self.clock)
        self._version = 0

    async def report(self, info: ReplicaInfo, **more: Any) -> ReportAnswer:
        self._version += 1
        return await self.manager.ask(
            Report(ReplicaSnapshot(info.replica_id, self._version, Phase.READY, info, **more))
        )

    async def up(self) -> None:
        await self.report(A, cache=CacheChange(1, HASHES, whole=True), cached_blocks=400)
        await self.report(B, cache=CacheChange(1, (), whole=True), cached_blocks=400)

    async def open(self, name: str, hashes: tuple[int, ...] = HASHES) -> Admit:
        request = SessionRequest(name, BLOCK * 40, 1, (Mode.PREFILL_LOCAL,), hashes=hashes)
        admit = await self.manager.ask(Open(request))
        assert isinstance(admit, Admit)
        return admit


async def test_the_tokens_of_a_hot_prefix_are_asked_for_once_and_then_it_is_copied() -> None:
    managed = Managed()
    await managed.up()
    for number in range(5):  # each takes 1.28 s beyond the prefix
        assert (await managed.open(f"r{number}")).tell_tokens == 0
    assert (await managed.report(B)).copy is None, "its tokens are not known"
    assert (await managed.open("other", tuple(range(32)))).tell_tokens == 0
    assert (await managed.open("asked")).tell_tokens == 32 * BLOCK
    await managed.manager.ask(TellPrefix(HASHES[-1], PREFIX))
    assert (await managed.open("later")).tell_tokens == 0
    managed.clock.now_s += PLAN_S
    assert (await managed.report(A)).copy is None
    assert (await managed.report(B)).copy == BeginCopy(PREFIX, A)
    assert (await managed.report(B)).copy is None, "it is told once"
    managed.clock.now_s += PLAN_S
    assert (await managed.report(B)).copy is None, "it is on its way"


async def test_without_spread_nothing_is_counted() -> None:
    allocator = Allocator(config(fetch=True), Random(1))
    assert allocator.spread is None
    snapshot = ReplicaSnapshot("a", 1, Phase.READY, A)
    assert HotPrefixes(allocator).copy_to(snapshot, 0.0) is None


def test_what_was_not_asked_for_is_not_kept_and_the_rest_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(hot, "MOST_TOKENS", 100)
    made = HotPrefixes(Allocator(config(fetch=True, spread=True), Random(1)))
    made.told(1, PREFIX)
    assert not made._known
    for name in (1, 2, 3):
        made._asked[name] = (1, 40)
        made.told(name, Pin("", (0,) * 40, 1))
    assert list(made._known) == [2, 3]
    assert made._tokens == 80
