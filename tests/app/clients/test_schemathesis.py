"""What schemathesis finds when it asks every operation of the OpenAPI document."""

from __future__ import annotations

import httpx
import pytest

from load_tests.fuzz import document
from tests.app.clients.baton import KEY, Baton

EXAMPLES, SEED = 8, 7


@pytest.mark.slow
def test_every_operation_answers_as_the_document_says(baton: Baton) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    found = document.ask(baton.url, EXAMPLES, SEED, key)
    assert found.faults == []
    paths = httpx.get(f"{baton.url}/openapi.json", headers=key).json()["paths"]
    assert found.asked.keys() == {f"{method.upper()} {path}" for path, item in paths.items() for method in item}
    assert {200, 400} < found.statuses.keys()
