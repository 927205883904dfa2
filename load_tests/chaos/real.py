"""Faults on real engines: `configs/cpu.yaml` as a user starts it, clients over HTTP, and signals to its processes.

A fault kills a process of a replica, of the session manager, of the ingress or of an engine; or it stops one for up to
four seconds and then continues it; or it changes or cuts the files of KV tiers; or a client leaves. Replicas fetch from
each other, and prefill's memory is too small for all prompts. So a replica that is killed or stopped may be the source
of a fetch. Before each kill everything has come back from the one before.
Between other faults up to two seconds pass. Answers are greedy. They are compared with those that the undisturbed
cluster gave at its start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import yaml

from deployments.host.processes import descendants
from load_tests.chaos.deck import DAMAGE, deck, held
from load_tests.chaos.http_crowd import ANSWERED_S, HttpCrowd
from load_tests.chaos.tier_files import damage
from load_tests.harness.application import ROOT, Application
from load_tests.harness.processes import marked

CONFIG = ROOT / "configs" / "cpu.yaml"
MARKER = "BATON_CHAOS_RUN"
SESSION_S = 120.0
BACK_S, SETTLE_S = 300.0, 2 * SESSION_S
STOPPED_S, BETWEEN_S = 4.0, 2.0
CLIENTS, WARM_UP_S = 3, 20.0
PREFILL_BYTES, HOST_BYTES, DISK_BYTES = 128 << 20, 32 << 20, 256 << 20
"""Of the default model, prefill has 22 blocks, and each replica 5 and 45 in its tiers."""
COUNTED = (
    "blocks_fetched",
    "fetches_broken",
    "fetches_corrupt",
    "tier_host_hits",
    "tier_disk_hits",
    "tier_digest_failures",
)
MUST_NOT = ("hung", "wrong", "truncated", "duplicated")
MAY = ("failed", "cut", "left")


def run(faults: int, seed: int) -> dict[str, Any]:
    """Runs it. Returns `real`, as the benchmark prints it."""
    marker = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as directory:
        tiers = Path(directory) / "tiers"
        application = Application(settings(tiers), Path(directory), {MARKER: marker})
        try:
            application.wait()
            _say(f"{application.url} is ready")
            return asyncio.run(_Run(application.url, f"{MARKER}={marker}", tiers, random.Random(seed)).all(faults))
        finally:
            application.stop()


def settings(tiers: Path) -> dict[str, Any]:
    """What `serve run` is given. `tiers`: the folder of the disk tiers."""
    serve: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    arguments = serve["applications"][0]["args"]
    # Every request has a handoff.
    arguments["placement"] = {"split": "always", "session_timeout_s": SESSION_S, "fetch": True}
    arguments["channel"]["handoff_timeout_s"] = SESSION_S / 4
    arguments["prefill"]["engine"]["kv_cache_memory_bytes"] = PREFILL_BYTES
    for pool in (arguments["prefill"], *arguments["decode"].values()):
        pool["engine"] |= {"host_kv_bytes": HOST_BYTES, "disk_kv": {"path": str(tiers), "bytes": DISK_BYTES}}
    return serve


class _Run:
    def __init__(self, url: str, marker: str, tiers: Path, draw: random.Random) -> None:
        self._url, self._marker, self._tiers, self._draw = url, marker, tiers, draw
        self._crowd = HttpCrowd(url, random.Random(draw.random()))
        self._lost: set[str] = set()

    async def all(self, faults: int) -> dict[str, Any]:
        await self._crowd.learn()
        await self._warm()
        await self._settled()
        before, counts, began_s = held(self._marker), Counter[str](), time.monotonic()
        over = asyncio.Event()
        asking = asyncio.create_task(self._crowd.run(CLIENTS, over.is_set))
        try:
            for number, fault in enumerate(deck(faults, self._draw), 1):
                _say(f"{time.monotonic() - began_s:.0f} s, {len(self._crowd.verdicts)} sessions, {number}: {fault}")
                if not await _within(BACK_S, lambda fault=fault: self._do(fault)):  # until its target is back
                    raise SystemExit(f"the target of this fault did not come back within {BACK_S:g} s: {fault}")
                counts[fault] += 1
                await asyncio.sleep(self._draw.random() * BETWEEN_S)
            await self._all_back()
            over.set()
            await asking
        finally:
            asking.cancel()
            await asyncio.wait({asking})
        left = await self._settled()
        more = {name: count - before[name] for name, count in held(self._marker).items() if count > before[name]}
        verdicts = Counter(self._crowd.verdicts)
        return {
            "faults": counts.total(),
            "sessions": len(self._crowd.verdicts),
            **{name: verdicts[name] for name in (*MUST_NOT, *MAY)},
            "completed_share": round(verdicts["whole"] / max(1, verdicts["whole"] + verdicts["failed"]), 5),
            "leaked": left | more,
            "kinds": dict(counts),
            "caches": await self._caches(),
            "why_not": self._crowd.why_not,
            "pauses_s": sorted(self._crowd.pauses_s)[-8:],
            "seconds": round(time.monotonic() - began_s, 1),
        }

    async def _warm(self) -> None:
        """Runs undisturbed load for a while, so that every pair has made its connections."""
        until_s = time.monotonic() + WARM_UP_S
        await self._crowd.run(CLIENTS, lambda: time.monotonic() > until_s)
        self._crowd.forget()

    # ---- faults

    async def _do(self, fault: str) -> bool:
        """Causes one fault. Returns whether there was a process or a client for it."""
        if fault == "leave":
            return self._crowd.leave()
        if fault == DAMAGE:
            return damage(self._tiers, self._draw) > 0
        verb, *words = fault.split()
        name = words[-1]
        if verb == "kill":
            await self._all_back()
        pids = self._pids(name, is_engine=words[0] == "engine")
        if not pids:
            return False
        if verb == "stop":
            await self._stop(pids)
            return True
        self._lost |= self._replica_ids(await self._status(), name)
        if name in ("ingress", "session-manager"):
            self._crowd.without(name)
        _signal(pids, signal.SIGKILL)
        return True

    async def _stop(self, pids: list[int]) -> None:
        _signal(pids, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._draw.random() * STOPPED_S)
        finally:
            _signal(pids, signal.SIGCONT)

    def _pids(self, name: str, is_engine: bool) -> list[int]:
        """The processes of a deployment's replicas, or those of the engines under them."""
        lines = marked(self._marker)
        found = [pid for pid, line in lines.items() if line.startswith(f"ray::ServeReplica:baton:{name}")]
        if not is_engine:
            return found
        return [pid for each in found for pid in descendants(each) if lines.get(pid, "").startswith("VLLM::")]

    # ---- what the cluster says

    async def _caches(self) -> dict[str, float]:
        """What the replicas that are up have fetched and loaded."""
        replicas = (await self._status()).get("replicas", {}).values()
        return {name: sum(each["counters"].get(name, 0.0) for each in replicas) for name in COUNTED}

    async def _status(self) -> dict[str, Any]:
        """The cluster's status. Empty when it does not answer."""
        try:
            async with httpx.AsyncClient(timeout=10.0) as http:
                response = await http.get(f"{self._url}/baton/status")
                answer: dict[str, Any] = response.json() if response.status_code == 200 else {}
                return answer
        except (httpx.HTTPError, ValueError):
            return {}

    def _replica_ids(self, status: dict[str, Any], pool: str) -> set[str]:
        return set(status.get("pools", {}).get(pool, {}).get("replicas", {}))

    async def _all_back(self) -> None:
        """Waits until every pool has a ready replica that was not killed. Raises SystemExit when it takes too long."""

        async def look() -> bool:
            status = await self._status()
            pools = status.get("pools", {})
            fresh = [
                any(each["fresh"] and each["phase"] == "ready" and name not in self._lost for name, each in found)
                for found in (pool["replicas"].items() for pool in pools.values())
            ]
            return bool(status.get("ready")) and len(fresh) == 3 and all(fresh)

        if not await _within(BACK_S, look):
            raise SystemExit("the replicas did not come back")
        self._crowd.all_back()

    async def _settled(self) -> dict[str, int]:
        """The sessions, promises and blocks that stay after the last request is over. Empty when none stays."""
        left = dict[str, int]()

        async def look() -> bool:
            nonlocal left
            status = await self._status()
            if not status:
                left = {"status": 1}
                return False
            used = sum(each["used_blocks"] for each in status["replicas"].values())
            counts = {"sessions": status["sessions"]["open"], "promises": len(status["promises"]), "blocks": used}
            left = {name: count for name, count in counts.items() if count}
            return not left

        await _within(SETTLE_S, look)
        return left


async def _within(seconds: float, look: Any) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds + ANSWERED_S):
            while not await look():  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.5)
            return True
    return False


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
