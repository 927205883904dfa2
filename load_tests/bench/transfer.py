"""How fast KV moves from prefill to decode, and at what cost: Baton's connector and vLLM's own two, side by side.

`make bench NAME=transfer`, or with `ARGS="--prompts 128,512 --repeats 3 --systems baton,vllm_pull"`. Progress goes to
stderr; the last line of stdout is one JSON object.

**What runs.** Three pairs of engine cores, one prefill and one decode each, without Ray and HTTP: `baton` (our
connector), `vllm_pull` (NixlPullConnector) and `vllm_push` (NixlPushConnector). Model, dtype, blocks, chunk size,
executor (in-process), OpenMP threads (one an engine), core count and niceness are alike. The run fails when vLLM made
different settings of the arguments. All pairs are started. SIGSTOP stops all but the one in use, because an idle vLLM
replica spins. A round serves one request of a length on each pair, and each time a different pair is first. After each
SIGCONT a short request goes first and does not count. Every prompt is new random tokens, and decode then computes
`OWN_TOKENS` tokens.

**What is measured where**, every time on the machine's monotonic clock:

- `kv_ready_ms`: from the end of the forward pass that computed the last of the prompt (`wait_for_save`, in all three)
  until the decode worker knows that it has the KV. baton: the channel's thread has the notification *and the first
  token*, which prefill samples after that pass. pull: the engine's step finds its READ done. push: the notification
  is out of NIXL. In all three the decode engine acts on it in its next step, which `handoff_ms` includes.
- `kv_written_ms`: from the same moment until the last transfer was known to be complete. It is below 0 when the
  transfer was complete before.
- `handoff_ms`: from prefill's token to the first token that decode computed, both as received here. Each includes one
  decode step after the KV is there (`decode_step_ms`: the mean of the steps that follow). baton goes on from prefill's
  token; vLLM's decode computes the last of the prompt again.
- `overlap_share`: share of the bytes whose transfer was complete before that pass ended.
- `gb_per_s`: bytes over the time from the first transfer posted to the last complete. For baton that time spans most of
  the prefill, by design. `in_flight_gb_per_s` leaves out the time in which nothing was under way.
- `cpu_s_per_gb`: CPU seconds per GB moved. It takes the CPU of both engines' processes from the request's start until
  its last token. It subtracts the CPU of a request of the same length and as many tokens on baton's prefill engine
  alone in the same round. The prefill is most of both, and varies by more than a transfer costs: read the figure
  together with `cpu_s_per_gb_range`.
- `idle_cpu_cores`: CPU of a pair without requests, over `--idle-s` seconds after the last request, halved.
- `prefill_slowdown`: how much longer baton's prefill takes with a transfer than without: the ratio minus 1. The time
  is from the first chunk scheduled (the engine's own event) to the token received here, so it includes the sampling
  of one token besides the forward passes. The figure is a median over neighbouring requests, and either is first in
  turn.
- `memcpy_gb_per_s`: one thread copying blocks of one layer between two plain buffers.

**What favours which system.** For baton: there are two cores, and the progress thread that vLLM's connectors leave
running takes most of one in each engine. Their prefill, polls and steps compete with it, and would look better with
cores to spare. Prefill is slow on CPU, which hides a transfer easily. For vLLM: pull's request starts the instant
prefill's answer is here, with no proxy or HTTP between; push's decode registers before the prefill begins; baton's
`kv_ready` waits for a token too, which theirs do not. For neither: bytes move by memory within one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_tests.harness.ending import in_a_folder
from load_tests.harness.engines.pair import Pair, Served
from load_tests.harness.engines.rig import SYSTEMS, Rig, blocks, configuration, kv_shape
from load_tests.harness.machine import conditions, memcpy_gb_per_s
from load_tests.report.handoffs import Handoff, TraceError, from_baton, from_nixl
from load_tests.report.transfer import Sample, by_prompt, prefill_slowdown, targets

# A core prefills some hundred tokens a second, and the whole run should end in about 12 minutes.
REPEATS = {128: 3, 512: 3, 1000: 4, 1500: 3, 2048: 2, 4096: 2}
OTHER_REPEATS = 2
OWN_TOKENS = 4  # tokens of every request that decode computes
WARM_TOKENS = 64
MEMCPY_BYTES = 256 * 1024 * 1024


class Bench:
    """Serves requests on started systems and keeps their figures."""

    def __init__(self, rig: Rig, systems: Sequence[str], layers: int, layer_block_bytes: int, seed: int) -> None:
        self._rig, self._systems = rig, systems
        self._layers, self._layer_block_bytes = layers, layer_block_bytes
        self._random, self._requests = random.Random(seed), 0
        self.samples: list[Sample] = []

    async def warm(self, system: str, tokens: int) -> None:
        """Serves a request that does not count."""
        async with self._rig.turn(system) as pair:
            await pair.serve(*self._request(tokens))

    async def round(self, prompt_tokens: int, turn: int) -> None:
        """Serves one request of this length on every system. The system that comes first changes with `turn`."""
        first = turn % len(self._systems)
        served: dict[str, Served] = {}
        for system in (*self._systems[first:], *self._systems[:first]):
            async with self._rig.turn(system) as pair:
                await pair.serve(*self._request(WARM_TOKENS))
                if system == self._systems[0]:
                    served[system], alone = await self._with_and_without(pair, prompt_tokens, turn % 2 == 0)
                else:
                    served[system] = await pair.serve(*self._request(prompt_tokens))
        for system, request in served.items():
            self._count(system, prompt_tokens, request, alone)

    async def _with_and_without(self, pair: Pair, prompt_tokens: int, split_first: bool) -> tuple[Served, Served]:
        if split_first:
            split = await pair.serve(*self._request(prompt_tokens))
            return split, await pair.serve_alone(*self._request(prompt_tokens))
        alone = await pair.serve_alone(*self._request(prompt_tokens))
        return await pair.serve(*self._request(prompt_tokens)), alone

    def _request(self, tokens: int) -> tuple[str, list[int], int]:
        self._requests += 1
        return f"request-{self._requests}", [self._random.randrange(100, 40000) for _ in range(tokens)], OWN_TOKENS

    def _count(self, system: str, prompt_tokens: int, request: Served, alone: Served) -> None:
        handoff = self._handoff(system, request, prompt_tokens)
        sample = Sample(
            system,
            prompt_tokens,
            handoff,
            request.handoff_s,
            request.step_s,
            request.prefill_s,
            request.cpu_s,
            alone.prefill_s,
            alone.cpu_s,
        )
        self.samples.append(sample)
        say(
            f"{prompt_tokens:5} tokens  {system:9}  prefill {request.prefill_s:6.2f} s ({alone.prefill_s:.2f} alone)  "
            f"KV ready {handoff.kv_ready_s * 1e3:7.1f} ms  handoff {request.handoff_s * 1e3:7.1f} ms"
        )

    def _handoff(self, system: str, request: Served, prompt_tokens: int) -> Handoff:
        if system == "baton":
            handoff = from_baton(request.events, request.request_id, prompt_tokens, self._layer_block_bytes)
        else:
            handoff = from_nixl(request.events, request.request_id, prompt_tokens)
        expected = blocks(prompt_tokens) * self._layers * self._layer_block_bytes
        if handoff.size != expected:
            raise TraceError(f"{system} moved {handoff.size} bytes for {prompt_tokens} tokens, not {expected}")
        return handoff


async def run(options: argparse.Namespace, trace_dir: Path) -> dict[str, Any]:
    """The whole benchmark. Its engines have ended when this returns or raises."""
    before = conditions()
    longest = max(options.prompts)
    rig = Rig(configuration(longest, options.chunk_tokens), trace_dir)
    layers, layer_block_bytes = kv_shape(rig.config.model)
    bench = Bench(rig, options.systems, layers, layer_block_bytes, options.seed)
    repeats = {tokens: options.repeats or REPEATS.get(tokens, OTHER_REPEATS) for tokens in options.prompts}
    try:
        for system in options.systems:
            say(f"starting {system}")
            await rig.start(system)
        settings = rig.common_settings()
        for system in options.systems:
            say(f"warming {system}: one request of {longest} tokens, so that its blocks' memory has been touched")
            await bench.warm(system, longest)
        for turn in range(max(repeats.values())):
            for tokens in options.prompts:
                if turn < repeats[tokens]:
                    await bench.round(tokens, turn)
        idle = {system: round(await rig.idle_cores(system, options.idle_s), 4) for system in options.systems}
    finally:
        await rig.close()
    figures = {
        "by_prompt": by_prompt(bench.samples),
        "idle_cpu_cores": idle,
        "prefill_slowdown": prefill_slowdown(bench.samples, "baton"),
        "memcpy_gb_per_s": round(memcpy_gb_per_s(layer_block_bytes, MEMCPY_BYTES), 2),
        "conditions": before | {"engine": settings, "repeats": repeats, "idle_s": options.idle_s},
    }
    return figures | {"targets": targets(figures)}


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="load_tests.bench.transfer", description="KV transfer, three connectors")
    parser.add_argument("--prompts", type=_numbers, default=list(REPEATS), help="prompt lengths in tokens, by comma")
    parser.add_argument("--repeats", type=int, help="requests of each length; default: fewer of the long ones")
    parser.add_argument("--systems", type=_systems, default=list(SYSTEMS), help="by comma; baton must be the first")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="prefill chunk; 256 in the CPU configurations")
    parser.add_argument("--idle-s", type=float, default=10.0, help="seconds over which idle CPU is measured")
    parser.add_argument("--seed", type=int, default=1, help="of the random prompts")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _systems(text: str) -> list[str]:
    systems = text.split(",")
    if systems[0] != "baton" or not set(systems) <= set(SYSTEMS):
        raise argparse.ArgumentTypeError(f"baton, and then any of {', '.join(SYSTEMS)}")
    return systems


if __name__ == "__main__":
    begun = time.monotonic()
    options = parse(None)
    result = asyncio.run(in_a_folder(lambda folder: run(options, folder)))
    result["conditions"]["run_s"] = round(time.monotonic() - begun)
    print(json.dumps(result), flush=True)
