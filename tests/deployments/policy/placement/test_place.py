"""Placement: filter, score, pick; and what a person is told when nothing fits."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import WeightsConfig
from deployments.fleet.columns import ReplicaView
from deployments.fleet.fleet import Fleet
from deployments.fleet.view import FleetView
from deployments.messages import (
    Admit,
    Decision,
    Mode,
    Phase,
    Placement,
    Queue,
    Reject,
    ReplicaInfo,
    ReplicaSnapshot,
    Role,
    SessionRequest,
)
from deployments.policy.placement.field import Field, PlacementSettings, claimed
from deployments.policy.placement.joint import Joint
from deployments.policy.placement.knowledge import Knowledge
from deployments.policy.placement.limits import Limits
from deployments.policy.placement.place import place as place_by
from deployments.policy.placement.split import ANY

SETTINGS = PlacementSettings(split_min_prompt_tokens=32, handoff_timeout_s=7.0, session_timeout_s=70.0)


def replica(
    replica_id: str, role: Role = Role.DECODE, *, total: int = 100, free: int | None = None, **load: int
) -> ReplicaView:
    info = ReplicaInfo(replica_id, f"{role}-pool", role, "node", "engine", 16, total, load.get("max_sessions", 8), 8192)
    room = total if free is None else free
    backlog = load.get("backlog_tokens", 0)
    return ReplicaView(
        info,
        room,
        load.get("sessions", 0),
        backlog,
        busy_until_s=backlog / 1000,
        behind_s=backlog / 1000,
        expected_blocks=total - room,
    )


def prefill(replica_id: str = "p0", **options: int) -> ReplicaView:
    return replica(replica_id, Role.PREFILL, **options)


def strict_prefill(replica_id: str = "p0", **options: int) -> ReplicaView:
    """One that never decodes."""
    view = prefill(replica_id, **options)
    return view._replace(info=replace(view.info, strict=True))


def fleet_of(*ready: ReplicaView, down: tuple[ReplicaView, ...] = (), silent: tuple[Role, ...] = ()) -> FleetView:
    return FleetView(ready, tuple(view.info for view in (*ready, *down)), silent)


def ask(prompt_tokens: int = 64, max_tokens: int = 96, *allowed: Mode) -> SessionRequest:
    return SessionRequest("s", prompt_tokens, max_tokens, allowed or ANY)


def place(request: SessionRequest, view: FleetView, settings: PlacementSettings) -> Decision:
    return place_by(here(request, view, settings), Joint())


def here(
    request: SessionRequest, view: FleetView, settings: PlacementSettings, rng: random.Random | None = None
) -> Field:
    return Field(request, view, settings, Knowledge(), rng or random.Random(0), (math.inf, math.inf))


def placed(request: SessionRequest, view: FleetView) -> Placement:
    decision = place(request, view, SETTINGS)
    assert isinstance(decision, Admit), decision
    return decision.placement


def test_a_split_session_names_both_replicas_its_blocks_and_its_deadlines() -> None:
    decode, helper = replica("d0"), prefill("p0")
    expected = Placement("s", 1, Mode.DISAGGREGATED, "split", decode.info, helper.info, 10, 7.0, 70.0)
    got = placed(ask(), fleet_of(decode, helper))
    assert replace(got, forecast=expected.forecast) == expected


def test_the_replica_whose_memory_is_expected_to_fill_least_wins() -> None:
    small, large = replica("a", total=100, free=60), replica("b", total=400, free=200)
    assert placed(ask(), fleet_of(small, large, prefill())).owner.replica_id == "a"


def test_chance_decides_between_equals_in_proportion_to_what_is_free() -> None:
    rng = random.Random(0)
    view = fleet_of(replica("d0", total=100), replica("d1", total=300), prefill("p0"), prefill("p1"))
    settings = replace(SETTINGS, weights=WeightsConfig(near_s=1.0))
    decisions = [place_by(here(ask(), view, settings, rng), Joint()) for _ in range(400)]
    placements = [decision.placement for decision in decisions if isinstance(decision, Admit)]
    owners = [placement.owner.replica_id for placement in placements]
    helpers = [placement.prefill.replica_id for placement in placements if placement.prefill]
    assert 250 < owners.count("d1") < 350
    assert 150 < helpers.count("p1") < 250


def test_under_load_unlike_pools_fill_side_by_side_and_a_big_prompt_goes_to_the_large_one() -> None:
    fleet = Fleet({"prefill": Role.PREFILL, "small": Role.DECODE, "large": Role.DECODE}, stale_s=5.0)
    for info in (
        ReplicaInfo("p0", "prefill", Role.PREFILL, "n", "engine", 16, 1000, 99, 8192),
        ReplicaInfo("s0", "small", Role.DECODE, "n", "engine", 16, 100, 99, 8192),
        ReplicaInfo("l0", "large", Role.DECODE, "n", "engine", 16, 400, 99, 8192),
    ):
        fleet.update(ReplicaSnapshot(info.replica_id, 1, Phase.READY, info), 0.0)
    owners = []
    for number in range(50):
        placement = placed(replace(ask(), session_id=str(number)), fleet.view(0.0))
        fleet.reserve(placement, 64, 0.0)
        owners.append(placement.owner.replica_id)
    assert (owners.count("s0"), owners.count("l0")) == (10, 40)
    assert "s0" in owners[:12]
    assert isinstance(place(ask(), fleet.view(0.0), SETTINGS), Queue)
    for number in range(50):
        fleet.release(str(number), 1, 0.0)
    assert placed(ask(3000, 1000), fleet.view(0.0)).owner.replica_id == "l0"


def test_prompt_and_answer_must_fit_blocks_sessions_and_model_length() -> None:
    exact = replica("d0", free=10)
    assert placed(ask(64, 96), fleet_of(exact, prefill())).reserved_blocks == 10
    assert isinstance(place(ask(64, 97), fleet_of(exact, prefill()), SETTINGS), Queue)
    full = replica("d0", sessions=8)
    assert place(ask(), fleet_of(full, strict_prefill()), SETTINGS) == Queue(
        "every replica that fits runs its most sessions"
    )
    short = replica("d0")
    short = short._replace(info=replace(short.info, max_model_len=159))
    assert isinstance(place(ask(64, 96), fleet_of(short, strict_prefill()), SETTINGS), Reject)


def test_the_prefill_replica_has_the_same_engine_and_the_least_backlog_and_may_be_full() -> None:
    other = prefill("p0")
    other = other._replace(info=replace(other.info, fingerprint="other"))
    late, soon = prefill("p1", backlog_tokens=900), prefill("p2", backlog_tokens=100, free=0)
    placement = placed(ask(), fleet_of(replica("d0"), other, late, soon))
    assert placement.prefill == soon.info


def test_a_decode_replica_without_a_like_prefill_replica_gives_way_to_one_that_has_it() -> None:
    odd = replica("d0", total=200)
    odd = odd._replace(info=replace(odd.info, fingerprint="odd"))
    assert placed(ask(), fleet_of(odd, replica("d1", free=50), prefill())).owner.replica_id == "d1"


def test_a_short_prompt_is_not_split() -> None:
    placement = placed(ask(31), fleet_of(replica("d0"), prefill()))
    assert (placement.mode, placement.reason, placement.prefill) == (Mode.DECODE_LOCAL, "short prompt", None)
    assert placed(ask(32), fleet_of(replica("d0"), prefill())).mode is Mode.DISAGGREGATED
    only = ask(31, 96, Mode.DISAGGREGATED)
    assert placed(only, fleet_of(replica("d0"), prefill())).mode is Mode.DISAGGREGATED


def test_without_a_prefill_replica_decode_prefills_and_says_why() -> None:
    placement = placed(ask(), fleet_of(replica("d0")))
    assert (placement.mode, placement.reason) == (Mode.DECODE_LOCAL, "no prefill replica is ready")


def test_prefill_decodes_only_as_a_last_resort_or_when_asked_first() -> None:
    placement = placed(ask(), fleet_of(prefill()))
    assert (placement.mode, placement.reason) == (Mode.PREFILL_LOCAL, "no decode replica is ready")
    assert (placement.decode, placement.reserved_blocks) == (None, 10)
    assert isinstance(place(ask(), fleet_of(replica("d0", free=0), prefill()), SETTINGS), Queue)
    one_token = replace(ask(64, 1, Mode.PREFILL_LOCAL, Mode.DECODE_LOCAL), rule="one_token")
    placement = placed(one_token, fleet_of(replica("d0"), prefill()))
    assert (placement.mode, placement.reason) == (Mode.PREFILL_LOCAL, "one_token")
    assert placed(one_token, fleet_of(replica("d0"), prefill(free=0))).mode is Mode.DECODE_LOCAL


def test_what_would_fit_an_empty_or_absent_replica_waits_with_a_reason() -> None:
    full = fleet_of(replica("d0", free=3), strict_prefill())
    assert place(ask(), full, SETTINGS) == Queue("KV blocks are short: 10 needed, at most 3 free on a replica")
    down = fleet_of(strict_prefill(), down=(replica("d0"),))
    assert place(ask(64, 96, Mode.DISAGGREGATED), down, SETTINGS) == Queue(
        "no replica is ready that decodes", unavailable=True
    )
    large_down = fleet_of(replica("d0"), prefill(), down=(replica("d1", total=400),))
    assert place(ask(1000, 1000, Mode.DECODE_LOCAL), large_down, SETTINGS) == Queue(
        "no ready replica is large enough for 2000 tokens"
    )


def test_what_could_never_fit_is_rejected_with_numbers() -> None:
    decision = place(ask(1000, 1000, Mode.DECODE_LOCAL), fleet_of(replica("d0"), prefill()), SETTINGS)
    assert decision == Reject(
        "the request needs 2000 tokens (1000 prompt + 1000 answer), and the largest replica holds 1600"
    )


def test_no_request_is_rejected_while_a_pool_has_not_said_how_large_it_is() -> None:
    view = fleet_of(replica("d0"), prefill(), silent=(Role.DECODE,))
    assert isinstance(place(ask(1000, 1000), view, SETTINGS), Queue)


def test_a_prompt_too_long_for_prefill_is_prefilled_on_decode() -> None:
    placement = placed(ask(1000, 100), fleet_of(replica("d0"), prefill(total=10)))
    assert placement.mode is Mode.DECODE_LOCAL
    assert "largest prefill replica holds 160" in placement.reason


def test_a_request_without_a_mode_is_an_error() -> None:
    with pytest.raises(ValueError, match="allows no mode"):
        place(SessionRequest("s", 1, 1, ()), fleet_of(), SETTINGS)


def test_a_waiter_claims_the_decode_replica_that_is_nearest_to_having_room() -> None:
    view = fleet_of(replica("d0", free=20), replica("d1", total=400, free=10), replica("d2", free=5), strict_prefill())
    assert claimed(ask(), view) == "d0"
    assert claimed(ask(1000, 1000), view) == "d1", "d0 could never hold it"
    assert claimed(ask(), view.without_room_on(["d0"])) == "d1"
    assert claimed(ask(9000, 1), view) is None
    assert claimed(ask(), view, {"decode-pool": Limits(min_prompt_tokens=65)}) is None


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=5),
    st.integers(1, 600),
    st.integers(1, 600),
    st.sets(st.sampled_from(list(Mode)), min_size=1),
)
def test_an_admitted_session_fits_where_it_goes(
    loads: list[tuple[int, int]], prompt: int, answer: int, allowed: set[Mode]
) -> None:
    decodes = [replica(f"d{i}", total=60, free=free, sessions=n) for i, (free, n) in enumerate(loads)]
    view = fleet_of(*decodes, prefill(total=40))
    request = ask(prompt, answer, *sorted(allowed))
    decision = place(request, view, SETTINGS)
    if isinstance(decision, Admit):
        owner = next(view for view in view.ready if view.info == decision.placement.owner)
        assert decision.placement.reserved_blocks * 16 >= prompt + answer
        assert decision.placement.reserved_blocks <= owner.free_blocks
        assert owner.sessions < owner.info.max_sessions
        assert decision.placement.mode in allowed
