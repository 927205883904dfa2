"""Every configuration that ships, what a wrong one is told, and the Serve application that comes of it."""

from __future__ import annotations

import inspect
import os
import typing
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from pydantic import ValidationError
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call_builder

from app.launch.config import LaunchError, load_config, model_of, with_surge
from app.main import NO_LIMIT, build
from configs.checks import bounds_of
from configs.schema import (
    BatonConfig,
    IngressConfig,
    ModelConfig,
    PoolConfig,
    ResourcesConfig,
    Section,
    VllmEngineConfig,
    role_of,
)
from deployments.engine.build import environment

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


def arguments(path: Path) -> dict[str, Any]:
    application: dict[str, Any] = yaml.safe_load(path.read_text())["applications"][0]
    found: dict[str, Any] = application["args"]
    return found


def vllm_arguments() -> dict[str, Any]:
    """A small valid configuration to spoil."""
    return {
        "model": {"max_model_len": 2048},
        "prefill": {"engine": {"kind": "vllm"}},
        "decode": {"main": {"engine": {"kind": "vllm"}}},
    }


def changed(place: str, value: Any) -> dict[str, Any]:
    """The small configuration with one key, given by its dotted place, set."""
    whole = vllm_arguments()
    *parents, last = place.split(".")
    at = whole
    for name in parents:
        at = at.setdefault(name, {})
    at[last] = value
    return whole


def deployments(application: Application) -> dict[str, Any]:
    """Every deployment of an application by name, those that it only hands to others included."""
    found: dict[str, Any] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Application):
            bound = value._bound_deployment
            found[bound.name] = bound
            visit([*bound.init_args, *bound.init_kwargs.values()])
        elif isinstance(value, dict):
            visit(list(value.values()))
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)

    visit(application)
    return found


# ---- the files


def test_the_files_that_the_main_job_needs_are_there() -> None:
    names = {path.stem for path in CONFIGS}
    assert names >= {"cpu", "cpu-1p1d", "cpu-compiled", "gpu-1p1d", "gpu-heterogeneous", "multi-node", "mock"}


@each_config
def test_a_file_is_valid_and_complete(path: Path) -> None:
    config = BatonConfig.model_validate(arguments(path))
    effective = load_config(path, 8123)
    assert model_of(effective, path) == config
    assert effective["http_options"]["port"] == 8123
    (application,) = effective["applications"]
    assert application["name"] == "baton"
    assert application["import_path"] == "app.main:build"
    assert effective["proxy_location"] in ("HeadOnly", "EveryNode")


@each_config
def test_a_configuration_survives_its_own_dump(path: Path) -> None:
    """Replicas and ingresses get it as JSON."""
    config = BatonConfig.model_validate(arguments(path))
    assert BatonConfig.model_validate(config.model_dump(mode="json")) == config


@each_config
def test_workers_of_a_replica_get_their_gpus(path: Path) -> None:
    config = BatonConfig.model_validate(arguments(path))
    for name, pool in config.pools.items():
        if pool.resources.num_gpus:
            assert pool.resources.num_gpus == getattr(pool.engine, "workers", 1), name


def test_the_default_has_one_prefill_pool_and_two_unlike_decode_pools() -> None:
    config = BatonConfig.model_validate(arguments(next(path for path in CONFIGS if path.stem == "cpu")))
    assert set(config.pools) == {"prefill", "decode-small", "decode-large"}
    small, large = (getattr(config.decode[name].engine, "kv_cache_memory_bytes", 0) for name in ("small", "large"))
    assert large >= 4 * small > 0


# ---- what a wrong one is told

