"""The default configuration, typed."""

from __future__ import annotations

import yaml

from configs.schema import BatonConfig
from load_tests.harness.application import ROOT


def cpu_config() -> BatonConfig:
    serve = yaml.safe_load((ROOT / "configs" / "cpu.yaml").read_text())
    return BatonConfig.model_validate(serve["applications"][0]["args"])
