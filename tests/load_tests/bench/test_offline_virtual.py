"""The benchmark of phases in virtual time runs, and its figures are of what it says."""

from __future__ import annotations

import json

import pytest

from load_tests.bench import offline_virtual
from load_tests.bench.offline_virtual import MACHINES, METHODS, WAYS


def test_the_machines_are_what_data_sheets_say() -> None:
    """65 GB of weights leave 4 x 39.2 - 65.5 GB for KV, at 262,144 bytes a token."""
    qwen = MACHINES["qwen2.5-32b-l20"]
    assert 300_000 < qwen.kv_tokens < 380_000
    assert MACHINES["llama-2-13b-l20"].kv_tokens < qwen.kv_tokens, "its KV is three times as large"
    # A step of 2,048 prompt tokens computes 2 x 32e9 FLOPs for each, at 45% of 119.5e12.
    assert qwen.steps.step_s(2048, 0, 0, 0) == pytest.approx(2.5, rel=0.1)


def test_every_way_gets_the_same_requests() -> None:
    assert offline_virtual.requests("chat", 50, 1) == offline_virtual.requests("chat", 50, 1)
    assert offline_virtual.requests("chat", 50, 1) != offline_virtual.requests("even", 50, 1)


@pytest.mark.slow
def test_it_measures_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    offline_virtual.main(["--requests", "40", "--machines", "llama-2-13b-l20", "--answers", "even"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "offline_virtual"
    found = result["machines"]["llama-2-13b-l20"]["even"]
    assert found["ways"].keys() == set(WAYS)
    assert found["over"].keys() == {"best", "default", "separate", "separate_even"}
    assert found["without"].keys() == METHODS.keys() - {"phased"}
    assert found["auto_over"].keys() == {"best", "phased"}
    seconds = {way: row["seconds"] * row["whole"] for way, row in found["ways"].items()}
    assert max(seconds.values()) == pytest.approx(min(seconds.values()), rel=0.01), "all answers have the same tokens"
    assert all(0 < row["bubble_share"] < 1 for row in found["ways"].values())
