"""What a request costs the session manager, by the size of the fleet and by the number of ingress processes.

`make bench NAME=manager`, or with `ARGS="--replicas 10,100 --ingresses 1,2 --seconds 4"`. Progress goes to stderr; the
last line of stdout is one JSON object.

**What runs.** The session manager runs in a process of its own, with its server, as under Serve. There is no Serve and
no engine. One process plays all replicas. Each replica has a connection of its own, and reports as often as the manager
lets it, whether or not there is news. A report has five steps, eight sessions that others placed, and thirty counters.
The ingress processes together open, report prefilled and close `--rate` requests a second. Each session lasts
`SESSION_S`. Each ingress also keeps a view of the fleet, as ingresses do. No prompt is cached, and memory is ample.

**Figures.** CPU is that of the manager's process. `reports_core_share`: the share of a core that it uses before there
is any ingress. The other figures are by the number of ingresses. `views_core_share`: the share that their views add.
`cpu_us_per_request`: what a request adds to both. `open_ms_p50` and `open_ms_p99`: from the question to the placement,
at the ingress. `growth` compares `cpu_us_per_request`: of the most replicas over that of the fewest, and of the most
ingresses over that of the fewest, with everything else alike. Replicas, ingresses and the manager share the machine's
cores, so times at the ingress mean less than CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from statistics import median, quantiles
from typing import Any

from configs.schema import BatonConfig, ChannelConfig, MockEngineConfig, PoolConfig
from deployments.host.garbage import Collector
from deployments.manager.calls import Close, Open, PrefillDone, Report, View
from deployments.manager.client import ManagerClient
from deployments.manager.manager import SessionManager
from deployments.manager.server import ManagerServer
from deployments.messages import (
    Admit,
    Phase,
    ReplicaInfo,
    ReplicaSnapshot,
    Reservation,
    Role,
    SessionRequest,
    StepSample,
)
from load_tests.harness.machine import conditions

SECRET = "a benchmark"
BLOCK, BLOCKS = 16, 50_000
SESSION_S, VIEW_S, PATIENCE_S = 1.0, 1.0, 300.0
PRIOR = (4e-3, 3e-5, 1e-9, 2e-5, 5e-9)
THEIRS = tuple(f"theirs-{number}" for number in range(8))
HELD = tuple(Reservation(20, 15, 200) for _ in THEIRS)
COUNTERS = {f"counter_{number}": float(number) for number in range(30)}
STEPS = tuple(StepSample(0.02, 0, 0, 8, 4000) for _ in range(5))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark and prints the figures."""
    options = _options().parse_args(arguments)
    begun = conditions()
    by_replicas = {}
    for replicas in options.replicas:
        by_replicas[str(replicas)] = _measure(replicas, options)
        print(f"{replicas} replicas: {by_replicas[str(replicas)]}", file=sys.stderr, flush=True)
    figures = {"by_replicas": by_replicas, "growth": _growth(by_replicas)}
    settings = {"seconds": options.seconds, "rate": options.rate}
    print(json.dumps({"benchmark": "manager", "conditions": begun | settings, **figures}))


def _options() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description="What a request costs the session manager.")
    parser.add_argument("--replicas", type=numbers, default=[10, 100, 1000])
    parser.add_argument("--ingresses", type=numbers, default=[1, 8])
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second, of all ingresses together")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--settle-seconds", type=float, default=2.0, help="of quiet before each measurement")
    return parser


def _growth(by_replicas: dict[str, dict[str, Any]]) -> dict[str, float]:
    rows = [row["by_ingresses"] for row in by_replicas.values()]
    fewest, most = next(iter(rows[0])), list(rows[0])[-1]
    return {
        "replicas": round(rows[-1][fewest]["cpu_us_per_request"] / rows[0][fewest]["cpu_us_per_request"], 2),
        "ingresses": round(rows[-1][most]["cpu_us_per_request"] / rows[-1][fewest]["cpu_us_per_request"], 2),
    }


