"""A configuration, and Ray's file that names the current cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.launch.current_cluster import current_cluster_file
from app.launch.ports import free_port
from tests.app.launch.configurations import write


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    return write(tmp_path / "config.yaml", http_options={"host": "0.0.0.0", "port": 9000, "root_path": "/x"})


@pytest.fixture
def current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, in a folder of this test's own; it names a cluster that has ended."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    file = current_cluster_file()
    file.parent.mkdir()
    file.write_text(f"127.0.0.1:{free_port('127.0.0.1')}")
    return file
