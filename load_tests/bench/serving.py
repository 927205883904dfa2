"""Baton beside what people would use instead, over HTTP: the same model, engines, cores and requests, in turn.

`make bench NAME=serving`; shorter: `ARGS="--rounds 1 --rates 1.5 --concurrency 16 --seconds 20 --peers baton,vllm"`.
Progress goes to stderr; the last line of stdout is one JSON object. Every run is also written to `--out`, with the
arrival of every token; `python -m load_tests.report.plots FILES` draws them.

**Peers.**

- `baton`: `configs/cpu-1p1d.yaml` with the default placement, or `--config`.
- `vllm`: two `vllm serve`, each prefilling and decoding, with prompts in chunks of vLLM's default size. The client
  sends to them in turn, so they need no balancer.
- `rayllm`: Ray Serve LLM's `build_pd_openai_app` with vLLM's `NixlConnector`, one prefill and one decode engine, as
  shipped.
- `vllm_chunk256`, only by `--peers`: as `vllm`, with chunks as small as Baton's.
- `baton_serve_proxy`, only by `--peers`: Baton with Serve's HTTP proxy in place of HAProxy (`make serve PROXY=serve`).

Each has two engines with the same model, dtype, KV memory, block size, limits of sequences and length, and thread
settings. Every engine has one core of its own. Frontends, proxies and this client share both cores. On CPU Ray Serve
LLM always takes the executor `mp`, which is one process more an engine; both processes of an engine have the same core.
Peers run one at a time, all of them in every round, and the first one changes from round to round. By default a peer
takes all loads and ends before the next one starts, which may be ten minutes later. With `--together` all of them are
up, each takes a load in turn, and the processes of the others are stopped meanwhile: a machine whose speed drifts by
the minute then gives a fair ratio. That takes the memory of all of them.

**Load.** `mixed.<rate>`: open loop, with the given requests per second for `--seconds`. Prompts of 1,000 tokens with
answers of 8 (35 of 155) come among prompts of 40 with answers of 60. Arrivals are Poisson (`--arrivals bursts`: herds
of eight). `closed.<n>`: n requests at any time, with prompts of 256 tokens and answers of 32, for `--closed-seconds`;
counting begins after a quarter of that. `talks.<n>`: n conversations of four turns at any time, with prompts of 384,
516, 648 and 780 tokens and answers of 32: each prompt is all that was said before and a question. `--trace azure`:
`trace.<rate>`, a trace's requests at those rates. Prompts are random tokens: no cache has them, but for what a
conversation has said before. In a round every peer gets the same requests; rounds differ. Before them comes a warm-up
that does not count.

**Objectives**, stated here and before any run. The first token comes within 0.5 s for a short request and within 4 s
for a long one. For both a token comes every 50 ms on average. `--slower 3` multiplies all of them by three, for a
machine a third as fast as the one they were stated for (AMD EPYC, 2 cores), where no peer could meet them.

**Figures.** Time counts from when a request was due. `short_*`: of short prompts; the other figures are over all
requests. `goodput_rps`: requests per second that met the objectives of their kind. `output_tokens_per_s`: tokens that
arrived within the window. `stolen_share`: of the machine's CPU time during the load, the share that others on its host
took. With `--tries`, a load of which they took more than `--most-stolen` is repeated, with other tokens of the same
number at the same times. The least disturbed of at most that many tries counts. `ready_s`: from the first command to
the first answer of every engine. Each figure is the median of the rounds; `spread` has their least and greatest.
`ratios`: Baton's median over the other's. `paired`: Baton's
figure over the other's of the same round: the median of the rounds, the least and the greatest. `answers_equal`:
whether all gave the same greedy answers to the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from load_tests.harness.application import ROOT
from load_tests.harness.machine import Stolen, conditions
from load_tests.harness.peers.group import PeerError
from load_tests.harness.peers.peers import PEERS, Peer, started
from load_tests.harness.peers.settings import Settings, settings
from load_tests.report.serving import rounded
from load_tests.report.serving_loads import ARRIVALS, MOST_TRIES, Load, loads
from load_tests.report.serving_rounds import Results, Row, objectives_for
from load_tests.simulator.traces import TraceError, find
from load_tests.traffic.client import Answer, Client, open_loop
from load_tests.traffic.workloads import CLOSED, LONG, SHORT, TALK, mixed, prompt_of

WARM_RATE = 1.0
CHECKED_PROMPTS, CHECKED_TOKENS, CHECK_TIMEOUT_S = (7, 200, 600), 12, 120.0


def greedy(peer: Peer) -> list[str]:
    """A peer's greedy answers to the same prompts. Raises PeerError when the answers of its URLs differ."""
    by_url = []
    for url in peer.urls:
        texts = []
        for tokens in CHECKED_PROMPTS:
            body = {"model": peer.model, "prompt": prompt_of(tokens, seed=0), "max_tokens": CHECKED_TOKENS}
            response = httpx.post(f"{url}/v1/completions", json=body | {"temperature": 0}, timeout=CHECK_TIMEOUT_S)
            response.raise_for_status()
            texts.append(response.json()["choices"][0]["text"])
        by_url.append(texts)
    if any(texts != by_url[0] for texts in by_url):
        raise PeerError(f"{peer.name}: its engines differ: {by_url}")
    return by_url[0]


