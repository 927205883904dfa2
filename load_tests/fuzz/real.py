"""A run against `configs/cpu.yaml` with real engines, as `make serve` starts it, over HTTP."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import yaml

from load_tests.chaos.deck import held, named
from load_tests.fuzz import document
from load_tests.fuzz.run import FAULTS, Asking
from load_tests.harness.application import ROOT, Application

CONFIG = ROOT / "configs" / "cpu.yaml"
MARKER = "BATON_FUZZ_RUN"
WARM_UP_CASES, ANSWERED_S, SETTLE_S, LOOK_S = 60, 300.0, 120.0, 1.0


def run(
    cases: int, seed: int, clients: int, warm_up_cases: int = WARM_UP_CASES, document_examples: int = 0
) -> dict[str, Any]:
    """Runs it. Returns `real`, as the benchmark prints it.

    `document_examples`: of `document.ask`, before what is left is counted; 0: that is left out.
    """
    serve = yaml.safe_load(CONFIG.read_text())
    serve["applications"][0]["args"]["ingress"] |= {"default_max_tokens": 8, "refusals_per_s": 0}
    marker = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as directory:
        application = Application(serve, Path(directory), {MARKER: marker})
        try:
            application.wait()
            asked = (cases, seed, clients, warm_up_cases, document_examples)
            return asyncio.run(_ask(application.url, f"{MARKER}={marker}", *asked))
        finally:
            application.stop()


async def _ask(
    url: str, marker: str, cases: int, seed: int, clients: int, warm_up_cases: int, examples: int
) -> dict[str, Any]:
    limits = httpx.Limits(max_keepalive_connections=0)  # a connection that is kept would count as a descriptor
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        await Asking(http, -1_000_000 - seed, ANSWERED_S).run(warm_up_cases, clients)
        if left := await _left(http, marker, Counter()):
            print(f"not settled after the warm-up: {left}", file=sys.stderr, flush=True)
        before, before_by_name, began_s = held(marker), named(marker), time.monotonic()
        findings = await Asking(http, seed, ANSWERED_S, _tell).run(cases, clients)
        of_document = await asyncio.to_thread(document.ask, url, examples, seed) if examples else document.Found()
        took_s = time.monotonic() - began_s
        if more := await _left(http, marker, before):
            print(f"left: {more}; {dict(named(marker) - before_by_name)}", file=sys.stderr, flush=True)
    figures = {"engine": "vllm", "seed": seed, **findings.figures(), "leaked": more}
    if examples:
        print(*of_document.faults, sep="\n", file=sys.stderr, flush=True)
        figures["document"] = {"cases": of_document.verdicts.total(), "verdicts": dict(of_document.verdicts)}
        for figure, name in FAULTS.items():
            figures[figure] += of_document.verdicts[name]
    return {**figures, "slowest": findings.slowest[:300], "seconds": round(took_s, 1)}


def _tell(done: int) -> None:
    if done % 50 == 0:
        print(f"{done} cases", file=sys.stderr, flush=True)


async def _left(http: httpx.AsyncClient, marker: str, before: Counter[str]) -> dict[str, int]:
    """What is there that was not before, once nothing is or `SETTLE_S` have passed.

    Without `before`: sessions, promises and blocks alone.
    """
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        status = (await http.get("/baton/status")).json()
        counts = {
            "sessions": status["sessions"]["open"],
            "promises": len(status["promises"]),
            "blocks": sum(each["used_blocks"] for each in status["replicas"].values()),
        }
        left = {name: count for name, count in counts.items() if count}
        if before:
            left |= {name: count - before[name] for name, count in held(marker).items() if count > before[name]}
        if not left or time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(LOOK_S)