WRONG = [
    # a wrong key, at every depth
    ("modle", {}, "modle"),
    ("model.maxlen", 5, "model.maxlen"),
    ("prefill.replica", 2, "prefill.replica"),
    ("prefill.resources.gpus", 1, "prefill.resources.gpus"),
    ("prefill.engine.batch", 1, "prefill.engine.vllm.batch"),
    ("decode.main.engine.batch", 1, "decode.main.engine.vllm.batch"),
    ("channel.timeout", 1, "channel.timeout"),
    ("placement.policy", "x", "placement.policy"),
    ("ingress.port", 80, "ingress.port"),
    # what needs something else
    ("placement.spread", True, "placement.spread needs placement.fetch"),
    # a wrong value
    ("model.max_model_len", 0, "model.max_model_len"),
    ("model.dtype", "int4", "model.dtype"),
    ("model.name", "", "model.name"),
    ("prefill.replicas", "two", "prefill.replicas"),
    ("prefill.engine.kind", "sglang", "prefill.engine"),
    ("prefill.engine.max_num_seqs", 0, "prefill.engine.vllm.max_num_seqs"),
    ("decode.main.engine.gpu_memory_utilization", 1.5, "decode.main.engine.vllm.gpu_memory_utilization"),
    ("decode", {}, "decode"),
    ("channel.kind", "carrier-pigeon", "channel.kind"),
    ("channel.handoff_timeout_s", 0, "channel.handoff_timeout_s"),
    ("placement.queue_timeout_s", -1, "placement.queue_timeout_s"),
    ("ingress.replicas", 0, "ingress.replicas"),
    ("placement.overcommit", 0.9, "placement.overcommit"),
    ("placement.classes", {"chat": {"weight": 0}}, "placement.classes.chat.weight"),
    ("placement.classes", {"chat": {"ttft": 1}}, "placement.classes.chat.ttft"),
    ("decode.main.max_prompt_tokens", 0, "decode.main.max_prompt_tokens"),
    ("channel.link_bytes_per_s", 0, "channel.link_bytes_per_s"),
    # values that do not go together
    ("placement.classes", {"chat": {}}, "placement.default_class 'default' is none of ['chat']"),
    ("placement.default_class", "chat", "placement.default_class 'chat' is none of ['default']"),
    ("placement", {"classes": {"a b": {}}, "default_class": "a b"}, "class name 'a b'"),
    (
        "placement.classes",
        {"default": {"rank": 1}, "night": {"rank": 1, "yields": True}},
        "placement.classes.night: a class that yields has a rank over 1",
    ),
    (
        "placement.classes",
        {"default": {}, "night": {"rank": 1, "yields": True, "tpot_s": 1}},
        "placement.classes.night: a class that yields has no objectives",
    ),
    (
        "ingress",
        {"batches": {}, "server_args": {"api_key": "x"}},
        "with batches API keys come from keys_file or keys_env",
    ),
    ("ingress.batches", {"database_url": "batches.db"}, "ingress.batches.database_url"),
    ("decode.main.classes", ["chat"], "decode-main: classes ['chat'] are not in placement.classes ['default']"),
    (
        "decode.main",
        {"min_prompt_tokens": 9, "max_prompt_tokens": 8},
        "min_prompt_tokens 9 is over max_prompt_tokens 8",
    ),
    ("prefill.min_prompt_tokens", 2048, "prefill: min_prompt_tokens 2048"),
    ("prefill", {"replicas": 1, "autoscaling": {"max_replicas": 2}}, "`replicas` or `autoscaling`"),
    ("scaling", {}, "scaling: no pool has `autoscaling`"),
    ("scaling.interval", 5, "scaling.interval"),
    ("prefill.cost", 0, "prefill.cost"),
    ("decode.main.engine", {"kind": "mock"}, "engine.kind must be the same"),
    ("decode.main.engine.block_size", 64, "engine.block_size must be the same"),
    ("decode.main.engine.max_model_len", 4096, "decode-main: engine.max_model_len 4096"),
    ("decode.main.engine.engine_args.kv_cache_dtype", "fp8", "engine.engine_args.kv_cache_dtype must be the same"),
    ("lora", {"adapters": [{"name": "a"}]}, "lora.adapters.0.path"),
    ("lora", {"max_lora_rank": 7}, "lora.max_lora_rank"),
    ("lora", {"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras 3 is under max_loras 4"),
    ("lora", {"adapters": [{"name": "a", "path": each} for each in "bc"]}, "adapters: ['a'] are there twice"),
    ("lora", {"adapters": [{"name": ModelConfig().name, "path": "/a"}]}, "is the model's own name"),
    ("decode.a b", {"engine": {"kind": "vllm"}}, "'a b'"),
    *(
        (f"prefill.engine.engine_args.{name}", "x", f"prefill: engine.engine_args may not set ['{name}']")
        for name in (
            "block_size",
            "dtype",
            "enable_lora",
            "kv_transfer_config",
            "max_model_len",
            "model",
            "worker_cls",
            "worker_extension_cls",
        )
    ),
]


@pytest.mark.parametrize(("place", "value", "named"), WRONG, ids=[f"{place}={value}" for place, value, _ in WRONG])
def test_what_is_wrong_is_named(place: str, value: Any, named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        BatonConfig.model_validate(changed(place, value))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("autoscaling", "scaling", "named"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, {}, "prefill: autoscaling needs 0 <= min_replicas"),
        ({"min_replicas": "1", "max_replicas": 2}, {}, "prefill: autoscaling needs"),
        ({"min_replicas": 2, "max_replicas": 4, "initial_replicas": 1}, {}, "not 2, 1, 4"),
        ({"min_replicas": 2, "max_replicas": 4}, {"max_cost_per_hour": 2.5}, "less than what the least sizes cost, 3"),
        ({"max_replicas": 4}, {"season_s": 60}, "scaling.season_s is under 20 times"),
        ({"max_replicas": 4}, {"season_s": 86400, "max_cost_per_hour": 2}, None),
    ],
)
def test_scaling_needs_sound_bounds_and_a_budget_for_them(
    autoscaling: dict[str, Any], scaling: dict[str, Any], named: str | None
) -> None:
    whole = changed("prefill.autoscaling", autoscaling) | {"scaling": scaling}
    if named is None:
        BatonConfig.model_validate(whole)
        return
    with pytest.raises(ValidationError, match=named):
        BatonConfig.model_validate(whole)