def _measure(replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """A fleet of one size, with each number of ingresses in turn."""
    with _Process(_manage) as manager:
        address = manager.told()
        with _Process(_play_replicas, address, replicas) as fleet:
            fleet.told()
            time.sleep(options.settle_seconds)
            reports_share = manager.cpu_share(options.seconds)
            row: dict[str, Any] = {"reports_core_share": round(reports_share, 4), "by_ingresses": {}}
            for ingresses in options.ingresses:
                processes = [_Process(_play_ingress, address, number) for number in range(ingresses)]
                try:
                    row["by_ingresses"][str(ingresses)] = _with_ingresses(manager, processes, reports_share, options)
                finally:
                    for process in processes:
                        process.__exit__()
    return row


def _with_ingresses(
    manager: _Process, processes: list[_Process], reports_share: float, options: argparse.Namespace
) -> dict[str, float]:
    for process in processes:
        process.told()
    time.sleep(options.settle_seconds)
    views_share = manager.cpu_share(options.seconds) - reports_share
    before_s = manager.cpu_s()
    for process in processes:
        process.tell((options.rate / len(processes), options.seconds))
    answers = [process.told() for process in processes]
    used_s = manager.cpu_s() - before_s
    opened_ms = [each for opened, _ in answers for each in opened]
    lasted_s = max(lasted for _, lasted in answers)
    own_s = used_s - (reports_share + views_share) * lasted_s
    return {
        "views_core_share": round(views_share, 4),
        "cpu_us_per_request": round(1e6 * own_s / len(opened_ms), 1),
        "requests": len(opened_ms),
        "open_ms_p50": round(median(opened_ms), 2),
        "open_ms_p99": round(quantiles(opened_ms, n=100)[98], 2),
    }


class _Process:
    """A process and a pipe to it."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()

    def told(self) -> Any:
        """The next message of the process. Raises EOFError when it has ended, TimeoutError after `PATIENCE_S`."""
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError(f"{self._process.name} said nothing for {PATIENCE_S:g} s")
        return self._pipe.recv()

    def tell(self, message: Any) -> None:
        self._pipe.send(message)

    def cpu_s(self) -> float:
        self.tell("cpu")
        return float(self.told())

    def cpu_share(self, seconds: float) -> float:
        """The share of a core that the process uses over `seconds`."""
        begun_s, before_s = time.monotonic(), self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before_s) / (time.monotonic() - begun_s)


# ---- what the processes do


def _manage(pipe: Connection) -> None:
    async def serve() -> None:
        pool = PoolConfig(engine=MockEngineConfig(block_size=BLOCK))
        config = BatonConfig(prefill=pool, decode={"main": pool}, channel=ChannelConfig(kind="in_process"))
        collector = Collector()
        server = ManagerServer(SessionManager(config, rng=random.Random(1)), SECRET)
        await server.start("127.0.0.1")
        pipe.send(server.address)
        while await asyncio.to_thread(pipe.recv):
            pipe.send(time.process_time())
            collector.tick(time.monotonic())

    asyncio.run(serve())


def _client(address: str) -> ManagerClient:
    async def locate() -> str:
        return address

    return ManagerClient(locate, SECRET)


def _play_replicas(pipe: Connection, address: str, replicas: int) -> None:
    async def report(number: int, known: asyncio.Event) -> None:
        client, info, version = _client(address), _info(number), 0
        rng = random.Random(number)
        while True:
            version += 1
            answer = await client.ask(Report(_snapshot(info, version)))
            known.set()
            await asyncio.sleep(max(0.1, answer.interval_s) * rng.uniform(0.9, 1.1))

    async def play() -> None:
        known = [asyncio.Event() for _ in range(replicas)]
        tasks = [asyncio.create_task(report(number, event)) for number, event in enumerate(known)]
        for event in known:
            await event.wait()
        pipe.send("all are known")
        await asyncio.gather(*tasks)

    asyncio.run(play())


def _play_ingress(pipe: Connection, address: str, number: int) -> None:
    opened_ms: list[float] = []

    async def session(client: ManagerClient, name: str) -> None:
        asked_s = time.monotonic()
        decision = await client.ask(Open(SessionRequest(name, 200, 100)))
        opened_ms.append(1e3 * (time.monotonic() - asked_s))
        assert isinstance(decision, Admit), decision
        epoch = decision.placement.epoch
        await asyncio.sleep(SESSION_S / 4)
        await client.ask(PrefillDone(name, epoch))
        await asyncio.sleep(3 * SESSION_S / 4)
        await client.ask(Close(name, epoch, "length", 100, ended=True))

    async def view(client: ManagerClient) -> None:
        while True:
            await client.ask(View(VIEW_S))

    async def play() -> None:
        client = _client(address)
        await client.ask(View(0.0))
        viewing = asyncio.create_task(view(client))
        pipe.send("connected")
        rate, seconds = await asyncio.to_thread(pipe.recv)
        begun_s, rng = time.monotonic(), random.Random(number)
        async with asyncio.TaskGroup() as group:
            at_s = rng.expovariate(rate)
            while at_s < seconds:
                await asyncio.sleep(begun_s + at_s - time.monotonic())
                group.create_task(session(client, f"{number}-{at_s}"))
                at_s += rng.expovariate(rate)
        pipe.send((opened_ms, time.monotonic() - begun_s))
        await viewing

    asyncio.run(play())


def _info(number: int) -> ReplicaInfo:
    role = Role.PREFILL if number % 2 else Role.DECODE
    pool = "prefill" if number % 2 else "decode-main"
    where = (f"tcp://10.0.{number // 256}.{number % 256}:7000",)
    return ReplicaInfo(f"r{number}", pool, role, "node", "engine", BLOCK, BLOCKS, 256, 20_000, where, 2048, 4096, PRIOR)


def _snapshot(info: ReplicaInfo, version: int) -> ReplicaSnapshot:
    return ReplicaSnapshot(
        info.replica_id,
        version,
        Phase.READY,
        info,
        used_blocks=160,
        running=len(THEIRS),
        sessions=THEIRS,
        reservations=HELD,
        pool=info.pool,
        counters=COUNTERS,
        running_tokens=2000,
        steps=STEPS,
    )


if __name__ == "__main__":
    main()
