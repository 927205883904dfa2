"""A batch beside online work, on real engines: what its lines get, and what the others feel of them.

`make bench NAME=batches`; shorter: `ARGS="--rounds 1 --seconds 20"`. Progress goes to stderr; the last line of stdout
is one JSON object.

**Ways**, each once in every round, on the same running Baton. The first one changes from round to round.

- `online`: an open loop of `--rate` requests a second, without a batch.
- `beside`: the same loop, with other tokens of the same numbers at the same times, beside a batch.
- `lines`: the batch alone.
- `full`: `--full` requests of the online work at any time, one after the other, without a batch: what Baton serves. It
  refuses what would miss an objective; those requests do not count as `failed`.

**Load.** Online work is the mixed work of `make bench NAME=serving`: prompts of 1,000 tokens with answers of 8 among
prompts of 40 with answers of 60. A line has a prompt of 128 tokens and an answer of 48. A batch has more lines than can
be answered. It comes before the window, which begins with the first answered line, and is cancelled after it.

**Baton** runs `--config` with `ingress.batches`, a host tier of `--host-kv-bytes` for every replica, and with the
objectives `--ttft-s` and `--tpot-s` for online work: lines take what is left within them.

**Figures** are of the window of `--seconds`; times count from when a request was due. `lines_tokens_per_s`: tokens of
the lines that were answered in it. `busy`: the share of the engines' cores that the engines used; an engine that writes
one answer uses as much as with many. `within`: the share of online requests within both objectives. Each is the median
of the rounds; `spread` has the least and the greatest. `over_online`: `beside` over `online` of the same round: the
median of the rounds, the least and the greatest. `share_of_idle`: the lines' tokens beside online work, over those of
the lines alone times the part that online work leaves: `1 - rate / full.requests_per_s`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from openai import AsyncOpenAI

from load_tests.harness.application import ROOT
from load_tests.harness.machine import Stolen, conditions
from load_tests.harness.peers.peers import Peer, started
from load_tests.harness.peers.settings import settings
from load_tests.harness.processes import cpu_s
from load_tests.report.serving import Objective, by_kind, figures, over_rounds, rounded
from load_tests.traffic.client import Answer, Ask, Client, closed_loop, open_loop
from load_tests.traffic.workloads import SHORT, Shape, asks, mixed, unlike

ONLINE, BESIDE, LINES, FULL = WAYS = ("online", "beside", "lines", "full")
LINE = Shape("line", 128, 48)
OVER = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "e2e_mean_s", "short_ttft_p99_s")
BATCH_TIMEOUT_S, POLL_S = 300.0, 0.2
Row = dict[str, float | None]


def configured(options: argparse.Namespace, directory: Path) -> Path:
    """The `serve run` file of `--config` with batches, host tiers and objectives."""
    serve = yaml.safe_load(options.config.read_text())
    baton = serve["applications"][0]["args"]
    pools = [pool for role in ("mixed", "decode") for pool in baton.get(role, {}).values()]
    for pool in [*pools, *([baton["prefill"]] if "prefill" in baton else [])]:
        pool["engine"]["host_kv_bytes"] = options.host_kv_bytes
    store = {"database_url": f"sqlite:///{directory / 'batches.db'}", "files_url": str(directory / "files")}
    baton.setdefault("ingress", {})["batches"] = store
    default = {"ttft_s": options.ttft_s, "tpot_s": options.tpot_s}
    baton.setdefault("placement", {})["classes"] = {"default": default}
    path = directory / "batches.yaml"
    path.write_text(yaml.safe_dump(serve))
    return path


def batch_file(model: str, lines: int, seed: int) -> bytes:
    """The lines of a batch, as OpenAI's API has them."""
    made = []
    for number, ask in enumerate(itertools.islice(asks(LINE, seed), lines)):
        body = {"model": model, "prompt": ask.prompt, "max_tokens": ask.output_tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        made.append(json.dumps(line))
    return "\n".join(made).encode()


class Batch:
    """A batch that runs. `answered` is the number of its lines that have been answered so far."""

    def __init__(self, client: AsyncOpenAI, batch_id: str) -> None:
        self._client, self._id = client, batch_id

    async def answered(self) -> int:
        """Raises RuntimeError where a line has failed."""
        counts = (await self._client.batches.retrieve(self._id)).request_counts
        if counts is None:
            return 0
        if counts.failed:
            raise RuntimeError(f"{counts.failed} lines have failed")
        return counts.completed

    async def begun(self) -> None:
        """Returns once a line has been answered."""
        while True:
            if await self.answered():
                return
            await asyncio.sleep(POLL_S)

    async def cancel(self) -> None:
        """Returns once nothing of it runs any more."""
        await self._client.batches.cancel(self._id)
        while True:
            if (await self._client.batches.retrieve(self._id)).status == "cancelled":
                return
            await asyncio.sleep(POLL_S)


@contextlib.asynccontextmanager
async def running(peer: Peer, lines: int, seed: int) -> AsyncIterator[Batch]:
    """A batch of which a line has been answered. It is cancelled in the end."""
    async with AsyncOpenAI(base_url=f"{peer.urls[0]}/v1", api_key="-", timeout=60.0) as client:
        content = io.BytesIO(batch_file(peer.model, lines, seed))
        file = await client.files.create(file=("lines.jsonl", content), purpose="batch")
        made = await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        batch = Batch(client, made.id)
        async with asyncio.timeout(BATCH_TIMEOUT_S):
            await batch.begun()
        try:
            yield batch
        finally:
            async with asyncio.timeout(BATCH_TIMEOUT_S):
                await batch.cancel()


async def measure(
    peer: Peer, way: str, asked: list[Ask], seed: int, options: argparse.Namespace
) -> tuple[Row, list[Answer]]:
    """One way, once."""
    stolen, begin_s = Stolen(), options.ramp_seconds if way == FULL else 0.0
    engines = peer.group.engines()
    pids = {pid for each in engines for pid in each}
    async with contextlib.AsyncExitStack() as stack:
        batch = await stack.enter_async_context(running(peer, options.lines, seed)) if way in (BESIDE, LINES) else None
        client = await stack.enter_async_context(Client(peer.urls, peer.model))
        if way == FULL:
            source = itertools.chain.from_iterable(unlike(asked, seed + turn) for turn in itertools.count())
            end_s = begin_s + options.seconds
            work = closed_loop(client, lambda: next(source), options.full, end_s, ramp_s=begin_s)
        else:
            work = open_loop(client, asked if way != LINES else [])
        loop = asyncio.create_task(work)
        await asyncio.sleep(begin_s)
        stolen.share()
        before, used = await batch.answered() if batch else 0, cpu_s(pids)
        await asyncio.sleep(options.seconds)
        answered, used = (await batch.answered() if batch else 0) - before, cpu_s(pids) - used
        stolen_share, answers = stolen.share(), await loop
    row: Row = {
        "busy": rounded(used / (options.seconds * len(engines))),
        "stolen_share": rounded(stolen_share),
    }
    if batch:
        row["lines_tokens_per_s"] = rounded(answered * LINE.output_tokens / options.seconds)
    if way == FULL:
        row["requests_per_s"] = rounded(ended(answers, begin_s, options.seconds) / options.seconds)
    if way in (ONLINE, BESIDE):
        row |= of_online(answers, options)
    return row, answers


def ended(answers: Sequence[Answer], begin_s: float, seconds: float) -> int:
    """The whole answers that ended in a window."""
    return sum(not each.error and begin_s <= each.events[-1][0] < begin_s + seconds for each in answers)


def of_online(answers: Sequence[Answer], options: argparse.Namespace) -> Row:
    """The figures of online work."""
    found = figures(answers, 0.0, options.seconds)
    short = figures(by_kind(answers).get(SHORT.kind, []), 0.0, options.seconds)
    objective = Objective(options.ttft_s, options.tpot_s)
    found["within"] = rounded(sum(objective.met(answer) for answer in answers) / max(1, len(answers)))
    found["short_ttft_p99_s"] = short["ttft_p99_s"]
    return {name: found[name] for name in (*OVER, "within", "requests", "failed")}


def summary(rounds: Sequence[Mapping[str, Row]], rate: float) -> dict[str, Any]:
    """Medians of the rounds, and the ratios within each of them. `rate`: online requests a second."""
    ways = {way: over_rounds([each[way] for each in rounds]) for way in WAYS}
    over = {name: _spread([_ratio(each[BESIDE][name], each[ONLINE][name]) for each in rounds]) for name in OVER}
    return {"ways": ways, "over_online": over, "share_of_idle": _spread([_of_idle(each, rate) for each in rounds])}


def _of_idle(rows: Mapping[str, Row], rate: float) -> float | None:
    load = _ratio(rate, rows[FULL]["requests_per_s"])
    share = _ratio(rows[BESIDE]["lines_tokens_per_s"], rows[LINES]["lines_tokens_per_s"])
    return None if load is None or share is None or load >= 1 else share / (1 - load)


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _spread(values: Sequence[float | None]) -> list[float | None] | None:
    """The median, the least and the greatest of those that there are."""
    known = [value for value in values if value is not None]
    return [rounded(found) for found in (statistics.median(known), min(known), max(known))] if known else None


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds on one Baton."""
    before, failed = conditions(), 0
    rounds: list[dict[str, Row]] = []
    with tempfile.TemporaryDirectory() as folder:
        made = settings(configured(options, Path(folder)))
        with started("baton", made, Path(folder), pin=options.pin) as peer:
            asyncio.run(warmed(peer, options))
            for number in range(options.rounds):
                turn = number % len(WAYS)
                rows: dict[str, Row] = {}
                for way in WAYS[turn:] + WAYS[:turn]:
                    asked = unlike(mixed(options.rate, options.seconds, options.seed + number), WAYS.index(way))
                    seed = (options.seed + number) * len(WAYS) + WAYS.index(way)
                    rows[way], answers = asyncio.run(measure(peer, way, asked, seed, options))
                    failed += sum(bool(answer.error) for answer in answers) if way != FULL else 0
                    print(f"round {number + 1}, {way}: {rows[way]}", file=sys.stderr, flush=True)
                rounds.append(rows)
    asked_for = {name: value for name, value in vars(options).items() if name != "config"}
    shapes = {"line": [LINE.prompt_tokens, LINE.output_tokens]}
    told = before | asked_for | shapes | {"config": options.config.name, "engine_arguments": dict(made.arguments)}
    return {"benchmark": "batches", "conditions": told, "failed": failed, **summary(rounds, options.rate)}


async def warmed(peer: Peer, options: argparse.Namespace) -> None:
    """Requests that do not count: the session manager learns what steps take."""
    async with Client(peer.urls, peer.model) as client:
        await open_loop(client, mixed(options.rate, options.warm_seconds, options.seed - 1))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "cpu-mixed.yaml", help="what Baton runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.6, help="online requests a second: half of what is served")
    parser.add_argument("--seconds", type=float, default=60.0, help="of every window")
    parser.add_argument("--full", type=int, default=24, help="online requests at any time, of the way `full`")
    parser.add_argument("--ramp-seconds", type=float, default=15.0, help="before the window of `full`")
    parser.add_argument("--warm-seconds", type=float, default=30.0, help="of online work before the first round")
    parser.add_argument("--ttft-s", type=float, default=8.0, help="objective of online work")
    parser.add_argument("--tpot-s", type=float, default=0.15, help="objective of online work")
    parser.add_argument("--lines", type=int, default=2000, help="of each batch")
    parser.add_argument("--host-kv-bytes", type=int, default=512 * 1024 * 1024, help="the host tier of each replica")
    parser.add_argument(
        "--no-pin", dest="pin", action="store_false", help="leave the engines where the system puts them"
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    print(json.dumps(run(parse(arguments))), flush=True)


if __name__ == "__main__":
    main()
