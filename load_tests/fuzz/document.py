"""Requests that schemathesis makes from the OpenAPI document: data that fits it, and data that does not.

An answer must be no 5xx, and have a status, headers, a content type and a body that the document has for the operation.
That valid data is accepted is not asked: vLLM's document does not say all that its server checks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

ANSWERED_S = 300.0
"""A request that takes longer than this counts as hung."""
SERVER_ERROR = "not_a_server_error"
CHECKED = (
    SERVER_ERROR,
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@dataclass
class Found:
    """What became of the requests. `verdicts`: as in `run.FAULTS`, or `ok`. `faults`: what was wrong, and with what."""

    verdicts: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def ask(
    url: str,
    examples: int,
    seed: int,
    headers: dict[str, str] | None = None,
    reading: dict[str, str] | None = None,
) -> Found:
    """Ask every operation of the document at `url` with `examples` requests that fit and as many that do not.

    Blocks until all are answered. `headers` go with every request. `reading`: those with which the document is read;
    None: the same. The same seed makes the same requests.
    """
    load_all_checks()
    found = Found()
    of_document = headers if reading is None else reading
    document: Any = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=of_document or {})
    for result in document.get_all_operations():
        operation = result.ok()
        for mode in GenerationMode:
            _ask_operation(operation.as_strategy(generation_mode=mode), found, examples, seed, headers or {})
    return found


def _ask_operation(cases: Any, found: Found, examples: int, seed: int, headers: dict[str, str]) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(cases)
    def run(case: Case[Any]) -> None:
        verdict, said = _verdict(case, found, headers)
        found.verdicts[verdict] += 1
        found.asked[f"{case.method} {case.operation.path}"] += 1
        if verdict != "ok":
            found.faults.append(f"{verdict}: {said}\n{case.as_curl_command(headers)[:2000]}")

    run()


def _verdict(case: Case[Any], found: Found, headers: dict[str, str]) -> tuple[str, str]:
    try:
        answer = case.call(headers=headers, timeout=ANSWERED_S)
    except requests.Timeout as error:
        return "hung", repr(error)
    except requests.RequestException as error:
        return "broken", repr(error)
    found.statuses[answer.status_code] += 1
    for name in CHECKED:
        try:
            checks: list[Any] = CHECKS.get_by_names([name])
            case.validate_response(answer, checks=checks, headers=headers)
        except AssertionError as error:
            return ("5xx" if name == SERVER_ERROR else "malformed"), str(error)
    return "ok", ""