async def measure(peer: Peer, load: Load, options: argparse.Namespace, number: int, results: Results) -> None:
    """Measures one load on a running peer, until neighbours leave it alone, `--tries` times at most.

    The least disturbed try is kept.
    """
    stolen = Stolen()
    tries: list[tuple[Row, list[Answer]]] = []
    async with Client(peer.urls, peer.model) as client:
        while not tries or (len(tries) < options.tries and tries[-1][0]["stolen_share"] > options.most_stolen):
            stolen.share()
            row, answers = await load.once(client, len(tries))
            tries.append((row | {"stolen_share": rounded(stolen.share())}, answers))
    row, answers = min(tries, key=lambda each: each[0]["stolen_share"])
    results.add(number, peer.name, load.work, load.name, row | {"tries": len(tries)}, answers)


async def warm(peer: Peer, seconds: float, seed: int) -> None:
    """Requests that are not measured."""
    async with Client(peer.urls, peer.model) as client:
        await open_loop(client, mixed(WARM_RATE, seconds, seed))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures every peer in every round. A peer that fails is noted, and the others go on."""
    before, made = conditions(), settings(options.config)
    results = Results(options.out)
    for number in range(options.rounds):
        turn = number % len(options.peers)
        names = options.peers[turn:] + options.peers[:turn]
        for group in [names] if options.together else [[name] for name in names]:
            print(f"round {number + 1} of {options.rounds}: {', '.join(group)}", file=sys.stderr, flush=True)
            _round(group, made, options, number, results)
    return {"benchmark": "serving", "conditions": before | _asked(options, made), **results.summary()}


def _round(names: Sequence[str], made: Settings, options: argparse.Namespace, number: int, results: Results) -> None:
    """One round of peers that are up at the same time. Of several, all but the one that is measured are stopped."""
    seed = options.seed + number
    with contextlib.ExitStack() as stack:
        peers = [peer for name in names if (peer := _up(stack, name, made, options, number, results))]
        for place, load in enumerate(loads(options, seed, made.arguments["max_model_len"])):
            first = place % len(peers) if peers else 0
            for peer in peers[first:] + peers[:first]:
                _let_run(peer, peers)
                with _noted(results, peer.name, number) as failed:
                    if not place or len(peers) > 1:
                        asyncio.run(warm(peer, options.warm_seconds, seed - 1 - MOST_TRIES * place))
                    asyncio.run(measure(peer, load, options, number, results))
                if failed:
                    peers.remove(peer)


def _up(
    stack: contextlib.ExitStack, name: str, made: Settings, options: argparse.Namespace, number: int, results: Results
) -> Peer | None:
    """A started peer that has answered; None when that failed, which is noted."""
    load = round(os.getloadavg()[0], 2)
    with _noted(results, name, number):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peer = stack.enter_context(started(name, made, folder, pin=options.pin))
        print(f"  ready after {peer.ready_s:.1f} s; engines on cores {peer.cores}", file=sys.stderr, flush=True)
        results.started(name, {"ready_s": rounded(peer.ready_s), "load_1min_before": load})
        results.answers.append(greedy(peer))
        peer.group.complete()
        return peer
    return None


def _let_run(peer: Peer, peers: Sequence[Peer]) -> None:
    """From now on this peer runs, and the others are stopped."""
    for other in peers:
        if other is not peer:
            other.group.pause()
    peer.group.resume()


@contextlib.contextmanager
def _noted(results: Results, name: str, number: int) -> Iterator[list[str]]:
    """Notes what fails. Gives a list that then has the error."""
    failed: list[str] = []
    try:
        yield failed
    except (PeerError, httpx.HTTPError) as error:
        print(f"  failed: {error}", file=sys.stderr, flush=True)
        failed.append(str(error)[-500:])
        results.failures.append({"peer": name, "round": number + 1, "error": failed[0]})


def _asked(options: argparse.Namespace, made: Settings) -> dict[str, Any]:
    return {
        "rounds": options.rounds,
        "seconds": options.seconds,
        "closed_seconds": options.closed_seconds,
        "seed": options.seed,
        "arrivals": options.arrivals,
        "trace": options.trace.name if options.trace else None,
        "pinned": options.pin,
        "together": options.together,
        "tries": options.tries,
        "most_stolen": options.most_stolen,
        "objectives": {kind: asdict(objective) for kind, objective in objectives_for(options.slower).items()},
        "shapes": {shape.kind: [shape.prompt_tokens, shape.output_tokens] for shape in (SHORT, LONG, CLOSED, TALK)},
        "model": made.name,
        "engine_arguments": dict(made.arguments),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=_names, default=["baton", "vllm", "rayllm"], help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", type=_numbers, default=[0.8, 1.55, 2.3], help="requests per second; empty: none")
    parser.add_argument(
        "--concurrency", type=_integers, default=[1, 4, 16, 64], help="of the closed loops; empty: none"
    )
    parser.add_argument("--talks", type=_integers, default=[16], help="conversations at a time; empty: none")
    parser.add_argument("--seconds", type=float, default=60.0, help="of every open loop")
    parser.add_argument("--closed-seconds", type=float, help="of every closed loop; --seconds")
    parser.add_argument("--warm-seconds", type=float, default=8.0, help="of the open loop that is not measured")
    parser.add_argument("--arrivals", choices=ARRIVALS, default="poisson")
    parser.add_argument("--tries", type=int, default=1, help="of a load that neighbours disturb, at most")
    parser.add_argument(
        "--most-stolen", type=float, default=0.05, help="a load is disturbed that they took more of the CPU time from"
    )
    parser.add_argument("--slower", type=float, default=1.0, help="objectives times this, for a slower machine")
    parser.add_argument(
        "--trace", type=find, help="also this trace, by the beginning of its file's name: azure, mooncake"
    )
    parser.add_argument("--config", type=Path, help="what Baton runs, as it is, and where engine arguments come from")
    parser.add_argument(
        "--no-pin", dest="pin", action="store_false", help="leave the engines where the system puts them"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="all peers are up at the same time, and every load is measured on each of them before the next load",
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "bench" / "serving", help="a file for every run")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if not 1 <= options.tries < MOST_TRIES:
        parser.error(f"--tries must be from 1 to {MOST_TRIES - 1}")
    options.closed_seconds = options.closed_seconds or options.seconds
    if wrong := set(options.peers) - set(PEERS):
        parser.error(f"no peer {sorted(wrong)}; there are {', '.join(PEERS)}")
    return options


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[float]:
    return [float(name) for name in _names(text)]


def _integers(text: str) -> list[int]:
    return [int(name) for name in _names(text)]


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        result = run(parse(arguments))
    except TraceError as error:
        sys.exit(str(error))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
