"""How a plan for all pools compares with other autoscalers, in the simulator: attainment and what it costs.

`make bench NAME=scaling`, or with `ARGS="--traces wave,azure --policies baton,keda --minutes 30"`. `--quick` gives a
first look within a minute. Progress goes to stderr; the last line of stdout is one JSON object.

**What runs.** Each trace on a prefill and a decode pool of 1 to `--most` replicas, that start with four each. A replica
takes `--start-s` seconds to start, with 10% of chance, and is paid for from the first of them until it has drained.
Placement and admission are Baton's own in every run, and the pools are strict unless `--no-strict` is given: only the
sizes differ. `wave` is a day of `--season-s` seconds, from a quarter of the rate to all of it; `bursts` is a quarter,
and all of it in the last 3 of 15 minutes; `steady` is the same all the time. They run on accelerators like an L40S.
`azure` and `mooncake` come in their own time, each request several times; Azure's on the same accelerators, Mooncake's
on H100.

**Policies.** `baton`: the planner, without a season; `baton_season`: with it, for `wave` and `bursts`. `serve`,
`dynamo`, `keda`: see `load_tests/simulator/scalers.py`. `fixed`: the sizes stay. They are the largest that Baton came
to, and 85% and 70% of it. The peak size is the cheapest of those with the highest attainment, within 0.1%.

**What is measured.** All but the first five minutes count. `attainment`: the share of the requests that were served
within both objectives; refused ones were not. `replica_hours`: until the last arrival. `reversals_per_h`: how often a
target changed its direction, of both pools. `summary`, by trace: attainment over that of the peak, replica-hours saved
against the peak, against the best fixed size (the cheapest with 99% of the peak's attainment), and against the cheapest
other policy with as much attainment, less 0.5%.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from configs.schema import BatonConfig
from deployments.messages import Role
from load_tests.harness.machine import conditions
from load_tests.simulator import waves
from load_tests.simulator.cluster import Options
from load_tests.simulator.elastic import Elasticity, ElasticSimulation, Scaler
from load_tests.simulator.experiment import LONG_CHAT, load_trace
from load_tests.simulator.metrics import Classes, Objectives
from load_tests.simulator.profiles import H100, L40S, Cluster, Pool, Profile
from load_tests.simulator.scalers import Profiled, scaler
from load_tests.simulator.steps import Limits
from load_tests.simulator.traces import Trace, TraceError

POLICIES = ("baton", "serve", "dynamo", "keda", "fixed")
TRACES = ("wave", "bursts", "steady", "azure", "mooncake")
PREFILL, DECODE = "prefill", "decode-main"
PARTS = (1.0, 0.85, 0.7)
"""The fixed sizes, as parts of the largest that Baton came to."""
NEARLY = 0.99
EQUAL, LEVEL = 0.005, 0.001
MAX_MODEL_LEN = 131_072
FIRST = 4
"""The replicas of each pool at the beginning; more where `--scale` is above 1."""
SETTINGS = ("minutes", "scale", "start_s", "season_s", "most", "seed", "strict")
COPIES = {"azure": 8, "mooncake": 4}
PER_S = 20.0
SLOW_CHAT: Classes = (Objectives("chat", ttft_s=2.5, tpot_s=0.05),)
"""An L40S prefills at a little over a third of an H100's speed: the first token is promised in 2.5 s and not in 1."""
WARMUP_S = 300.0
"""The first minutes do not count: a fleet of the wrong size finds its own."""
SNAPSHOT_S = 0.25
"""Replicas report four times a second, so that an hour is simulated in a minute."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `sizes`: at the beginning. `season_s`: None: Baton expects none."""

    trace: str
    policy: str
    minutes: float
    sizes: tuple[int, int] = (FIRST, FIRST)
    most: int = 60
    start_s: float = 60.0
    season_s: float | None = None
    wave_s: float = 1800.0
    scale: float = 1.0
    seed: int = 1
    strict: bool = True


def trace_of(run: Run) -> Trace:
    """The requests of a run."""
    length_s, per_s = 60.0 * run.minutes, PER_S * run.scale
    match run.trace:
        case "wave":
            return waves.wave(per_s, length_s, run.wave_s, run.seed)
        case "bursts":
            return waves.bursts(per_s, length_s, run.seed)
        case "steady":
            return waves.steady(per_s / 2, length_s, run.seed)
    copies = max(1, round(COPIES.get(run.trace, 4) * run.scale))
    return waves.larger(load_trace(run.trace, MAX_MODEL_LEN), copies, length_s, run.seed)


