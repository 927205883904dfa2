"""Finds an engine's settings for a machine and a model, by role: `make tune CONFIG=configs/cpu-1p1d.yaml`.

It starts the engine of each pool by itself, without Ray and HTTP, and measures what its steps take. Progress goes to
stderr, on a terminal with a bar, and so do the settings found, as YAML for the file. The last line of stdout is one
JSON object. One engine runs at a time. Where several engines will share cores or a memory bus, steps will take longer
than they do here.

**Prefill.** `engine.max_num_batched_tokens`: prompts of `--prompt` tokens are computed in chunks of each of `--chunks`.
The smallest chunk is chosen that gives up no more than `--loss` of the best throughput. A small chunk has two uses: an
abort or a new request waits for a chunk, and the KV cache of a chunk travels while the next one is computed.

**Decode.** `engine.max_num_seqs`: the most of `--sequences`, each with a prompt of `--context` tokens, whose step
takes at most `--tpot-s`. Numbers that the pool's KV memory does not hold are left out.
`engine.max_num_batched_tokens`: the largest of `--chunks` that a step can compute beside that many sequences within
`--gap-s`. This is the delay that a short prompt, prefilled here, costs the requests that are being answered. Without
`--tpot-s`, that of `placement.default_class` counts.

**Variants.** `--variant '{"engine": {"omp_threads": 2}}'`, given any number of times, measures each pool again with
these of its keys changed. They may be threads, their binding (`{"env": {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}}`),
compiled or eager (`{"engine": {"enforce_eager": false}}`), or quantisation. For prefill the variant with the highest
throughput is best; for decode the one with the most tokens per second within `--tpot-s`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.schema import BatonConfig, VllmEngineConfig
from deployments.engine.protocol import EngineError
from load_tests.harness.application import ROOT
from load_tests.harness.engines.solo import Solo, SoloError, solo
from load_tests.harness.machine import conditions
from load_tests.report.handoffs import median
from load_tests.report.progress import Progress, progress
from load_tests.report.serving import rounded
from load_tests.tune.choices import Chunk, Goals, Load, chunk_of, decode_chunk, most_sequences, prefill_chunk

TPOT_S = 0.1
GAPS_OF_TPOT = 4.0
GROWTH_TOKENS = 256  # tokens that a sequence may gain while others are measured
SEED = 1
Row = dict[str, Any]


async def measure_prefill(engine: Solo, options: argparse.Namespace, shown: Progress) -> list[Chunk]:
    """Measures every chunk with `--repeats` prompts. Returns the median prompt of each chunk."""
    found = []
    for tokens in options.chunks:
        prompts = [chunk_of(tokens, await engine.chunked(tokens, options.prompt)) for _ in range(options.repeats)]
        found.append(sorted(prompts, key=lambda chunk: chunk.tokens_per_s)[len(prompts) // 2])
        middle = found[-1]
        shown.say(
            f"    chunks of {tokens}: {middle.tokens_per_s:.0f} tokens/s, the longest step {middle.longest_s:.3f} s"
        )
        shown.advance()
    return found


async def measure_decode(
    engine: Solo, options: argparse.Namespace, goals: Goals, shown: Progress
) -> tuple[list[Load], dict[int, float]]:
    """Measures numbers of sequences in turn, and then every chunk beside the largest number whose step is short enough.

    A number that the KV memory does not hold is left out. The first number whose step takes too long is the last one
    measured. Raises SoloError when the KV memory holds none of them.
    """
    loads: list[Load] = []
    for sequences in (n for n in options.sequences if fits(engine, n, options)):
        loads.append(Load(sequences, await engine.decoding(sequences, options.context)))
        shown.say(f"    {sequences} sequences: a step {loads[-1].step_s:.3f} s, {loads[-1].tokens_per_s:.0f} tokens/s")
        shown.advance()
        if loads[-1].step_s > goals.tpot_s:
            break
    if not loads:
        raise SoloError(f"the KV memory does not hold {options.sequences[0]} sequence(s) of {options.context} tokens")
    shown.advance(len(options.sequences) - len(loads))
    chosen = most_sequences(loads, goals.tpot_s).sequences
    await engine.keep_decoding(chosen)
    beside_s = {}
    for tokens in options.chunks:
        beside_s[tokens] = median([await engine.beside(tokens) for _ in range(options.repeats)])
        shown.say(f"    a chunk of {tokens} beside {chosen} sequences: a step {beside_s[tokens]:.3f} s")
        shown.advance()
    await engine.keep_decoding(0)
    return loads, beside_s


def fits(engine: Solo, sequences: int, options: argparse.Namespace) -> bool:
    """Whether the pool's KV memory holds `sequences` sequences beside the largest chunk."""
    block = engine.info.block_size
    each, chunk = -(-(options.context + GROWTH_TOKENS) // block), -(-options.chunks[-1] // block)
    return bool(sequences * each + chunk <= engine.info.total_blocks)


async def tune_pool(config: BatonConfig, pool: str, options: argparse.Namespace, goals: Goals, shown: Progress) -> Row:
    """Measures one pool as it is configured. Returns its figures and the settings that they suggest."""
    async with solo(config, pool, SEED) as engine:
        memory = {"kv_bytes_per_token": engine.info.kv_bytes_per_token, "kv_blocks": engine.info.total_blocks}
        if pool == "prefill":
            chunks = await measure_prefill(engine, options, shown)
            best = prefill_chunk(chunks, goals.loss)
            return memory | {
                "chunks": [_figures(each) for each in chunks],
                "settings": {"max_num_batched_tokens": best.tokens},
                "score": best.tokens_per_s,
            }
        loads, beside_s = await measure_decode(engine, options, goals, shown)
    most, chunk = most_sequences(loads, goals.tpot_s), decode_chunk(beside_s, goals.gap_s)
    in_time = most.step_s <= goals.tpot_s
    return memory | {
        "sequences": [_figures(each) | {"tokens_per_s": rounded(each.tokens_per_s)} for each in loads],
        "beside_s": {str(tokens): rounded(seconds) for tokens, seconds in beside_s.items()},
        "settings": {"max_num_seqs": most.sequences, "max_num_batched_tokens": chunk},
        "met": {"tpot": in_time, "gap": beside_s[chunk] <= goals.gap_s},
        "score": most.tokens_per_s if in_time else 0.0,
    }


def _figures(each: Chunk | Load) -> Row:
    return {name: rounded(value) for name, value in asdict(each).items()}


def measured(config: BatonConfig, pool: str, variant: Mapping[str, Any], options: argparse.Namespace) -> BatonConfig:
    """The configuration in which a pool is measured: changed as the variant says, with limits too high to matter.

    Ends the program with a message where the variant makes it invalid.
    """
    wide: Row = {
        "max_num_seqs": options.sequences[-1] + 1,
        "max_num_batched_tokens": options.chunks[-1] + options.sequences[-1] + 1,
        "engine_args": {"long_prefill_token_threshold": 0},  # a chunk is one whole step, with no limit for long prompts
    }
    arguments = config.model_dump(mode="json")
    role, _, name = pool.partition("-")
    group, name = (arguments[role], name) if name else (arguments, role)
    group[name] = merged(merged(group[name], variant), {"engine": wide})
    try:
        return BatonConfig.model_validate(arguments)
    except ValidationError as error:
        sys.exit(f"{pool} with {json.dumps(variant)}: {error}")


def merged(into: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with some of its values changed, at any depth."""
    both = dict(into)
    for name, value in changes.items():
        inner = both.get(name)
        both[name] = merged(inner, value) if isinstance(value, Mapping) and isinstance(inner, Mapping) else value
    return both


def run(options: argparse.Namespace) -> Row:
    """Measures every pool in every variant, one engine at a time."""
    before, config = conditions(), read(options.config)
    goals = goals_of(config, options)
    variants: list[Row] = [{}, *options.variant]
    wanted = {
        pool: [(variant, measured(config, pool, variant, options)) for variant in variants]
        for pool in options.pools or config.pools
    }
    pools: dict[str, Row] = {}
    total = sum(len(variants) * measurements(pool, options) for pool in wanted)
    with progress("measurements", total, options.json) as shown:
        for pool, each in wanted.items():
            rows: list[Row] = []
            for variant, changed in each:
                shown.say(f"{pool} {json.dumps(variant) if variant else 'as configured'}")
                rows.append({"variant": variant} | asyncio.run(tune_pool(changed, pool, options, goals, shown)))
            best = max(rows, key=lambda row: float(row["score"]))
            pools[pool] = {"settings": merged(best["variant"], {"engine": best["settings"]}), "variants": rows}
    asked = {"prompt": options.prompt, "context": options.context, "repeats": options.repeats, "goals": asdict(goals)}
    return {"tune": str(options.config), "conditions": before | asked, "pools": pools}


def measurements(pool: str, options: argparse.Namespace) -> int:
    """How many figures a pool has, in one variant. Those that are left out count, as if they were measured at once."""
    return len(options.chunks) + (0 if pool == "prefill" else len(options.sequences))


def read(file: Path) -> BatonConfig:
    """Reads the `args` of a `serve run` file.

    Ends the program with a message where the file is not one, or where an engine is not vLLM's.
    """
    try:
        config = BatonConfig.model_validate(yaml.safe_load(file.read_text())["applications"][0]["args"])
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValidationError) as error:
        sys.exit(f"{file} is no configuration of Baton: {error}")
    if not all(isinstance(pool.engine, VllmEngineConfig) for pool in config.pools.values()):
        sys.exit(f"{file}: only vLLM's engines can be tuned")
    return config


def goals_of(config: BatonConfig, options: argparse.Namespace) -> Goals:
    """The goals for steps. Without `--tpot-s` the objective of the default class counts, else `TPOT_S`."""
    of_class = config.placement.classes.get(config.placement.default_class)
    tpot_s = options.tpot_s or (of_class and of_class.tpot_s) or TPOT_S
    return Goals(tpot_s, options.gap_s or GAPS_OF_TPOT * tpot_s, options.loss)


def fragment(pools: Mapping[str, Row]) -> str:
    """The settings found, as YAML for the `args` of a configuration."""
    found: Row = {}
    for pool, row in pools.items():
        role, _, name = pool.partition("-")
        if name:
            found.setdefault(role, {})[name] = row["settings"]
        else:
            found[role] = row["settings"]
    return yaml.safe_dump(found, sort_keys=False)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "cpu-1p1d.yaml", help="what is to be tuned")
    parser.add_argument(
        "--pools", type=lambda text: text.split(","), help="prefill, decode-NAME, mixed-NAME; default: all"
    )
    parser.add_argument("--variant", type=_variant, action="append", default=[], metavar="JSON", help="keys of a pool")
    parser.add_argument("--chunks", type=_integers, default=[128, 256, 512, 1024], help="prompt tokens of a step")
    parser.add_argument("--sequences", type=_integers, default=[1, 2, 4, 8, 16, 32, 64], help="that decode at once")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompts that prefill is measured with")
    parser.add_argument("--context", type=int, default=256, help="tokens of the prompts before decode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tpot-s", type=float, help=f"default: the default class's, else {TPOT_S}")
    parser.add_argument("--gap-s", type=float, help=f"default: {GAPS_OF_TPOT:g} times --tpot-s")
    parser.add_argument("--loss", type=float, default=0.05, help="share of prefill's best throughput")
    parser.add_argument("--json", action="store_true", help="no bar on stderr, only lines")
    options = parser.parse_args(arguments)
    config = read(options.config)
    if wrong := set(options.pools or ()) - config.pools.keys():
        parser.error(f"no pool {sorted(wrong)}; there are {', '.join(config.pools)}")
    block = next(iter(config.pools.values())).engine.block_size
    if unfit := [chunk for chunk in options.chunks if chunk % block or options.prompt % chunk]:
        parser.error(f"--chunks {unfit}: whole blocks of {block} tokens, and whole parts of --prompt")
    most = min(_longest(config, pool) for pool in options.pools or config.pools)
    if max(options.prompt, options.context + GROWTH_TOKENS) >= most:
        parser.error(
            f"a pool takes {most} tokens at most: --prompt, and --context with {GROWTH_TOKENS} more, must be less"
        )
    return options


def _longest(config: BatonConfig, pool: str) -> int:
    """The most tokens, prompt and answer together, that a pool takes."""
    engine = config.pools[pool].engine
    assert isinstance(engine, VllmEngineConfig)
    return engine.max_model_len or config.model.max_model_len


def _integers(text: str) -> list[int]:
    return sorted(int(number) for number in text.split(","))


def _variant(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"a JSON object with keys of a pool, not {text}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        result = run(parse(arguments))
    except (EngineError, SoloError) as error:
        sys.exit(str(error))
    print(fragment(result["pools"]), file=sys.stderr, flush=True)
    print(json.dumps(result), flush=True)