def test_a_block_size_is_a_power_of_two_in_every_pool() -> None:
    spoilt = vllm_arguments()
    for pool in (spoilt["prefill"], spoilt["decode"]["main"]):
        pool["engine"]["block_size"] = 48
    with pytest.raises(ValidationError, match=r"prefill: engine\.block_size must be a power of two, not 48"):
        BatonConfig.model_validate(spoilt)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_parallelism_may_differ(size: str) -> None:
    BatonConfig.model_validate(changed(f"decode.main.engine.{size}", 2))


def test_an_engine_has_a_gpu_for_every_worker() -> None:
    sizes = VllmEngineConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert sizes.workers == 6
    for gpus in (0, 6, 8):
        PoolConfig(engine=sizes, resources=ResourcesConfig(num_gpus=gpus))
    PoolConfig(engine=VllmEngineConfig(), resources=ResourcesConfig(num_gpus=0.5))
    with pytest.raises(ValidationError, match=r"num_gpus 5 is under the 6 workers"):
        PoolConfig(engine=sizes, resources=ResourcesConfig(num_gpus=5))


def test_pipeline_stages_need_our_own_channel() -> None:
    whole = changed("decode.main.engine.pipeline_parallel_size", 2)
    with pytest.raises(
        ValidationError, match=r"decode-main: pipeline_parallel_size needs channel\.kind nixl, not vllm"
    ):
        BatonConfig.model_validate(whole | {"channel": {"kind": "vllm"}})


