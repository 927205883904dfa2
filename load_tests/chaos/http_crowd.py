"""Clients of a real cluster, over HTTP, and the outcome of each of their sessions."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

MODEL = "smollm2-135m-instruct"
QUESTIONS = 24
PROMPTS, ANSWERS = (20, 400), (24, 64)
ANSWERED_S = 180.0
"""A session that takes longer than this counts as hung. Its own deadline is 120 s."""


@dataclass
class _Asked:
    """One request. `without`: processes that were killed while it was open, or were not back yet when it began."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    broken: str = ""
    without: set[str] = field(default_factory=set)
    task: asyncio.Task[None] | None = None


class HttpCrowd:
    """Clients that ask one question after the other. Call `learn` first, on an undisturbed cluster, then `run`.

    The code that kills a process calls `without`, and calls `all_back` when everything is back.
    """

    def __init__(self, url: str, draw: random.Random) -> None:
        self._url, self._draw = url, draw
        self._whole: list[tuple[list[int], list[int]]] = []
        self._open: list[_Asked] = []
        self._away: set[str] = set()
        self._not = Counter[str]()
        self.verdicts: list[str] = []
        self.pauses_s: list[float] = []

    @property
    def why_not(self) -> dict[str, int]:
        """The errors of the sessions whose answers were not whole, the most frequent first."""
        return dict(self._not.most_common(8))

    async def learn(self) -> None:
        """Learns the answers of an undisturbed cluster. Raises SystemExit when it does not answer."""
        for _ in range(QUESTIONS):
            prompt = [self._draw.randrange(100, 40_000) for _ in range(self._draw.randint(*PROMPTS))]
            asked = _Asked(prompt, self._draw.randint(*ANSWERS))
            await self._ask(asked)
            if asked.finish != "length":
                raise SystemExit(f"the undisturbed cluster does not answer: {asked.error or asked.broken}")
            self._whole.append((prompt, asked.tokens))

    def forget(self) -> None:
        """Forgets what has been seen so far: it was a warm-up."""
        self.verdicts.clear()
        self.pauses_s.clear()
        self._not.clear()

    async def run(self, clients: int, is_over: Callable[[], bool]) -> None:
        """Asks one question after the other until `is_over()` is true."""

        async def client() -> None:
            while not is_over():
                await self._one()

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())

    def leave(self) -> bool:
        """One of the clients leaves, if any has a request open. Returns whether one did."""
        if not self._open:
            return False
        task = self._draw.choice(self._open).task
        assert task is not None
        return task.cancel()

    def without(self, name: str) -> None:
        """Notes that the ingress has been killed, or another process whose death all sessions notice."""
        self._away.add(name)
        for asked in self._open:
            asked.without.add(name)

    def all_back(self) -> None:
        self._away.clear()

    async def _one(self) -> None:
        prompt, whole = self._draw.choice(self._whole)
        asked = _Asked(prompt, len(whole), without=set(self._away))
        asked.task = asyncio.create_task(self._ask(asked))
        self._open.append(asked)
        done, _ = await asyncio.wait({asked.task}, timeout=ANSWERED_S)
        self._open.remove(asked)
        verdict = self._verdict(asked, whole, hung=not done)
        asked.task.cancel()
        await asyncio.wait({asked.task})
        self.verdicts.append(verdict)
        if verdict == "whole":
            self.pauses_s += [round(max((b - a for a, b in pairwise(asked.times_s)), default=0.0), 3)]
        elif verdict != "left":
            self._not[f"{verdict}: {asked.error or asked.broken}"[:200]] += 1
            await asyncio.sleep(1.0)

    def _verdict(self, asked: _Asked, whole: list[int], hung: bool) -> str:
        tokens = asked.tokens
        if len(tokens) > len(whole):
            return "duplicated"
        if tokens != whole[: len(tokens)]:
            return "wrong"
        if hung:
            return "hung"
        assert asked.task is not None
        if asked.task.cancelled():
            return "left"
        if asked.finish:
            return "whole" if tokens == whole else "truncated"
        if "ingress" in asked.without:
            return "cut"
        if not asked.error and not asked.broken:
            return "truncated"
        return "failed"

    async def _ask(self, asked: _Asked) -> None:
        body = {
            "model": MODEL,
            "prompt": asked.prompt,
            "max_tokens": asked.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        try:
            async with (
                httpx.AsyncClient(base_url=self._url, timeout=2 * ANSWERED_S) as http,
                http.stream("POST", "/v1/completions", json=body) as response,
            ):
                if response.status_code != 200:
                    asked.error = f"{response.status_code} {(await response.aread()).decode()[:150]}"
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(asked, json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            asked.broken = repr(error)

    def _take(self, asked: _Asked, event: dict[str, Any]) -> None:
        if "error" in event:
            asked.error = json.dumps(event["error"])
            return
        (choice,) = event["choices"]
        asked.tokens += choice["token_ids"] or []
        asked.times_s += [time.monotonic()] if choice["token_ids"] else []
        asked.finish = choice["finish_reason"] or asked.finish
