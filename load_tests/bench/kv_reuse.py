"""How soon a second turn's first token comes, by where the first turn's KV is: Baton's engines, without Ray and HTTP.

`make bench NAME=kv_reuse`, or with `ARGS="--tokens 500,1000 --repeats 3"`. Progress goes to stderr; the last line of
stdout is one JSON object.

**What runs.** Five real engine cores on CPU, float32, one OpenMP thread each: `target`, `prefill` (another prefill
replica), `decode`, `host` and `disk` (with a tier of that kind). One works at a time, except for the slowdown.

**A round** has one history of `--tokens` tokens. Its last `ANSWERED` tokens are an answer that `decode` wrote. The
second turn is the history and `TAIL` new tokens. It is asked once each way, and the order changes from round to round:

- `cached`: on an engine that has the history in its memory;
- `fetch_prefill`, `fetch_decode`: on `target`, which fetches the history from that engine;
- `host`, `disk`: on an engine whose memory was emptied, and whose tier has the history. Disk means the file, which
  Linux has in its page cache by then;
- `recompute`: on `target`, with nothing.

Between two ways the engine's memory is emptied. Whole blocks alone are reused, so up to `BLOCK_TOKENS` + `TAIL` tokens
are computed each way.

**What is measured.** `ttft_s`: from the request's way to the engine until its token is received, on one clock.
`gb_per_s`: the reused bytes over what the way takes longer than `cached`, at the medians. `brought_s_p50`: the time of
the fetch or load itself, by the engine's counters. `layered_saves_at_most`: the share of the time to a first token that
could be saved if the rest of the prompt were computed while the KV comes: the shorter of the two times at most.
`tiers`: what the stores' own counters say of their loads, and the digest's share of that time, from its speed alone.
`fetches`: the same of all fetches, with the time that the digests of both sides took. `prefill_slowdown`: the time of a
prefill of `SLOWED_TOKENS` tokens on `prefill` while `target` fetches `FETCHED_TOKENS` tokens from it all the time, and
computes one: over the same alone, and over the same beside such requests that `target` has cached, so that nothing is
fetched. Each is first in turn. `answers_equal`: whether all ways gave the same token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.schema import BatonConfig, DiskKVConfig, ModelConfig, PoolConfig, VllmEngineConfig
from load_tests.harness.ending import in_a_folder
from load_tests.harness.engines.pair import Core
from load_tests.harness.engines.rig import kv_shape
from load_tests.harness.engines.several import several
from load_tests.harness.machine import conditions, digest_gb_per_s, memcpy_gb_per_s
from load_tests.report.kv_reuse import GB, Sample, by_tokens, of_recomputing, slowdown, targets
from load_tests.traffic.workloads import prompt

TOKENS = (500, 1000, 1800)
REPEATS, SLOWED_REPEATS = 5, 5
BLOCK_TOKENS, TAIL, ANSWERED = 128, 16, 17
SLOWED_TOKENS, FETCHED_TOKENS = 1000, 8 * BLOCK_TOKENS
WAYS = ("recompute", "cached", "fetch_prefill", "fetch_decode", "host", "disk")
ENGINES = {
    "target": "prefill",
    "prefill": "prefill",
    "decode": "decode-plain",
    "host": "mixed-host",
    "disk": "mixed-disk",
}
KV_BYTES, TIER_BYTES, MEMCPY_BYTES = 384 << 20, 1 << 30, 256 << 20
BROUGHT = ("fetch_s", "tier_load_s")
"""Counters of the seconds in which an engine's fetches and loads came."""
BESIDE = ("alone", "cached", "fetches")
FETCH_TIMEOUT_S = 60.0
POLL_S = 0.005


def configuration(folder: Path) -> BatonConfig:
    """The pools of the engines."""
    common: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": KV_BYTES,
        "max_num_batched_tokens": 256,
    }
    plain = PoolConfig(engine=VllmEngineConfig(**common))
    host = PoolConfig(engine=VllmEngineConfig(**common, host_kv_bytes=TIER_BYTES))
    disk = PoolConfig(engine=VllmEngineConfig(**common, disk_kv=DiskKVConfig(path=str(folder), bytes=TIER_BYTES)))
    return BatonConfig(
        model=ModelConfig(dtype="float32", max_model_len=4096),
        prefill=plain,
        decode={"plain": plain},
        mixed={"host": host, "disk": disk},
    )


