"""Import rules for the standard library, which import-linter does not see. The rest is in pyproject.toml."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PURE = (
    "deployments/fleet/fleet.py",
    "deployments/policy",
    "deployments/cluster/recovery.py",
    "deployments/cluster/session.py",
    "deployments/cluster/timings.py",
    "transfer/memory/blocks.py",
    "transfer/control/handoff.py",
    "transfer/memory/layout.py",
)
# Time, randomness, ids, concurrency and the outside world are arguments of a decision, never fetched by it.
IMPURE = frozenset(
    {
        *("asyncio", "concurrent", "multiprocessing", "queue", "selectors", "subprocess", "threading"),
        *("datetime", "time", "random", "secrets", "uuid"),
        *("http", "os", "signal", "socket", "urllib"),
        *("httpx", "nixl", "ray", "starlette", "torch", "vllm", "zmq"),
    }
)


def pure_files() -> list[Path]:
    return [
        file
        for name in PURE
        for file in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py")))
    ]


def imported_roots(source: str) -> Iterator[str]:
    """The top-level packages that a module imports anywhere, functions and type checking included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("file", pure_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_decisions_take_time_and_chance_as_arguments(file: Path) -> None:
    assert not IMPURE & set(imported_roots(file.read_text()))


def test_the_check_sees_imports_inside_functions() -> None:
    source = "import os.path\ndef f():\n    from time import monotonic\nfrom . import random\n"
    assert set(imported_roots(source)) == {"os", "time"}
