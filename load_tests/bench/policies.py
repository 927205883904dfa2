"""How placement policies compare under load, in the simulator: the real policy code over simulated replicas.

`make bench NAME=policies`, or with `ARGS="--replicas 64 --traces azure --loads 0.8,1,2 --policies joint,round_robin"`.
`--quick` gives a first look within half a minute. The whole benchmark takes about an hour on two cores. `--replicas
1000` is not part of it and takes longer. `--prefill 36` sets how many of the replicas prefill. Progress goes to stderr;
the last line of stdout is one JSON object.

**What runs.** Every trace runs at every load on fleets of every size, once per policy without admission.
`load_tests/simulator/profiles.py` describes the fleet: prefill on H100, decode on H100 and H200, and where the numbers
are from. Every policy may have admission: `joint` runs with it everywhere, and the policies that `--admitted` names run
with it at the knee. A load is a part of the fleet's estimated capacity. The top of
`load_tests/simulator/experiment.py` defines that estimate and the objectives. All runs have the same seed, arrivals and
fleet.

Then `joint` runs twice more at the knee, with eight ingresses and snapshots that come 100 ms late. The first time all
ingresses ask one session manager, and a call to it takes 1 ms each way: this is how the application runs. The second
time each ingress decides for itself with a ledger of its own: this is how it would run without a manager.

**What is measured.** `runs` has a row for each run, over the requests that arrive in the second half of the time
(`counted_s`). In the first half, `warmup_s`, an empty fleet fills up, which takes longer than an answer does.
`offered`, `goodput`: requests per second, all of them and those within both objectives. `whole_goodput`,
`whole_refused`: with the first half included, where a policy that refuses many requests leaves more room for later.
`ttft_*`, `tpot_*`: of the served requests. `hit_rate`: of all prompt blocks, the share found in the cache of the
replica that prefilled. `preemptions`, `moves`: of the whole run. `refused`: requests not served, for any reason
(`refusals`).

`summary` has an entry for each trace and fleet. The knee is the first load at which even the best of the other policies
serves less than 95% of what is offered within the objectives, all without admission. `goodput_ratio` is `joint` over
each policy at the knee, like with like: `with_admission`, `without_admission`. `whole_goodput_ratio` is the same with
the first half. `admission_ratio` is `joint` with admission over each policy without. `overload`: goodput at twice the
load at which it is highest, over the highest. `ingress8`, `allocators8`: goodput at the knee over that with one ingress
and fresh snapshots; with eight ingresses that share a manager, and with eight that decide for themselves.

`--caches` compares what caches give, and no other sweep runs. Every trace runs at every load in four forms,
without admission. `load_tests/simulator/caches.py` describes the forms, and `summary` with them. All have the tier of
`--tier-gb`. `caches` of a row says which form it is.

`--traces hot,documents` are not part of the benchmark by itself: most requests ask about one document, or four, and
then about the next. `hot_ttft_*` are of these requests.

**What to keep in mind.** Times of a trace are compressed to reach a rate, which brings the turns of a conversation
closer together than they were. A large fleet is simulated for less time (`simulated_s`), with fewer policies and loads;
`--loads` and `--policies` ask for more. The traces' prompts are cached, and their answers are not. No replica fails and
no client cancels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from typing import Any, get_args

from configs.schema import PlacementConfig
from load_tests.harness.machine import conditions
from load_tests.simulator import caches
from load_tests.simulator.experiment import MADE, Experiment, classes_of, load_trace, perform
from load_tests.simulator.traces import TraceError
from load_tests.simulator.verdict import OURS, TWOFOLD, compare, knee, peak_load

POLICIES: tuple[str, ...] = get_args(PlacementConfig.model_fields["policy"].annotation)
LARGE_POLICIES = (OURS, "overlap_cost", "least_tokens", "round_robin")
REPLICAS = (16,)
TRACES = ("mooncake", "azure", "burst", "conversations", "agents", "shared")
LOADS = (0.8, 1.2, 1.6, 2.4)
LARGE_LOADS = (1.2,)
ADMITTED = ("overlap_cost", "least_tokens", "round_robin")
SMALL = 32  # replicas; up to this size, as many requests of every trace are sent
LARGE = 256  # replicas; from this size on, fewer loads and policies are tried, and more requests are sent
SMALL_REQUESTS, REQUESTS, LARGE_REQUESTS = 3000, 24_000, 200_000
LONG_REQUESTS, LARGE_LONG_REQUESTS = 6000, 60_000  # for Mooncake's traces, whose prompts are ten times as long
QUICK_TRACES, QUICK_LOADS, QUICK_REQUESTS = ("mooncake", "azure"), (0.8, 1.2), 300
INGRESSES, OLD_S, CALL_S = 8, 0.1, 0.001


def experiments(options: argparse.Namespace) -> list[Experiment]:
    """Every run of the sweep. The large ones come first, so that the last to end are short ones."""
    made = []
    for replicas, trace in itertools.product(sorted(options.replicas, reverse=True), options.traces):
        requests = options.requests or _requests(trace, replicas)
        for load in options.loads or (LARGE_LOADS if replicas >= LARGE else LOADS):
            for policy in options.policies or (LARGE_POLICIES if replicas >= LARGE else POLICIES):
                for admission in (True, False) if policy == OURS else (False,):
                    one = Experiment(trace, replicas, load, policy, admission, requests, seed=options.seed)
                    made.append(
                        replace(
                            one, placement=tuple(options.placement), prefill=options.prefill, tier_gb=options.tier_gb
                        )
                    )
    return made


def _requests(trace: str, replicas: int) -> int:
    """The requests of one run of a trace.

    They are enough to fill a fleet in the first half of the time, and few enough that the benchmark has time for all
    of its runs.
    """
    if replicas <= SMALL:
        return SMALL_REQUESTS
    if trace.startswith("mooncake"):
        return LARGE_LONG_REQUESTS if replicas >= LARGE else LONG_REQUESTS
    return LARGE_REQUESTS if replicas >= LARGE else REQUESTS


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark. Raises TraceError when a trace cannot be read."""
    before = conditions()
    for name in options.traces:
        load_trace(name, 1 << 20)
    if options.caches:
        rows = _caches(options)
        return {"runs": rows, "summary": caches.compare(rows), "conditions": before | _settings(options)}
    with ProcessPoolExecutor(options.processes) as processes:
        rows = _perform(processes, experiments(options))
        rows += _perform(processes, _admitted(options, rows) + _overloads(options, rows))
        late = _perform(processes, _with_many(options, rows))
    summary = {}
    for replicas, trace in itertools.product(options.replicas, options.traces):
        mine = _of(rows, trace, replicas)
        summary[f"{trace}-{replicas}"] = compare(mine) | _many(mine, _of(late, trace, replicas))
    return {"runs": rows + late, "summary": summary, "conditions": before | _settings(options)}


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "processes": options.processes,
        "seed": options.seed,
        "placement": dict(options.placement),
        "objectives": {name: [asdict(each) for each in classes_of(name)] for name in options.traces},
    }