class Bench:
    """Asks second turns on started engines, and keeps what they took."""

    def __init__(self, cores: dict[str, Core], block_bytes: int, seed: int) -> None:
        self._cores, self._block_bytes, self._rng = cores, block_bytes, random.Random(seed)
        self._number = itertools.count()
        self.samples: list[Sample] = []
        self.answers_equal = True

    async def round(self, tokens: int, turn: int, ways: Sequence[str]) -> None:
        """Ask one second turn each way."""
        question = prompt(self._rng, tokens - ANSWERED)
        _, answer = await self._ask("decode", question, ANSWERED)
        history = [*question, *answer]
        if "fetch_prefill" in ways:
            await self._ask("prefill", history, 1)
        second, first = [*history, *prompt(self._rng, TAIL)], turn % len(ways)
        said: set[int] = set()
        for way in (*ways[first:], *ways[:first]):
            ttft_s, (token,), brought_s = await self._second_turn(way, history, second)
            said.add(token)
            reused = (len(history) - (way == "fetch_decode")) // BLOCK_TOKENS * self._block_bytes
            self.samples.append(Sample(tokens, way, ttft_s, reused, brought_s))
            say(f"{tokens:5} tokens  {way:13}  {ttft_s * 1e3:8.1f} ms")
        self.answers_equal &= len(said) == 1
        for name in self._cores:
            await self._forget(name)

    async def _second_turn(
        self, way: str, history: Sequence[int], second: Sequence[int]
    ) -> tuple[float, list[int], float]:
        """Seconds until the first token, that token, and the seconds in which KV came before."""
        name = way if way in ("host", "disk") else "target"
        source = {"fetch_prefill": "prefill", "fetch_decode": "decode"}.get(way)
        await self._forget(name)
        if way in ("cached", "host", "disk"):
            await self._ask(name, history, 1, source="decode")
        if way in ("host", "disk"):
            await self._forget(name)
        before = await self._settled(name)
        ttft_s, answer = await self._ask(name, second, 1, source)
        after = await self._settled(name)
        return ttft_s, answer, sum(after.get(each, 0.0) - before.get(each, 0.0) for each in BROUGHT)

    async def slowed(self, repeats: int) -> dict[str, dict[str, float]]:
        """A prefill beside fetches from the same engine, beside as many requests that fetch nothing, and alone."""
        history = prompt(self._rng, FETCHED_TOKENS)
        await self._ask("prefill", history, 1)
        taken: dict[str, list[float]] = {beside: [] for beside in BESIDE}
        for turn in range(repeats):
            for beside in (*BESIDE[turn % 3 :], *BESIDE[: turn % 3]):
                await self._forget("target")
                other = asyncio.create_task(self._ask_on_and_on(history, beside)) if beside != "alone" else None
                taken_s, _ = await self._ask("prefill", prompt(self._rng, SLOWED_TOKENS), 1)
                taken[beside].append(taken_s)
                if other is not None:
                    other.cancel()
                    await asyncio.gather(other, return_exceptions=True)
        say(f"prefill of {SLOWED_TOKENS} tokens, s: {taken}")
        alone, cached, fetches = (taken[beside] for beside in BESIDE)
        return {"over_alone": slowdown(alone, fetches), "over_cached": slowdown(cached, fetches)}

    async def _ask_on_and_on(self, history: Sequence[int], beside: str) -> None:
        while True:
            source = "prefill" if beside == "fetches" else None
            await asyncio.shield(self._ask("target", [*history, *prompt(self._rng, 1)], 1, source))
            if source is not None:
                await asyncio.shield(self._forget("target"))

    async def _ask(
        self, name: str, tokens: Sequence[int], answer: int, source: str | None = None
    ) -> tuple[float, list[int]]:
        """Seconds until the first token, and the answer. `source`: the engine from which the prompt is fetched."""
        core, request_id = self._cores[name], f"turn-{next(self._number)}"
        transfer = self._fetch(source, request_id, len(tokens)) if source and source != name else None
        begun = time.monotonic()
        await core.add(request_id, tokens, answer, transfer)
        done = await core.answer(request_id)
        return done.times_s[0] - begun, done.tokens

    def _fetch(self, source: str, request_id: str, tokens: int) -> dict[str, Any]:
        peers = list(self._cores[source].info.endpoints)
        plan = {"session": request_id, "epoch": 1, "peers": peers, "tokens": tokens, "timeout_s": FETCH_TIMEOUT_S}
        return {"baton_fetch": plan}

    async def _settled(self, name: str) -> dict[str, float]:
        """Wait until nothing moves to or from the engine, or into its tiers. Its counters then."""
        while True:
            counters = await self._cores[name].engine.counters()
            busy = ("open_receiving", "open_writing", "tier_open_jobs")
            if not any(counters.get(each) for each in busy):
                return counters
            await asyncio.sleep(POLL_S)

    async def _forget(self, name: str) -> None:
        """Empty the engine's own memory; its tiers keep what they have."""
        await self._settled(name)
        engine: Any = self._cores[name].engine
        while not await engine.forget():  # noqa: ASYNC110 - an engine in another process has no event
            await asyncio.sleep(POLL_S)

    async def tiers(self) -> dict[str, dict[str, float]]:
        """The loads of each tier by its own counters, and the digest's share of their time."""
        found, digest = {}, digest_gb_per_s(self._block_bytes, MEMCPY_BYTES)
        for name in {"host", "disk"} & self._cores.keys():
            counters = await self._settled(name)
            loaded, load_s = counters["tier_loaded_bytes"], counters["tier_load_s"]
            share = loaded / digest / GB / load_s
            found[name] = {"load_gb_per_s": round(loaded / load_s / GB, 2), "digest_share": round(share, 3)}
        return found

    async def fetches(self) -> dict[str, float] | None:
        """All fetches by the channels' own counters, and the digests' share of their time; None where none were.

        An engine lends or fetches, and none does both.
        """
        counters = [await self._settled(name) for name in self._cores]
        fetch_s = sum(each["fetch_s"] for each in counters)
        if not fetch_s:
            return None
        fetched = sum(each["blocks_fetched"] for each in counters) * self._block_bytes
        target_s = sum(each["fetch_digest_s"] for each in counters if each["blocks_fetched"])
        source_s = sum(each["fetch_digest_s"] for each in counters) - target_s
        return {
            "gb_per_s": round(fetched / fetch_s / GB, 2),
            "digest_share_source": round(source_s / fetch_s, 3),
            "digest_share_target": round(target_s / fetch_s, 3),
        }


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole benchmark. Its engines have ended when this returns or raises."""
    before, config = conditions(), configuration(folder)
    layers, layer_block_bytes = kv_shape(config.model)
    needed = {"target", "decode", *({"prefill"} if "fetch_prefill" in options.ways or options.slowed else set())}
    names = {name: pool for name, pool in ENGINES.items() if name in needed | set(options.ways)}
    say(f"starting {', '.join(names)}")
    async with several(config, names) as cores:
        bench = Bench(cores, layers * layer_block_bytes, options.seed)
        await bench.round(min(options.tokens), 0, options.ways)  # the first round does not count
        bench.samples.clear()
        for turn in range(options.repeats):
            for tokens in options.tokens:
                await bench.round(tokens, turn, options.ways)
        fetches, tiers = await bench.fetches(), await bench.tiers()
        slowed = await bench.slowed(options.slowed) if options.slowed else None
    figures = by_tokens(bench.samples)
    ratios = of_recomputing(figures)
    return {
        "by_tokens": figures,
        "of_recomputing": ratios,
        "tiers": tiers,
        "fetches": fetches,
        "prefill_slowdown": slowed,
        "memcpy_gb_per_s": round(memcpy_gb_per_s(layer_block_bytes, MEMCPY_BYTES), 2),
        "digest_gb_per_s": round(digest_gb_per_s(layers * layer_block_bytes, MEMCPY_BYTES), 2),
        "answers_equal": bench.answers_equal,
        "targets": targets(ratios, slowed),
        "conditions": before | {"model": config.model.source, "tail": TAIL, "block_tokens": BLOCK_TOKENS},
    }


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="load_tests.bench.kv_reuse", description="the second turn's first token")
    parser.add_argument("--tokens", type=_numbers, default=list(TOKENS), help="of the history, by comma")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="rounds of each length")
    parser.add_argument("--ways", type=_ways, default=list(WAYS), help=f"by comma, of {', '.join(WAYS)}")
    parser.add_argument("--slowed", type=int, default=SLOWED_REPEATS, help="prefills beside fetches; 0: none")
    parser.add_argument("--seed", type=int, default=1, help="of the random prompts")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _ways(text: str) -> list[str]:
    ways = text.split(",")
    if not set(ways) <= set(WAYS):
        raise argparse.ArgumentTypeError(f"of {', '.join(WAYS)}")
    return ways


if __name__ == "__main__":
    begun = time.monotonic()
    options = parse(None)
    result = asyncio.run(in_a_folder(lambda folder: run(options, folder)))
    result["conditions"]["run_s"] = round(time.monotonic() - begun)
    print(json.dumps(result), flush=True)
