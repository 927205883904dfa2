"""The model's preparation in a process of its own: how it is called, and what its failure says."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from app.launch.config import LaunchError
from app.launch.model import prepare_model
from configs.schema import BatonConfig
from tests.app.launch.configurations import ARGUMENTS


def config(**model: str) -> BatonConfig:
    return BatonConfig.model_validate({**ARGUMENTS, "model": model})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, Any]]]:
    """The commands that are run: each prints a path and ends with status 0."""
    made: list[tuple[list[str], dict[str, Any]]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        made.append((command, options))
        return subprocess.CompletedProcess(command, 0, stdout="/checkpoint\n")

    monkeypatch.setattr("app.launch.model.subprocess.run", run)
    return made


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ({"source": "/model"}, ["--source", "/model"]),
        ({"source": "/model", "cache_dir": "/cache"}, ["--source", "/model", "--cache-dir", "/cache"]),
    ],
    ids=["no cache", "cache"],
)
def test_the_checkpoint_is_what_the_process_prints(
    calls: list[tuple[list[str], dict[str, Any]]], model: dict[str, str], arguments: list[str]
) -> None:
    assert prepare_model(config(**model)) == "/checkpoint"
    ((command, options),) = calls
    assert command == [sys.executable, "-m", "deployments.checkpoint.prepare", *arguments]
    assert options["start_new_session"], "a Ctrl-C in the terminal does not reach it"


def test_a_preparation_that_fails_or_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, stdout="")

    def hangs(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("app.launch.model.subprocess.run", fails)
    with pytest.raises(LaunchError, match="could not be prepared"):
        prepare_model(config())
    monkeypatch.setattr("app.launch.model.subprocess.run", hangs)
    with pytest.raises(LaunchError, match="more than 15 minutes"):
        prepare_model(config())
