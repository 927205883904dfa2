"""The session manager: sessions open, wait, close and leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from configs.schema import BatonConfig, ChannelConfig, MockEngineConfig, PlacementConfig, PoolConfig
from deployments.manager.calls import Close, Lost, Open, PrefillDone, Ready, Report, Silent, Status, View, Withdraw
from deployments.manager.manager import SessionManager
from deployments.messages import (
    MANAGER_RETIRES,
    Admit,
    Finished,
    Mode,
    Peers,
    Phase,
    Placement,
    Reject,
    ReplicaInfo,
    ReplicaSnapshot,
    Reservation,
    Role,
    SessionRequest,
)
from deployments.policy.admission.breakers import FIRST_S

BLOCK = 16
BOTH = (Mode.DISAGGREGATED, Mode.DECODE_LOCAL)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def config(**placement: Any) -> BatonConfig:
    pool = PoolConfig(engine=MockEngineConfig(block_size=BLOCK))
    return BatonConfig(
        prefill=pool,
        decode={"small": pool},
        channel=ChannelConfig(kind="in_process", handoff_timeout_s=7.0),
        placement=PlacementConfig(session_timeout_s=70.0, **placement),
    )


def info(replica_id: str, pool: str, total_blocks: int) -> ReplicaInfo:
    role = Role.PREFILL if pool == "prefill" else Role.DECODE
    return ReplicaInfo(replica_id, pool, role, "node", "engine", BLOCK, total_blocks, 8, 2048)


P0, D0 = replace(info("p0", "prefill", 100), strict=True), info("d0", "decode-small", 20)


class Cluster:
    """A session manager, and replicas that report what the test says."""

    def __init__(self, **placement: Any) -> None:
        self.clock = Clock()
        self.manager = SessionManager(config(**placement), self.clock)
        self._version = 0

    async def report(self, replica: ReplicaInfo, **load: Any) -> None:
        self._version += 1
        phase = load.pop("phase", Phase.READY)
        await self.manager.ask(Report(ReplicaSnapshot(replica.replica_id, self._version, phase, replica, **load)))

    async def peers(self, replica: ReplicaInfo, version: int = 0) -> Peers | None:
        self._version += 1
        snapshot = ReplicaSnapshot(replica.replica_id, self._version, Phase.READY, replica, peers_version=version)
        return (await self.manager.ask(Report(snapshot))).peers

    async def up(self) -> None:
        await self.report(P0)
        await self.report(D0)

    async def admit(self, session_id: str, blocks: int = 10) -> Placement:
        answer = await self.manager.ask(Open(ask(session_id, blocks)))
        assert isinstance(answer, Admit), answer
        return answer.placement

    def queue(self, session_id: str, blocks: int = 10) -> asyncio.Task[Admit | Reject]:
        return asyncio.create_task(self.manager.ask(Open(ask(session_id, blocks))))


def ask(session_id: str, blocks: int = 10) -> SessionRequest:
    return SessionRequest(session_id, BLOCK, (blocks - 1) * BLOCK, BOTH)


async def settle() -> None:
    """Let every task that can run, run."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Two replicas that are up; nothing may be left of any session at the end."""
    cluster = Cluster()
    await cluster.up()
    yield cluster
    await settle()
    status = await cluster.manager.ask(Status())
    assert status["promises"] == []
    assert status["sessions"]["queued"] == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_session_is_placed_and_closed(cluster: Cluster) -> None:
    placement = await cluster.admit("a")
    expected = Placement("a", 1, Mode.DISAGGREGATED, "split", D0, P0, 10, 7.0, 70.0)
    assert replace(placement, forecast=expected.forecast) == expected
    await cluster.manager.ask(PrefillDone("a", 1))
    await cluster.manager.ask(Close("a", 1, "finished"))
    await cluster.manager.ask(Close("a", 1, "failed"))
    status = await cluster.manager.ask(Status())
    assert status["sessions"] == {"open": 0, "queued": 0, "closed": {"finished": 1}}
    assert status["modes"] == {"disaggregated": 1}