def test_vllms_own_connector_takes_no_mock() -> None:
    mocks = {"prefill": {"engine": {"kind": "mock"}}, "decode": {"main": {"engine": {"kind": "mock"}}}}
    with pytest.raises(ValidationError, match=r"channel\.kind vllm .* engine\.kind must be vllm, not mock"):
        BatonConfig.model_validate({**mocks, "channel": {"kind": "vllm"}})


CLASSES = {"chat": {"ttft_s": 2, "tpot_s": 0.1}, "batch": {"rank": 1, "weight": 0.2, "max_queued": 100}}


def test_a_class_needs_a_decode_pool_that_serves_it() -> None:
    whole = changed("placement", {"classes": CLASSES, "default_class": "chat"})
    whole["decode"]["main"]["classes"] = ["chat"]
    with pytest.raises(ValidationError, match="no decode or mixed pool serves class 'batch'"):
        BatonConfig.model_validate(whole)
    whole["decode"]["slow"] = {"engine": {"kind": "vllm"}, "min_prompt_tokens": 256}
    assert BatonConfig.model_validate(whole).placement.classes["batch"].max_queued == 100


def test_batches_may_have_a_pool_of_their_own() -> None:
    whole = changed("ingress", {"batches": {}})
    whole["decode"]["lines"] = {"engine": {"kind": "vllm"}, "classes": ["batch"]}
    assert BatonConfig.model_validate(whole).classes["batch"].yields


@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_a_pool_is_needed(missing: str) -> None:
    spoilt = vllm_arguments()
    del spoilt[missing]
    with pytest.raises(ValidationError, match=missing):
        BatonConfig.model_validate(spoilt)


def test_the_base_to_spoil_is_valid() -> None:
    assert set(BatonConfig.model_validate(vllm_arguments()).pools) == {"prefill", "decode-main"}


def test_sections_are_frozen_and_closed() -> None:
    for section in Section.__subclasses__():
        assert section.model_config["frozen"]
        assert section.model_config["extra"] == "forbid"


@each_config
def test_the_launcher_names_a_wrong_key_and_the_file(path: Path, tmp_path: Path) -> None:
    spoilt = yaml.safe_load(path.read_text())
    args = spoilt["applications"][0]["args"]
    pool = args["prefill"] if "prefill" in args else args["mixed"]["main"]
    pool["enginee"] = {}
    file = tmp_path / path.name
    file.write_text(yaml.safe_dump(spoilt))
    with pytest.raises(LaunchError) as caught:
        load_config(file, None)
    assert ".enginee" in str(caught.value)
    assert str(file) in str(caught.value)


def test_the_section_of_a_pool_is_its_role() -> None:
    pool = {"engine": {"kind": "mock"}}
    config = BatonConfig.model_validate({"prefill": pool, "decode": {"a": pool}, "mixed": {"b": pool}})
    assert {name: role_of(name) for name in config.pools} == {
        "prefill": "prefill",
        "decode-a": "decode",
        "mixed-b": "mixed",
    }


