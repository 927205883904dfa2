"""The manager's plans: made from what is known, told to Serve, explained. The planner is a script here."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from configs.schema import BatonConfig
from deployments.manager.calls import Open, Ready, Report, Status
from deployments.manager.manager import SessionManager
from deployments.manager.scaling import FOLLOWED_S, LISTEN_S, Scaling, Size
from deployments.messages import Mode, Phase, Reject, ReplicaInfo, ReplicaSnapshot, Role, SessionRequest
from deployments.policy.scaling.inputs import Now, Plan, Predicted
from deployments.policy.scaling.reasons import Reason

POOL = {"engine": {"kind": "mock"}}
SETTLED = {"prefill": Size(1, 0, True), "decode-main": Size(1, 0, True), "ingress": Size(1, 0, True)}


class Script:
    """A planner that answers what the test says; `seen`: what it was shown."""

    def __init__(self) -> None:
        self.targets = {"prefill": 1, "decode-main": 1}
        self.codes = dict.fromkeys(self.targets, Reason.NEEDED)
        self.seen: list[Now] = []
        self.error: Exception | None = None

    def plan(self, now: Now) -> Plan:
        self.seen.append(now)
        if self.error is not None:
            raise self.error
        reasons = {name: f"{name} is as it is" for name in self.targets}
        return Plan(
            now.at_s, dict(self.targets), reasons, "decode-main", {"decode-main": Predicted(0.5)}, codes=self.codes
        )


class Fleet:
    """A session manager, replicas that report what the test says, and its plans."""

    def __init__(self, least: int = 1, **scaling: Any) -> None:
        self.now_s = 0.0
        scaled = {**POOL, "autoscaling": {"min_replicas": least, "max_replicas": 3}}
        config = {"prefill": POOL, "decode": {"main": scaled}, "channel": {"kind": "in_process"}, "scaling": scaling}
        self.manager = SessionManager(BatonConfig.model_validate(config), lambda: self.now_s)
        assert self.manager.scaling is not None
        self.scaling: Scaling = self.manager.scaling
        self.script = Script()
        self.scaling._planner = self.script  # type: ignore[assignment]
        self._version = 0

    async def report(self, pool: str, replica_id: str, phase: Phase = Phase.READY) -> None:
        self._version += 1
        role = Role.PREFILL if pool == "prefill" else Role.DECODE
        info = ReplicaInfo(replica_id, pool, role, "node", "engine", 16, 100, 8, 2048)
        loaded = info if phase is not Phase.LOADING else None
        await self.manager.ask(Report(ReplicaSnapshot(replica_id, self._version, phase, loaded, pool=pool)))

    async def up(self) -> None:
        await self.report("prefill", "p0")
        await self.report("decode-main", "d0")

    def starting(self) -> tuple[float, ...]:
        (pool,) = (pool for pool in self.script.seen[-1].pools if pool.name == "decode-main")
        return pool.starting


async def test_a_changed_target_is_told_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    await fleet.up()
    fleet.scaling.think(SETTLED)
    assert fleet.scaling.told() == {"decode-main": 1}, "a fixed pool is not Serve's to scale"
    assert not caplog.messages
    fleet.script.targets["decode-main"], fleet.script.codes["decode-main"] = 3, Reason.DECODE_TPOT
    fleet.scaling.think(SETTLED)
    assert fleet.scaling.told() == {"decode-main": 3}
    assert fleet.scaling.decisions == {("decode-main", "up", "decode_tpot"): 1}
    assert fleet.scaling.reasons == {("decode-main", "needed"): 1, ("decode-main", "decode_tpot"): 1}
    assert caplog.messages == ["decode-main gets 3 replicas, not 1 (decode_tpot): decode-main is as it is"]
    fleet.scaling.think(SETTLED)
    assert len(caplog.messages) == 1
    fleet.script.targets["decode-main"], fleet.script.codes["decode-main"] = 2, Reason.SPARE
    fleet.scaling.think(SETTLED)
    assert fleet.scaling.decisions["decode-main", "down", "spare"] == 1


async def test_a_replica_is_a_start_until_it_takes_sessions() -> None:
    fleet = Fleet()
    await fleet.up()
    fleet.script.targets["decode-main"] = 2
    fleet.scaling.think(SETTLED)
    assert fleet.starting() == ()
    fleet.scaling.think(SETTLED)
    assert fleet.starting() == (0.0,)
    fleet.now_s = 1.0
    await fleet.up()
    await fleet.report("decode-main", "d1", Phase.LOADING)
    fleet.scaling.think(SETTLED)
    assert fleet.starting() == (1.0,)
    assert fleet.scaling.explain()["pools"]["decode-main"]["starting_s"] == [1.0]
    await fleet.report("decode-main", "d1")
    fleet.scaling.think(SETTLED)
    assert fleet.starting() == ()


async def test_a_restarted_manager_plans_when_the_replicas_that_run_have_reported() -> None:
    fleet = Fleet()
    running = SETTLED | {"decode-main": Size(2, 1, False)}
    assert fleet.scaling.think(None) is None
    assert fleet.scaling.think(running) is None
    await fleet.up()
    assert fleet.scaling.think(running) is None
    assert fleet.scaling.told() == {}
    await fleet.report("decode-main", "d1")
    assert fleet.scaling.think(running) is not None
    (pool,) = (pool for pool in fleet.script.seen[0].pools if pool.name == "decode-main")
    assert (pool.target, pool.ready, pool.starting) == (3, 2, (0.0,)), "Serve starts one that has not reported"


@pytest.mark.parametrize("sizes", [None, {"decode-main": Size(2, 0, True)}])
async def test_a_restarted_manager_does_not_listen_for_ever(sizes: Mapping[str, Size] | None) -> None:
    fleet = Fleet()
    fleet.now_s = LISTEN_S
    await fleet.up()
    assert fleet.scaling.think(sizes) is not None


async def test_a_request_waits_for_the_first_replica_until_its_start_is_given_up() -> None:
    fleet = Fleet(least=0, start_timeout_s=100.0)
    fleet.now_s, room = LISTEN_S, fleet.manager._allocator.room
    assert room.keep_until_s == 0.0
    fleet.script.targets = {"prefill": 0, "decode-main": 1}
    fleet.scaling.think(None)
    fleet.now_s += 5.0
    fleet.scaling.think(None)
    started_s = fleet.now_s
    fleet.now_s += 40.0
    fleet.scaling.think(None)
    assert room.keep_until_s == started_s + 100.0
    await fleet.report("decode-main", "d0")
    fleet.now_s += 1.0
    await fleet.report("decode-main", "d0")
    fleet.scaling.think(None)
    assert room.keep_until_s == fleet.now_s + 30.0, "what waited has queue_timeout_s for a place"
    fleet.now_s += 20.0
    await fleet.report("decode-main", "d0")
    fleet.scaling.think(None)
    assert room.keep_until_s == fleet.now_s + 10.0, "that is said once"


async def test_a_request_no_longer_waits_for_a_start_that_is_not_asked_for_any_more() -> None:
    fleet = Fleet(least=0)
    fleet.now_s, room = LISTEN_S, fleet.manager._allocator.room
    fleet.script.targets = {"prefill": 0, "decode-main": 1}
    for _ in range(2):
        fleet.scaling.think(None)
    assert room.keep_until_s > fleet.now_s
    fleet.script.targets["decode-main"] = 0
    for _ in range(2):
        fleet.scaling.think(None)
    assert room.keep_until_s == 0.0


async def test_a_request_is_refused_as_soon_as_no_start_is_under_way_and_its_time_is_over() -> None:
    """Its timer is set to the end of a start that may take hours, and no replica is there to report."""
    fleet = Fleet(least=0, interval_s=0.001, start_timeout_s=10_000.0)
    fleet.now_s, room = LISTEN_S, fleet.manager._allocator.room
    fleet.script.targets = {"prefill": 0, "decode-main": 1}
    planning = asyncio.create_task(fleet.manager.plan(_settled))
    await _until(lambda: room.keep_until_s > LISTEN_S)
    request = SessionRequest("a", 100, 10, (Mode.DISAGGREGATED,))
    waiting = asyncio.create_task(fleet.manager.ask(Open(request)))
    await _until(lambda: "a" in room)
    await asyncio.sleep(0)
    fleet.now_s += 1000.0
    fleet.script.targets["decode-main"] = 0
    async with asyncio.timeout(60.0):
        decision = await waiting
    assert isinstance(decision, Reject)
    assert "no capacity" in decision.reason
    planning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await planning


async def test_a_full_fleet_changes_no_deadline() -> None:
    fleet = Fleet()
    await fleet.up()
    fleet.script.targets["decode-main"] = 3
    for _ in range(3):
        fleet.scaling.think(SETTLED)
    assert fleet.manager._allocator.room.keep_until_s == 0.0, "one is there, though another one starts"


async def test_a_dry_run_explains_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(dry_run=True)
    await fleet.up()
    fleet.script.targets["decode-main"] = 3
    for _ in range(2):
        fleet.scaling.think(SETTLED)
    assert fleet.scaling.told() == {}
    assert fleet.script.seen[-1].pools[1].target == 1, "it is what Serve has"
    assert caplog.messages == ["decode-main would get 3 replicas, not 1 (needed): decode-main is as it is"]
    assert fleet.scaling.explain()["pools"]["decode-main"]["target"] == 3


async def test_the_status_explains_the_plan() -> None:
    fleet = Fleet()
    await fleet.up()
    assert (await fleet.manager.ask(Status()))["scaling"]["age_s"] is None
    fleet.scaling.think(SETTLED)
    fleet.now_s = 2.0
    shown = (await fleet.manager.ask(Status()))["scaling"]
    assert json.loads(json.dumps(shown)) == shown
    assert (shown["age_s"], shown["short"], shown["failure"]) == (2.0, "decode-main", None)
    pool = shown["pools"]["decode-main"]
    assert (pool["target"], pool["ready"], pool["bounds"], pool["followed"]) == (1, 1, [1, 3], True)
    assert (pool["code"], pool["reason"]) == ("needed", "decode-main is as it is")
    assert pool["predicted"]["fill"] == 0.5


async def test_a_manager_without_scaling_has_none() -> None:
    config = BatonConfig.model_validate({"prefill": POOL, "decode": {"main": POOL}})
    manager = SessionManager(config)
    assert manager.scaling is None
    assert (await manager.ask(Status()))["scaling"] is None


async def test_a_plan_that_serve_does_not_carry_out_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    await fleet.up()
    fleet.script.targets["decode-main"] = 2
    caplog.set_level(logging.ERROR)
    fleet.scaling.think(SETTLED)
    caplog.set_level(logging.WARNING)
    fleet.scaling.think(SETTLED)
    fleet.now_s = FOLLOWED_S - 1
    fleet.scaling.think(SETTLED | {"decode-main": Size(1, 1, False)})
    fleet.scaling.think(SETTLED)
    fleet.now_s = 2 * FOLLOWED_S - 2
    fleet.scaling.think(SETTLED)
    assert caplog.messages == [], "a start that takes long is no such case"
    for more_s in (2.0, 2.0):
        fleet.now_s += more_s
        fleet.scaling.think(SETTLED)
    (message,) = caplog.messages
    assert message.startswith("Serve keeps 1 replicas of decode-main, and the plan has 2: ")
    assert "autoscaling_policy" in message
    assert fleet.scaling.explain()["pools"]["decode-main"]["followed"] is False
    fleet.scaling.think(SETTLED | {"decode-main": Size(2, 0, True)})
    assert fleet.scaling.explain()["pools"]["decode-main"]["followed"] is True


async def test_a_pool_that_may_be_empty_does_not_keep_an_application_from_being_ready() -> None:
    fleet = Fleet(least=0)
    await fleet.report("prefill", "p0")
    assert (await fleet.manager.ask(Ready()))["ready"]
    fleet = Fleet(least=1)
    await fleet.report("prefill", "p0")
    assert not (await fleet.manager.ask(Ready()))["ready"]


async def test_plans_are_made_one_after_the_other_until_they_are_stopped() -> None:
    fleet = Fleet(interval_s=0.001)
    await fleet.up()
    running = asyncio.create_task(fleet.manager.plan(_settled))
    async with asyncio.timeout(60.0):
        while len(fleet.script.seen) < 3:
            await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert fleet.scaling.explain()["failure"] is None


async def test_a_plan_that_fails_is_loud_and_planning_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(interval_s=0.001)
    await fleet.up()
    fleet.scaling.think(SETTLED)
    running = asyncio.create_task(fleet.manager.plan(_settled))
    for error in (ValueError("no such pool"), ValueError("no such pool 2"), KeyError("steps")):
        fleet.script.error = error
        await _fails(fleet)
    shown = fleet.scaling.explain()
    assert (shown["failure"], shown["failures"]) == ("KeyError: 'steps'", fleet.scaling.failures)
    assert fleet.scaling.told() == {"decode-main": 1}, "the last plan stays"
    failed = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info and record.exc_info[0] for record in failed] == [ValueError, KeyError], "each kind once"
    fleet.script.error, fleet.script.targets["decode-main"] = None, 2
    await _until(lambda: fleet.scaling.told() == {"decode-main": 2})
    assert fleet.scaling.explain()["failure"] is None
    assert fleet.scaling.explain()["failures"] == shown["failures"], "the count stays"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_failure_before_the_first_plan_is_shown() -> None:
    fleet = Fleet(interval_s=0.001)
    await fleet.up()
    fleet.script.error = ValueError("no such pool")
    running = asyncio.create_task(fleet.manager.plan(_settled))
    await _fails(fleet)
    assert fleet.scaling.explain()["failure"] == "ValueError: no such pool"
    assert fleet.scaling.told() == {}
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def _fails(fleet: Fleet) -> None:
    """Three plans more have failed."""
    before = fleet.scaling.failures
    await _until(lambda: fleet.scaling.failures >= before + 3)


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not is_so():
            await asyncio.sleep(0)


async def _settled() -> Mapping[str, Size]:
    return SETTLED
