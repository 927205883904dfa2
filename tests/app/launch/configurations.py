"""A Serve configuration in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ARGUMENTS = {"prefill": {"engine": {"kind": "mock"}}, "decode": {"main": {"engine": {"kind": "mock"}}}}


def write(path: Path, **changes: Any) -> Path:
    application = {"name": "baton", "route_prefix": "/", "import_path": "app.main:build", "args": ARGUMENTS}
    config = {"proxy_location": "HeadOnly", "applications": [application]} | changes
    path.write_text(yaml.safe_dump(config))
    return path
