"""The Grafana dashboard and the alerts: made as they should be, of metrics that there are, and each alert fires."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.grafana.make import FILE, ROWS, whole
from deployments.metrics.catalogue import METRICS
from tests.metrics_asked import ALERTS, NO_MEANING, NONE_OF_IT, ROOT, filled, measured, questions, rules, shown

TRIED = ALERTS.with_name("alerts_test.yaml")


def package(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def names_that_there_are() -> set[str]:
    """Metrics of our list, of vLLM's sources, and those that Ray's own dashboards ask for."""
    ours = {name for metric in METRICS for name in metric.shown}
    vllm = re.findall(r'name\s*=\s*"vllm:(\w+)"', (package("vllm") / "v1/metrics/loggers.py").read_text())
    folder = package("ray") / "dashboard/modules/metrics/dashboards"
    rays = {name for file in folder.glob("*.py") for name in re.findall(r"ray_serve_\w+", file.read_text())}
    assert ours
    assert vllm
    assert rays
    endings = ("", "_total", "_bucket", "_sum", "_count")
    return ours | rays | {f"ray_vllm_{name}{ending}" for name in vllm for ending in endings}


def test_the_dashboard_is_what_its_module_makes() -> None:
    assert FILE.read_text() == whole(), "run: python -m deploy.grafana.make --write"


def test_the_dashboard_has_every_graph_and_no_panel_over_another() -> None:
    panels = json.loads(FILE.read_text())["panels"]
    assert [panel["title"] for panel in panels if panel["type"] == "timeseries"] == [
        graph.title for graphs in ROWS.values() for graph in graphs
    ]
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24


def test_every_expression_is_of_metrics_that_there_are() -> None:
    known = names_that_there_are()
    for expression in [*shown(FILE.read_text()), *(rule["expr"] for rule in rules())]:
        asked = set(re.findall(r"\bray_\w+", expression))
        assert asked
        assert sorted(asked - known) == []


def test_every_alert_has_its_line_in_the_guide_and_fires_in_a_test() -> None:
    names = [rule["alert"] for rule in rules()]
    guide = (ROOT / "docs/guides/alerts.md").read_text()
    assert re.findall(r"^### (\w+)$", guide, re.MULTILINE) == names
    tried = [each for case in yaml.safe_load(TRIED.read_text())["tests"] for each in case["alert_rule_test"]]
    assert {each["alertname"] for each in tried if each["exp_alerts"]} == set(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["runbook"] == f"docs/guides/alerts.md#{rule['alert'].lower()}"


def test_no_variable_is_left_in_an_expression_and_every_exception_is_of_one() -> None:
    asked = [each for expressions in questions("a-model").values() for each in expressions]
    assert len(asked) > 100
    assert [each for each in asked if re.search(r"\$[a-z_]|{{", each)] == []
    exceptions = {**NO_MEANING, **NONE_OF_IT}
    assert [part for part in exceptions if not any(re.search(part, each) for each in asked)] == []


def test_what_an_alert_measures_is_its_expression_without_the_number() -> None:
    assert measured("absent(a)") == "a"
    assert measured("sum(a) > 0\nand on () sum(rate(b[5m])) == 0\n") == "sum(a) > 0\nand on () sum(rate(b[5m]))"
    assert measured("a / b > 0.05") == "a / b"


@pytest.mark.slow
def test_promtool_takes_every_expression_and_every_alert_fires(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; Debian has it in the package prometheus")
    expressions = [filled(each) for each in shown(FILE.read_text())]
    recorded = [{"record": f"graph_{number}", "expr": each} for number, each in enumerate(expressions)]
    graphs = tmp_path / "graphs.yaml"
    graphs.write_text(yaml.safe_dump({"groups": [{"name": "graphs", "rules": recorded}]}))
    for command in (["check", "rules", str(ALERTS), str(graphs)], ["test", "rules", str(TRIED)]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
