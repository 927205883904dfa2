"""What `baton doctor --transfer` tries: KV between two processes of this machine, by each way that UCX may take.

`transfer.gpu_check` does it: real NIXL agents and Baton's channel, on main memory and, where there is one, on the GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from app.cli.doctor import Line

WAYS: tuple[tuple[str, str | None], ...] = (("UCX's choice", None), ("TCP", "tcp"), ("shared memory", "sm,tcp"))
"""Their names, and the value of UCX_TLS. Across machines it is TCP or RDMA; between processes of one, any of them."""
STEP_S, LONGEST_S = 60, 240
Try = Callable[[str, str | None], dict[str, Any]]


def transfers(has_gpu: bool, attempt: Try | None = None) -> Iterator[Line]:
    """A line for each way, as it is tried. A GPU is tried by UCX's choice alone."""
    attempt = attempt or _attempt
    for name, transports in WAYS:
        yield _line(f"kv by {name}", attempt("cpu", transports), is_needed=transports is None)
    if has_gpu:
        yield _line("kv between GPUs", attempt("cuda", None), is_needed=True)


def _line(check: str, result: dict[str, Any], is_needed: bool) -> Line:
    if result.get("ok"):
        rate = max(row["gb_per_s"] for row in result["bandwidth"]["writes"])
        verified = result["bytes_verified"] / 1e6
        return Line(check, "ok", f"{rate:.2f} GB/s at most; {verified:.0f} MB came as they were sent")
    hint = "docs/guides/networks.md: UCX settings; or set channel.transports" if is_needed else "Baton works without it"
    return Line(check, "fail" if is_needed else "warn", str(result.get("error", "no figures")), hint)


def _attempt(device: str, transports: str | None) -> dict[str, Any]:
    """The figures of the check, or `{"error"}`."""
    more = ["--transports", transports] if transports else []
    command = [sys.executable, "-m", "transfer.gpu_check", "--device", device, "--rounds", "1"]
    try:
        done = subprocess.run(
            [*command, "--timeout-s", str(STEP_S), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        result = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"not over within {LONGEST_S} s"}
    except (OSError, ValueError, IndexError) as error:
        return {"error": f"the check gave no figures: {error}"}
    return result if isinstance(result, dict) else {"error": "the check gave no figures"}
