"""Moves: which sessions a replica gives up, by the settings, the fleet and the breakers; which replicas are barred."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from configs.schema import BatonConfig, MockEngineConfig, PoolConfig
from deployments.fleet.columns import UNKNOWN
from deployments.fleet.fleet import Fleet
from deployments.messages import Mode, Phase, ReplicaInfo, ReplicaSnapshot, Reservation, Role, SessionRequest
from deployments.policy.admission.breakers import FIRST_S, Breakers
from deployments.policy.decider import Decider, OpenSession
from deployments.policy.moves import Moves
from deployments.policy.placement.field import PlacementSettings
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.limits import Limits
from deployments.policy.placement.rebalance import REST_S
from deployments.policy.placement.split import ANY
from deployments.step_cost import Coefficients

REQUEST = SessionRequest("a", 140, 500)


def info(name: str, role: Role = Role.DECODE, **more: Any) -> ReplicaInfo:
    shape = {"fingerprint": "engine", "total_blocks": 60, "max_model_len": 4096, "max_sessions": 8, **more}
    return ReplicaInfo(name, f"pool-{name}", role, "node", block_size=16, **shape)


def pressed(replica: ReplicaInfo) -> ReplicaSnapshot:
    """It has two long answers and one free block."""
    return ReplicaSnapshot(
        replica.replica_id,
        2,
        Phase.READY,
        replica,
        used_blocks=replica.total_blocks - 1,
        running=2,
        sessions=("a", "b"),
        reservations=(Reservation(40, 40, 400),) * 2,
        held_tokens=(160, 320),
        movable=frozenset("ab"),
    )


def sessions_of(request: SessionRequest | None) -> dict[str, OpenSession]:
    """Both answers as this allocator's, or none of them."""
    return {} if request is None else {each: OpenSession(request, Knowledge(), 0.0) for each in "ab"}


class Stage:
    """A pressed replica `d0`, and another one that is empty."""

    def __init__(self, settings: PlacementSettings | None = None, other: ReplicaInfo | None = None) -> None:
        self.fleet = Fleet({"pool-d0": Role.DECODE, "pool-d1": Role.DECODE}, stale_s=60.0)
        other = other or info("d1")
        self.fleet.update(ReplicaSnapshot("d1", 1, Phase.READY, other), 0.0)
        self.breakers = Breakers()
        pool = PoolConfig(engine=MockEngineConfig())
        decider = Decider(BatonConfig(prefill=pool, decode={"small": pool}), random.Random(0))
        decider.settings = settings or PlacementSettings()
        self.moves = Moves(decider, self.fleet, self.breakers, interval_s=0.1)

    def choose(
        self, snapshot: ReplicaSnapshot | None = None, request: SessionRequest | None = REQUEST, now_s: float = 0.0
    ) -> tuple[str, ...]:
        snapshot = snapshot or pressed(info("d0"))
        self.fleet.update(snapshot, now_s)
        return self.moves.choose(snapshot, UNKNOWN, sessions_of(request), now_s)


def test_a_session_moves_where_another_replica_has_room_and_both_replicas_take_no_new_one() -> None:
    stage = Stage()
    assert stage.choose() == ("a",)
    assert sorted(stage.moves.barred(0.0, moving=False)) == ["d0", "d1"]
    assert stage.moves.barred(0.0, moving=True) == ("d0",), "the other has kept its room for sessions that move"


def test_none_moves_where_moves_are_off() -> None:
    assert Stage(PlacementSettings(moves=False)).choose() == ()


def test_a_replica_that_never_decodes_gives_nothing_up() -> None:
    assert Stage().choose(pressed(info("d0", Role.PREFILL, strict=True))) == ()
    assert Stage().choose(pressed(info("d0", Role.PREFILL))) == ("a",)


@pytest.mark.parametrize("unsaid", [{"held_tokens": ()}, {"info": None}])
def test_a_replica_that_does_not_say_what_it_holds_gives_nothing_up(unsaid: dict[str, Any]) -> None:
    stage = Stage()
    assert stage.moves.choose(replace(pressed(info("d0")), **unsaid), UNKNOWN, sessions_of(REQUEST), 0.0) == ()
    assert stage.moves.barred(0.0, moving=False) == ()


def test_none_moves_to_a_replica_with_another_engine() -> None:
    assert Stage(other=info("d1", fingerprint="another")).choose() == ()


def test_none_moves_to_a_replica_that_has_just_lost_a_session() -> None:
    stage = Stage()
    stage.breakers.lost("d1", 0.0)
    assert stage.choose() == ()
    assert stage.choose(now_s=10 * FIRST_S) == ("a",)


