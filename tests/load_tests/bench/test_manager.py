"""The benchmark of the session manager runs, and its figures are of what it says."""

from __future__ import annotations

import json

import pytest

from load_tests.bench import manager


@pytest.mark.slow
def test_it_measures_every_size_and_number(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--replicas", "2,4", "--ingresses", "1,2"]
    manager.main([*sizes, "--rate", "40", "--seconds", "3", "--settle-seconds", "0.1"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["benchmark"] == "manager"
    assert figures["by_replicas"].keys() == {"2", "4"}
    for row in figures["by_replicas"].values():
        assert row["reports_core_share"] > 0
        assert row["by_ingresses"].keys() == {"1", "2"}
        for each in row["by_ingresses"].values():
            assert each["requests"] > 10
            assert each["cpu_us_per_request"] > 50, "a placement is not free"
            assert each["open_ms_p99"] >= each["open_ms_p50"] > 0
    assert figures["growth"].keys() == {"replicas", "ingresses"}
