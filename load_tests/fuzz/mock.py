"""A run against the real ingress over the control plane in one process, with mock engines."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from configs.schema import BatonConfig
from load_tests.chaos.held import SETTLE_S, grown, held, leaked
from load_tests.fuzz.run import Asking, Findings
from load_tests.harness.control_plane import InProcess, config, in_process
from load_tests.harness.control_plane.server import Served, served

WARM_UP_CASES, WARM_UP_ROUNDS, CLIENTS, TOLD_EVERY = 300, 6, 8, 500


def settings() -> BatonConfig:
    """The mock cluster's configuration, with short answers where a case says no length."""
    made = config(scale=4)
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    ingress = made.ingress.model_copy(update={"default_max_tokens": 8, "refusals_per_s": 0.0, "server_args": tools})
    return made.model_copy(update={"ingress": ingress})


class Cluster:
    """A cluster that is fuzzed: `server` over `control_plane`."""

    def __init__(self, control_plane: InProcess, server: Served, http: httpx.AsyncClient) -> None:
        self._plane, self._server, self._http = control_plane, server, http

    async def ask(self, seed: int, cases: int, clients: int) -> Findings:
        """Ask the cases of a seed."""
        asking = Asking(self._http, seed, tell=self._tell)
        self._asking = asking
        return await asking.run(cases, clients)

    def _tell(self, done: int) -> None:
        for pool in self._plane.pools.values():
            pool.tasks.clear()
        if done % TOLD_EVERY == 0:
            print(f"{done} cases, {dict(self._asking.findings.verdicts)}", file=sys.stderr, flush=True)

    async def warm(self, seed: int, cases: int, clients: int, rounds: int = WARM_UP_ROUNDS) -> dict[str, int]:
        """Ask other cases until a round of them ends with no more than the one before it. Returns what is held then."""
        before: dict[str, int] | None = None
        for number in range(rounds):
            await self.ask(seed + number, cases, clients)
            await self._server.settle(self._plane)
            now = await held(self._plane)
            if before is not None and not grown(now, before):
                return before
            before = now
        return now

    async def left(self, before: dict[str, int], settle_s: float) -> dict[str, int]:
        """What is there that was not before: sessions, promises, blocks, tasks, threads and descriptors."""
        try:
            await self._server.settle(self._plane)
        except (AssertionError, TimeoutError) as error:
            print(f"not settled: {error}", file=sys.stderr, flush=True)
            return {"unsettled": 1, **await leaked(self._plane, before, settle_s)}
        if more := await leaked(self._plane, before, settle_s):
            threads = sorted(each.name for each in threading.enumerate())
            print(f"left: {more}; {threads}; {_descriptors()}", file=sys.stderr, flush=True)
        return more


def _descriptors() -> list[str]:
    """What is open now, by name."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own descriptor is gone when it is looked at
            found.append(str(each.readlink()))
    return sorted(found)


async def run(
    cases: int,
    seed: int,
    clients: int = CLIENTS,
    warm_up_cases: int = WARM_UP_CASES,
    settle_s: float = SETTLE_S,
    made: BatonConfig | None = None,
) -> dict[str, Any]:
    """Runs it. Returns `mock`, as the benchmark prints it."""
    made = made or settings()
    async with in_process(made) as plane, served(plane, made) as server:
        transport = httpx.ASGITransport(server.gateway)
        async with httpx.AsyncClient(transport=transport, base_url="http://baton", timeout=None) as http:
            cluster = Cluster(plane, server, http)
            before = await cluster.warm(-1_000_000 - seed, warm_up_cases, clients)
            findings = await cluster.ask(seed, cases, clients)
            more = await cluster.left(before, settle_s)
    return {"engine": "mock", "seed": seed, **findings.figures(), "leaked": more, "slowest": findings.slowest[:300]}