def cluster_of(run: Run) -> Cluster:
    """A prefill and a decode pool of one kind of accelerator."""
    profile: Profile = H100 if run.trace.startswith("mooncake") else L40S
    prefill, decode = run.sizes
    pools = (
        Pool("prefill", Role.PREFILL, prefill, profile, Limits(batched_tokens=8192, sequences=256), run.strict),
        Pool("main", Role.DECODE, decode, profile, Limits(batched_tokens=2048, sequences=256), run.strict),
    )
    return Cluster(pools, MAX_MODEL_LEN)


def perform(run: Run) -> dict[str, Any]:
    """Simulate one run. Returns one row of figures."""
    begun_s = time.process_time()
    trace, cluster = trace_of(run), cluster_of(run)
    classes = LONG_CHAT if run.trace.startswith("mooncake") else SLOW_CHAT
    bounds = dict.fromkeys((PREFILL, DECODE), (1, run.most))
    trace = trace.fitting(int(min(pool.profile.kv_bytes / pool.profile.kv_bytes_per_token for pool in cluster.pools)))

    def make(config: BatonConfig) -> Scaler:
        policy = "baton" if run.policy.startswith("baton") else run.policy
        return scaler(policy, _scaled(config, run), _profiled(cluster, classes, trace), (PREFILL, DECODE))

    warmup_s = min(WARMUP_S, 30.0 * run.minutes)
    elasticity = Elasticity(start_s=run.start_s, bounds=bounds, count_from_s=warmup_s)
    options = Options(seed=run.seed, snapshot_interval_s=SNAPSHOT_S)
    done = ElasticSimulation(cluster, trace, classes, options, elasticity, make).run_elastic()
    records = [record for record in done.result.records if record.at_s >= warmup_s]
    hours = done.length_s / 3600
    good = sum(record.meets(classes) for record in records)
    return {
        "trace": run.trace,
        "policy": run.policy,
        "attainment": round(good / len(records), 4),
        "replica_hours": round(done.replica_hours, 3),
        "reversals_per_h": round(done.reversals / hours, 2),
        "requests": len(records),
        "refused": sum(bool(record.refused) for record in records),
        "moves": done.result.moves,
        "first": list(run.sizes),
        "most": [max((size for _, size in done.sizes[name]), default=0) for name in (PREFILL, DECODE)],
        "length_s": round(done.length_s),
        "sizes": {name: [[round(at_s), size] for at_s, size in each] for name, each in done.sizes.items()},
        "cpu_s": round(time.process_time() - begun_s, 1),
    }


def _scaled(config: BatonConfig, run: Run) -> BatonConfig:
    """The configuration with `scaling` and pools that may change."""
    raw = config.model_dump()
    raw["scaling"] = {"season_s": run.season_s}
    for pool in (raw["prefill"], raw["decode"]["main"]):
        pool.update(replicas=None, autoscaling={"min_replicas": 1, "max_replicas": run.most})
    return BatonConfig.model_validate(raw)


