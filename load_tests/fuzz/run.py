"""Cases asked one after the other by some clients, and what became of them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from load_tests.fuzz.bodies import Case, case
from load_tests.fuzz.judge import verdict

ANSWERED_S = 120.0
"""A case that takes longer than this counts as hung."""
_TOLD = 2000


@dataclass
class Findings:
    """What became of the cases. `faults`: the first ones with a fault, and the answers that they got."""

    verdicts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""

    def figures(self) -> dict[str, Any]:
        """The benchmark's figures, without `leaked`."""
        names = {"status_5xx": "5xx", "hung": "hung", "malformed": "malformed", "broken": "broken"}
        return {
            "cases": self.verdicts.total(),
            **{figure: self.verdicts[name] for figure, name in names.items()},
            "no_capacity": self.verdicts["no_capacity"],
            "left": self.verdicts["left"],
            "statuses": dict(sorted(self.statuses.items())),
            "slowest_s": round(self.slowest_s, 2),
        }


async def run(http: httpx.AsyncClient, seed: int, cases: int, clients: int, every: int = 500) -> Findings:
    """Ask the cases of a seed. Progress goes to stderr after `every` cases."""
    findings, numbers = Findings(), iter(range(cases))

    async def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            await _ask(http, case(seed, number), findings)
            done = findings.verdicts.total()
            if done % every == 0:
                print(f"{done} cases, {dict(findings.verdicts)}", file=sys.stderr, flush=True)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client(numbers))
    return findings


async def _ask(http: httpx.AsyncClient, asked: Case, findings: Findings) -> None:
    headers = {"content-type": "application/json", "x-request-id": f"case-{asked.number}"}
    call = asyncio.ensure_future(http.post(asked.path, content=asked.content, headers=headers))
    began_s = time.monotonic()
    done, _ = await asyncio.wait({call}, timeout=ANSWERED_S if asked.leaves_s is None else asked.leaves_s)
    if not done:
        call.cancel()
        await asyncio.wait({call})
        found, said = ("hung" if asked.leaves_s is None else "left"), ""
    elif (error := call.exception()) is not None:
        found, said = "broken", repr(error)
    else:
        answer = call.result()
        found = verdict(asked, answer.status_code, answer.headers.get("content-type", ""), answer.content)
        said = f"{answer.status_code} {answer.text[-_TOLD:]}"
        findings.statuses[str(answer.status_code)] += 1
    findings.verdicts[found] += 1
    if (took_s := time.monotonic() - began_s) > findings.slowest_s:
        findings.slowest_s, findings.slowest = took_s, str(asked)
    if found not in ("ok", "refused", "left"):
        findings.faults.append(f"{found} {asked}\n    {said}")
        print(findings.faults[-1], file=sys.stderr, flush=True)
