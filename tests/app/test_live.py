"""The live page: one snapshot for all that watch, and the latencies that it shows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from app.api import Gateway
from app.live.feed import Feed
from app.live.latencies import LOOK_S, Latencies, quantile
from app.live.page import Page
from app.live.sessions import Sessions
from configs.schema import BatonConfig, IngressConfig
from deployments.cluster.timeline import Timelines
from deployments.manager.calls import Call, Overview
from deployments.manager.manager import SessionManager
from deployments.metrics.catalogue import GENERATED, ITL, TTFT
from deployments.metrics.registry import Registry
from tests.app.toys import OK, Control, Toy

WITHIN_S = 60.0


class Counting:
    """A manager that counts how often it is asked, and fails while `fails`."""

    def __init__(self) -> None:
        self.asked, self.fails = 0, False

    async def ask(self, call: Call[Any]) -> Any:
        assert isinstance(call, Overview)
        self.asked += 1
        if self.fails:
            raise ConnectionError("away")
        return {"ready": True, "number": self.asked}


async def first(snapshots: AsyncGenerator[str]) -> dict[str, Any]:
    async with asyncio.timeout(WITHIN_S):
        text: dict[str, Any] = json.loads(await anext(snapshots))
    return text


def no_sessions() -> Sessions:
    async def nothing(*_: object) -> list[Any]:
        return []

    return Sessions(Timelines(1), nothing, nothing)


async def test_all_that_watch_share_one_snapshot_and_none_is_made_unwatched() -> None:
    manager = Counting()
    feed = Feed(manager, None, "m", every_s=0.01)
    watching = [feed.snapshots() for _ in range(50)]
    assert {(await first(each))["number"] for each in watching} <= set(range(1, manager.asked + 1))
    together = await asyncio.gather(*map(first, watching))
    assert len({each["number"] for each in together}) < len(watching)
    for each in watching:
        await each.aclose()
    async with asyncio.timeout(WITHIN_S):
        while any(task.get_name() == "baton-live" for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)
    asked = manager.asked
    await asyncio.sleep(0.05)
    assert manager.asked == asked
    async with aclosing(feed.snapshots()) as again:
        assert (await first(again))["number"] == asked + 1, "not an old one"


async def test_while_the_manager_is_away_the_page_says_so_and_goes_on() -> None:
    manager = Counting()
    feed = Feed(manager, None, "m", every_s=0.01)
    async with aclosing(feed.snapshots()) as snapshots:
        manager.fails = True
        while "error" not in (await first(snapshots)):
            pass
        manager.fails = False
        while "error" in (shown := await first(snapshots)):
            pass
    assert (shown["model"], shown["ready"]) == ("m", True)


async def test_watching_ends_when_the_ingress_stops() -> None:
    feed = Feed(Counting(), None, "m", every_s=0.01)
    snapshots = feed.snapshots()
    await first(snapshots)
    await feed.close()
    async with asyncio.timeout(WITHIN_S):
        assert [each async for each in snapshots] == []


async def test_the_page_and_its_events() -> None:
    feed = Feed(SessionManager(BatonConfig.model_validate(CONFIG)), None, "m", every_s=0.01)
    gateway = Gateway(Toy(*OK), IngressConfig(), Control(), page=Page(feed, no_sessions()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://baton") as http:
        page = await http.get("/status")
        refused = await http.post("/status/events", content=b"{}")
    assert page.status_code == 200
    assert "status/events" in page.text
    assert "http" not in page.text.replace("http://www.w3.org/2000/svg", ""), "it needs no file from elsewhere"
    assert "connect-src 'self'" in page.headers["content-security-policy"]
    assert refused.headers["content-type"] != "text/event-stream"
    async with aclosing(feed.snapshots()) as snapshots:
        shown = await first(snapshots)
    named = {"pools", "sessions", "waiting", "flows", "modes", "rejects", "breakers", "scaling", "latencies", "model"}
    assert named <= shown.keys()


CONFIG: dict[str, Any] = {
    "model": {"source": "bundled:smollm2-135m-instruct", "name": "m", "max_model_len": 128},
    "mixed": {"main": {"replicas": 1, "engine": {"kind": "mock"}}},
}


def test_latencies_are_of_the_last_minute_and_of_each_minute_of_the_hour() -> None:
    now_s, registry = 0.0, Registry(model_name="m")
    latencies = Latencies(registry, lambda: now_s)
    for _ in range(25):  # two minutes, and the first look of the third
        latencies.look()
        registry.histogram(TTFT, pool="a").observe(0.09 if now_s < 60 else 0.9)
        registry.histogram(ITL, pool="b").observe(0.09)
        registry.value(GENERATED, pool="b").add(50)
        now_s += LOOK_S
    shown = latencies.shown()
    assert [0.08 < each["ttft_p50_s"] <= 0.1 for each in shown["hour"]] == [True, False]
    assert 0.75 < shown["now"]["ttft_p99_s"] <= 1.0
    assert 0.075 < shown["now"]["itl_p50_s"] <= 0.1
    assert shown["now"]["tokens_per_s"] == pytest.approx(50 / LOOK_S)


def test_a_quantile_lies_within_its_bucket() -> None:
    assert quantile((1.0, 2.0), (0, 0, 0), 0.5) is None
    assert quantile((1.0, 2.0), (10, 10, 0), 0.75) == pytest.approx(1.5)
    assert quantile((1.0, 2.0), (0, 0, 4), 0.5) == 2.0, "above the last bound"
