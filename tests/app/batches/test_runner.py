"""Batches from upload to output, with one ingress and with several, over a server that is a toy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.batches import batch_rows, lease_rows, line_call
from app.batches.stores import Stores
from deployments.errors import StoreAway
from tests.app.batches.toys import (
    CHAT,
    MODEL,
    Clock,
    Ingress,
    ToyServer,
    jsonl,
    line,
    running,
    seen,
    stores_in,
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that are tried again come back soon."""
    monkeypatch.setattr(line_call, "FIRST_BACKOFF_S", 0.01)


class Several:
    """Ingresses that share their stores; each has a database of its own to reach it."""

    def __init__(self, folder: Path, clock: Clock, server: ToyServer, *names: str, **runner: Any) -> None:
        self.ingresses = [Ingress(stores_in(folder, clock), server, name, **runner) for name in names]

    async def __aenter__(self) -> list[Ingress]:
        for ingress in self.ingresses:
            await ingress.stores.prepare()
            ingress.runner.start()
        return self.ingresses

    async def __aexit__(self, *error: object) -> None:
        for ingress in self.ingresses:
            await ingress.runner.close()
            await ingress.http.aclose()
            await ingress.stores.close()


def answers(lines: list[dict[str, Any]]) -> dict[str, str]:
    """What each line was answered, by its `custom_id`; each is there once."""
    found = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in lines}
    assert len(found) == len(lines)
    return found


def codes(lines: list[dict[str, Any]]) -> dict[str | None, str]:
    assert all(each["response"] is None for each in lines)
    return {each["custom_id"]: each["error"]["code"] for each in lines}