@pytest.mark.parametrize(
    ("pools", "error"),
    [
        ({}, "no pool"),
        ({"prefill": {}}, "a decode pool is missing"),
        ({"decode": {"main": {}}}, "a prefill pool is missing"),
        ({"mixed": {"main": {"strict": True}}}, "mixed-main: strict is for prefill and decode pools"),
        ({"mixed": {"a b": {}}}, "mixed pool name 'a b'"),
    ],
)
def test_pools_that_cannot_serve_are_refused(pools: dict[str, Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        BatonConfig.model_validate(pools)


PHASED: dict[str, Any] = {"kind": "vllm", "phases": True}


@pytest.mark.parametrize("phases", [True, "auto"])
def test_a_mixed_pool_may_work_in_phases(phases: bool | str) -> None:
    asked = {"mixed": {"batch": {"engine": {**PHASED, "phases": phases}}}}
    engine = BatonConfig.model_validate(asked).mixed["batch"].engine
    assert engine.kind == "vllm"
    assert engine.phases == phases


@pytest.mark.parametrize(
    ("pools", "error"),
    [
        ({"prefill": {"engine": PHASED}, "decode": {"main": {}}}, "prefill: phases are for mixed pools"),
        ({"mixed": {"a": {"engine": {**PHASED, "phases": "sometimes"}}}}, "phases"),
        (
            {"mixed": {"a": {"engine": {**PHASED, "engine_args": {"scheduler_cls": "x"}}}}},
            "may not set \\['scheduler_cls'\\] with phases",
        ),
    ],
)
def test_phases_are_for_mixed_pools_and_for_our_scheduler(pools: dict[str, Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        BatonConfig.model_validate(pools)


@pytest.mark.parametrize("pools", [{"mixed": {"main": {}}}, {"mixed": {"main": {}}, "prefill": {}}])
def test_mixed_pools_need_no_others(pools: dict[str, Any]) -> None:
    assert BatonConfig.model_validate(pools).pools


# ---- the application


def test_the_builder_is_annotated_with_the_class_itself() -> None:
    """Serve validates `args` only by a class: an annotation that is a string is skipped in silence."""
    (parameter,) = inspect.signature(build).parameters.values()
    assert parameter.annotation is BatonConfig
    assert typing.get_type_hints(build) == {"config": BatonConfig, "return": Application}


def test_serve_refuses_wrong_arguments_by_name() -> None:
    """As `serve run` and `serve deploy` do it."""
    with pytest.raises(ValidationError, match=r"decode\.main\.engine\.vllm\.batch"):
        call_builder(build, changed("decode.main.engine.batch", 1))


@each_config
def test_the_graph(path: Path) -> None:
    config = BatonConfig.model_validate(arguments(path))
    ray_runs = ray.is_initialized()
    application = call_builder(build, arguments(path))
    found = deployments(application)
    assert ray.is_initialized() == ray_runs, "building starts nothing"
    assert application._bound_deployment.name == "ingress"
    assert set(found) == {"ingress", "session-manager", *config.pools}
    assert found["session-manager"].num_replicas == 1, "the ledger has one owner"
    assert found["ingress"].num_replicas == config.ingress.count(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("cores", "ingresses"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 2), (23, 2), (24, 3), (64, 8), (512, 8)]
)
def test_a_machine_with_cores_to_spare_has_more_ingresses(
    cores: int, ingresses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    ingress = deployments(build(BatonConfig.model_validate(vllm_arguments())))["ingress"]
    assert ingress.num_replicas == ingresses
    assert BatonConfig.model_validate(ingress.init_args[0]).ingress.replicas == ingresses, "each knows of the others"
    assert IngressConfig(replicas=5).count(cores) == 5


@each_config
def test_each_pool_takes_what_its_section_says(path: Path) -> None:
    config = BatonConfig.model_validate(arguments(path))
    found = deployments(build(config))
    for name, pool in config.pools.items():
        options, resources = found[name].ray_actor_options, pool.resources
        assert options["num_cpus"] == resources.num_cpus
        assert options["num_gpus"] == resources.num_gpus
        assert options["resources"] == resources.custom
        assert options.get("accelerator_type") == resources.accelerator_type
        assert options["runtime_env"]["env_vars"].items() >= pool.env.items()
        assert found[name].max_ongoing_requests == NO_LIMIT, "admission limits sessions, and nothing else does"
        scaling = found[name]._deployment_config.autoscaling_config
        if pool.autoscaling is None:
            assert scaling is None
            assert found[name].num_replicas == (pool.replicas or 1)
        elif config.scaling is not None:
            assert (scaling.min_replicas, scaling.max_replicas, scaling.initial_replicas) == bounds_of(pool)
            delays = scaling.upscale_delay_s, scaling.downscale_delay_s, scaling.downscale_to_zero_delay_s
            assert delays == (0, 0, 0), "the plan has waited"
            assert scaling.policy.policy_function == "deployments.serve.scaling:stay", (
                "the application's policy decides"
            )
        else:
            assert {key: getattr(scaling, key) for key in pool.autoscaling} == pool.autoscaling
            assert scaling.policy.policy_function == "deployments.serve.scaling:by_sessions"


@each_config
def test_an_update_starts_successors_first_and_everything_has_its_time_to_end(path: Path) -> None:
    config = BatonConfig.model_validate(arguments(path))
    found = deployments(build(config))
    for name, deployment in found.items():
        options = deployment._deployment_config
        surge = config.pools[name].surge_percent if name in config.pools else 1
        assert options.max_surge_percent == surge > 0
        if name != "session-manager":
            drain_s = config.placement.drain_s if name in config.pools else config.ingress.drain_s
            assert options.graceful_shutdown_timeout_s > drain_s, "Serve kills what has not ended by then"


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if path.stem.startswith(("cpu", "mock"))], ids=lambda p: p.stem
)
def test_a_configuration_for_cpus_fits_two_of_them_with_a_successor_of_everything(path: Path) -> None:
    """`serve run` starts a Ray with the machine's CPUs. Serve's controller and proxy ask for none."""
    asked = 0.0
    for deployment in deployments(build(BatonConfig.model_validate(arguments(path)))).values():
        replicas = with_surge(deployment.num_replicas, deployment._deployment_config.max_surge_percent)
        asked += replicas * deployment.ray_actor_options["num_cpus"]
    assert 0 < round(asked, 4) <= 2


def test_pools_of_one_application_may_be_unlike() -> None:
    whole = vllm_arguments()
    whole["decode"]["big"] = {
        "autoscaling": {"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 7},
        "resources": {"num_gpus": 2, "accelerator_type": "H100", "custom": {"rack": 1}},
        "engine": {"kind": "vllm", "max_num_seqs": 2},
        "env": {"OMP_NUM_THREADS": "3"},
    }
    big = deployments(build(BatonConfig.model_validate(whole)))["decode-big"]
    assert big.ray_actor_options["accelerator_type"] == "H100"
    assert big.ray_actor_options["num_gpus"] == 2
    assert big.ray_actor_options["resources"] == {"rack": 1}
    variables = big.ray_actor_options["runtime_env"]["env_vars"]
    assert variables["OMP_NUM_THREADS"] == "3", "the pool's own wins"
    assert "TORCH_COMPILE_DISABLE" not in variables, "on CPU only"
    assert environment(BatonConfig.model_validate(whole), "prefill")["TORCH_COMPILE_DISABLE"] == "1"
    whole["prefill"]["engine"]["enforce_eager"] = False
    compiled = environment(BatonConfig.model_validate(whole), "prefill")
    assert "TORCH_COMPILE_DISABLE" not in compiled
    assert compiled["VLLM_USE_AOT_COMPILE"] == "0", "vLLM 0.32 cannot load it on CPU"
    assert "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS" not in compiled
    whole["prefill"]["engine"] |= {"host_kv_bytes": 1 << 30, "tensor_parallel_size": 2}
    tiered = environment(BatonConfig.model_validate(whole), "prefill")
    assert int(tiered["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"]) > 10, "the longest that tiers drain"
    scaling = big._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 7)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_serve_writes_its_lines_in_the_format_of_the_logs(log_format: str) -> None:
    whole = vllm_arguments() | {"log_format": log_format, "ingress": {"stored_responses": {}}}
    for name, deployment in deployments(build(BatonConfig.model_validate(whole))).items():
        said = deployment._deployment_config.logging_config
        if name == "ingress":
            assert said["enable_access_log"] is False, "it has one of its own"
        elif log_format == "text":
            assert said is None, "what the Serve file says counts"
            continue
        assert said["encoding"] == log_format.upper()
