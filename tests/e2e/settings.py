"""The default configuration, typed."""

from __future__ import annotations

import yaml

from configs.schema import BatonConfig
from tests.e2e.cluster import ROOT


def cpu_config() -> BatonConfig:
    serve = yaml.safe_load((ROOT / "configs" / "cpu.yaml").read_text())
    return BatonConfig.model_validate(serve["applications"][0]["args"])
