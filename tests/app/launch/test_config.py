"""The effective configuration, and what is printed about it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.launch.config import (
    PLANNED,
    LaunchError,
    base_url,
    cpus_needed,
    curl_line,
    load_config,
    model_of,
    parse_address,
    stop_limit_s,
    with_model,
    with_surge,
)
from app.launch.ports import RayPorts
from configs.schema import BatonConfig
from deployments.replica.drain import STOP_S
from tests.app.launch.configurations import ARGUMENTS, write


def test_the_port_is_overridden_and_the_rest_stays(config_path: Path) -> None:
    config = load_config(config_path, 8123)
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8123, "root_path": "/x"}
    assert load_config(config_path, None)["http_options"]["port"] == 9000
    assert base_url(config) == "http://127.0.0.1:8123"


def test_http_options_have_loopback_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "c.yaml"), None)
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000}


def test_the_model_source_becomes_the_checkpoint(config_path: Path) -> None:
    config = load_config(config_path, None)
    changed = with_model(config, "/checkpoint")
    assert model_of(changed).model.source == "/checkpoint"
    assert model_of(changed).model.name == model_of(config).model.name
    assert "model" not in config["applications"][0]["args"], "the original is left alone"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "is not YAML"),
        ("[]", "exactly one entry"),
        ("applications: []", "exactly one entry"),
        ("applications: [{args: {prefil: {}}}]", "is not valid"),
    ],
)
def test_a_wrong_configuration_says_why(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(LaunchError, match=reason):
        load_config(path, None)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot read"):
        load_config(tmp_path / "none.yaml", None)


def test_the_curl_line_is_a_command_with_a_valid_body() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", "m"))
    assert words[2] == "http://127.0.0.1:8000/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "m"


def test_addresses() -> None:
    assert parse_address(None, 1, 2) == RayPorts("127.0.0.1", 1, 2)
    assert parse_address("head:6380", 1, 2) == RayPorts("head", 6380, 2)
    for wrong in ("auto", "head:", ":1"):
        with pytest.raises(LaunchError, match="host:port"):
            parse_address(wrong, 1, 2)


def test_an_update_has_logical_cpus_for_successors() -> None:
    def needed(**prefill: Any) -> int:
        pool = {"engine": {"kind": "mock"}}
        return cpus_needed(
            BatonConfig.model_validate(
                {"prefill": {"resources": {"num_cpus": 4}, **pool, **prefill}, "decode": {"d": pool}}
            )
        )

    assert needed(surge_percent=0) == 4 + 2 + 1 + 1
    assert needed() == needed(surge_percent=100) == 2 * 4 + 2 + 1 + 1
    assert needed(replicas=5) == (5 + 2) * 4 + 2 + 1 + 1


@pytest.mark.parametrize(
    ("replicas", "percent", "most"), [(4, 0, 4), (4, 25, 5), (4, 26, 6), (1, 1, 2), (3, 100, 6), (100, 1, 101)]
)
def test_a_surge_is_rounded_up(replicas: int, percent: int, most: int) -> None:
    assert with_surge(replicas, percent) == most


@pytest.mark.parametrize(("host", "reached"), [("::", "127.0.0.1"), ("10.0.0.7", "10.0.0.7")])
@pytest.mark.parametrize(("prefix", "path"), [(None, ""), ("/", ""), ("/llm", "/llm"), ("/llm/", "/llm")])
def test_a_url_has_the_route_and_a_host_that_can_be_reached(
    host: str, reached: str, prefix: str | None, path: str
) -> None:
    config = {"http_options": {"host": host, "port": 9000}, "applications": [{"route_prefix": prefix}]}
    assert base_url(config) == f"http://{reached}:9000{path}"


def test_a_pool_that_scales_needs_the_cpus_of_its_largest_size() -> None:
    pool = {"engine": {"kind": "mock"}, "surge_percent": 0}
    scaled = {**pool, "autoscaling": {"min_replicas": 1, "max_replicas": 9}}
    ingress = {"replicas": 3, "num_cpus": 0.5}
    baton = BatonConfig.model_validate({"prefill": scaled, "decode": {"d": pool}, "ingress": ingress})
    assert cpus_needed(baton) == 9 + 1 + 2 + 1
    small = BatonConfig.model_validate({"prefill": pool, "decode": {"d": pool}})
    assert cpus_needed(small) == 8, "the least"


@pytest.mark.parametrize(("ingress_s", "replica_s"), [(100.0, 10.0), (10.0, 100.0)])
def test_a_stop_may_take_as_long_as_the_longest_drain(ingress_s: float, replica_s: float) -> None:
    changes = {"ingress": {"drain_s": ingress_s}, "placement": {"drain_s": replica_s}}
    limit_s = stop_limit_s(BatonConfig.model_validate(ARGUMENTS | changes))
    assert 100.0 + STOP_S < limit_s < 110.0 + STOP_S


def test_an_address_may_name_its_scheme() -> None:
    assert parse_address("ray://head:6380", 1, 2) == RayPorts("head", 6380, 2)


POLICY = {"policy_function": PLANNED}
SCALED = {"prefill": {"engine": {"kind": "mock"}, "autoscaling": {"max_replicas": 2}}, "scaling": {}}


@pytest.mark.parametrize("policy", [None, {}, "deployments.serve.scaling:planned", {"policy_function": "their:own"}])
def test_a_plan_that_nothing_would_carry_out_is_refused(tmp_path: Path, policy: Any) -> None:
    path = _with_policy(tmp_path, SCALED, policy)
    with pytest.raises(LaunchError, match=f"autoscaling_policy: {{policy_function: {PLANNED}}}"):
        load_config(path, None)


def test_what_would_carry_out_a_plan_that_is_not_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="which needs `scaling` in `args`"):
        load_config(_with_policy(tmp_path, {}, POLICY), None)


def test_a_plan_and_the_policy_that_carries_it_out_stay_together(tmp_path: Path) -> None:
    config = load_config(_with_policy(tmp_path, SCALED, POLICY), None)
    assert config["applications"][0]["autoscaling_policy"] == POLICY
    assert model_of(config).scaling is not None


def _with_policy(tmp_path: Path, arguments: dict[str, Any], policy: Any) -> Path:
    """A file whose application has this policy."""
    application = {"name": "baton", "args": ARGUMENTS | arguments, "autoscaling_policy": policy}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path
