"""The decider: early refusals by the class, with the numbers they were made by."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from configs.schema import BatonConfig, ClassConfig, MockEngineConfig, PlacementConfig, PoolConfig
from deployments.fleet.columns import ReplicaView
from deployments.fleet.view import FleetView, LiveView, View
from deployments.messages import Admit, Mode, Queue, Reject, ReplicaInfo, Role, SessionRequest
from deployments.policy.decider import Decider, OpenSession, Tried, settings_of
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.place import HANDOFF_FAILED
from deployments.policy.placement.split import ANY
from deployments.step_cost import Coefficients

TRUSTED = Knowledge(trusted=frozenset({"decode-small"}))
SHORT = Queue("KV blocks are short")


def config(**placement: Any) -> BatonConfig:
    pool = PoolConfig(engine=MockEngineConfig(block_size=16))
    classes = placement.pop("classes", {"default": ClassConfig(ttft_s=1.0)})
    return BatonConfig(
        prefill=pool,
        decode={"small": pool.model_copy(update={"max_prompt_tokens": 1000})},
        placement=PlacementConfig(classes=classes, default_class="default", **placement),
    )


def decider(**placement: Any) -> Decider:
    return Decider(config(**placement), random.Random(0))


def session(attempt: int = 1, tokens: int = 160) -> OpenSession:
    request = SessionRequest("a", tokens, 160, (Mode.DECODE_LOCAL,), attempt=attempt)
    return OpenSession(request, TRUSTED, since_s=0.0)


def view(free_blocks: int) -> FleetView:
    info = ReplicaInfo("d0", "decode-small", Role.DECODE, "node", "engine", 16, 1000, 8, 4096)
    return FleetView((ReplicaView(info, free_blocks, 0, 0),), known=(info,))


def test_settings_have_limits_only_for_pools_that_the_configuration_limits() -> None:
    settings = settings_of(config())
    assert settings.limits.keys() == {"decode-small"}
    assert settings.limits["decode-small"].max_prompt_tokens == 1000


def test_a_pool_that_takes_only_classes_that_yield_is_their_own() -> None:
    made = config(classes={"default": ClassConfig(), "night": ClassConfig(rank=1, yields=True)})
    pool = made.decode["small"]

    def own(*classes: str) -> frozenset[str]:
        pools = {"small": pool, "other": pool.model_copy(update={"classes": classes})}
        return settings_of(made.model_copy(update={"decode": pools})).own

    assert own("night") == {"decode-other"}
    assert own() == own("default") == own("default", "night") == frozenset()


def test_a_pool_of_the_default_class_takes_requests_that_name_none() -> None:
    pools = config().decode["small"].model_copy(update={"classes": ("default",)})
    other = pools.model_copy(update={"classes": ("other",)})
    limits = settings_of(config().model_copy(update={"decode": {"small": pools, "large": other}})).limits
    unnamed, named = session().request, replace(session().request, priority="default")
    assert [limits["decode-small"].take(each) for each in (unnamed, named)] == [True, True]
    assert [limits["decode-large"].take(each) for each in (unnamed, named)] == [False, False]


def test_a_request_that_has_waited_longer_than_its_class_allows_is_refused() -> None:
    deciding = decider()
    assert deciding.try_again(session(), view(0), Tried(), 0.5, 2.0) == Queue(
        "KV blocks are short: 20 needed, at most 0 free on a replica"
    )
    late = deciding.try_again(session(), view(0), Tried(), 100.0, 2.0)
    assert isinstance(late, Reject)
    assert (late.code, late.retry_after_s) == ("predicted_ttft", 2.0)
    assert isinstance(deciding.try_again(session(attempt=2), view(0), Tried(), 100.0, 2.0), Queue)
    assert isinstance(deciding.try_again(session(), view(100), Tried(), 0.5, 2.0), Admit)


def test_a_request_is_refused_when_the_wait_behind_others_is_predicted_to_be_too_long() -> None:
    deciding = decider()
    assert deciding.refuse_queueing(session(), 1000) is None, "no rate is known yet"
    for now_s in range(5):
        deciding.placed_from_queue(float(now_s))
    assert deciding.refuse_queueing(session(), 0) is None
    refusal = deciding.refuse_queueing(session(), 10)
    assert refusal is not None
    assert "predicted wait 10.0 s behind 10 others" in refusal.reason
    assert deciding.refuse_queueing(session(attempt=2), 10) is None
    assert decider(admission=False).refuse_queueing(session(), 10) is None


def test_a_pass_tries_no_request_again_that_finds_neither_room_nor_turn() -> None:
    tried, no_turn, all_pools = Tried(), Queue("busy", for_turn=True), (True, True)
    tried.note(all_pools, 500, "chat", SHORT)
    tried.note(all_pools, 100, "chat", no_turn)
    assert tried.known(all_pools, 500, "batch") == SHORT
    assert tried.known(all_pools, 400, "chat") == no_turn
    assert tried.known(all_pools, 400, "batch") is None, "a class with another objective may join a longer queue"
    tried.note(all_pools, 300, "batch", SHORT)
    assert tried.known(all_pools, 300, "batch") == SHORT
    assert tried.known((True, False), 500, "chat") is None, "other pools take it"


def test_a_pass_tries_one_of_many_requests_that_the_same_pools_take(monkeypatch: pytest.MonkeyPatch) -> None:
    tried_tokens = list[int]()

    def decide(deciding: Decider, asked: OpenSession, view: View, now_s: float) -> Queue:
        tried_tokens.append(asked.request.prompt_tokens)
        return SHORT

    monkeypatch.setattr(Decider, "decide", decide)
    deciding, tried = decider(), Tried()
    assert deciding.settings.limits["decode-small"].max_prompt_tokens == 1000
    for tokens in (160, 160, 900, 1001, 1200, 100):
        assert deciding.try_again(session(tokens=tokens), view(0), tried, 0.5, 2.0) == SHORT
    assert tried_tokens == [160, 1001, 100], (
        "the first that the small pool takes, the first that it does not, a smaller one"
    )


def fleet(*replica_ids: str) -> FleetView:
    rows = []
    for replica_id in replica_ids:
        role = Role.PREFILL if replica_id.startswith("p") else Role.DECODE
        pool = "prefill" if role is Role.PREFILL else "decode-small"
        strict = replica_id.endswith("s")
        rows.append(ReplicaInfo(replica_id, pool, role, "node", "engine", 16, 1000, 8, 4096, strict=strict))
    return FleetView(tuple(ReplicaView(info, 1000, 0, 0) for info in rows), known=tuple(rows))


def busy_fleet() -> FleetView:
    """The only decode replica has prompts of nine seconds to compute, and could take an answer at once."""
    there = fleet("p0", "d0")
    prefill, decode = there.ready
    return replace(there, ready=(prefill, decode._replace(behind_s=9.0)))


@pytest.mark.parametrize(
    ("there", "failed", "mode", "replicas", "reason"),
    [
        ("p0 p1 d0", "p0", Mode.DISAGGREGATED, {"p1", "d0"}, "split"),
        ("p0 p1 d0", "p0 p1", Mode.DECODE_LOCAL, {"d0"}, HANDOFF_FAILED),
        ("p0 p1 p2 d0", "p0 p1", Mode.DECODE_LOCAL, {"d0"}, HANDOFF_FAILED),
        ("p0 d0", "p0", Mode.DECODE_LOCAL, {"d0"}, HANDOFF_FAILED),
        ("p0s d0s", "p0s", Mode.DECODE_LOCAL, {"d0s"}, HANDOFF_FAILED),
        ("p0s p1s d0s", "p0s", Mode.DISAGGREGATED, {"p1s", "d0s"}, "split"),
        ("p0s p1s d0s", "p0s p1s", Mode.DECODE_LOCAL, {"d0s"}, HANDOFF_FAILED),
    ],
)
def test_a_session_whose_handoff_failed_goes_to_another_prefill_replica_or_to_one_that_does_all(
    there: str, failed: str, mode: Mode, replicas: set[str], reason: str
) -> None:
    request = SessionRequest("a", 160, 160, ANY, attempt=2, failed_handoffs=tuple(failed.split()))
    opened = OpenSession(request, TRUSTED, since_s=0.0)
    decision = decider(split="always").decide(opened, fleet(*there.split()), 0.0)
    assert isinstance(decision, Admit)
    placement = decision.placement
    found = {replica.replica_id for replica in (placement.prefill, placement.decode) if replica is not None}
    assert (placement.mode, found, placement.reason) == (mode, replicas, reason)


@pytest.mark.parametrize(("failed", "decision"), [((), Admit), (("p0",), Queue), (("p0", "p0"), Queue)])
def test_a_session_whose_handoff_failed_waits_for_its_turn_rather_than_go_to_the_same_pair(
    failed: tuple[str, ...], decision: type
) -> None:
    request = SessionRequest("a", 160, 160, ANY, attempt=1 + len(failed), failed_handoffs=failed)
    assert type(decider(split="always").decide(OpenSession(request, TRUSTED, 0.0), busy_fleet(), 0.0)) is decision


def test_a_pass_places_others_behind_a_session_whose_handoff_failed_and_that_waits_for_its_turn() -> None:
    deciding, tried, busy = decider(split="always"), Tried(), busy_fleet()
    again = SessionRequest("a", 160, 160, ANY, attempt=2, failed_handoffs=("p0",))
    first = SessionRequest("b", 160, 160, ANY)
    found = [deciding.try_again(OpenSession(each, TRUSTED, 0.0), busy, tried, 0.0, 1.0) for each in (again, first)]
    assert [type(each) for each in found] == [Queue, Admit]


def test_a_request_takes_half_its_objective_in_a_queue_and_its_prefill() -> None:
    info = ReplicaInfo("d0", "decode-small", Role.DECODE, "node", "engine", 16, 1000, 8, 4096)
    columns = FleetView((ReplicaView(info, 100, 0, 0),), known=(info,)).columns
    columns.learn({"decode-small": Coefficients(0.01, 1e-3, 0.0, 0.0, 0.0)})
    there = LiveView(columns, (info,), (), 0.0)
    assert decider().takes_s(session(), there) == pytest.approx(0.5 + 0.01 + 160 * 1e-3)
    assert decider(classes={"default": ClassConfig()}).takes_s(session(), there) == 0.0
