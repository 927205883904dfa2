"""The devices that a plan may choose from, with what a replica on them costs an hour.

**The default costs are plain numbers to replace**: 2.5 for an H100 and 3.5 for an H200, in any one unit. Only their
ratio decides. Speeds are those of `load_tests/simulator/profiles.py`: an 8B model in bfloat16, one device a replica.

A file brings devices of one's own, as YAML or JSON:

    h100: {cost: 2.2}
    mine:
      cost: 0.8
      steps: {base_s: 0.01, prefill_token_s: 5.0e-5, prefill_context_s: 1.0e-9, sequence_s: 2.0e-5, context_s: 2.0e-8}
      kv_tokens: 120000
      kv_bytes_per_token: 131072

`steps` is what a session manager has learned of a pool: `predictions.steps` in `/baton/status`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deployments.step_cost import Coefficients
from load_tests.simulator.profiles import H100, H200, NIC_BYTES_PER_S, Profile

COSTS = {"h100": 2.5, "h200": 3.5}
KNOWN = {"h100": H100, "h200": H200}
LAYERS = 32


class DeviceError(Exception):
    """A device is not known, or the file does not say all of it."""


@dataclass(frozen=True, slots=True)
class Device:
    """`cost`: of one replica for an hour. `kv_tokens`: what its KV memory holds. `sequences`: that it runs at once."""

    name: str
    cost: float
    profile: Profile
    sequences: int = 256

    @property
    def steps(self) -> Coefficients:
        return self.profile.steps

    @property
    def kv_tokens(self) -> int:
        return int(self.profile.kv_bytes / self.profile.kv_bytes_per_token)


def known_devices() -> dict[str, Device]:
    """The devices that need no file."""
    return {name: Device(name, COSTS[name], profile) for name, profile in KNOWN.items()}


def read_devices(file: Path) -> dict[str, Device]:
    """The devices of a file, and no others. Raises DeviceError."""
    try:
        found = yaml.safe_load(file.read_text())
        return {str(name): _device(str(name), row) for name, row in found.items()}
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DeviceError(f"{file}: {error!r}") from error


def _device(name: str, row: dict[str, Any]) -> Device:
    cost = float(row["cost"])
    if cost <= 0:
        raise ValueError(f"{name}: a cost of {cost:g}")
    sequences = int(row.get("sequences", 256))
    if "steps" not in row:
        if name not in KNOWN:
            raise ValueError(f"{name}: `steps` is missing; without it there are {', '.join(KNOWN)}")
        return Device(name, cost, KNOWN[name], sequences)
    steps = Coefficients(**{key: float(value) for key, value in row["steps"].items()})
    per_token = float(row["kv_bytes_per_token"])
    nic = float(row.get("nic_bytes_per_s", NIC_BYTES_PER_S))
    layers = int(row.get("layers", LAYERS))
    return Device(
        name, cost, Profile(name, steps, steps, row["kv_tokens"] * per_token, per_token, layers, nic, "h100"), sequences
    )
