"""What every peer of a run is started with: one model, one set of engine arguments, one set of thread settings.

They are read from a Baton configuration with vLLM engines, so that a figure is about the peers and not about their
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.schema import BatonConfig, VllmEngineConfig
from deployments.engine.build import checkpoint, environment
from load_tests.harness.application import ROOT

DEFAULT_CONFIG = ROOT / "configs" / "cpu-1p1d.yaml"


@dataclass(frozen=True)
class Settings:
    """`serve`: the `serve run` file of Baton. `path`: the checkpoint. `arguments`: of every engine, by vLLM's names in
    Python. `environment`: of every engine's processes."""

    serve: Mapping[str, Any]
    name: str
    path: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]


def settings(file: Path | None = None) -> Settings:
    """From a configuration; none: `configs/cpu-1p1d.yaml` with the default placement, which splits what gains by it.

    The peers' engines are alike and take the larger of prefill's and decode's limits of sequences. The chunk of a step
    is not among the arguments: a role of Baton has its own, a peer vLLM's default.
    """
    serve = yaml.safe_load((file or DEFAULT_CONFIG).read_text())
    if file is None:
        serve["applications"][0]["args"].pop("placement", None)
    config = BatonConfig.model_validate(serve["applications"][0]["args"])
    engines = [pool.engine for pool in config.pools.values() if isinstance(pool.engine, VllmEngineConfig)]
    if len(engines) != len(config.pools):
        raise ValueError("the peers run vLLM: every pool's engine.kind must be vllm")
    first = engines[-1]
    arguments = {
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_model_len,
        "block_size": first.block_size,
        "enforce_eager": first.enforce_eager,
        "max_num_seqs": max(engine.max_num_seqs for engine in engines),
        "kv_cache_memory_bytes": first.kv_cache_memory_bytes,
        **first.engine_args,
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    return Settings(serve, config.model.name, checkpoint(config), given, environment(config, "prefill"))
