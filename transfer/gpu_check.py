"""Check the KV channel between two processes, without vLLM: its bytes, its speed, and its overlap with a prefill.

Run `make gpu-check`, or `python -m transfer.gpu_check`. It needs torch, nixl, pyzmq, msgspec, xxhash and numpy. A
prefill process and a decode process hold one KV cache each, on two GPUs where there are two. It prints:

- bytes: blocks are written in several patterns. Then both caches are compared whole, by one digest per block.
- bandwidth: the median time from handing blocks of all layers to the channel until the last write is complete. Beside
  it stands the rate of `torch.Tensor.copy_` for as many bytes on the device, and between devices where there are two.
  A GB is 10^9 bytes, counted once.
- overlap: a transformer prefills a prompt in chunks. After each layer's attention an event is recorded on the compute
  stream and handed to the channel, as `transfer/vllm/connector.py` does. The prefill ends when its stream ends.
  Rounds with writes alternate with rounds without. The figures are medians.

The last line of stdout is one JSON object. The exit status is 0 when all is well; 1 when bytes are wrong, a step takes
too long, or a side fails; 2 when there is no GPU, or a package is missing.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from transfer.check.shape import PRESETS, CheckFailed, Shape


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="transfer.gpu_check", description="The KV channel without vLLM")
    parser.add_argument(
        "--device", choices=sorted(PRESETS), default="cuda", help="cpu: the same on main memory, smaller"
    )
    for name in ("layers", "hidden", "block-size", "prompt-tokens", "chunk-tokens"):
        defaults = ", ".join(f"{getattr(shape, name.replace('-', '_'))} ({key})" for key, shape in PRESETS.items())
        parser.add_argument(f"--{name}", type=_positive, help=f"default: {defaults}")
    parser.add_argument(
        "--rounds", type=_positive, default=5, help="of each measurement, after one that does not count"
    )
    parser.add_argument("--transports", help="UCX_TLS of both processes; default: UCX decides")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="the longest that any one step may take")
    options = parser.parse_args(arguments)
    if options.hidden and options.hidden % (2 * PRESETS[options.device].head_dim):
        parser.error(f"--hidden must be a multiple of {2 * PRESETS[options.device].head_dim}")
    return options


def shape_of(options: argparse.Namespace) -> Shape:
    """The device's preset, with the values of the command line. Heads follow the hidden size, two per KV head."""
    preset = PRESETS[options.device]
    given = {name: value for name, value in vars(options).items() if value is not None and hasattr(preset, name)}
    shape = replace(preset, **given)
    heads = shape.hidden // shape.head_dim
    return replace(shape, heads=heads, kv_heads=heads // 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and print the figures. Returns the exit status."""
    options = parse(arguments)
    try:
        import torch

        from transfer.check.run import run
    except ImportError as error:  # imported here, so that the message names a package that is missing
        return _unable(f"torch, nixl, pyzmq, msgspec, xxhash and numpy are needed: {error}")
    devices = ["cpu"]
    if options.device == "cuda":
        if not torch.cuda.is_available():
            return _unable(f"torch {torch.__version__} sees no GPU; --device cpu runs the same on main memory")
        devices = [f"cuda:{index}" for index in range(min(2, torch.cuda.device_count()))]
    try:
        result = run(devices, shape_of(options), options.rounds, options.transports, options.timeout_s, _say)
    except CheckFailed as error:
        return _ended(str(error), 1)
    except KeyboardInterrupt:
        return _ended("interrupted", 130)
    print(json.dumps(result), flush=True)
    return 0


def _unable(reason: str) -> int:
    return _ended(reason, 2)


def _ended(reason: str, status: int) -> int:
    print(f"gpu-check: {reason}", file=sys.stderr)
    print(json.dumps({"ok": False, "error": reason}), flush=True)
    return status


def _say(line: str) -> None:
    print(line, flush=True)


def _terminated(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)  # SIGTERM ends the child processes as well, as Ctrl-C does
    sys.exit(main())
