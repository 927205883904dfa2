"""`baton plan TRACE --ttft 1 --tpot 0.05`: which fleet serves this trace within these objectives for the least cost.

It simulates fleets with the policies of the product: a prefill and a decode pool of each pair of devices, and mixed
pools of each device. TRACE is a file, or the beginning of its name in $TRACES: Mooncake's format, Azure's, or a trace
of your own traffic (`trace` in the configuration). The busiest `--requests` requests in a row are what a fleet has to
carry; `--rate` makes them more. A fleet meets the objectives when at least `--target` of the requests in the second
half of that time get their first token and every further one in time, with both of two seeds. Refused requests miss.
The fleet that is found is simulated again with a third seed, and so are the fleets with one replica fewer of a pool.

Progress goes to stderr, on a terminal with a count of what was simulated. The result goes as a table to stdout, and
the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from pathlib import Path

from load_tests.plan.demand import Demand, Room, busiest, hopeless, room
from load_tests.plan.devices import Device, DeviceError, known_devices, read_devices
from load_tests.plan.fleets import Fleet, kinds
from load_tests.plan.judge import Verdict, judge, judge_all
from load_tests.plan.planned import Planned
from load_tests.plan.report import found, picture, table
from load_tests.plan.search import Search
from load_tests.report.progress import Progress, progress
from load_tests.simulator import traces
from load_tests.simulator.metrics import Classes, Objectives
from load_tests.simulator.traces import Trace, TraceError

TARGET = 0.99
"""An objective is mostly meant as a 99th percentile, and beyond its capacity a fleet falls below any target fast: with
0.95 the same plans are found, or one replica fewer."""
MAX_MODEL_LEN = 131072


class PlanError(Exception):
    """No fleet can meet the objectives, and the message says why."""


def plan(
    demand: Demand,
    rooms: Sequence[Room],
    most: int,
    seed: int,
    executor: Executor,
    lanes: int,
    minutes: float,
    shown: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> Planned:
    """Search, confirm with another seed, and search on where that fails. `lanes`: simulations at once."""
    planned = Planned(demand, list(rooms), Search(rooms, most))
    ends_s = clock() + 60 * minutes
    seeds = (seed, seed + 1)
    while True:
        simulate = functools.partial(judge_all, demand, seeds=seeds)
        _search(planned, executor, lanes, simulate, shown, lambda: clock() > ends_s)
        best = planned.search.best
        if best is None:
            return planned
        fleets = (best, *best.fewer())
        again = functools.partial(judge, demand, seed=seed + 2, whole=True)
        planned.confirmed, *planned.fewer = _shown(shown, [executor.submit(again, fleet) for fleet in fleets])
        planned.verdicts += [planned.confirmed, *planned.fewer]
        if planned.confirmed.meets:
            return planned
        shown.say(f"{best.name} does not meet the objectives with seed {seed + 2}")
        planned.search.tell(best, meets=False)


def _search(
    planned: Planned,
    executor: Executor,
    lanes: int,
    run: Callable[[Fleet], Verdict],
    shown: Progress,
    is_over: Callable[[], bool],
) -> None:
    """Ask and tell until there is nothing to ask, or the time is over."""
    search, running = planned.search, dict[Future[Verdict], Fleet]()
    while True:
        planned.is_cut = is_over()
        while len(running) < lanes and not planned.is_cut:
            if (fleet := search.ask(tuple(running.values()))) is None:
                break
            running[executor.submit(run, fleet)] = fleet
        if not running:
            return
        for future in _first_done(shown, running):
            del running[future]
            verdict = future.result()
            planned.verdicts.append(verdict)
            search.tell(verdict.fleet, verdict.meets)
            share = f"{verdict.attained:.2%}" if verdict.meets else f"under {planned.demand.target:.2%}"
            shown.say(f"{verdict.fleet.name:40} {verdict.fleet.cost:8.2f} an hour  {share}")


def _first_done(shown: Progress, running: Iterable[Future[Verdict]]) -> set[Future[Verdict]]:
    """Waits until one or more are done, which are counted."""
    while not (done := wait(running, shown.redraw_s, FIRST_COMPLETED).done):
        shown.redraw()
    shown.advance(len(done))
    return done


def _shown(shown: Progress, running: list[Future[Verdict]]) -> list[Verdict]:
    """The results of all, in their order, each counted when it is there."""
    left = set(running)
    while left:
        left -= _first_done(shown, left)
    return [future.result() for future in running]


def demand_of(options: argparse.Namespace) -> Demand:
    """What the command line asks. Raises TraceError."""
    file = Path(options.trace)
    trace = traces.load(file) if file.is_file() else traces.find(options.trace)
    fitting = trace.fitting(MAX_MODEL_LEN)
    if not fitting.requests:
        raise TraceError(f"{trace.name}: no request fits into {MAX_MODEL_LEN} tokens")
    chat = Objectives("chat", options.ttft, options.tpot)
    classes: Classes = (chat,)
    if options.long:
        tokens, ttft_s = options.long
        classes = (
            Objectives("chat", options.ttft, options.tpot, most_prompt_tokens=tokens),
            Objectives("long", ttft_s, options.tpot),
        )
    return Demand(busiest(fitting, options.requests, options.rate), classes, options.target, MAX_MODEL_LEN)


def check(demand: Demand, devices: Sequence[Device]) -> None:
    """Raises PlanError where more requests than may are too much for an idle replica of every device."""
    misses = min(hopeless(demand, device) for device in devices)
    if misses > demand.misses_allowed:
        raise PlanError(
            f"{misses / demand.counted:.1%} of the requests miss these objectives even on an idle replica, and only "
            f"{1 - demand.target:.1%} may: longer prompts take longer (--long TOKENS:SECONDS gives them more time)"
        )


def run(options: argparse.Namespace) -> Planned:
    """The whole command. Raises PlanError, TraceError and DeviceError."""
    demand = demand_of(options)
    devices = read_devices(options.devices) if options.devices else known_devices()
    if unknown := set(options.use or ()) - devices.keys():
        raise DeviceError(f"no device {sorted(unknown)}; there are {', '.join(devices)}")
    chosen = [replaced for name, replaced in devices.items() if not options.use or name in options.use]
    check(demand, chosen)
    rooms = [room(demand, kind) for kind in kinds(chosen, options.roles != "mixed", options.roles != "split")]
    lanes = options.processes
    with progress("fleets simulated", None, options.json) as shown, _executor(lanes) as executor:
        shown.say(f"{describe(demand.trace)}; at least {min(each.least for each in rooms)} replicas")
        return plan(demand, rooms, options.most, options.seed, executor, lanes, options.minutes, shown)


def _executor(lanes: int) -> Executor:
    return ThreadPoolExecutor(1) if lanes == 1 else ProcessPoolExecutor(lanes)


def describe(trace: Trace) -> str:
    """The demand in a few words."""
    number, length_s = len(trace.requests), trace.requests[-1].at_s
    prompts, outputs = (
        sum(tokens) / number
        for tokens in zip(*((each.prompt_tokens, each.output_tokens) for each in trace.requests), strict=True)
    )
    rate = (number - 1) / length_s
    return (
        f"{trace.name}: {number} requests, {rate:.3g} a second, prompts of {prompts:.0f} and answers of {outputs:.0f}"
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(prog="baton")
    about = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    one = whole.add_subparsers(required=True).add_parser("plan", help="the cheapest fleet for a trace", **about)  # type: ignore[arg-type]
    one.add_argument("trace", help="a file, or the beginning of its name in $TRACES")
    one.add_argument("--ttft", type=float, default=1.0, help="objective: seconds until the first token")
    one.add_argument("--tpot", type=float, default=0.05, help="objective: seconds from one token to the next")
    one.add_argument("--long", type=_long, metavar="TOKENS:SECONDS", help="TTFT of the prompts with more tokens")
    one.add_argument("--target", type=_share, default=TARGET, help=f"share of requests in time; default: {TARGET}")
    one.add_argument("--rate", type=_positive, help="mean requests per second of the whole trace; default: its own")
    one.add_argument("--requests", type=int, default=4000, help="the busiest so many in a row are simulated")
    one.add_argument("--devices", type=Path, metavar="FILE", help="devices and their costs, as YAML or JSON")
    one.add_argument("--use", type=lambda text: text.split(","), help="of these devices only, by comma")
    one.add_argument("--roles", choices=("any", "split", "mixed"), default="any", help="pools to choose from")
    one.add_argument("--most", type=int, default=64, help="replicas of the largest fleet")
    one.add_argument("--minutes", type=_positive, default=10.0, help="the search ends after that, with what it has")
    one.add_argument("--processes", type=int, default=2, help="simulations at once")
    one.add_argument("--seed", type=int, default=1, help="the first of three")
    one.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw what was simulated")
    one.add_argument("--json", action="store_true", help="only the JSON object on stdout, and no count on stderr")
    return whole


def _long(text: str) -> tuple[int, float]:
    tokens, _, seconds = text.partition(":")
    return int(tokens), _positive(seconds)


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 < share <= 1.0:
        raise argparse.ArgumentTypeError(f"a share over 0 and up to 1, not {text}")
    return share


def _positive(text: str) -> float:
    number = float(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"a number over 0, not {text}")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; its exit status is 1 where there is no plan."""
    options, began_s = parser().parse_args(arguments), time.monotonic()
    if options.requests < 2 or options.most < 1 or options.processes < 1:
        sys.exit("--requests must be 2 or more, --most and --processes 1 or more")
    try:
        planned = run(options)
    except (PlanError, TraceError, DeviceError) as error:
        sys.exit(str(error))
    if not options.json:
        print(table(planned))
    if options.picture:
        options.picture.write_text(picture(planned))
    print(json.dumps(found(planned) | {"run_s": round(time.monotonic() - began_s, 1)}), flush=True)
    if planned.search.best is None:
        sys.exit(1)


if __name__ == "__main__":
    main()
