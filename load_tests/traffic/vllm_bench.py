"""`vllm bench serve`, unmodified, against any of our endpoints: a check that does not depend on our own client.

`python -m load_tests.traffic.vllm_bench --base-url http://127.0.0.1:8000 --model smollm2-135m-instruct --tokenizer
DIR`, and any option of `vllm bench serve` after `--`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_tests.harness.application import ROOT
from load_tests.harness.peers import commands

TIMEOUT_S = 1800.0


class BenchError(Exception):
    """`vllm bench serve` failed or took too long. After a failure the message ends with its output."""


def run(
    base_url: str, model: str, tokenizer: str, more: Sequence[str] = (), timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Runs it and returns the result that it writes.

    `tokenizer`: a directory. `more`: further options of `vllm bench serve`. Raises BenchError.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "backend": "openai",
            "endpoint": "/v1/completions",
            "base_url": base_url,
            "model": model,
            "tokenizer": tokenizer,
            "dataset_name": "random",
            "ignore_eos": True,
            "disable_tqdm": True,
            "save_result": True,
            "result_dir": folder,
            "result_filename": "result.json",
        }
        command = [*commands.vllm_bench_serve(options), *more]
        quiet = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"not done within {timeout_s:.0f} s") from error
        result = Path(folder) / "result.json"
        if done.returncode or not result.exists():
            raise BenchError(f"status {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True, help="a directory")
    parser.add_argument("more", nargs="*", help="options of `vllm bench serve`, after --")
    options = parser.parse_args(arguments)
    print(json.dumps(run(options.base_url, options.model, options.tokenizer, options.more)))


if __name__ == "__main__":
    main()
