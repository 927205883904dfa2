"""`transfer/gpu_check.py`: a small run on main memory, its figures, and that it sees what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer.check.child import Child
from transfer.check.figures import Pass, block_digests, gb_per_s, overlap, wrong_blocks
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
    # Ten seconds as a rule; once over a hundred, and nobody could say where they went.
    where = f"import faulthandler\nfaulthandler.dump_traceback_later({2 * WAIT_S}, exit=True)\n"
    program = f"{where}import sys\nsys.modules.update(dict.fromkeys({BLOCKED}))\nimport {', '.join(modules)}\n"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=2.5 * WAIT_S
    )
    assert ended.returncode == 0, ended.stderr


def caches() -> tuple[np.ndarray, np.ndarray]:
    """Two caches of 2 layers, 8 blocks and 64 bytes, with nothing in common."""
    made = np.random.default_rng(1).integers(0, 256, (2, 2, 8, 64), dtype=np.uint8)
    return made[0], made[1]


def test_what_was_sent_and_nothing_else_is_right() -> None:
    prefill, decode = caches()
    before, sent = block_digests(decode), block_digests(prefill)
    decode[:, [6, 0]] = prefill[:, [1, 2]]
    assert wrong_blocks(before, block_digests(decode), sent, [1, 2], [6, 0]) == []


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("block", [6, 3])
def test_one_corrupted_byte_is_seen_where_it_is(layer: int, block: int) -> None:
    prefill, decode = caches()
    before, sent = block_digests(decode), block_digests(prefill)
    decode[:, [6, 0]] = prefill[:, [1, 2]]
    decode[layer, block, 17] ^= 1
    assert wrong_blocks(before, block_digests(decode), sent, [1, 2], [6, 0]) == [block]


def test_blocks_that_never_came_or_were_swapped_are_seen() -> None:
    prefill, decode = caches()
    before, sent = block_digests(decode), block_digests(prefill)
    decode[:, [0, 6]] = prefill[:, [1, 2]]
    assert wrong_blocks(before, block_digests(decode), sent, [1, 2], [6, 0]) == [0, 6]
    assert wrong_blocks(before, before, sent, [1, 2], [6, 0]) == [0, 6]


def test_the_figures_of_passes_made_by_hand() -> None:
    half = Pass(0.0, 1.0, ((0.5, 100), (1.0, 100), (1.25, 200)))
    whole = Pass(10.0, 12.0, ((11.0, 400),))
    figures = overlap([half, whole], [1.5, 11.0], [Pass(0.0, 1.0), Pass(0.0, 1.0)])
    assert figures["overlap_share_range"] == [0.5, 1.0]
    assert figures["overlap_share"] == 0.75
    assert figures["tail_ms_range"] == [-1000.0, 500.0]
    assert figures["prefill_slowdown"] == 0.5
    assert figures["kv_bytes"] == half.size == 400
    assert half.write_s == 1.25
    assert gb_per_s(3 * 10**9, [1.0, 2.0, 3.0]) == 1.5


class Sleeper:
    """A side that answers, fails or does neither."""

    def pid(self) -> int:
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("nothing to see")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self) -> None:
        os._exit(3)

    def close(self) -> None:
        return


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("fail", (), "failed in fail: ValueError: nothing to see"),
        ("die", (), "ended before it answered die"),
        ("sleep", (600.0,), "did not answer sleep in 0.2 s"),
    ],
)
def test_a_process_that_gives_no_answer_is_reported_and_ended(
    method: str, arguments: tuple[float, ...], message: str
) -> None:
    pids: list[int] = []

    def use() -> None:
        with Child("test", Sleeper, (), WAIT_S) as child:
            pids.append(child.call("pid"))
            child.timeout_s = 0.2 if method == "sleep" else WAIT_S
            child.call(method, *arguments)

    with pytest.raises(CheckFailed, match=message):
        use()
    assert not Path(f"/proc/{pids[0]}").exists()


def test_heads_follow_the_hidden_size() -> None:
    shape = shape_of(parse(["--hidden", "4096", "--prompt-tokens", "1000", "--chunk-tokens", "400"]))
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.prompt_blocks) == (32, 16, 128, 8)
    assert shape.chunks(1000) == [400, 800, 1000]
    assert shape.block_bytes == 16 * 128 * 256 * 2
    with pytest.raises(SystemExit):
        parse(["--hidden", "100"])
