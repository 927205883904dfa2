"""What serving costs beside the engine: CPU per token and request, and time added, at 1 to 1,000 concurrent streams.

`make bench NAME=overhead`; shorter: `ARGS="--streams 1,32 --seconds 5 --peers baton,starlette"`. Progress goes to
stderr; the last line of stdout is one JSON object.

**Servers.** Each runs over an engine that computes nothing and takes `--step-s` for every step.

- `baton`: the whole application. It has one prefill and one decode replica with mock engines whose steps hardly cost
  CPU (`engine.computes: false`), and `--ingresses` ingresses. Every prompt is split (`placement.split: always`).
- `baton_unsplit`: the same, but prompts of 32 tokens are too short to be split (`placement.split_min_prompt_tokens`).
  One replica has all of a request, as in Ray Serve LLM's plain application.
- `baton_without_metrics`: split, with `metrics: false`. It runs where `--peers` names it, and with `--metrics both`
  after `baton`.
- `baton_serve_proxy`: split, with Serve's HTTP proxy in place of HAProxy (`make serve PROXY=serve`).
- `starlette`: a plain server, one uvicorn process, that streams events of the same shape.
- `vllm`: `vllm serve`. Scheduler, engine core and messages are vLLM's; the worker computes nothing
  (`load_tests/harness/peers/free_worker.py`).
- `rayllm`: Ray Serve LLM's `build_openai_app` over the same worker, with one replica. Its prefill-decode application
  has one hop and one engine more, and needs a real worker.
- `rayllm_direct`: the same with direct streaming: HAProxy forwards to the engine's replica, without an ingress.

**Load.** The given number of streams runs at any time, and each is followed by the next. Prompts have 32 tokens and
answers `--output-tokens`. The load runs for `--seconds`, after a quarter of that which does not count. The client is
one process beside the servers on the same cores.

**Figures.** CPU is that of all processes of the server, except the engines' own (`VLLM::EngineCore` and workers) and
Ray's daemons (raylet, GCS, dashboard, agents, the launcher). `cpu_us_per_token_by` shows those apart. Baton's mock
engines run inside the replicas and count. `requests_per_s`: requests that ended in the window. It shows what a server
can do only where the engine is not the limit: at 1,000 streams. `added_ms_p99`: of the gaps between tokens, less a
step; several tokens of one event count as one gap and gaps of nothing. `ttft_ms_p99`: includes one step of the engine,
or two where a prompt is split. `tokens_per_event`: above 1 when a server could not keep up and put several tokens
together. `idle_cpu_cores`: before any request, all processes but the engines' own, Ray's daemons
included. `stolen_share`: of the machine's CPU time, the share that others on its host took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from load_tests.harness.machine import Stolen, conditions
from load_tests.harness.peers.doubles import DOUBLES, MOST_STREAMS, MOST_TOKENS, Double, started
from load_tests.harness.peers.group import PeerError
from load_tests.harness.peers.peers import Peer
from load_tests.harness.peers.settings import settings
from load_tests.harness.processes import cpu_by_process, title
from load_tests.report.serving import e2e_s, gaps_s, percentiles, rounded, ttft_s
from load_tests.traffic.client import Answer, Client, closed_loop
from load_tests.traffic.workloads import Shape, asks

PROMPT_TOKENS = 32
ENGINE, DAEMONS = "engine", "daemons"
WITHOUT_METRICS = "baton_without_metrics"
SETTLE_S = 10.0
"""A server that has just started has things to do for some seconds."""
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
Usage = dict[int, tuple[str, float]]
"""By process id: the part of the server that it is, and the CPU seconds that it has used."""


def part_of(name: str, on_ray: bool) -> str:
    """The part of a server that a process is, found from its title."""
    if name.startswith("VLLM::") and "APIServer" not in name:
        return ENGINE
    if not on_ray:
        return "server"
    if name.partition(" ")[0].endswith("/haproxy"):
        return "haproxy"
    if not name.startswith("ray::") or name.startswith(RAY_AGENTS):
        return DAEMONS
    words = name.removeprefix("ray::").replace("#", ".").split(":")
    return (words[2] if words[0] == "ServeReplica" and len(words) > 2 else words[0]).partition(".")[0]


def usage(peer: Peer) -> Usage:
    """The usage of every process of a server."""
    titles = {pid: title(pid) for pid in peer.group.pids()}
    on_ray = any(name.startswith("ray::") for name in titles.values())
    return {pid: (part_of(titles[pid], on_ray), used) for pid, used in cpu_by_process(titles).items()}


def used_between(before: Usage, after: Usage) -> dict[str, float]:
    """CPU seconds by part. A process that is not in both is left out: it started or ended within the window."""
    parts: dict[str, float] = {}
    for pid, (part, used) in after.items():
        if pid in before:
            parts[part] = parts.get(part, 0.0) + used - before[pid][1]
    return parts


def row(
    answers: Sequence[Answer], begin_s: float, end_s: float, cpu: Mapping[str, float], step_s: float
) -> dict[str, Any]:
    """The figures of one number of streams."""
    arrived = [count for answer in answers for at_s, count in answer.events if begin_s <= at_s < end_s]
    tokens, whole = sum(arrived), [answer for answer in answers if not answer.error]
    ended = [answer for answer in whole if begin_s <= answer.events[-1][0] < end_s]
    counted = [answer for answer in whole if begin_s <= answer.due_s < end_s]
    ours = sum(used for part, used in cpu.items() if part not in (ENGINE, DAEMONS))
    added = [max(0.0, gap - step_s) for answer in counted for gap in gaps_s(answer)]
    return {
        "cpu_us_per_token": _micros(ours, tokens),
        "cpu_us_per_request": _micros(ours, len(ended)),
        "requests_per_s": rounded(len(ended) / (end_s - begin_s)),
        "added_ms_p99": _millis(percentiles("added", added)["added_p99_s"]),
        "ttft_ms_p50": _millis(percentiles("ttft", [ttft_s(answer) for answer in counted])["ttft_p50_s"]),
        "ttft_ms_p99": _millis(percentiles("ttft", [ttft_s(answer) for answer in counted])["ttft_p99_s"]),
        "e2e_ms_p99": _millis(percentiles("e2e", [e2e_s(answer) for answer in counted])["e2e_p99_s"]),
        "tokens_per_s": rounded(tokens / (end_s - begin_s)),
        "tokens_per_event": rounded(tokens / len(arrived)) if arrived else None,
        "failed": len(answers) - len(whole),
        "cpu_us_per_token_by": {part: _micros(used, tokens) for part, used in sorted(cpu.items())},
    }


def _micros(seconds: float, over: int) -> float | None:
    return rounded(seconds / over * 1e6) if over else None


def _millis(seconds: float | None) -> float | None:
    return None if seconds is None else rounded(seconds * 1e3)


async def measure(peer: Peer, streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one number of streams on one running server."""
    shape, seconds = Shape("overhead", PROMPT_TOKENS, options.output_tokens), options.seconds
    source, begin_s, end_s, stolen = asks(shape, streams), seconds / 4, 1.25 * seconds, Stolen()
    async with Client(peer.urls, peer.model) as client, asyncio.TaskGroup() as group:
        running = group.create_task(closed_loop(client, source.__next__, streams, end_s, ramp_s=begin_s))
        await asyncio.sleep(begin_s)
        stolen.share()
        before, begun_s = usage(peer), client.now_s()
        await asyncio.sleep(end_s - begun_s)
        after, ended_s, stolen_share = usage(peer), client.now_s(), stolen.share()
        answers = await running
    for error in sorted({answer.error for answer in answers if answer.error}):
        print(f"  an answer failed: {error}", file=sys.stderr, flush=True)
    found = row(answers, begun_s, ended_s, used_between(before, after), options.step_s)
    return found | {"stolen_share": rounded(stolen_share)}


