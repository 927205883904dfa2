"""What hostile but valid requests do to the server: answers, hangs and leaks.

`make bench NAME=fuzz`, or with `ARGS="--cases 1000 --real-cases 0"`. Progress and every fault go to stderr; the last
line of stdout is one JSON object.

**What runs.** `load_tests/fuzz` makes bodies for the eight routes that take one, by a seed: values at their bounds and
just over them, deep and recursive schemas and grammars, many answers, odd text, large bodies. One in eight has a field
taken away or replaced. Three in a hundred clients leave. `mock`: the real ingress application (the gateway, vLLM's
server, a cluster core) over the real control plane with mock engines, in this process. `real`: `configs/cpu.yaml` as
`make serve` starts it, asked over HTTP.

**What is measured.** `cases`. `status_5xx`: answers with such a status or, in a stream, such an error, except a 503
with `no_replica_available`, which `no_capacity` counts. `hung`: no answer within two minutes. `malformed`: neither an
answer nor an error in the API's shape. `broken`: the connection broke. `left`: the client left. `leaked`: what is open
at the end, by name: sessions, promises, blocks, tasks, threads and descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from configs.schema import BatonConfig
from load_tests.fuzz.run import Findings, run
from load_tests.harness.application import ROOT, Application
from load_tests.harness.control_plane import config, in_process
from load_tests.harness.control_plane.server import served
from load_tests.harness.machine import conditions

CONFIG = ROOT / "configs" / "cpu.yaml"
WARM_UP_CASES, SETTLE_S = 200, 300.0


def settings() -> BatonConfig:
    """The mock cluster's configuration, with short answers where a case says no length."""
    made = config(scale=4)
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    ingress = made.ingress.model_copy(update={"default_max_tokens": 8, "server_args": tools})
    return made.model_copy(update={"ingress": ingress})