async def test_every_line_is_answered_in_the_order_of_the_file(ingress: Ingress) -> None:
    batch_id = await ingress.begin(*(line(number) for number in range(50)))
    done = await ingress.until(batch_id, "completed")
    output = await ingress.lines_of(done)
    assert answers(output) == {f"id-{number}": f"line {number}" for number in range(50)}
    assert [each["custom_id"] for each in output] == [f"id-{number}" for number in range(50)]
    assert {each["response"]["status_code"] for each in output} == {200}
    assert done["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    assert done["error_file_id"] is None
    assert done["usage"]["input_tokens"] == 150
    assert done["usage"]["input_tokens_details"] == {"cached_tokens": 50}
    assert done["usage"]["total_tokens"] == 250
    assert ingress.noted == [True] * 50
    moments = [done[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
    assert None not in moments
    assert all(count == 1 for count in ingress.server.calls.values())


async def test_lines_are_requests_of_their_class_and_owner(ingress: Ingress) -> None:
    batch_id = await ingress.begin(line(1))
    await ingress.until(batch_id, "completed")
    (scope,) = ingress.server.scopes
    assert (scope["method"], scope["path"]) == ("POST", CHAT)
    owner = (await ingress.stores.database.read(lambda c: batch_rows.by_number(c, 1))).owner
    assert scope["baton.owner"] == owner != ""


async def test_a_bad_line_has_its_own_error_and_the_others_go_on(ingress: Ingress) -> None:
    ingress.server.statuses = {"line 3": [400]}
    long = line(6, body={"messages": [{"role": "user", "content": "x" * 5000}]})
    batch_id = await ingress.begin(
        line(1), b"{", line(2, method="GET"), line(3), long, line(4), line(4), {"custom_id": "x"}, line(5)
    )
    done = await ingress.until(batch_id, "completed")
    assert answers(await ingress.lines_of(done)).keys() == {"id-1", "id-4", "id-5"}
    errors = await ingress.lines_of(done, "error_file_id")
    refused = [each for each in errors if each["error"] is None]
    assert [(each["custom_id"], each["response"]["status_code"]) for each in refused] == [("id-3", 400)]
    others = [each for each in errors if each["error"] is not None]
    assert [(each["custom_id"], each["error"]["code"]) for each in others] == [
        (None, "invalid_json_line"),
        ("id-2", "invalid_method"),
        (None, "line_too_long"),
        ("id-4", "duplicate_custom_id"),
        ("x", "invalid_method"),
    ]
    assert done["request_counts"] == {"total": 9, "completed": 3, "failed": 6}
    assert ingress.server.calls["line 4"] == 1


@pytest.mark.parametrize(
    ("content", "code"), [(b"\n\n", "empty_file"), (jsonl(*map(line, range(11))), "too_many_lines")]
)
async def test_a_file_of_which_nothing_can_be_answered_fails_its_batch(
    stores: Stores, server: ToyServer, content: bytes, code: str
) -> None:
    async with running(Ingress(stores, server, lines=10)) as ingress, ingress.http:
        file_id = (await ingress.upload(content)).json()["id"]
        batch_id = (await ingress.create(file_id)).json()["id"]
        failed = await ingress.until(batch_id, "failed")
        assert [each["code"] for each in failed["errors"]["data"]] == [code]
        assert failed["failed_at"] is not None
        assert (failed["output_file_id"], failed["error_file_id"]) == (None, None)
        cancelled = await ingress.http.post(f"/v1/batches/{batch_id}/cancel", headers={"authorization": "Bearer a"})
        assert (cancelled.status_code, cancelled.json()["error"]["code"]) == (409, "batch_over")
    assert not server.calls


async def test_a_line_waits_for_as_long_as_admission_refuses_it(ingress: Ingress) -> None:
    ingress.server.statuses = {"line 1": [429, 503] * 4, "line 2": [500, 504], "line 3": [500] * 9}
    batch_id = await ingress.begin(line(1), line(2), line(3))
    done = await ingress.until(batch_id, "completed")
    assert answers(await ingress.lines_of(done)).keys() == {"id-1", "id-2"}
    assert ingress.server.calls == {"line 1": 9, "line 2": 3, "line 3": line_call.MOST_TRIES}
    (failed,) = await ingress.lines_of(done, "error_file_id")
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("id-3", 500)


async def test_no_more_lines_run_than_are_let_in_and_all_are_answered(stores: Stores, server: ToyServer) -> None:
    server.most_let_in = 3
    async with running(Ingress(stores, server, most=32)) as ingress, ingress.http:
        batch_id = await ingress.begin(*(line(number) for number in range(60)))
        done = await ingress.until(batch_id, "completed")
        assert len(answers(await ingress.lines_of(done))) == 60
        assert server.most_running <= 32
        assert ingress.slots.room.places < 32


async def test_a_cancelled_batch_keeps_what_it_has_and_names_the_rest(ingress: Ingress) -> None:
    ingress.server.gate.clear()
    batch_id = await ingress.begin(*(line(number) for number in range(20)))
    await seen(lambda: ingress.server.running == 4)
    await ingress.http.post(f"/v1/batches/{batch_id}/cancel", headers={"authorization": "Bearer a"})
    ingress.server.gate.set()
    done = await ingress.until(batch_id, "cancelled", "completed")
    assert done["status"] == "cancelled"
    assert done["cancelled_at"] is not None
    output = answers(await ingress.lines_of(done))
    left = codes(await ingress.lines_of(done, "error_file_id"))
    assert output.keys() | left.keys() == {f"id-{number}" for number in range(20)}
    assert not output.keys() & left.keys()
    assert set(left.values()) == {"batch_cancelled"}
    assert done["request_counts"] == {"total": 20, "completed": len(output), "failed": len(left)}
    assert ingress.server.running == 0


async def test_what_is_not_answered_within_the_window_expires(ingress: Ingress, clock: Clock) -> None:
    ingress.server.statuses = {"line 2": [429] * 1000}
    batch_id = await ingress.begin(line(1), line(2), b"{", completion_window="1h")
    await seen(lambda: ingress.server.calls["line 2"] > 2 and ingress.noted == [True])
    clock.now_s += 3600
    done = await ingress.until(batch_id, "expired")
    assert answers(await ingress.lines_of(done)).keys() == {"id-1"}
    left = codes(await ingress.lines_of(done, "error_file_id"))
    assert left == {"id-2": "batch_expired", None: "invalid_json_line"}
    assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    assert done["expired_at"] is not None


async def test_several_ingresses_answer_each_line_once(no_leaks: None, tmp_path: Path, clock: Clock) -> None:
    server = ToyServer()
    async with Several(tmp_path, clock, server, "one", "two", "three") as ingresses:
        made = [await each.begin(*(line(number) for number in range(40))) for each in ingresses]
        for ingress, batch_id in zip(ingresses, made, strict=True):
            done = await ingress.until(batch_id, "completed")
            assert len(answers(await ingress.lines_of(done))) == 40
    assert set(server.calls.values()) == {3}


async def test_another_ingress_goes_on_where_one_has_stopped(no_leaks: None, tmp_path: Path, clock: Clock) -> None:
    server = ToyServer()
    async with Several(tmp_path, clock, server, "one", "two", most=32) as (one, two):
        await two.runner.close()
        server.statuses = {f"line {number}": [429] * 10**6 for number in range(30, 40)}
        batch_id = await one.begin(*(line(number) for number in range(40)))
        await seen(lambda: len(one.noted) == 30)
        await one.runner.close()  # as an ingress that is stopped does
        server.statuses = {}
        two.runner.start()
        done = await two.until(batch_id, "completed")
        assert len(answers(await two.lines_of(done))) == 40
        assert len(two.noted) == 10
    assert all(server.calls[f"line {number}"] == 1 for number in range(30))


async def test_a_batch_of_a_silent_ingress_is_taken_and_that_ingress_adds_nothing(
    no_leaks: None, tmp_path: Path, clock: Clock
) -> None:
    server = ToyServer()
    async with Several(tmp_path, clock, server, "one", "two", most=4) as (one, two):
        await two.runner.close()
        server.gate.clear()
        batch_id = await one.begin(line(1), line(2))
        await seen(lambda: server.running == 2)
        for task in one.runner._tasks:  # it does not renew its leases any more, and its lines still run
            task.cancel()
        clock.now_s += lease_rows.LEASE_S
        two.runner.start()
        await seen(lambda: server.running == 4)
        server.gate.set()
        done = await two.until(batch_id, "completed")
        assert len(answers(await two.lines_of(done))) == 2
        await seen(lambda: len(one.runner) == 0)
        assert done["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


async def test_answered_lines_wait_for_a_database_that_is_away(
    ingress: Ingress, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingress.server.gate.clear()
    batch_id = await ingress.begin(line(1), line(2))
    await seen(lambda: ingress.server.running == 2)
    write, refused = ingress.stores.database.write, list[Any]()

    async def away(work: Any) -> Any:
        if len(refused) < 3:
            refused.append(work)
            raise StoreAway("away")
        return await write(work)

    monkeypatch.setattr(ingress.stores.database, "write", away)
    ingress.server.gate.set()
    done = await ingress.until(batch_id, "completed")
    assert len(answers(await ingress.lines_of(done))) == 2
    assert len(refused) == 3
    assert ingress.server.calls == {"line 1": 1, "line 2": 1}


async def test_what_breaks_in_the_server_is_the_lines_error(ingress: Ingress) -> None:
    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        raise RuntimeError("it breaks")

    ingress.runner._parts.caller._app = breaks
    done = await ingress.until(await ingress.begin(line(1)), "completed")
    (failed,) = await ingress.lines_of(done, "error_file_id")
    assert failed["response"]["status_code"] == 500


async def test_output_files_expire_as_the_batch_says(ingress: Ingress, clock: Clock) -> None:
    expires = {"anchor": "created_at", "seconds": 7200}
    done = await ingress.until(await ingress.begin(line(1), output_expires_after=expires), "completed")
    file = (await ingress.get(f"/v1/files/{done['output_file_id']}")).json()
    assert (file["purpose"], file["expires_at"]) == ("batch_output", file["created_at"] + 7200)
    refused = await ingress.create(done["output_file_id"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_file_id")
    clock.now_s += 7201
    assert (await ingress.get(f"/v1/files/{done['output_file_id']}")).status_code == 404


async def test_prompts_that_begin_alike_are_asked_one_after_the_other(ingress: Ingress) -> None:
    ingress.server.gate.clear()
    heads = "0" * 600, "1" * 600
    lines = [
        line(n, body={"model": MODEL, "messages": [{"role": "user", "content": f"{heads[n % 2]} {n}"}]})
        for n in range(8)
    ]
    batch_id = await ingress.begin(*lines)
    await seen(lambda: ingress.server.running == 4)
    assert len({asked[:600] for asked in ingress.server.order}) == 1
    ingress.server.gate.set()
    await ingress.until(batch_id, "completed")
