"""Cases asked by some clients, and what became of them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from load_tests.fuzz.bodies import Case, case
from load_tests.fuzz.judge import verdict

ANSWERED_S = 120.0
"""A case that takes longer than this counts as hung."""
FAULTS = {"status_5xx": "5xx", "hung": "hung", "malformed": "malformed", "broken": "broken"}
"""What must not be, by the names of the figures and of the verdicts."""
_TOLD = 2000


@dataclass
class Findings:
    """What became of the cases. `faults`: those with a fault, and the answers that they got."""

    verdicts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""

    def figures(self) -> dict[str, Any]:
        """The benchmark's figures, without `leaked`."""
        return {
            "cases": self.verdicts.total(),
            **{figure: self.verdicts[name] for figure, name in FAULTS.items()},
            **{name: self.verdicts[name] for name in ("ok", "refused", "no_capacity", "left")},
            "statuses": dict(sorted(self.statuses.items())),
            "slowest_s": round(self.slowest_s, 2),
        }


class Asking:
    """Clients that ask the cases of a seed.

    `answered_s`: a case that takes longer counts as hung. `tell` is called with the number of cases so far, after each.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        seed: int,
        answered_s: float = ANSWERED_S,
        tell: Callable[[int], None] = lambda done: None,
    ) -> None:
        self.findings = Findings()
        self._http, self._seed, self._answered_s, self._tell = http, seed, answered_s, tell

    async def run(self, cases: int, clients: int) -> Findings:
        """Ask this many cases, `clients` at a time."""
        numbers = iter(range(cases))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(clients, cases)):
                group.create_task(self._client(numbers))
        return self.findings

    async def _client(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._ask(case(self._seed, number))
            self._tell(self.findings.verdicts.total())

    async def _ask(self, asked: Case) -> None:
        findings, began_s = self.findings, time.monotonic()
        found, said = await self._answer(asked)
        findings.verdicts[found] += 1
        if (took_s := time.monotonic() - began_s) > findings.slowest_s:
            findings.slowest_s, findings.slowest = took_s, str(asked)
        if found in FAULTS.values():
            findings.faults.append(f"{found}: {asked}\n    {said}")
            print(findings.faults[-1], file=sys.stderr, flush=True)

    async def _answer(self, asked: Case) -> tuple[str, str]:
        """The verdict, and what the answer says."""
        headers = {"content-type": "application/json", "x-request-id": f"case-{asked.seed}-{asked.number}"}
        request = self._http.request(asked.method, asked.path, content=asked.content, headers=headers)
        call = asyncio.ensure_future(request)
        stays_s = self._answered_s if asked.leaves_s is None else asked.leaves_s
        done, _ = await asyncio.wait({call}, timeout=stays_s)
        if not done:
            call.cancel()
            await asyncio.wait({call})
            return ("hung" if asked.leaves_s is None else "left"), f"nothing in {stays_s:g} s"
        if (error := call.exception()) is not None:
            return "broken", repr(error)
        answer = call.result()
        self.findings.statuses[str(answer.status_code)] += 1
        found = verdict(asked, answer.status_code, answer.headers.get("content-type", ""), answer.content)
        if found == "no_capacity" and await self._has_capacity():
            found = "5xx"
        return found, f"{answer.status_code} {answer.content[-_TOLD:].decode(errors='replace')}"

    async def _has_capacity(self) -> bool:
        """Whether every pool has a replica that is ready."""
        return (await self._http.get("/ready")).status_code == 200
