"""Some hundred cases of the fuzzer with mock engines: no error of the server, no hang, no leak."""

from __future__ import annotations

from typing import Any

import pytest

from load_tests.fuzz import mock
from load_tests.fuzz.run import FAULTS
from load_tests.harness.control_plane import InProcess

SEED, CASES = 5, 300


async def test_hostile_requests_get_an_answer_and_leave_nothing() -> None:
    found = await mock.run(CASES, SEED, warm_up_cases=40, settle_s=60.0)
    assert found["cases"] == CASES
    assert {name: found[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert found["no_capacity"] == 0
    assert found["leaked"] == {}
    assert found["ok"] > CASES / 4
    assert found["refused"] > CASES / 10


async def test_what_a_case_leaves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mock, "held", _nothing)
    monkeypatch.setattr(mock, "WARM_UP_ROUNDS", 1)
    found = await mock.run(1, SEED, warm_up_cases=1, settle_s=0.0)
    assert found["leaked"].keys() >= {"tasks", "descriptors"}


async def _nothing(plane: InProcess) -> dict[str, Any]:
    return dict.fromkeys(("tasks", "threads", "descriptors", "links", "shared_memory", "replicas"), 0)