@pytest.mark.parametrize(
    ("settings", "other", "request_", "moved"),
    [
        pytest.param({"limits": {"pool-d1": Limits(max_prompt_tokens=159)}}, {}, REQUEST, (), id="long by now"),
        pytest.param({"limits": {"pool-d1": Limits(max_prompt_tokens=160)}}, {}, REQUEST, ("a",), id="just not"),
        pytest.param({}, {"max_model_len": 639}, REQUEST, (), id="too long at its end"),
        pytest.param({}, {"max_model_len": 640}, REQUEST, ("a",), id="as long as may be"),
        pytest.param({}, {"max_model_len": 639}, None, ("a",), id="the request of another allocator"),
    ],
)
def test_a_replica_must_take_what_is_left_of_the_request(
    settings: Any, other: Any, request_: SessionRequest | None, moved: tuple[str, ...]
) -> None:
    stage = Stage(PlacementSettings(**settings), info("d1", **other))
    assert stage.choose(request=request_) == moved


class Crowded(Stage):
    """`d0` writes eight answers, `d1` none, and the steps of both are known."""

    def __init__(
        self, settings: PlacementSettings | None = None, attempt: int = 1, allowed: tuple[Mode, ...] = ANY
    ) -> None:
        super().__init__(settings, info("d1", total_blocks=600))
        replica, ids = info("d0", total_blocks=600, max_sessions=16), "abcdefgh"
        self.crowded = ReplicaSnapshot(
            "d0",
            2,
            Phase.READY,
            replica,
            running=8,
            sessions=tuple(ids),
            reservations=(Reservation(40, 40, 400),) * 8,
            held_tokens=(160,) * 8,
            running_tokens=1280,
            movable=frozenset(ids[1:]),
        )
        self.fleet.update(self.crowded, 0.0)
        request = replace(REQUEST, allowed=allowed, attempt=attempt)
        self.sessions = {
            each: OpenSession(replace(request, session_id=each), Knowledge(output_tokens=400), 0.0) for each in ids
        }

    def rebalance(self, now_s: float = 0.0) -> tuple[str, ...]:
        steps = Coefficients(5e-2, 1e-3, 0.0, 2e-2, 0.0)
        view = self.fleet.live(now_s, {"pool-d0": steps, "pool-d1": steps})
        return self.moves.rebalance(self.crowded, self.sessions, view)


def test_an_answer_of_a_crowded_replica_moves_to_one_that_has_none() -> None:
    assert Crowded().rebalance() == ("b",), "the first that can move"


def test_an_answer_that_has_moved_twice_or_that_another_allocator_placed_stays() -> None:
    assert Crowded(attempt=3).rebalance() == ()
    stage = Crowded()
    stage.sessions.clear()
    assert stage.rebalance() == ()


def test_an_answer_that_has_just_come_from_another_replica_stays_for_a_while() -> None:
    stage = Crowded(attempt=2)
    assert stage.rebalance(0.9 * REST_S) == ()
    assert stage.rebalance(1.1 * REST_S) == ("b",)
    assert Crowded(attempt=1).rebalance() == ("b",), "one that began here does not"


def test_an_answer_whose_kv_cache_cannot_be_handed_over_stays() -> None:
    assert Crowded(allowed=(Mode.DECODE_LOCAL,)).rebalance() == ()


def test_it_is_time_to_rebalance_once_a_second_where_moves_and_rebalancing_are_on() -> None:
    stage = Crowded()
    assert stage.moves.is_time_to_rebalance(stage.crowded, 0.0)
    assert not stage.moves.is_time_to_rebalance(stage.crowded, 0.5)
    assert stage.moves.is_time_to_rebalance(stage.crowded, 1.5)
    for settings in (PlacementSettings(moves=False), PlacementSettings(rebalances=False)):
        stage = Crowded(settings)
        assert not stage.moves.is_time_to_rebalance(stage.crowded, 0.0)


def test_no_session_is_given_up_for_memory_where_all_of_it_is_reserved() -> None:
    assert Stage(PlacementSettings(relieves=False)).choose() == ()


class Drained(Crowded):
    """An operator drains `d0`."""

    def away(self) -> tuple[str, ...]:
        return self.moves.away(self.crowded, self.sessions, self.fleet.live(0.0, shut=["d0"]))


def test_an_answer_of_a_drained_replica_moves_where_another_has_room_whatever_it_costs() -> None:
    assert Drained().away() == ("b",), "the first that can move"
    assert Drained(attempt=3).away() == ("b",), "however often it has moved"


def test_an_answer_of_a_drained_replica_stays_where_no_other_has_room_for_it() -> None:
    stage = Drained()
    stage.fleet.update(ReplicaSnapshot("d1", 2, Phase.READY, info("d1", total_blocks=30)), 0.0)
    assert stage.away() == ()
    assert Drained(allowed=(Mode.DECODE_LOCAL,)).away() == (), "its KV cache cannot be handed over"
    assert Drained(PlacementSettings(moves=False)).away() == ()
    stage = Drained()
    stage.sessions.clear()
    assert stage.away() == (), "the sessions of another allocator"