async def test_a_close_may_overtake_the_opening(cluster: Cluster) -> None:
    """Serve keeps no order between calls: a withdrawal may be heard before the call that asks for the placement."""
    await cluster.manager.ask(Withdraw("a", "cancelled"))
    assert isinstance(await cluster.manager.ask(Open(ask("a"))), Reject)
    assert (await cluster.manager.ask(Status()))["promises"] == []
    cluster.clock.now_s = 61.0  # by then the call has arrived, and the id is forgotten
    await cluster.up()
    assert cluster.manager._allocator.entry._withdrawn == {}


async def test_a_close_that_finds_its_session_waiting_ends_the_wait(cluster: Cluster) -> None:
    holders = [await cluster.admit(name) for name in "ab"]
    waiting = cluster.queue("c")
    await settle()
    await cluster.manager.ask(Withdraw("c", "cancelled"))
    assert isinstance(await waiting, Reject)
    for placement in holders:
        await cluster.manager.ask(Close(placement.session_id, placement.epoch, "finished"))


async def test_a_session_waits_until_another_closes(cluster: Cluster) -> None:
    first, second = await cluster.admit("a"), await cluster.admit("b")
    waiting = cluster.queue("c")
    await settle()
    assert not waiting.done()
    assert (await cluster.manager.ask(Status()))["sessions"]["queued"] == 1
    await cluster.manager.ask(Close("a", first.epoch, "finished"))
    answer = await waiting
    assert isinstance(answer, Admit)
    for placement in (second, answer.placement):
        await cluster.manager.ask(Close(placement.session_id, placement.epoch, "finished"))


async def test_a_report_that_shows_room_wakes_the_queue(cluster: Cluster) -> None:
    await cluster.report(D0, used_blocks=20, running=2, sessions=("x", "y"))
    waiting = cluster.queue("a")
    await settle()
    assert not waiting.done()
    await cluster.report(D0)
    assert isinstance(await waiting, Admit)
    await cluster.manager.ask(Close("a", 1, "finished"))


async def test_what_can_never_fit_is_rejected_at_once(cluster: Cluster) -> None:
    answer = await cluster.manager.ask(Open(ask("a", 21)))
    assert isinstance(answer, Reject)
    assert answer.retry_after_s is None
    assert "336 tokens" in answer.reason
    assert (await cluster.manager.ask(Status()))["rejects"] == {"never_fits": 1}


async def test_a_waiter_is_rejected_when_its_time_is_up_even_if_nothing_happens() -> None:
    manager = SessionManager(config(queue_timeout_s=0.02))
    answer = await asyncio.wait_for(manager.ask(Open(ask("a"))), 60.0)
    assert answer == Reject(
        "no capacity within 0.02 s: no replica is ready that decodes", 0.02, unavailable=True, code="queue_timeout"
    )
    assert (await manager.ask(Status()))["rejects"] == {"queue_timeout": 1}


async def test_an_event_after_the_deadline_rejects_too(cluster: Cluster) -> None:
    await cluster.report(D0, used_blocks=20)
    waiting = cluster.queue("a")
    await settle()
    cluster.clock.now_s = 30.0
    await cluster.report(D0, used_blocks=20)
    answer = await waiting
    assert isinstance(answer, Reject)
    assert answer.retry_after_s == 30.0
    assert "KV blocks are short: 10 needed, at most 0 free" in answer.reason


async def test_a_full_queue_rejects_at_once() -> None:
    cluster = Cluster(max_queued_requests=0)
    answer = await cluster.manager.ask(Open(ask("a")))
    assert answer == Reject("0 requests are waiting already", 1.0, code="queue_full")
    await cluster.up()
    await cluster.admit("a")


