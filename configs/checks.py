"""Rules of a configuration that concern several fields at once. Each raises ValueError with the field's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import BatonConfig, IngressConfig, LoraConfig, PoolConfig, VllmEngineConfig

DEFAULT_CLASS = "default"
"""The only priority class of a configuration that names none. It has no objectives."""

_SET_BY_BATON = {
    "distributed_executor_backend",
    "dtype",
    "enable_lora",
    "enable_prefix_caching",
    "kv_events_config",
    "kv_transfer_config",
    "max_cpu_loras",
    "max_lora_rank",
    "max_loras",
    "model",
    "worker_cls",
    "worker_extension_cls",
}
"""vLLM arguments that `engine_args` may not hold."""


def check_pool(pool: PoolConfig) -> None:
    """Check the rules between the fields of one pool. Raises ValueError."""
    if pool.replicas is not None and pool.autoscaling is not None:
        raise ValueError("give `replicas` or `autoscaling`, not both")
    if pool.max_prompt_tokens is not None and pool.max_prompt_tokens < pool.min_prompt_tokens:
        raise ValueError(
            f"min_prompt_tokens {pool.min_prompt_tokens} is over max_prompt_tokens {pool.max_prompt_tokens}"
        )
    workers = pool.engine.workers if pool.engine.kind == "vllm" else 1
    if workers > 1 and 0 < pool.resources.num_gpus < workers:
        raise ValueError(
            f"resources.num_gpus {pool.resources.num_gpus:g} is under the {workers} workers of the engine: "
            "tensor_parallel_size times pipeline_parallel_size"
        )


def check_lora(lora: LoraConfig) -> None:
    """Check the rules between the fields of the adapters. Raises ValueError."""
    if lora.max_cpu_loras < lora.max_loras:
        raise ValueError(f"max_cpu_loras {lora.max_cpu_loras} is under max_loras {lora.max_loras}")
    names = [adapter.name for adapter in lora.adapters]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"adapters: {sorted(twice)} are there twice")


def check_application(config: BatonConfig) -> None:
    """Check every rule between the sections. Raises ValueError."""
    for role, pools in (("decode", config.decode), ("mixed", config.mixed)):
        for name in pools:
            _check_name(name, f"{role} pool name")
    _check_roles(config)
    _check_engines(config)
    _check_classes(config)
    if config.placement.spread and (not config.placement.fetch or config.channel.kind == "vllm"):
        raise ValueError("placement.spread needs placement.fetch, and Baton's own channel")
    _check_scaling(config)
    _check_keys(config.ingress)
    adapters = config.lora.adapters if config.lora else ()
    if config.model.name in {adapter.name for adapter in adapters}:
        raise ValueError(f"lora.adapters: {config.model.name!r} is the model's own name")
    for name, pool in config.pools.items():
        if pool.min_prompt_tokens >= config.model.max_model_len:
            raise ValueError(
                f"{name}: min_prompt_tokens {pool.min_prompt_tokens}, and the model takes "
                f"{config.model.max_model_len} tokens of prompt and answer"
            )


def _check_name(name: str, what: str) -> None:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"{what} {name!r}: letters, digits, - and _ only")


def _check_roles(config: BatonConfig) -> None:
    """Check that there are pools for both sides of a request."""
    if not config.pools:
        raise ValueError("no pool: give `prefill` and `decode`, or `mixed`")
    for name, pool in config.mixed.items():
        if pool.strict:
            raise ValueError(f"mixed-{name}: strict is for prefill and decode pools; a mixed pool does both")
    if not config.mixed and (config.prefill is None or not config.decode):
        raise ValueError(
            f"a {'decode' if config.prefill else 'prefill'} pool is missing; without `mixed` pools give both"
        )


def _check_engines(config: BatonConfig) -> None:
    """Check that the pools' engines can exchange KV blocks."""
    engines = {name: pool.engine for name, pool in config.pools.items()}
    for attribute in ("kind", "block_size"):
        values = {name: getattr(engine, attribute) for name, engine in engines.items()}
        if len(set(values.values())) > 1:
            raise ValueError(f"engine.{attribute} must be the same in every pool, not {values}")
    vllm = {name: engine for name, engine in engines.items() if engine.kind == "vllm"}
    for name, engine in vllm.items():
        _check_vllm(name, engine, config.model.max_model_len)
        _check_tiers(name, engine, config.channel.kind)
        if engine.pipeline_parallel_size > 1 and config.channel.kind != "nixl":
            raise ValueError(f"{name}: pipeline_parallel_size needs channel.kind nixl, not {config.channel.kind}")
        _check_phases(name, engine)
    if config.channel.kind == "vllm" and vllm.keys() != engines.keys():
        raise ValueError("channel.kind vllm is vLLM's own connector: every pool's engine.kind must be vllm, not mock")
    dtypes = {name: engine.engine_args.get("kv_cache_dtype", "auto") for name, engine in vllm.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(
            f"engine.engine_args.kv_cache_dtype must be the same in every pool to exchange KV, not {dtypes}"
        )


def _check_tiers(name: str, engine: VllmEngineConfig, channel: str) -> None:
    """Check that an engine can have the KV tiers that it is given."""
    if not engine.host_kv_bytes and engine.disk_kv is None:
        return
    if channel != "nixl":
        raise ValueError(f"{name}: host_kv_bytes and disk_kv need channel.kind nixl, not {channel}")
    algorithm = engine.engine_args.get("prefix_caching_hash_algo", "sha256")
    if not str(algorithm).startswith("sha256"):
        raise ValueError(f"{name}: host_kv_bytes and disk_kv name blocks by sha256, not by {algorithm}")


def _check_phases(name: str, engine: VllmEngineConfig) -> None:
    """Check that an engine that works in phases does so alone with its requests, and with Baton's scheduler."""
    if not engine.phases:
        return
    if not name.startswith("mixed-"):
        raise ValueError(f"{name}: phases are for mixed pools: a prefill or decode pool has one phase only")
    if taken := {"async_scheduling", "scheduler_cls"} & engine.engine_args.keys():
        raise ValueError(
            f"{name}: engine.engine_args may not set {sorted(taken)} with phases: Baton sets the scheduler"
        )


def _check_classes(config: BatonConfig) -> None:
    """Check that every class that is named exists, and that a decode pool serves it."""
    placement = config.placement
    known = config.classes.keys()
    for name in known:
        _check_name(name, "placement.classes: class name")
    if placement.default_class not in (placement.classes or {DEFAULT_CLASS}):
        raise ValueError(f"placement.default_class {placement.default_class!r} is none of {sorted(known)}")
    _check_yielding(config)
    for name, pool in config.pools.items():
        if unknown := set(pool.classes) - known:
            raise ValueError(f"{name}: classes {sorted(unknown)} are not in placement.classes {sorted(known)}")
    for name in known:
        decoding = [*config.decode.values(), *config.mixed.values()]
        if not any(not pool.classes or name in pool.classes for pool in decoding):
            raise ValueError(f"no decode or mixed pool serves class {name!r}")


def _check_yielding(config: BatonConfig) -> None:
    """Check that a class that yields promises nothing, and goes after all that do not yield."""
    classes = config.placement.classes
    others = max((each.rank for each in classes.values() if not each.yields), default=-1)
    for name, each in classes.items():
        if not each.yields:
            continue
        if each.rank <= others:
            raise ValueError(f"placement.classes.{name}: a class that yields has a rank over {others}, that of another")
        if each.ttft_s is not None or each.tpot_s is not None:
            raise ValueError(f"placement.classes.{name}: a class that yields has no objectives")


def _check_keys(ingress: IngressConfig) -> None:
    """Check that API keys come from one place."""
    given = [name for name in ("keys_file", "keys_env") if getattr(ingress, name) is not None]
    if "api_key" in ingress.server_args:
        given.append("server_args.api_key")
    if len(given) > 1:
        raise ValueError(f"ingress: API keys come from one place, not from {' and '.join(given)}")
    if ingress.batches is not None and "api_key" in ingress.server_args:
        raise ValueError("ingress: with batches API keys come from keys_file or keys_env, not from server_args.api_key")
    if ingress.keys_file is not None and not ingress.keys_file.is_absolute():
        raise ValueError(f"ingress.keys_file must be an absolute path, not {str(ingress.keys_file)!r}")


def bounds_of(pool: PoolConfig) -> tuple[int, int, int]:
    """The least, the most and the first number of a pool's replicas, with Serve's names and defaults."""
    if pool.autoscaling is None:
        fixed = pool.replicas or 1
        return fixed, fixed, fixed
    least = pool.autoscaling.get("min_replicas", 1)
    most = pool.autoscaling.get("max_replicas", 1)
    first = pool.autoscaling.get("initial_replicas")
    return least, most, least if first is None else first


def _check_scaling(config: BatonConfig) -> None:
    """Check that a plan can be made: pools that may change, sound bounds, a budget for the least sizes."""
    scaling = config.scaling
    if scaling is None:
        return
    pools = config.pools
    if not any(pool.autoscaling for pool in pools.values()):
        raise ValueError("scaling: no pool has `autoscaling`, so there is nothing to scale")
    for name, pool in pools.items():
        least, most, first = bounds_of(pool)
        is_whole = all(isinstance(number, int) and not isinstance(number, bool) for number in (least, most, first))
        if not is_whole or not 0 <= least <= first <= most or most < 1:
            raise ValueError(
                f"{name}: autoscaling needs 0 <= min_replicas <= initial_replicas <= max_replicas, not "
                f"{least}, {first}, {most}"
            )
    cost = sum(pool.cost * bounds_of(pool)[0] for pool in pools.values())
    if scaling.max_cost_per_hour is not None and cost > scaling.max_cost_per_hour:
        raise ValueError(
            f"scaling.max_cost_per_hour {scaling.max_cost_per_hour:g} is less than what the least sizes cost, {cost:g}"
        )
    if scaling.season_s is not None and scaling.season_s < 20 * scaling.interval_s:
        raise ValueError("scaling.season_s is under 20 times scaling.interval_s: so short a season cannot be learned")


def _check_vllm(pool: str, engine: VllmEngineConfig, max_model_len: int) -> None:
    if engine.block_size & (engine.block_size - 1):
        raise ValueError(f"{pool}: engine.block_size must be a power of two, not {engine.block_size}")
    if engine.max_model_len is not None and engine.max_model_len > max_model_len:
        raise ValueError(f"{pool}: engine.max_model_len {engine.max_model_len} is over the model's {max_model_len}")
    owned = _SET_BY_BATON | type(engine).model_fields.keys()
    if taken := owned & engine.engine_args.keys():
        raise ValueError(f"{pool}: engine.engine_args may not set {sorted(taken)}: Baton sets them")
