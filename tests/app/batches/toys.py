"""Stores in a folder, a server that answers as it is told, and a client above the routes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

from app.batches.blobs import Blobs
from app.batches.database import Database
from app.batches.file_rows import Quota
from app.batches.line_call import LineCaller
from app.batches.routes import BatchRoutes
from app.batches.run import Parts
from app.batches.runner import BatchRunner
from app.batches.slots import Slots
from app.batches.stores import Stores
from app.batches.validation import Limits
from app.errors import Answer, error_body, type_of
from app.held_response import Receive, Scope, Send, respond
from configs.schema import IngressConfig

CHAT = "/v1/chat/completions"
MODEL = "toy"
QUOTA = Quota(files=20, bytes=10_000_000, total_bytes=20_000_000, batches=3)
PATIENCE_S = 60.0
DAY_S = 86400


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def stores_in(folder: Path, clock: Callable[[], float], quota: Quota = QUOTA) -> Stores:
    database = Database(f"sqlite:///{folder / 'batches.db'}")
    return Stores(database, Blobs(str(folder / "files")), quota, 30 * DAY_S, clock)


class ToyServer:
    """Answers a chat with its own last message. `calls`: the requests for each message.

    `statuses`: what the next requests for a message get instead. `gate`: requests wait for it.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self.statuses: dict[str, list[int]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = self.most_running = 0
        self.most_let_in: int | None = None
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = str(json.loads((await receive())["body"])["messages"][-1]["content"])
        self.calls[text] += 1
        self.order.append(text)
        self.scopes.append(scope)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            await respond(send, self._answer(text))
        finally:
            self.running -= 1

    def _answer(self, text: str) -> Answer:
        if self.most_let_in is not None and self.running > self.most_let_in:
            return _refusal(429)
        if wanted := self.statuses.get(text):
            return _refusal(wanted.pop(0))
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        return Answer(200, {"object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage})


def _refusal(status: int) -> Answer:
    return Answer(status, error_body("refused", type_of(status), "refused"))


def line(number: int, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"line {number}"}]}
    return {"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": body, **more}


def jsonl(*lines: Any) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


class Ingress:
    """One ingress: its routes, its runner, and what its lines ask."""

    def __init__(
        self, stores: Stores, server: ToyServer, holder: str = "one", most: int = 8, lines: int = 1000, **runner: Any
    ) -> None:
        self.stores, self.server, self.slots = stores, server, Slots(most)
        caller = LineCaller(server, IngressConfig(), self.slots, "batch", 4, lambda context, status: None)
        self.noted: list[bool] = []
        limits = Limits(lines, 4096)
        parts = Parts(stores, caller, self.slots, limits, lambda found: self.noted.extend(r.is_ok for r in found))
        self.runner = BatchRunner(holder, parts, **{"look_s": 0.02, **runner})
        self.routes = BatchRoutes(stores, 1_000_000, 7 * DAY_S, wake=self.runner.wake)
        transport = httpx.ASGITransport(self.routes)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://baton", timeout=PATIENCE_S)

    async def upload(self, content: bytes, key: str = "a", **fields: str) -> httpx.Response:
        files = {"file": ("lines.jsonl", content)}
        data = {"purpose": "batch", **fields}
        return await self.http.post("/v1/files", files=files, data=data, headers=_key(key))

    async def create(self, file_id: str, key: str = "a", **more: Any) -> httpx.Response:
        asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **more}
        return await self.http.post("/v1/batches", json=asked, headers=_key(key))

    async def begin(self, *lines: Any, **more: Any) -> str:
        """The id of a new batch with these lines."""
        file_id = (await self.upload(jsonl(*lines))).json()["id"]
        created = await self.create(file_id, **more)
        assert created.status_code == 200, created.text
        return str(created.json()["id"])

    async def get(self, path: str, key: str = "a", **query: Any) -> httpx.Response:
        return await self.http.get(path, params=query, headers=_key(key))

    async def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.get(f"/v1/batches/{batch_id}")).json()
        return found

    async def until(self, batch_id: str, *statuses: str) -> dict[str, Any]:
        """The batch, once it is in one of these statuses."""
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.batch(batch_id))["status"] not in statuses:
                await asyncio.sleep(0.005)
        return found

    async def lines_of(self, batch: dict[str, Any], which: str = "output_file_id") -> list[dict[str, Any]]:
        if batch[which] is None:
            return []
        content = (await self.get(f"/v1/files/{batch[which]}/content")).text
        return [json.loads(each) for each in content.splitlines()]


def _key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextlib.asynccontextmanager
async def running(ingress: Ingress) -> AsyncIterator[Ingress]:
    """The ingress, while it runs batches."""
    await ingress.stores.prepare()
    ingress.runner.start()
    try:
        yield ingress
    finally:
        await ingress.runner.close()


async def seen(look: Callable[[], bool]) -> None:
    """Wait until this is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not look():
            await asyncio.sleep(0.005)