def _caches(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of every form of the caches, at every load of every trace."""
    plain = [one for one in experiments(options) if one.policy == OURS and not one.admission]
    named = [(name, form) for one in plain for name, form in caches.forms(one).items()]
    with ProcessPoolExecutor(options.processes) as processes:
        rows = _perform(processes, [form for _, form in named])
    return [row | {"caches": name} for row, (name, _) in zip(rows, named, strict=True)]


def _perform(processes: ProcessPoolExecutor, wanted: Sequence[Experiment]) -> list[dict[str, Any]]:
    """Runs the experiments and prints each row as it comes. Returns the rows in the order of the experiments."""
    futures = {processes.submit(perform, experiment): index for index, experiment in enumerate(wanted)}
    rows: dict[int, dict[str, Any]] = {}
    for future in as_completed(futures):
        row = rows[futures[future]] = future.result()
        say(
            f"{len(rows):4}/{len(wanted)}  {row['trace']:13} {row['replicas']:5} replicas  load {row['load']:4}  "
            f"{row['policy']:20} {'admission' if row['admission'] else '':9}  "
            f"{row['ingresses']} ingress {row['allocators']} allocator  "
            f"goodput {row['goodput']:8} of {row['offered']:8}/s  ttft p99 {row['ttft_p99_s']:7} s  "
            f"tpot p99 {row['tpot_p99_s']:8} s  hits {row['hit_rate']:6}  refused {row['refused']:5}  {row['cpu_s']} s"
        )
    return [rows[index] for index in range(len(wanted))]


def _overloads(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> list[Experiment]:
    """`joint` at twice the load of its highest goodput, with and without admission, where that has not run yet."""
    made = {}
    for one in experiments(options):
        peak = peak_load(_of(rows, one.trace, one.replicas))
        if one.policy == OURS and peak is not None:
            double = replace(one, load=TWOFOLD * peak)
            made[double] = not any(_is_of(row, double) for row in rows)
    return [one for one, is_new in made.items() if is_new]


def _admitted(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> list[Experiment]:
    """The other policies at each knee, with admission as `joint` has it."""
    return [
        replace(one, admission=True)
        for one in experiments(options)
        if one.policy in set(options.admitted) - {OURS} and one.load == knee(_of(rows, one.trace, one.replicas))
    ]


def _is_of(row: dict[str, Any], one: Experiment) -> bool:
    return all(row[name] == getattr(one, name) for name in ("trace", "replicas", "load", "policy", "admission"))


def _with_many(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> list[Experiment]:
    """`joint` at each knee, with old snapshots and many ingresses: they share an allocator, or each has its own."""
    made = []
    for one in experiments(options):
        is_ours = one.policy == OURS and one.admission
        if is_ours and one.load == knee(_of(rows, one.trace, one.replicas)):
            many = replace(one, ingresses=INGRESSES, snapshot_delay_s=OLD_S)
            made += [replace(many, call_s=CALL_S), replace(many, allocators=INGRESSES)]
    return made


def _of(rows: Sequence[dict[str, Any]], trace: str, replicas: int) -> list[dict[str, Any]]:
    return [row for row in rows if row["trace"] == trace and row["replicas"] == replicas]


def _many(rows: Sequence[dict[str, Any]], late: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"ingress8": None, "allocators8": None}
    for many in late:
        one = next(r for r in rows if r["policy"] == OURS and r["admission"] and r["load"] == many["load"])
        ratio = round(many["goodput"] / one["goodput"], 4) if one["goodput"] else None
        name = "ingress8" if many["allocators"] == 1 else "allocators8"
        found[name] = {"goodput": many["goodput"], "ratio": ratio, "preemptions": many["preemptions"]}
    return found


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="load_tests.bench.policies", description="placement policies, simulated")
    parser.add_argument("--quick", action="store_true", help="a small fleet, few loads and requests")
    parser.add_argument("--replicas", type=_integers, help="fleet sizes, by comma; default: 16")
    parser.add_argument("--traces", type=_names, help=f"files' beginnings, or {', '.join(MADE)}")
    parser.add_argument("--policies", type=_names, help="by comma; default: all, of a large fleet four")
    parser.add_argument("--admitted", type=_names, default=ADMITTED, help="other policies that run with admission too")
    parser.add_argument("--loads", type=_numbers, help="in parts of the estimated capacity, by comma")
    parser.add_argument("--requests", type=int, help="requests of each run")
    parser.add_argument(
        "--placement", type=_setting, action="append", default=[], metavar="KEY=VALUE", help="of the configuration"
    )
    parser.add_argument("--prefill", type=int, help="so many of the replicas prefill; default: 11 of 16")
    parser.add_argument("--tier-gb", type=float, default=0.0, help="main memory of each replica for KV, 10^9 bytes")
    parser.add_argument("--caches", action="store_true", help="affinity, tiers and fetches, and nothing else")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if wrong := set(options.policies or ()) - set(POLICIES):
        parser.error(f"no policy {sorted(wrong)}; there are {', '.join(POLICIES)}")
    options.replicas = options.replicas or REPLICAS
    options.traces = options.traces or (QUICK_TRACES if options.quick else TRACES)
    if options.prefill is not None and not 0 < options.prefill < min(options.replicas) - 1:
        parser.error("--prefill must leave at least two replicas for decode")
    if options.quick:
        options.loads = options.loads or QUICK_LOADS
        options.requests = options.requests or QUICK_REQUESTS
    return options


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


def _setting(text: str) -> tuple[str, object]:
    key, _, value = text.partition("=")
    return key, json.loads(value)


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