async def test_a_cancelled_waiter_leaves_the_queue(cluster: Cluster) -> None:
    await cluster.admit("a", 20)
    waiting = cluster.queue("b")
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await cluster.manager.ask(Status()))["sessions"]["queued"] == 0
    await cluster.manager.ask(Close("a", 1, "finished"))
    assert (await cluster.manager.ask(Status()))["sessions"]["closed"] == {"abandoned": 1, "finished": 1}


async def test_a_placement_for_a_caller_that_is_gone_is_released_and_goes_to_the_next(
    cluster: Cluster,
) -> None:
    await cluster.admit("a", 20)
    gone, following = cluster.queue("b", 20), cluster.queue("c", 20)
    await settle()
    await cluster.manager.ask(Close("a", 1, "finished"))  # places b, whose task has not run yet
    gone.cancel()
    answer = await following
    assert gone.cancelled()
    assert isinstance(answer, Admit)
    await cluster.manager.ask(Close("c", answer.placement.epoch, "finished"))


async def test_opening_again_gives_a_new_epoch_and_old_news_changes_nothing(cluster: Cluster) -> None:
    await cluster.admit("a")
    await cluster.manager.ask(Close("a", 1, "failed"))
    assert (await cluster.admit("a")).epoch == 2
    await cluster.manager.ask(Close("a", 1, "failed"))
    await cluster.manager.ask(PrefillDone("a", 1))
    (promise,) = (await cluster.manager.ask(Status()))["promises"]
    assert (promise["epoch"], promise["prefilling"]) == (2, True)
    await cluster.manager.ask(Close("a", 2, "finished"))


async def test_nothing_is_placed_on_a_lost_or_stale_replica(cluster: Cluster) -> None:
    await cluster.manager.ask(Lost("d0"))
    waiting = cluster.queue("a")
    await settle()
    assert not waiting.done()
    await cluster.report(D0)
    await settle()
    assert not waiting.done(), "it may be about to fail again"
    assert (await cluster.manager.ask(Status()))["breakers"] == {"d0": FIRST_S}
    cluster.clock.now_s += FIRST_S
    await cluster.report(D0)
    assert isinstance(await waiting, Admit)
    await cluster.manager.ask(Close("a", 1, "finished"))
    cluster.clock.now_s = 6.0
    assert not (await cluster.manager.ask(Ready()))["ready"]


async def test_a_manager_that_has_just_begun_calls_no_replica_silent(cluster: Cluster) -> None:
    assert await cluster.manager.ask(Silent(("d0", "unknown"))) == ()
    cluster.clock.now_s += 5.0
    assert await cluster.manager.ask(Silent(("d0", "unknown"))) == ("unknown",)
    cluster.clock.now_s += 0.1
    assert await cluster.manager.ask(Silent(("d0", "unknown"))) == ("d0", "unknown")
    await cluster.report(D0)
    assert await cluster.manager.ask(Silent(("d0",))) == ()


async def test_a_session_that_is_never_closed_gives_its_blocks_back(cluster: Cluster) -> None:
    await cluster.admit("a", 20)
    waiting = cluster.queue("b", 20)
    await settle()
    cluster.clock.now_s = 29.0
    await cluster.report(D0, sessions=("a",))
    waiting.cancel()
    await settle()
    cluster.clock.now_s = 60.0
    await cluster.report(D0)
    status = await cluster.manager.ask(Status())
    assert status["sessions"]["closed"] == {"expired": 1, "abandoned": 1}


async def test_a_session_whose_ingress_is_gone_is_closed(cluster: Cluster) -> None:
    placement = await cluster.admit("a", 20)
    await cluster.report(D0, sessions=("a",))
    waiting = cluster.queue("b", 20)
    await settle()
    over = Finished("a", placement.epoch, 3, orphaned=True)
    for _ in range(2):
        await cluster.report(D0, finished=(over,), finished_version=1)
    assert (await cluster.manager.ask(Status()))["sessions"]["closed"] == {"orphaned": 1}
    answer = await waiting
    assert isinstance(answer, Admit)
    await cluster.manager.ask(Close("b", answer.placement.epoch, "finished"))


