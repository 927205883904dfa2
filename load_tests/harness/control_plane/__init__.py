"""A control plane in one process, for its tests and for the benchmark `chaos`. Use it by the names listed here."""

from load_tests.harness.control_plane.fleet import (
    BLOCKS,
    LARGE,
    MAX_MODEL_LEN,
    PATIENCE_S,
    PREFILL,
    REPLICAS,
    SMALL,
    WAIT_S,
    config,
    until,
)
from load_tests.harness.control_plane.gates import GatedEngine, GatedPlane
from load_tests.harness.control_plane.in_process import InProcess, in_process
from load_tests.harness.control_plane.ingress import Answer

__all__ = [
    "BLOCKS",
    "LARGE",
    "MAX_MODEL_LEN",
    "PATIENCE_S",
    "PREFILL",
    "REPLICAS",
    "SMALL",
    "WAIT_S",
    "Answer",
    "GatedEngine",
    "GatedPlane",
    "InProcess",
    "config",
    "in_process",
    "until",
]
