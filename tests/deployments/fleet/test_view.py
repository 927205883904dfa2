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


def test_rows_are_found_by_role() -> None:
    assert VIEW.of(Role.DECODE) == ROWS[:2]
    assert VIEW.columns(Role.DECODE).rows.keys() == {"d0", "d1"}
    assert VIEW.columns(Role.PREFILL).rows.keys() == {"p0", "p1"}


def test_equal_engines_have_equal_codes_in_the_columns_of_both_roles() -> None:
    decode, prefill = VIEW.columns(Role.DECODE), VIEW.columns(Role.PREFILL)
    assert decode.fingerprint[decode.rows["d1"]] == prefill.fingerprint[prefill.rows["p0"]]
    assert decode.fingerprint[decode.rows["d0"]] == prefill.fingerprint[prefill.rows["p1"]]
    assert decode.fingerprint[decode.rows["d0"]] != decode.fingerprint[decode.rows["d1"]]


def test_room_that_is_kept_for_others_is_no_room_in_rows_nor_in_columns() -> None:
    live = LiveView({role: VIEW.columns(role) for role in Role}, VIEW.known, VIEW.silent, VIEW.now_s)
    for view in (VIEW.without_room_on(["d0"]), live.without_room_on(["d0"])):
        columns = view.columns(Role.DECODE)
        free = {name: columns["room_blocks"][at] for name, at in columns.rows.items()}
        assert free == {"d0": 0.0, "d1": 50.0}
        assert (view.silent, view.now_s) == ((Role.PREFILL,), 3.0)
    assert [each.free_blocks for each in VIEW.ready] == [50, 50, 50, 50]
