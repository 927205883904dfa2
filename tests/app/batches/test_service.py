"""Files and batches as an ingress has them: made from a configuration, behind the gateway, counted and logged."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.access.gate import Gate
from app.access.keys import parse
from app.api import Gateway
from app.batches.line_rows import Result
from app.batches.meter import BatchMeter
from app.batches.service import batches_of
from configs.schema import BatchesConfig, BatonConfig, IngressConfig, MockEngineConfig, PoolConfig
from deployments.metrics.catalogue import BATCH_LINES, BATCHES
from deployments.metrics.registry import Registry
from tests.app.access.test_keys import entry
from tests.app.batches.toys import CHAT, PATIENCE_S, ToyServer, jsonl, line, seen
from tests.app.toys import Control

CHATS, ALL = "for-chats", "for-all"


def settings(folder: Path, **batches: Any) -> BatonConfig:
    urls = {"database_url": f"sqlite:///{folder / 'batches.db'}", "files_url": str(folder / "files")}
    ingress = IngressConfig(batches=BatchesConfig(**{**urls, **batches}))
    return BatonConfig(mixed={"a": PoolConfig(engine=MockEngineConfig())}, ingress=ingress)


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def post(http: httpx.AsyncClient, key: str) -> httpx.Response:
    files = {"file": ("a.jsonl", jsonl(line(1)))}
    return await http.post("/v1/files", files=files, data={"purpose": "batch"}, headers=shown(key))


def test_without_the_section_there_are_none(tmp_path: Path) -> None:
    config = settings(tmp_path)
    without = config.model_copy(update={"ingress": IngressConfig()})
    assert batches_of(without, ToyServer(), "one") is None


async def test_a_batch_behind_the_gateway_with_api_keys(
    no_leaks: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, counted = ToyServer(), list[tuple[str, int]]()
    config = settings(tmp_path)
    registry = Registry(model_name="toy")
    meter = BatchMeter(registry)
    batches = batches_of(
        config, server, "one", lambda context, status: counted.append((context.priority, status)), meter.noted
    )
    assert batches is not None
    known = parse("keys:\n" + entry("chats", CHATS, classes="[default]") + entry("all", ALL), config.classes)
    gateway = Gateway(server, config.ingress, Control(), gate=Gate(lambda: known), batches=batches.routes)
    await batches.start()
    caplog.set_level(logging.INFO, "baton.access")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton") as http:
        assert (await http.get("/v1/files")).status_code == 401
        refused = await post(http, CHATS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "class_not_allowed")
        file_id = (await post(http, ALL)).json()["id"]
        asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "1h"}
        path = f"/v1/batches/{(await http.post('/v1/batches', json=asked, headers=shown(ALL))).json()['id']}"
        async with asyncio.timeout(PATIENCE_S):
            while (await http.get(path, headers=shown(ALL))).json()["status"] != "completed":
                await asyncio.sleep(0.01)
        assert (await http.get(path, headers=shown(CHATS))).status_code == 404
    await batches.close()
    assert counted == [("batch", 200)]
    assert registry.value(BATCH_LINES, outcome="completed").value == 1
    written = [json.loads(record.message) for record in caplog.records if record.name == "baton.access"]
    found = [(each["path"], each["status"], each.get("code"), each.get("key")) for each in written]
    assert ("/v1/files", 403, "class_not_allowed", "chats") in found
    assert ("/v1/files", 200, None, "all") in found
    assert {scope["baton.owner"] for scope in server.scopes} == {"key all"}


async def test_the_stores_may_come_up_later_than_the_ingress(no_leaks: None, tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    config = settings(tmp_path, database_url=f"sqlite:///{tmp_path / 'later'}")  # a folder
    batches = batches_of(config, ToyServer(), "one")
    assert batches is not None
    await batches.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(batches.routes), base_url="http://baton") as http:
        refused = await http.get("/v1/files")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        (tmp_path / "later").rmdir()
        async with asyncio.timeout(PATIENCE_S):
            while (await http.get("/v1/files")).status_code == 503:
                await asyncio.sleep(0.05)
    await batches.close()


async def test_the_meter_counts_what_is_answered_and_what_runs() -> None:
    registry = Registry(model_name="toy")
    meter = BatchMeter(registry)
    meter.noted([Result(1, True, b""), Result(2, False, b""), Result(3, True, b"")])
    counts = [registry.value(BATCH_LINES, outcome=name).value for name in ("completed", "failed")]
    assert counts == [2, 1]
    following = asyncio.create_task(meter.follow([1, 2, 3]))
    await seen(lambda: registry.value(BATCHES).value == 3)
    following.cancel()
    await asyncio.wait([following])