def _profiled(cluster: Cluster, classes: Classes, trace: Trace) -> Profiled:
    requests = trace.requests
    context = sum(each.prompt_tokens + each.output_tokens / 2 for each in requests) / len(requests)
    return Profiled(cluster.prefill, cluster.decode[0], classes[0], context)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark. Raises TraceError when a trace cannot be read."""
    before = conditions()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.processes) as processes:
        moving = [one for one in _runs(options) if one.policy != "fixed"]
        rows += _perform(processes, moving)
        if "fixed" in options.policies:
            rows += _perform(processes, _fixed(options, rows))
    traces = {row["trace"]: [each for each in rows if each["trace"] == row["trace"]] for row in rows}
    settings = {name: getattr(options, name) for name in SETTINGS}
    return {
        "runs": [{key: value for key, value in row.items() if key != "sizes"} for row in rows],
        "summary": {name: summary(mine) for name, mine in traces.items()},
        "conditions": before | settings,
    }


def _runs(options: argparse.Namespace) -> list[Run]:
    made = []
    for trace in options.traces:
        one = Run(trace, "", options.minutes, start_s=options.start_s, scale=options.scale, most=options.most)
        first = max(FIRST, round(FIRST * options.scale))
        one = replace(one, seed=options.seed, wave_s=options.season_s, strict=options.strict, sizes=(first, first))
        made += [replace(one, policy=policy) for policy in options.policies]
        season_s = {"wave": options.season_s, "bursts": waves.EVERY_S}.get(trace)
        if season_s is not None and "baton" in options.policies:
            made.append(replace(one, policy="baton_season", season_s=season_s))
    return made


def _fixed(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> list[Run]:
    """Fixed fleets of the largest size that Baton came to, and of parts of it."""
    made = []
    for one in _runs(options):
        ours = next((row for row in rows if row["trace"] == one.trace and row["policy"] == "baton"), None)
        if one.policy == "fixed" and ours is not None:
            sizes = {tuple(max(1, round(part * most)) for most in ours["most"]) for part in PARTS}
            made += [replace(one, sizes=(each[0], each[1])) for each in sorted(sizes, reverse=True)]
    return made


def _perform(processes: ProcessPoolExecutor, wanted: Sequence[Run]) -> list[dict[str, Any]]:
    rows = []
    for row in processes.map(perform, wanted):
        rows.append(row)
        print(
            f"{row['trace']:9} {row['policy']:13} attainment {row['attainment']:6} in {row['replica_hours']:8} h, "
            f"reversals {row['reversals_per_h']:6}/h, refused {row['refused']:6} of {row['requests']:6}, "
            f"first {row['first']}, most {row['most']}, {row['cpu_s']} s",
            file=sys.stderr,
            flush=True,
        )
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One trace: Baton against the peak, against the best fixed size, and against the best of the others."""
    ours = next((row for row in rows if row["policy"] == "baton"), None)
    fixed = [row for row in rows if row["policy"] == "fixed"]
    others = [row for row in rows if row["policy"] not in ("baton", "baton_season")]
    if ours is None:
        return {}
    found: dict[str, Any] = {}
    if fixed:
        highest = max(row["attainment"] for row in fixed)
        peak = min((row for row in fixed if row["attainment"] >= highest - LEVEL), key=lambda row: row["replica_hours"])
        enough = [row for row in fixed if row["attainment"] >= NEARLY * peak["attainment"]]
        best = min(enough, key=lambda row: row["replica_hours"])
        found["best_fixed"] = {"sizes": best["first"], "attainment": best["attainment"], "hours": best["replica_hours"]}
        found["attainment_of_peak"] = round(ours["attainment"] / peak["attainment"], 4)
        found["hours_saved_of_peak"] = _saved(ours, peak)
        found["hours_saved_of_best_fixed"] = _saved(ours, best)
    equal = [row for row in others if row["attainment"] >= ours["attainment"] - EQUAL]
    if equal:
        best = min(equal, key=lambda row: row["replica_hours"])
        found["best_other"] = {"policy": best["policy"], "attainment": best["attainment"]}
        found["hours_saved_of_best_other"] = _saved(ours, best)
    return found


def _saved(ours: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    return round(1.0 - float(ours["replica_hours"]) / float(other["replica_hours"]), 4)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="load_tests.bench.scaling", description="autoscalers, simulated")
    parser.add_argument("--quick", action="store_true", help="ten minutes of a wave, of a smaller fleet")
    parser.add_argument("--traces", type=_names, help=f"of {', '.join(TRACES)}, by comma")
    parser.add_argument("--policies", type=_names, default=POLICIES, help="by comma")
    parser.add_argument("--minutes", type=float, help="of each trace; default: 60")
    parser.add_argument("--scale", type=float, default=1.0, help="of the rates")
    parser.add_argument("--most", type=int, default=60, help="replicas of a pool")
    parser.add_argument("--start-s", type=float, default=60.0, help="seconds that a replica takes to start")
    parser.add_argument("--season-s", type=float, help="of the wave; default: 1800")
    parser.add_argument("--strict", action=argparse.BooleanOptionalAction, default=True, help="pools keep to a role")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if wrong := set(options.policies) - set(POLICIES):
        parser.error(f"no policy {sorted(wrong)}; there are {', '.join(POLICIES)}")
    options.traces = options.traces or (("wave",) if options.quick else TRACES)
    options.minutes = options.minutes or (10.0 if options.quick else 60.0)
    options.season_s = options.season_s or (300.0 if options.quick else 1800.0)
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    begun = time.monotonic()
    try:
        result = run(parse(None))
    except TraceError as error:
        sys.exit(str(error))
    result["conditions"]["run_s"] = round(time.monotonic() - begun)
    print(json.dumps(result), flush=True)
