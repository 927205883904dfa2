"""Import rules for the standard library, which import-linter does not see. The other rules are in pyproject.toml."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PURE = (
    "deployments/cluster/recovery.py",
    "deployments/cluster/session.py",
    "deployments/cluster/timings.py",
    "deployments/fleet",
    "deployments/policy",
    "transfer/channel/pacing.py",
    "transfer/control/handoff.py",
    "transfer/memory",
    "transfer/store/admission.py",
    "transfer/store/eviction.py",
    "transfer/store/slots.py",
)
# The two planes move the bytes.
NOT_PURE = frozenset({"transfer/memory/in_process_plane.py", "transfer/memory/nixl_plane.py"})
# Time, randomness, ids, concurrency and the outside world are arguments of a decision, never fetched by it.
IMPURE = frozenset(
    {
        *("asyncio", "concurrent", "multiprocessing", "queue", "selectors", "subprocess", "threading"),
        *("datetime", "time", "random", "secrets", "uuid"),
        *("http", "os", "signal", "socket", "urllib"),
        *("httpx", "nixl", "ray", "starlette", "torch", "vllm", "zmq"),
    }
)


def pure_files() -> list[str]:
    """Paths from the root. A name in `PURE` that is not there any more is an error, and not a rule without effect."""
    files: set[str] = set()
    for name in PURE:
        found = [ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py"))
        assert found, name
        files.update(str(file.relative_to(ROOT)) for file in found)
    return sorted(files - NOT_PURE)


def imported_roots(source: str) -> Iterator[str]:
    """The top-level packages that a module imports anywhere, functions and type checking included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("file", pure_files())
def test_decisions_take_time_and_chance_as_arguments(file: str) -> None:
    assert not IMPURE & set(imported_roots((ROOT / file).read_text()))


def test_the_check_sees_imports_inside_functions() -> None:
    source = "import os.path\ndef f():\n    from time import monotonic\nfrom . import random\n"
    assert set(imported_roots(source)) == {"os", "time"}
