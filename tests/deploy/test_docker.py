"""The Dockerfiles: hadolint, what they copy and install, and that they do not run as root."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "docker").iterdir())
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.suffix)


def test_there_is_one_for_each_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {file.suffix.removeprefix(".") for file in FILES} == extras.keys() - {"dev"}


@each_file
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    checked = subprocess.run([hadolint, file], capture_output=True, text=True, check=False, timeout=60)
    assert (checked.returncode, checked.stdout) == (0, "")


@each_file
def test_it_installs_its_extra_and_copies_what_the_builder_is_given(file: Path) -> None:
    text = file.read_text()
    assert f"--extra {file.suffix.removeprefix('.')}" in text
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name.rstrip("/") for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()}
    assert copied <= allowed
    assert [name for name in copied if not (ROOT / name).exists()] == []
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in found} <= copied


@each_file
def test_it_runs_as_the_user_of_the_manifests_and_says_whether_it_serves(file: Path) -> None:
    text = file.read_text()
    assert re.findall(r"^USER (\d+)$", text, re.MULTILINE) == ["1000"]
    assert "/health" in text.split("HEALTHCHECK")[1]
    config = re.findall(r"configs/[\w-]+\.yaml", text)
    assert config
    assert [name for name in config if not (ROOT / name).is_file()] == []
