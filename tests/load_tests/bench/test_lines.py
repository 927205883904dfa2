"""The benchmark of lines beside a trace: its figures add up, in a small run."""

from __future__ import annotations

import json

import pytest

from load_tests.bench import lines


def test_a_small_run_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    lines.main(["--trace", "poisson", "--replicas", "6", "--seconds", "16", "--alone", "400"])
    said = capsys.readouterr()
    row = json.loads(said.out.splitlines()[-1])
    *paces, _, _ = said.err.splitlines()
    assert len(paces) >= 1
    assert all(float(pace.split()[-1]) < 0.99 for pace in paces[:-1]), "the fastest pace that is kept up with"
    assert float(paces[-1].split()[-1]) >= 0.99
    assert row["alone_per_s"]["online"] < row["at_once_per_s"]
    assert row["left_out"] > 0, "longer prompts than a line's"
    assert row["requests_per_s"] == pytest.approx(0.5 * row["alone_per_s"]["online"], abs=0.2)
    without, beside = row["without"], row["beside"]
    assert without["lines_per_s"] == 0
    assert 0 < beside["lines_per_s"] < row["alone_per_s"]["lines"]
    assert row["of_idle"] == pytest.approx(beside["lines_per_s"] / (0.5 * row["alone_per_s"]["lines"]), abs=0.02)
    assert without["attainment"] > 0.9
    assert row["ratio"]["tpot_p50_s"] == pytest.approx(beside["tpot_p50_s"] / without["tpot_p50_s"], abs=0.01)
