"""A real Prometheus is asked what dashboards and alerts ask: which expressions have an answer."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from collections.abc import Iterable

import httpx
import pytest

from app.launch.prometheus import VARIABLE

LOOK_S = 5.0


def require_prometheus() -> None:
    """Skip the test where there is none."""
    if shutil.which(os.environ.get(VARIABLE) or "prometheus") is None:
        pytest.skip("Prometheus is not installed; Debian has it in the package prometheus")


async def unanswered(url: str, expressions: Iterable[str], within_s: float) -> set[str]:
    """The expressions that have had no number in any answer within `within_s`. Fails where one is an error.

    NaN is no number: it is what a division by zero gives.
    """
    left, deadline_s = set(expressions), time.monotonic() + within_s
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
        while True:
            left = {each for each in left if not await _has_number(client, each)}
            if not left or time.monotonic() > deadline_s:
                return left
            await asyncio.sleep(LOOK_S)


async def _has_number(client: httpx.AsyncClient, expression: str) -> bool:
    answer = await client.post("/api/v1/query", data={"query": expression})
    assert answer.status_code == 200, (expression, answer.text)
    found = answer.json()["data"]
    assert found["resultType"] == "vector", expression
    return any(not math.isnan(float(each["value"][1])) for each in found["result"])
