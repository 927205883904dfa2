"""`/v1/files` and `/v1/batches` over HTTP, without a runner."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.batches.blobs import PIECE
from app.batches.stores import Stores
from tests.app import toys as gateway
from tests.app.batches.toys import CHAT, DAY_S, QUOTA, Clock, Ingress, ToyServer, jsonl, line

BODY = jsonl(line(1), line(2))


@pytest.fixture
async def at(stores: Stores) -> AsyncIterator[Ingress]:
    made = Ingress(stores, ToyServer())
    async with made.http:
        yield made


def error(response: httpx.Response) -> tuple[int, str, str | None]:
    found = response.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    return response.status_code, found["code"], found["param"]


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "files").iterdir())


async def test_a_file_comes_back_as_it_was_sent(at: Ingress, tmp_path: Path, clock: Clock) -> None:
    made = (await at.upload(BODY)).json()
    expected = {
        "object": "file",
        "bytes": len(BODY),
        "created_at": int(clock.now_s),
        "expires_at": int(clock.now_s) + 30 * DAY_S,
        "filename": "lines.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    assert {name: value for name, value in made.items() if name != "id"} == expected
    path = f"/v1/files/{made['id']}"
    assert (await at.get(path)).json() == made
    content = await at.get(f"{path}/content")
    assert (content.content, content.headers["content-length"]) == (BODY, str(len(BODY)))
    deleted = await at.http.delete(path, headers={"authorization": "Bearer a"})
    assert deleted.json() == {"id": made["id"], "object": "file", "deleted": True}
    assert error(await at.get(path)) == (404, "file_not_found", None)
    assert stored(tmp_path) == []


async def test_a_large_file_comes_in_pieces_and_whole(at: Ingress) -> None:
    content = b"x" * (3 * PIECE + 17)
    made = (await at.upload(content)).json()
    assert (await at.get(f"/v1/files/{made['id']}/content")).content == content


async def test_a_client_has_its_own_files_and_batches_alone(at: Ingress) -> None:
    file_id = (await at.upload(BODY, key="a")).json()["id"]
    batch_id = (await at.create(file_id, key="a")).json()["id"]
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert error(await at.get(path, key="b")) == (404, "file_not_found", None)
    assert error(await at.get(f"/v1/batches/{batch_id}", key="b")) == (404, "batch_not_found", None)
    assert error(await at.create(file_id, key="b")) == (404, "file_not_found", None)
    for path in ("/v1/files", "/v1/batches"):
        assert (await at.get(path, key="b")).json()["data"] == []
        assert len((await at.get(path, key="a")).json()["data"]) == 1


async def test_lists_come_in_pages(at: Ingress) -> None:
    files = [(await at.upload(BODY)).json()["id"] for _ in range(5)]
    page = (await at.get("/v1/files", limit=2)).json()
    assert [each["id"] for each in page["data"]] == files[:-3:-1]
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", files[4], files[3], True)
    page = (await at.get("/v1/files", limit=3, after=files[3])).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (files[2::-1], False)
    page = (await at.get("/v1/files", limit=2, order="asc", after=files[0])).json()
    assert [each["id"] for each in page["data"]] == files[1:3]
    assert (await at.get("/v1/files", purpose="batch_output")).json()["data"] == []
    batches = [(await at.create(files[0])).json()["id"] for _ in range(3)]
    page = (await at.get("/v1/batches", limit=2)).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (batches[:0:-1], True)
    page = (await at.get("/v1/batches", after=batches[1])).json()
    assert [each["id"] for each in page["data"]] == batches[:1]
    assert error(await at.get("/v1/files", after="file-x")) == (404, "file_not_found", None)
    assert error(await at.get("/v1/batches", after="batch_x")) == (404, "batch_not_found", None)
    for query in ({"limit": 0}, {"limit": "x"}, {"limit": 101}):
        assert error(await at.get("/v1/batches", **query)) == (400, "bad_batch_request", "limit")
    assert error(await at.get("/v1/files", order="up")) == (400, "bad_batch_request", "order")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"expires_after[anchor]": "created_at"}, "expires_after"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, "expires_after"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}, "expires_after"),
    ],
)
async def test_a_form_that_is_wrong_leaves_nothing(
    at: Ingress, tmp_path: Path, fields: dict[str, str], param: str
) -> None:
    assert error(await at.upload(BODY, **fields)) == (400, "bad_batch_request", param)
    assert stored(tmp_path) == []
    assert (await at.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize(
    ("content_type", "content"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b""),
        ("multipart/form-data; boundary=x", b"no form"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc'),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--',
        ),
        ("multipart/form-data; boundary=x", b"--x\r\nA: " + b"b" * 20_000),
    ],
)
async def test_what_is_no_form_is_refused(at: Ingress, tmp_path: Path, content_type: str, content: bytes) -> None:
    sent = await at.http.post("/v1/files", content=content, headers={"content-type": content_type})
    assert error(sent)[:2] == (400, "bad_batch_request")
    assert stored(tmp_path) == []


async def test_a_file_over_the_limit_is_refused_while_it_comes(at: Ingress, tmp_path: Path) -> None:
    assert error(await at.upload(b"x" * 1_000_001)) == (413, "file_too_large", None)
    assert stored(tmp_path) == []


async def test_a_client_that_leaves_while_it_sends_leaves_nothing(at: Ingress, tmp_path: Path) -> None:
    begun = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"y" * 2 * PIECE
    messages = [
        {"type": "http.request", "body": begun, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "headers": headers, "query_string": b""}
    await at.routes(scope, receive, send)
    assert messages == []
    assert stored(tmp_path) == []


async def test_an_uploaded_file_expires_when_it_says(at: Ingress, tmp_path: Path, clock: Clock) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    made = (await at.upload(BODY, **fields)).json()
    kept = (await at.upload(BODY)).json()
    assert made["expires_at"] == made["created_at"] + 3600
    clock.now_s += 3601
    assert error(await at.get(f"/v1/files/{made['id']}")) == (404, "file_not_found", None)
    assert [each["id"] for each in (await at.get("/v1/files")).json()["data"]] == [kept["id"]]
    await at.runner.sweep()
    assert stored(tmp_path) == [kept["id"]]


async def test_a_file_that_a_batch_reads_stays(at: Ingress, tmp_path: Path, clock: Clock) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file_id = (await at.upload(BODY, **fields)).json()["id"]
    await at.create(file_id)
    deleted = await at.http.delete(f"/v1/files/{file_id}", headers={"authorization": "Bearer a"})
    assert error(deleted) == (409, "file_in_use", None)
    assert deleted.headers["x-should-retry"] == "false"
    clock.now_s += 3601
    await at.runner.sweep()
    assert stored(tmp_path) == [file_id]


async def test_a_client_has_so_many_files_bytes_and_batches(at: Ingress) -> None:
    file_id = (await at.upload(BODY)).json()["id"]
    for _ in range(QUOTA.batches):
        assert (await at.create(file_id)).status_code == 200
    assert error(await at.create(file_id)) == (429, "batch_quota", None)
    for _ in range(10):
        full = await at.upload(b"x" * 999_999)
    assert error(full) == (429, "batch_quota", None)  # with the first file they are over the bytes
    for _ in range(QUOTA.files - 10):
        assert (await at.upload(b"x")).status_code == 200
    assert error(await at.upload(b"x")) == (429, "batch_quota", None)
    assert (await at.upload(b"x", key="b")).status_code == 200


async def test_a_batch_is_shown_as_openai_shows_it(at: Ingress, clock: Clock) -> None:
    file_id = (await at.upload(BODY)).json()["id"]
    metadata = {"night": "1"}
    made = (await at.create(file_id, metadata=metadata, completion_window="2h")).json()
    assert made["id"].startswith("batch_")
    times = dict.fromkeys(
        ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at")
    )
    assert {name: value for name, value in made.items() if name not in ("id", "usage")} == {
        "object": "batch",
        "endpoint": CHAT,
        "errors": None,
        "input_file_id": file_id,
        "completion_window": "2h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": int(clock.now_s),
        "expires_at": int(clock.now_s) + 7200,
        **times,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
    }


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"other": 3}, "other"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused(at: Ingress, wish: dict[str, Any], param: str) -> None:
    file_id = (await at.upload(BODY)).json()["id"]
    assert error(await at.create(file_id, **wish)) == (400, "bad_batch_request", param)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 100_000])
async def test_a_body_that_is_no_object_is_refused(at: Ingress, content: bytes) -> None:
    status, code, _ = error(await at.http.post("/v1/batches", content=content))
    assert (status, code) in ((400, "bad_batch_request"), (413, "body_too_large"))


async def test_a_batch_is_cancelled_until_it_is_over(at: Ingress, clock: Clock) -> None:
    file_id = (await at.upload(BODY)).json()["id"]
    made = (await at.create(file_id)).json()
    headers = {"authorization": "Bearer a"}
    for _ in range(2):
        found = (await at.http.post(f"/v1/batches/{made['id']}/cancel", headers=headers)).json()
        assert (found["status"], found["cancelling_at"]) == ("cancelling", int(clock.now_s))


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "/v1/files"), ("POST", "/v1/files/x"), ("GET", "/v1/batches/x/cancel"), ("DELETE", "/v1/batches/x")],
)
async def test_other_methods_are_refused(at: Ingress, method: str, path: str) -> None:
    assert error(await at.http.request(method, path)) == (405, "method_not_allowed", None)


async def test_a_database_that_is_away_gives_503(at: Ingress, tmp_path: Path, stores: Stores) -> None:
    await stores.database.write(lambda c: c.exec_driver_sql("ALTER TABLE files RENAME TO away"))
    refused = await at.get("/v1/files")
    assert error(refused) == (503, "store_unavailable", None)
    assert refused.headers["retry-after"] == "1"


async def test_a_server_without_batches_says_so() -> None:
    toy = gateway.Toy(*gateway.OK)
    async with gateway.client(toy) as http:
        for path in ("/v1/files", "/v1/files/x/content", "/v1/batches", "/v1/batches/x"):
            assert error(await http.get(path)) == (400, "batches_off", None)
        assert json.loads((await http.get("/v1/filesystem")).content) == {}
    assert toy.calls == 1
