"""The live page as a browser shows it, of a whole Baton with two ingresses and mock engines, while sessions run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from load_tests.harness.browser import Page, browser, installed
from tests.e2e.client import Load, until
from tests.e2e.cluster import NAME, Cluster, processes, started

WITHIN_S = 120.0
PROMPT = list(range(100, 400))
WIDTHS = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}
LUMINANCE = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
FILLED = {
    "state": "document.getElementById('state').textContent === 'ready'",
    "pools": "['prefill', 'decode-small', 'decode-large'].every((each) => "
    "document.getElementById('pools').textContent.includes(each))",
    "replicas": "document.querySelectorAll('#pools meter').length === 6",
    "sessions": "[...document.querySelectorAll('#flows tbody tr')].some((row) => "
    "row.cells[0].textContent === 'prefill' && +row.cells[2].textContent + +row.cells[3].textContent > 0)",
    "latencies": "/[0-9] m?s/.test(document.querySelector('#now .card:nth-child(3) b').textContent)",
}
"""What the page shows once it has filled in, as JavaScript."""
pytestmark = [
    pytest.mark.serve,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]
needs_chromium = pytest.mark.skipif(installed() is None, reason="there is no Chromium here: apt install chromium")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("live")
    with started("mock.yaml", folder, more={"ingress": {"replicas": 2}}) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def page(cluster: Cluster) -> AsyncIterator[Page]:
    """A browser, while sessions run."""
    questions = [
        {"model": "mock", "prompt": PROMPT[: 50 + 30 * number], "max_tokens": 600, "temperature": 0}
        | {"ignore_eos": True, "return_token_ids": True}
        for number in range(6)
    ]
    async with Load(cluster, questions, 6) as load, browser() as page:
        yield page
    assert [said.error for said in load.said if said.error] == []


async def ask(cluster: Cluster, request_id: str, max_tokens: int = 20) -> None:
    asked = {"model": "mock", "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=WITHIN_S) as client:
        answer = await client.post("/v1/completions", json=asked, headers={"x-request-id": request_id})
    assert answer.status_code == 200, answer.text


def lines(cluster: Cluster, path: str) -> dict[int, list[dict[str, Any]]]:
    """The lines of each ingress's access log for a path, by process id."""
    title = f"ray::ServeReplica:{NAME}:ingress"
    found = {}
    for pid in [pid for pid, line in processes(cluster.marker).items() if line.startswith(title)]:
        text = Path(f"/proc/{pid}/fd/1").resolve().read_text()
        entries = [json.loads(line) for line in text.splitlines() if line.startswith('{"time"')]
        found[pid] = [entry for entry in entries if entry["path"] == path]
    return found


async def test_every_ingress_finds_a_session_that_one_of_them_served(cluster: Cluster) -> None:
    await ask(cluster, "seen")
    path = "/status/sessions/seen"

    async def look() -> dict[str, Any]:
        """What an ingress says, once no replica and no other ingress is slow to answer it."""
        while True:
            async with httpx.AsyncClient(base_url=cluster.url, timeout=WITHIN_S) as client:  # a new connection
                answer = await client.get(path)
            found: dict[str, Any] = answer.json()
            if answer.status_code == 200 and not found["silent"]:
                return found

    async with asyncio.timeout(WITHIN_S):
        while (await look())["sessions"][0]["outcome"] is None:
            pass
        found = [await look() for _ in range(8)]
    await until(lambda: all(lines(cluster, path).values()), WITHIN_S, "both have logged that they were asked")
    assert len(lines(cluster, path)) == 2
    sessions = [each["sessions"][0] for each in found]
    assert len({each["session_id"] for each in sessions}) == 1
    for session in sessions:
        assert (session["outcome"], session["output_tokens"]) == ("length", 20)
        assert {"placement", "offer", "chunk", "writes", "landed", "handoff", "decode"} <= {
            span["what"] for span in session["spans"]
        }
    async with httpx.AsyncClient(base_url=cluster.url, timeout=WITHIN_S) as client:
        assert (await client.get("/status/sessions/never")).status_code == 404


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("screen", WIDTHS)
async def test_the_page_fills_in(cluster: Cluster, page: Page, screen: str, dark: bool) -> None:
    width, height = WIDTHS[screen]
    await page.open(f"{cluster.url}/status", width, height, dark)
    for expression in FILLED.values():
        await page.until(expression, WITHIN_S)
    assert await page.value("innerWidth") == width
    assert await page.value("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    assert (await page.value(LUMINANCE) < 3 * 128) is dark


@needs_chromium
async def test_a_session_is_found_by_keyboard_and_shown_as_bars_and_as_a_table(cluster: Cluster, page: Page) -> None:
    await ask(cluster, "a/b?c")
    await page.open(f"{cluster.url}/status", *WIDTHS["phone"])
    for _ in range(20):
        await page.press("Tab")
        if await page.value("document.activeElement.id") == "name":
            break
    await page.type("a/b?c")
    await page.press("Enter", "\r")
    await page.until("document.querySelectorAll('#session .step').length > 5", WITHIN_S)
    named = await page.value(
        "[...document.querySelectorAll('#session tbody tr')].map((row) => row.cells[0].textContent)"
    )
    assert {"placement", "offer", "chunk", "writes", "decode"} <= set(named)
    assert len(named) == await page.value("document.querySelectorAll('#session .step').length")
    said = await page.value("document.querySelector('#session [role=img]').ariaLabel")
    assert all(each in said for each in named)
    assert await page.value("document.getElementById('said').textContent") == "1 session"
    assert await page.value("document.documentElement.scrollWidth") <= WIDTHS["phone"][0]
    await page.open(f"{cluster.url}/status#never", *WIDTHS["phone"])
    await page.until("document.getElementById('said').textContent.startsWith('No ingress')", WITHIN_S)


@needs_chromium
async def test_every_element_that_takes_part_has_a_name(cluster: Cluster, page: Page) -> None:
    """As a screen reader is told by the browser."""
    await ask(cluster, "named")
    await page.open(f"{cluster.url}/status#named", *WIDTHS["desktop"])
    await page.until(FILLED["replicas"], WITHIN_S)
    await page.until("document.querySelectorAll('#session .step').length > 5", WITHIN_S)
    await page.call("Accessibility.enable")
    nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
    roles = ("meter", "image", "searchbox", "button", "region", "heading", "link")
    shown = [
        (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
    ]
    assert {"meter", "searchbox", "button", "heading", "table"} <= {role for role, _ in shown}
    assert [role for role, name in shown if role in roles and not name.strip()] == []
