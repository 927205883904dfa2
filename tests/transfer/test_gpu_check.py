"""`transfer/gpu_check.py`: a small run on main memory, its figures, and that it sees what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from transfer.check.shape import CheckFailed
from transfer.gpu_check import main, parse, shape_of

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 100.0  # a bound, not an expectation
SMALL = ["--device=cpu", "--layers=2", "--hidden=64", "--prompt-tokens=72", "--chunk-tokens=32", "--rounds=2"]
BLOCKED = ("app", "configs", "deployments", "httpx", "pydantic", "ray", "starlette", "vllm", "yaml")


def gpu_check(*arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The command as a user runs it, and its last line."""
    command = [sys.executable, "-m", "transfer.gpu_check", *arguments]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    return ended, json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_small_run_verifies_bytes_and_prints_its_figures() -> None:
    ended, result = gpu_check(*SMALL)
    assert ended.returncode == 0, ended.stderr
    assert result["ok"]
    assert set(result["devices"]) == {"prefill", "decode"}
    assert result["bytes"]["patterns"] == ["contiguous", "descending", "scattered", "in chunks", "one block"]
    prompt_bytes = result["overlap"]["kv_bytes"]
    assert prompt_bytes == 5 * 2 * 16 * 64 * 4  # blocks, layers, tokens, keys and values of one KV head, float32
    # The patterns and three prefills move the prompt's blocks, one pattern one block; two kinds of each size.
    assert result["bytes_verified"] == (4 + 3 + 2) * prompt_bytes + (1 + 2) * prompt_bytes // 5
    writes = result["bandwidth"]["writes"]
    assert [(row["blocks"], row["kind"]) for row in writes] == [
        (count, kind) for count in (1, 5) for kind in ("contiguous", "scattered")
    ]
    assert all(row["gb_per_s"] >= 0 for row in writes)
    assert result["bandwidth"]["copy_within_device_gb_per_s"] > 0
    assert 0 <= result["overlap"]["overlap_share"] <= 1
    assert result["overlap"]["rounds"] == 2
    assert set(result["conditions"]["versions"]) == {"python", "torch", "cuda", "nixl"}
    for word in ("bytes", "bandwidth", "overlap", "prefill", "decode"):
        assert f"\n{word} " in f"\n{ended.stdout}"


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_told() -> None:
    ended, result = gpu_check(CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 2
    assert "sees no GPU" in ended.stderr
    assert not result["ok"]


def test_a_check_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(*arguments: object) -> None:
        raise CheckFailed("decode blocks [3] do not hold what they should")

    monkeypatch.setattr("transfer.check.run.run", failing)
    assert main(SMALL) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"ok": False, "error": "decode blocks [3] do not hold what they should"}
    assert "blocks [3]" in printed.err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "transfer.check.run", raising=False)
    monkeypatch.setitem(sys.modules, "transfer.memory.nixl_plane", None)
    monkeypatch.delitem(sys.modules, "transfer.check.sides", raising=False)
    assert main(["--device", "cpu"]) == 2
    assert "nixl_plane" in capsys.readouterr().err


@pytest.mark.slow
def test_everything_but_the_folder_of_vllm_imports_without_vllm_and_ray() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "transfer").rglob("*.py"))
        if path.name != "__init__.py" and "vllm" not in path.relative_to(ROOT).parts
    ]
    assert "transfer.check.run" in modules
    # Ten seconds as a rule; once over a hundred, for a reason that was not found.
    where = f"import faulthandler\nfaulthandler.dump_traceback_later({2 * WAIT_S}, exit=True)\n"
    program = f"{where}import sys\nsys.modules.update(dict.fromkeys({BLOCKED}))\nimport {', '.join(modules)}\n"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=2.5 * WAIT_S
    )
    assert ended.returncode == 0, ended.stderr


def test_heads_follow_the_hidden_size() -> None:
    shape = shape_of(parse(["--hidden", "4096", "--prompt-tokens", "1000", "--chunk-tokens", "400"]))
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.prompt_blocks) == (32, 16, 128, 8)
    assert shape.chunks(1000) == [400, 800, 1000]
    assert shape.block_bytes == 16 * 128 * 256 * 2
    with pytest.raises(SystemExit):
        parse(["--hidden", "100"])
