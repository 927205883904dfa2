"""What schemathesis finds when it asks every operation of the OpenAPI document, without API keys and with them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.access.gate import OPEN
from load_tests.fuzz import document
from tests.app.clients.baton import KEY, LIMITED, Baton

EXAMPLES, SEED = 8, 7
pytestmark = pytest.mark.slow


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def operations(url: str) -> set[str]:
    paths: dict[str, Any] = httpx.get(f"{url}/openapi.json", headers=shown(KEY)).json()["paths"]
    return {f"{method.upper()} {path}" for path, item in paths.items() for method in item}


def test_every_operation_answers_as_the_document_says(baton: Baton) -> None:
    found = document.ask(baton.url, EXAMPLES, SEED, shown(KEY))
    assert found.faults == []
    assert found.asked.keys() == operations(baton.url)
    assert {200, 400} < found.statuses.keys()


@pytest.mark.parametrize(("key", "refused"), [(KEY, {400}), (LIMITED, {400, 403, 429})])
def test_and_so_it_does_with_a_key(baton: Baton, key: str, refused: set[int]) -> None:
    found = document.ask(baton.gated_url, 2, SEED, shown(key))
    assert found.faults == []
    assert found.asked.keys() == operations(baton.gated_url)
    assert {200} | refused <= found.statuses.keys()
    assert 401 not in found.statuses


@pytest.mark.parametrize("given", [{}, shown("unknown")])
def test_without_a_key_that_it_knows_all_but_probes_are_refused(baton: Baton, given: dict[str, str]) -> None:
    found = document.ask(baton.gated_url, 2, SEED, given, reading=shown(KEY))
    assert found.faults == []
    every = operations(baton.gated_url)
    assert found.asked.keys() == every
    probes = sum(count for each, count in found.asked.items() if each.partition(" ")[2] in OPEN)
    assert found.statuses[401] == found.asked.total() - probes > 0
