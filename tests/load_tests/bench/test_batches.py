"""The benchmark `batches`: what Baton is given, what a batch has, and the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.schema import BatonConfig
from load_tests.bench.batches import LINE, OVER, WAYS, batch_file, configured, ended, of_online, parse, summary
from load_tests.harness.application import ROOT
from load_tests.traffic.client import Answer
from load_tests.traffic.workloads import LONG, SHORT


@pytest.mark.parametrize("name", ["cpu-mixed.yaml", "cpu-1p1d.yaml"])
def test_baton_gets_batches_a_tier_and_objectives(name: str, tmp_path: Path) -> None:
    options = parse(["--config", str(ROOT / "configs" / name), "--ttft-s", "3", "--host-kv-bytes", "1000000"])
    serve = yaml.safe_load(configured(options, tmp_path).read_text())
    config = BatonConfig.model_validate(serve["applications"][0]["args"])
    assert config.classes["default"].ttft_s == 3
    assert config.classes["batch"].yields
    assert {pool.engine.host_kv_bytes for pool in config.pools.values()} == {1_000_000}  # type: ignore[union-attr]


def test_a_batch_has_lines_of_one_shape_and_a_seed_gives_the_same() -> None:
    lines = [json.loads(line) for line in batch_file("m", 5, 1).splitlines()]
    assert [line["custom_id"] for line in lines] == list("01234")
    assert {line["url"] for line in lines} == {"/v1/completions"}
    assert {len(line["body"]["prompt"]) for line in lines} == {LINE.prompt_tokens}
    assert len({tuple(line["body"]["prompt"]) for line in lines}) == 5
    assert batch_file("m", 5, 1) == batch_file("m", 5, 1) != batch_file("m", 5, 2)


def answer(kind: str, due_s: float, first_s: float, tokens: int, step_s: float) -> Answer:
    events = [(first_s + number * step_s, 1) for number in range(tokens)]
    return Answer(kind, due_s, tokens, due_s, events)


def test_the_figures_of_online_work() -> None:
    options = parse(["--seconds", "10", "--ttft-s", "1", "--tpot-s", "0.1"])
    good, late = answer(SHORT.kind, 1.0, 1.5, 5, 0.05), answer(SHORT.kind, 2.0, 4.0, 5, 0.05)
    found = of_online([good, late, answer(LONG.kind, 3.0, 3.9, 5, 0.2)], options)
    assert found["requests"] == 3
    assert found["failed"] == 0
    assert found["within"] == pytest.approx(1 / 3, abs=1e-3)
    assert found["short_ttft_p99_s"] == pytest.approx(2.0, abs=0.05)


def test_the_answers_that_ended_in_a_window() -> None:
    whole = answer(SHORT.kind, 0.0, 1.0, 5, 1.0)
    assert whole.events[-1][0] == 5.0
    broken = answer(SHORT.kind, 0.0, 1.0, 5, 1.0)
    broken.error = "broken"
    assert ended([whole, whole, broken], 4.0, 2.0) == 2
    assert ended([whole], 0.0, 5.0) == ended([whole], 5.5, 5.0) == 0


def rows(ttft_s: float, beside: float, lines: float, served: float) -> dict[str, Any]:
    return {
        "online": dict.fromkeys(OVER, 1.0),
        "beside": dict.fromkeys(OVER, ttft_s) | {"lines_tokens_per_s": beside},
        "lines": {"lines_tokens_per_s": lines},
        "full": {"requests_per_s": served},
    }


def test_ratios_are_within_a_round_and_the_share_is_of_what_is_idle() -> None:
    found = summary([rows(1.2, 20, 50, 2.0), rows(1.4, 10, 50, 2.0)], rate=1.0)
    assert found["ways"].keys() == set(WAYS)
    assert found["over_online"]["ttft_p99_s"] == pytest.approx([1.3, 1.2, 1.4])
    assert found["share_of_idle"] == pytest.approx([0.6, 0.4, 0.8])
    assert found["ways"]["beside"]["lines_tokens_per_s"] == 15


def test_a_fleet_that_online_work_fills_has_nothing_idle() -> None:
    assert summary([rows(1.0, 1.0, 1.0, 2.0)], rate=2.0)["share_of_idle"] is None