def idle_cores(peer: Peer, seconds: float) -> float | None:
    """The share of one core that a server takes without a request, its engines' own processes apart."""
    before, began_s = usage(peer), time.monotonic()
    time.sleep(seconds)
    used = used_between(before, usage(peer))
    return rounded(sum(cpu for part, cpu in used.items() if part != ENGINE) / (time.monotonic() - began_s))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures every server in turn. What a failed server did not give is null, and `failures` has the reason."""
    before, double = conditions(), Double(options.step_s, settings(), options.ingresses)
    by_streams: dict[str, dict[str, Any]] = {str(count): dict.fromkeys(options.peers) for count in options.streams}
    failures: dict[str, str] = {}
    idle: dict[str, float | None] = dict.fromkeys(options.peers)
    for name in options.peers:
        print(name, file=sys.stderr, flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder, started(name, double, Path(folder)) as peer:
                time.sleep(SETTLE_S)
                idle[name] = idle_cores(peer, options.seconds)
                print(f"  idle: {idle[name]}", file=sys.stderr, flush=True)
                for count in options.streams:
                    found = asyncio.run(measure(peer, count, options))
                    by_streams[str(count)][name] = found
                    print(f"  {count} streams: {found}", file=sys.stderr, flush=True)
        except PeerError as error:
            print(f"  failed: {error}", file=sys.stderr, flush=True)
            failures[name] = str(error)[-500:]
    asked = {"seconds": options.seconds, "step_s": options.step_s, "ingresses": options.ingresses}
    shape = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": options.output_tokens}
    return {
        "benchmark": "overhead",
        "conditions": before | asked | shape,
        "by_streams": by_streams,
        "idle_cpu_cores": idle,
        "failures": failures,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in DOUBLES if name != WITHOUT_METRICS]
    parser.add_argument("--peers", type=lambda text: text.split(","), default=usual, help="those to measure")
    parser.add_argument("--metrics", choices=("on", "both"), default="on", help="both: also Baton without metrics")
    parser.add_argument("--streams", type=_integers, default=[1, 32, 256, 1000], help="at once")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each number of streams")
    parser.add_argument("--step-s", type=float, default=0.02, help="that a step of every engine takes")
    parser.add_argument("--output-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--ingresses", type=int, default=1, help="of Baton")
    options = parser.parse_args(arguments)
    if wrong := set(options.peers) - set(DOUBLES):
        parser.error(f"no server {sorted(wrong)}; there are {', '.join(DOUBLES)}")
    if options.metrics == "both" and WITHOUT_METRICS not in options.peers:
        options.peers = [other for name in options.peers for other in _with_and_without(name)]
    if options.output_tokens > MOST_TOKENS - PROMPT_TOKENS:
        parser.error(f"at most {MOST_TOKENS - PROMPT_TOKENS} tokens of output")
    if max(options.streams) > MOST_STREAMS:
        parser.error(f"at most {MOST_STREAMS} streams")
    return options


def _with_and_without(name: str) -> list[str]:
    return [name, WITHOUT_METRICS] if name == "baton" else [name]


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    print(json.dumps(run(parse(arguments))), flush=True)


if __name__ == "__main__":
    main()
