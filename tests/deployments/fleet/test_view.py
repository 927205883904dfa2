"""Views: rows and columns give policy the same fleet."""

from __future__ import annotations

from deployments.fleet.columns import ReplicaView
from deployments.fleet.view import FleetView, LiveView
from deployments.messages import ReplicaInfo, Role


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


def test_room_that_is_kept_for_others_is_no_room_in_rows_nor_in_columns() -> None:
    live = LiveView(VIEW.columns, VIEW.known, VIEW.silent, VIEW.now_s)
    for view in (VIEW.without_room_on(["d0"]), live.without_room_on(["d0"])):
        columns = view.columns
        free = {name: columns["room_blocks"][at] for name, at in columns.rows.items()}
        assert free == {"d0": 0.0, "d1": 50.0, "p0": 50.0, "p1": 50.0}
        assert (view.silent, view.now_s) == ((Role.PREFILL,), 3.0)
    assert [each.free_blocks for each in VIEW.ready] == [50, 50, 50, 50]
