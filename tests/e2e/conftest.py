"""One real cluster for the whole test session, and what a plain engine says to the same prompts."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.checkpoint.prepare import DEFAULT_CACHE_DIR, resolve
from deployments.engine.build import environment
from deployments.engine.names import names_until_started
from load_tests.harness.application import ROOT
from tests.e2e.adapters import ADMIN_KEY, NAMES, made
from tests.e2e.cluster import Cluster, started

LENGTHS = (1, 2, 127, 128, 129, 255, 256, 257, 600, 1800)
ANSWER_TOKENS, LONG_ANSWER_TOKENS = 12, 144
CROWD = 16
TUNED_QUESTIONS = ("tuned-129", "tuned-600", "recovery-long")


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that no other seed's prompt begins with."""
    generator = random.Random(seed)
    return [generator.randrange(100, 40_000) for _ in range(tokens)]


def questions() -> dict[str, tuple[list[int], int]]:
    """Every prompt whose answer the tests compare with the plain engine's."""
    lengths = {f"length-{n}": (prompt(n, n), ANSWER_TOKENS) for n in LENGTHS}
    crowd = {f"crowd-{i}": (prompt(10_000 + i, 20 + 13 * i), ANSWER_TOKENS) for i in range(CROWD)}
    recovery = {f"recovery-{n}": (prompt(30_000 + n, n), ANSWER_TOKENS) for n in (200, 700, 1500)}
    tuned = {f"tuned-{n}": (prompt(40_000 + n, n), ANSWER_TOKENS) for n in (129, 600)}
    return lengths | crowd | recovery | tuned | {"recovery-long": (prompt(30_000, 300), LONG_ANSWER_TOKENS)}


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of the LoRA adapters, by name."""
    return made(tmp_path_factory.mktemp("adapters"), Path(resolve("bundled:smollm2-135m-instruct", DEFAULT_CACHE_DIR)))


@pytest.fixture(scope="session")
def reference(adapters: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The plain engine's answers, by question, and those with an adapter by adapter and question.

    Its process has ended when this returns. The first of several test processes asks it, and the others wait.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    told = shared / "answers.json"
    with (shared / "answers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            _ask_a_plain_engine(adapters, tmp_path_factory.mktemp("reference"), told)
    answers: dict[str, list[int]] = json.loads(told.read_text())
    return answers


def _ask_a_plain_engine(adapters: dict[str, str], directory: Path, told: Path) -> None:
    """Write the answers to all questions into `told`."""
    asked, written = directory / "questions.json", directory / "answers.json"
    plain = {name: (tokens, limit, "") for name, (tokens, limit) in questions().items()}
    tuned = {
        f"{name} {question}": (*questions()[question], folder)
        for name, folder in adapters.items()
        for question in TUNED_QUESTIONS
    }
    asked.write_text(json.dumps(plain | tuned))
    model = str(resolve("bundled:smollm2-135m-instruct", DEFAULT_CACHE_DIR))
    command = [sys.executable, str(Path(__file__).parent / "reference.py"), model, str(asked), str(written)]
    from tests.e2e.settings import cpu_config

    with names_until_started():
        variables = os.environ | environment(cpu_config(), "prefill")
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stderr[-4000:]
    shutil.copy(written, told)


@pytest.fixture(scope="session")
def baton(
    reference: dict[str, list[int]], adapters: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """configs/cpu.yaml, running. Every request is split and stays where it is, so that tests know where it is.

    Responses are stored, and logs are JSON with a line of each session from each of its processes. The first adapter is
    of the configuration; the second one can be loaded.
    """
    name = NAMES[0]
    more: dict[str, Any] = {
        "lora": {"adapters": [{"name": name, "path": adapters[name]}], "max_loras": 2},
        "ingress": {"admin_key": ADMIN_KEY, "stored_responses": {}},
        "log_format": "json",
        "log_level": "info",
    }
    with started("cpu.yaml", tmp_path_factory.mktemp("baton"), more=more, split="always", rebalance=False) as cluster:
        yield cluster
