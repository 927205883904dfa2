"""Views: rows and columns give policy the same fleet."""

from __future__ import annotations

import pytest

from deployments.fleet.columns import Columns, ReplicaView
from deployments.fleet.ledger import Ledger, Share
from deployments.fleet.view import FleetView, LiveView
from deployments.messages import Mode, Placement, ReplicaInfo, Role
from deployments.step_cost import Coefficients


def row(name: str, role: Role, fingerprint: str = "engine", free_blocks: int = 50) -> ReplicaView:
    info = ReplicaInfo(name, role.value, role, "node", fingerprint, 16, 100, 8, 2048)
    return ReplicaView(info, free_blocks, 0, 0)


ROWS = (
    row("d0", Role.DECODE, "older"),
    row("d1", Role.DECODE),
    row("p0", Role.PREFILL),
    row("p1", Role.PREFILL, "older"),
)
VIEW = FleetView(ROWS, silent=(Role.PREFILL,), now_s=3.0)


def test_the_columns_have_a_row_for_each_ready_replica() -> None:
    columns = VIEW.columns
    assert columns.rows.keys() == {"d0", "d1", "p0", "p1"}
    assert columns.is_of(Role.DECODE)[:4].tolist() == [True, True, False, False]
    assert columns.is_of(Role.MIXED).sum() == 0


def test_equal_engines_have_equal_codes_whatever_their_roles() -> None:
    columns = VIEW.columns
    engines = {name: columns.fingerprint[at] for name, at in columns.rows.items()}
    assert engines["d1"] == engines["p0"]
    assert engines["d0"] == engines["p1"]
    assert engines["d0"] != engines["d1"]


def test_a_view_without_what_yields_counts_it_as_gone() -> None:
    columns = Columns()
    columns.learn({role.value: Coefficients(0.01, 0.0, 0.0, 0.002, 1e-6) for role in Role})
    for view in (row("d0", Role.DECODE)._replace(sessions=8, held_tokens=900.0, expected_blocks=40), ROWS[1], ROWS[2]):
        columns.put(view)
    shares = {"d0": share(2), "unknown": share(1)}
    live = LiveView(columns, VIEW.known, VIEW.silent, VIEW.now_s, yielding=shares)
    without = live.without_yielding()
    assert without is not None
    assert without.without_yielding() is None
    names = ("sessions", "free_blocks", "room_blocks", "held_tokens", "expected_blocks")
    assert [without.columns[name][0] for name in names] == [6.0, 110.0, 110.0, 580.0, 0.0]
    assert without.columns["step_s"][0] == pytest.approx(0.01 + 6 * 0.002 + 580e-6)
    assert [columns[name][0] for name in names] == [8.0, 50.0, -1.0, 900.0, 40.0], "the fleet is as it was"
    assert without.columns["room_blocks"][1] == 50.0
    assert live.without_room_on(["d0"]).without_yielding() is None, "what is kept for others is not theirs"
    assert LiveView(columns, (), (), 0.0).without_yielding() is None
    assert VIEW.without_yielding() is None


def share(answers: int) -> Share:
    """Answers that yield, of 30 blocks each, whose prompts of 160 tokens are computed."""
    ledger, where = Ledger({}, 1.0, 1.0), row("d0", Role.DECODE).info
    for number in range(answers):
        held = Placement(str(number), 1, Mode.DECODE_LOCAL, "", where, None, 30, 1.0, 1.0, yields=True)
        ledger.reserve(held, 160, 0.0)
        ledger.prefill_done(str(number), 1, 0.0)
    return ledger.share("d0")


def test_replicas_that_a_view_is_without_are_not_ready_in_rows_nor_in_columns() -> None:
    live = LiveView(VIEW.columns, VIEW.known, VIEW.silent, VIEW.now_s)
    for view in (VIEW.without(["d0", "gone"]), live.without(["d0", "gone"])):
        ready = {name for name, at in view.columns.rows.items() if view.columns.ready[at]}
        assert ready == {"d1", "p0", "p1"}
    assert live.columns.ready[live.columns.rows["d0"]]


def test_room_that_is_kept_for_others_is_no_room_in_rows_nor_in_columns() -> None:
    live = LiveView(VIEW.columns, VIEW.known, VIEW.silent, VIEW.now_s)
    for view in (VIEW.without_room_on(["d0"]), live.without_room_on(["d0"])):
        columns = view.columns
        free = {name: columns["room_blocks"][at] for name, at in columns.rows.items()}
        assert free == {"d0": 0.0, "d1": 50.0, "p0": 50.0, "p1": 50.0}
        assert (view.silent, view.now_s) == ((Role.PREFILL,), 3.0)
    assert [each.free_blocks for each in VIEW.ready] == [50, 50, 50, 50]