async def test_a_manager_that_has_been_restarted_listens_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would place meanwhile, it would place as if the first to report were all there are."""
    cluster = Cluster()
    monkeypatch.setattr(cluster.manager, "_listen_s", 0.2)
    prefill = replace(P0, endpoints=("p",))
    assert await cluster.peers(prefill) is None, "a replica would forget the others"
    waiting, view = cluster.queue("a"), asyncio.create_task(cluster.manager.ask(View()))
    await settle()
    assert (await cluster.manager.ask(Status()))["sessions"]["queued"] == 0
    assert not waiting.done()
    assert not view.done()
    await cluster.report(replace(D0, endpoints=("d",)), sessions=("theirs",), reservations=(Reservation(5),))
    cluster.clock.now_s += 0.2
    answer = await asyncio.wait_for(waiting, 60.0)
    assert isinstance(answer, Admit)
    assert answer.placement.mode is Mode.DISAGGREGATED
    assert {replica.info.replica_id for replica in (await view).replicas} == {"p0", "d0"}
    peers = await cluster.peers(prefill)
    assert peers is not None
    assert peers.endpoints == (("d",),)
    load = (await cluster.manager.ask(Ready()))["pools"]["decode-small"]["replicas"]["d0"]["load"]
    assert load["free_blocks"] == D0.total_blocks - 5 - 10


async def test_a_placement_gets_the_epoch_that_its_request_asks_for_or_a_higher_one(cluster: Cluster) -> None:
    for least, epoch in ((7, 7), (1, 8), (8, 9)):
        answer = await cluster.manager.ask(Open(replace(ask("a"), least_epoch=least)))
        assert isinstance(answer, Admit)
        assert answer.placement.epoch == epoch
        await cluster.manager.ask(Close("a", epoch, "lost"))


async def test_a_request_that_allows_no_mode_is_an_error_and_poisons_nothing(cluster: Cluster) -> None:
    await cluster.admit("a", 20)
    waiting = cluster.queue("b")
    await settle()
    with pytest.raises(ValueError, match="allows no mode"):
        await cluster.manager.ask(Open(SessionRequest("c", 1, 1, ())))
    with pytest.raises(ValueError, match="waiting already"):
        await cluster.manager.ask(Open(ask("b")))
    await cluster.manager.ask(Close("a", 1, "finished"))
    assert isinstance(await waiting, Admit)
    await cluster.manager.ask(Close("b", 1, "finished"))


async def test_ready_names_every_expected_pool() -> None:
    cluster = Cluster()
    assert await cluster.manager.ask(Ready()) == {
        "ready": False,
        "pools": {
            "prefill": {"ready": False, "replicas": {}},
            "decode-small": {"ready": False, "replicas": {}},
        },
    }
    await cluster.report(P0)
    await cluster.manager.ask(Report(ReplicaSnapshot("d0", 1, Phase.LOADING, pool="decode-small")))
    cluster.clock.now_s = 1.0
    ready = await cluster.manager.ask(Ready())
    assert not ready["ready"]
    loading = {"phase": "loading model", "age_s": 1.0, "fresh": True, "load": {}}
    assert ready["pools"]["decode-small"]["replicas"] == {"d0": loading}
    await cluster.report(D0)
    ready = await cluster.manager.ask(Ready())
    assert ready["ready"]
    assert ready["pools"]["decode-small"]["replicas"]["d0"]["load"]["free_blocks"] == 20
    await cluster.manager.check_health()


async def test_no_replica_is_ever_promised_more_than_it_has(cluster: Cluster) -> None:
    """Two hundred sessions of random size come, wait, are cancelled and end in random order."""
    dice = random.Random(7)

    async def session(name: str) -> None:
        answer = await cluster.manager.ask(Open(ask(name, dice.randint(2, 20))))
        assert isinstance(answer, Admit)
        try:
            for _ in range(dice.randint(0, 5)):
                await asyncio.sleep(0)
        finally:
            await cluster.manager.ask(Close(name, answer.placement.epoch, "over"))

    tasks = [asyncio.create_task(session(str(number))) for number in range(200)]
    while not all(task.done() for task in tasks):
        status = await cluster.manager.ask(Status())
        assert sum(promise["reserved_blocks"] for promise in status["promises"]) <= D0.total_blocks
        dice.choice(tasks).cancel() if dice.random() < 0.1 else None
        await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
    assert (await cluster.manager.ask(Ready()))["pools"]["decode-small"]["replicas"]["d0"]["load"]["free_blocks"] == 20


async def test_a_report_is_answered_with_peers_that_are_news(cluster: Cluster) -> None:
    prefill, decode = replace(P0, endpoints=("p",)), replace(D0, endpoints=("d", "e"))
    other = replace(D0, replica_id="old", fingerprint="another engine", endpoints=("x",))
    none = await cluster.peers(prefill)
    assert none is not None
    assert none.endpoints == ()
    assert await cluster.peers(prefill, none.version) is None
    found = await cluster.peers(decode)
    assert found is not None
    assert found.endpoints == (("d", "e"), ("p",)), "any decode replica may move a session to any other"
    await cluster.peers(other)
    news = await cluster.peers(prefill, none.version)
    assert news is not None
    assert news.endpoints == (("d", "e"),)
    await cluster.manager.ask(Lost("d0"))
    gone = await cluster.peers(prefill, news.version)
    assert gone is not None
    assert gone == none


async def test_a_manager_that_leaves_sends_those_who_wait_to_the_next(cluster: Cluster) -> None:
    placement = await cluster.admit("a", 20)
    waiting = cluster.queue("b", 20)
    await settle()
    cluster.manager.retire()
    for answer in (await asyncio.wait_for(waiting, 1.0), await cluster.manager.ask(Open(ask("c")))):
        assert isinstance(answer, Reject)
        assert (answer.code, answer.unavailable) == (MANAGER_RETIRES, True)
    await cluster.manager.ask(Close("a", placement.epoch, "length"))


async def test_a_replica_that_is_starting_is_held_until_its_engine_has_a_partner(cluster: Cluster) -> None:
    async def held(replica: ReplicaInfo, version: int, phase: Phase, is_starting: bool = True) -> bool:
        snapshot = ReplicaSnapshot(replica.replica_id, version, phase, replica, is_starting=is_starting)
        return (await cluster.manager.ask(Report(snapshot))).hold

    prefill, decode = (replace(each, replica_id=f"new-{each.pool}", fingerprint="new") for each in (P0, D0))
    assert await held(prefill, 1, Phase.LOADING)
    assert not await held(decode, 1, Phase.LOADING)
    assert await held(decode, 2, Phase.READY), "Serve would stop an old one, and no replica can pair with this one yet"
    assert not await held(prefill, 2, Phase.LOADING)
    assert not await held(prefill, 3, Phase.READY)
    assert not await held(decode, 3, Phase.READY)
    odd = replace(D0, replica_id="odd", fingerprint="odd")
    assert not await held(odd, 1, Phase.READY, is_starting=False)


@pytest.mark.parametrize(("overcommit", "expected"), [(1.0, [0.0, 0.2, 1.0, 1.0]), (1.2, [0.0] * 4)])
async def test_a_large_fleet_reports_less_often_but_where_blocks_are_promised_twice(
    overcommit: float, expected: list[float]
) -> None:
    manager, found = SessionManager(config(overcommit=overcommit)), []
    for number in range(1, 601):
        replica = info(f"d{number}", "decode-small", 20)
        answer = await manager.ask(Report(ReplicaSnapshot(replica.replica_id, 1, Phase.READY, replica)))
        if number in (1, 100, 500, 600):
            found.append(round(answer.interval_s, 2))
    assert found == expected
