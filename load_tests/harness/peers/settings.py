"""What every peer of a run is started with: one model, one set of engine arguments, one set of thread settings.

They come from a Baton configuration with vLLM engines. So a measurement compares the peers and not their arguments.
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
    """What every peer is started with.

    `serve`: Baton's `serve run` file. `path`: the checkpoint. `arguments`: those of every engine, by vLLM's names in
    Python. `environment`: the variables of every engine's processes.
    """

    serve: Mapping[str, Any]
    name: str
    path: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]


def settings(file: Path | None = None) -> Settings:
    """The settings from a configuration file.

    Without a file they come from `configs/cpu-1p1d.yaml` with the default placement, which splits the requests that
    gain from it. The peers' engines are alike. Their limit of sequences is the larger of prefill's and decode's. The
    chunk of a step is not among the arguments: each role of Baton has its own, and a peer has vLLM's default.
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
    return Settings(serve, config.model.name, checkpoint(config), given, environment(config, next(iter(config.pools))))
