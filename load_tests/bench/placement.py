"""What a placement costs: decisions per second of one core, and how long one takes, at 10, 100 and 1,000 replicas.

`make bench NAME=placement`, or with `ARGS="--replicas 10,100 --decisions 500 --blocks 100000 --sessions 1000"`.
Progress goes to stderr; the last line of stdout is one JSON object.

**What runs.** `Allocator.open` of the policy `joint`, as the session manager calls it. It predicts the answer's length,
looks up the prompt's blocks in the prefix index, chooses the pair, applies the objectives of the class, and makes the
ledger's entry and the index's optimistic one. Nothing is mocked, and nothing else runs in the process. Automatic
garbage collection is off, as in the session manager's process (`deployments/host/garbage.py`). `collect_ms` is the time
that a collection of everything takes; the session manager's process does one every ten minutes. A third of the replicas
prefill. The others decode, in two unlike pools.

Before the clock starts, the index holds `--blocks` blocks over all replicas, in prefixes of which half are on two
replicas. `--sessions` sessions are in flight. Prompts are `PROMPT_BLOCKS` blocks long. For half of them some replicas
have a prefix. After every decision, and off the clock, an older session ends its prefill, another is closed, and a
replica reports, with a step, so that rows are made anew as in production. That work is timed apart, as `events_us`.
`shared_prompt` is the largest fleet again, where all prompts also begin with the same `SHARED_BLOCKS` blocks, which
every replica has: a system prompt. With `--fetch`, replicas may fetch cached KV, and every way is weighed with that.

`index_bytes_per_block`: memory of the process that the index took when it was filled, by tracemalloc, over its blocks.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np

from configs.schema import BatonConfig, ClassConfig, MockEngineConfig, PlacementConfig, PoolConfig
from deployments.host.garbage import Collector
from deployments.messages import (
    Admit,
    CacheChange,
    Mode,
    Phase,
    ReplicaInfo,
    ReplicaSnapshot,
    Role,
    SessionRequest,
    StepSample,
)
from deployments.policy.allocator import Allocator
from deployments.policy.prediction.prefix_index import PrefixIndex
from load_tests.harness.machine import conditions

BLOCK = 128
PROMPT_BLOCKS = 32
PREFIX_BLOCKS = 25
SHARED_BLOCKS = 4
MODES = (Mode.DISAGGREGATED, Mode.DECODE_LOCAL, Mode.PREFILL_LOCAL)
PRIOR = (4e-3, 3e-5, 1e-9, 2e-5, 5e-9)


class Cluster:
    """An allocator with a given number of replicas, blocks in its index and sessions in flight."""

    def __init__(
        self, replicas: int, blocks: int, sessions: int, seed: int, shared: int = 0, fetch: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        engine = MockEngineConfig(block_size=BLOCK)
        pool = PoolConfig(engine=engine)
        config = BatonConfig(
            prefill=pool,
            decode={"small": pool, "large": pool},
            placement=PlacementConfig(
                classes={"default": ClassConfig(ttft_s=1e6, tpot_s=1e6)},
                default_class="default",
                snapshot_stale_s=1e9,
                fetch=fetch,
            ),
        )
        self.allocator = Allocator(config, self.rng)
        self.infos = [_info(number) for number in range(replicas)]
        self.shared = self._hashes(shared)
        self.prefixes = [self._hashes(PREFIX_BLOCKS) for _ in range(max(1, blocks // (3 * PREFIX_BLOCKS // 2)))]
        self.versions = 0
        self.sequences = dict.fromkeys((info.replica_id for info in self.infos), 0)
        self.now_s = 1000.0
        self.flying: list[tuple[str, int]] = []
        self.number = 0
        for info in self.infos:
            self.report(info)
        self.index_bytes = self._fill()
        for info in self.infos if shared else ():
            self._store(info, self.shared)
        while len(self.flying) < sessions:
            self.decide()

    def _hashes(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.getrandbits(64) for _ in range(count))

    def _fill(self) -> float:
        """Stores half of the prefixes on one replica each, and half on two. Returns bytes per block."""
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        self.allocator.predictors.index = PrefixIndex()
        for number, prefix in enumerate(self.prefixes):
            for info in self.rng.sample(self.infos, 1 + number % 2):
                self._store(info, prefix)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return (after - before) / max(1, len(self.allocator.predictors.index))

    def _store(self, info: ReplicaInfo, hashes: tuple[int, ...]) -> None:
        sequence = self.sequences[info.replica_id] = self.sequences[info.replica_id] + 1
        # New integer objects, as they come off the wire: the index cannot count on sharing those of the benchmark.
        stored = tuple(int.from_bytes(each.to_bytes(8, "little"), "little") for each in hashes)
        self.allocator.predictors.index.apply(
            info.replica_id, CacheChange(sequence, stored, (), sequence == 1), self.now_s
        )

    def report(self, info: ReplicaInfo) -> None:
        self.versions += 1
        sequences = self.rng.randint(1, 64)
        step = StepSample(PRIOR[0] + sequences * PRIOR[3] * self.rng.uniform(0.9, 1.1), 0, 0, sequences, 0)
        snapshot = ReplicaSnapshot(info.replica_id, self.versions, Phase.READY, info, steps=(step,))
        self.allocator.report(snapshot, self.now_s)

    def request(self) -> SessionRequest:
        self.number += 1
        known = self.rng.random() < 0.5
        head = self.rng.choice(self.prefixes)[: self.rng.randint(1, PREFIX_BLOCKS)] if known else ()
        head = self.shared + head
        hashes = head + self._hashes(PROMPT_BLOCKS - len(head))
        client = f"client-{self.rng.randrange(100)}"
        tokens = PROMPT_BLOCKS * BLOCK + 17
        return SessionRequest(f"s{self.number}", tokens, 256, MODES, hashes=hashes, client=client, chat=True)

    def decide(self) -> float:
        """Opens one session. Returns the seconds that it took."""
        request = self.request()
        self.now_s += 1e-4
        begun = time.perf_counter()
        decision = self.allocator.open(request, self.now_s)
        took_s = time.perf_counter() - begun
        if not isinstance(decision, Admit):
            raise SystemExit(f"a session was not placed: {decision}")
        self.flying.append((request.session_id, decision.placement.epoch))
        return took_s

    def turn(self) -> float:
        """Another session ends its prefill, one closes, and a replica reports. Returns the seconds that this took."""
        begun = time.perf_counter()
        session_id, epoch = self.flying[self.rng.randrange(len(self.flying))]
        self.allocator.prefill_done(session_id, epoch, self.now_s)
        at = self.rng.randrange(len(self.flying))
        self.flying[at], self.flying[-1] = self.flying[-1], self.flying[at]
        session_id, epoch = self.flying.pop()
        self.allocator.close(session_id, epoch, "stop", self.now_s, self.rng.randint(1, 256))
        self.report(self.rng.choice(self.infos))
        return time.perf_counter() - begun


def _info(number: int) -> ReplicaInfo:
    role = Role.PREFILL if number % 3 == 0 else Role.DECODE
    pool = "prefill" if role is Role.PREFILL else ("decode-small", "decode-large")[number % 2]
    blocks = 262_144 if pool == "decode-large" else 131_072
    name = f"replica-{number:04d}"
    return ReplicaInfo(
        name, pool, role, "node", "engine", BLOCK, blocks, 16_384, 131_072, (name,), 2048, 131_072, PRIOR
    )


def measure(cluster: Cluster, decisions: int, collector: Collector) -> dict[str, float]:
    """Measures `decisions` decisions, and then one collection of everything."""
    took: list[float] = []
    events: list[float] = []
    for _ in range(decisions):
        took.append(cluster.decide())
        events.append(cluster.turn())
        collector.tick(cluster.now_s)
    begun = time.perf_counter()
    gc.collect()
    collect_s = time.perf_counter() - begun
    p50, p99 = np.percentile(np.array(took) * 1e6, (50, 99))
    return {
        "decisions_per_s": round(decisions / sum(took), 1),
        "p50_us": round(float(p50), 1),
        "p99_us": round(float(p99), 1),
        "events_us": round(float(np.median(events)) * 1e6, 1),
        "collect_ms": round(collect_s * 1e3, 1),
    }


def run(
    replicas: Sequence[int], blocks: int, sessions: int, decisions: int, seed: int, fetch: bool = False
) -> dict[str, Any]:
    """Measures every size in turn. The index's memory is that of the largest."""
    by_replicas: dict[str, dict[str, float]] = {}
    index_bytes = 0.0
    for count in replicas:
        print(f"{count} replicas: filling", file=sys.stderr)
        cluster = Cluster(count, blocks, sessions, seed, fetch=fetch)
        index_bytes = cluster.index_bytes
        by_replicas[str(count)] = _warm_and_measure(cluster, decisions)
        print(f"{count} replicas: {by_replicas[str(count)]}", file=sys.stderr)
    cluster = Cluster(max(replicas), blocks, sessions, seed, SHARED_BLOCKS, fetch)
    shared = _warm_and_measure(cluster, decisions)
    print(f"{max(replicas)} replicas, a shared system prompt: {shared}", file=sys.stderr)
    return {"by_replicas": by_replicas, "shared_prompt": shared, "index_bytes_per_block": round(index_bytes, 1)}


def _warm_and_measure(cluster: Cluster, decisions: int) -> dict[str, float]:
    collector = Collector()
    measure(
        cluster, max(50, decisions // 10), collector
    )  # the first decisions also pay for warming up, which does not count
    return measure(cluster, decisions, collector)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="10,100,1000", help="sizes of the fleet")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the prefix index")
    parser.add_argument("--sessions", type=int, default=10_000, help="sessions in flight")
    parser.add_argument("--decisions", type=int, default=5000, help="decisions measured at each size")
    parser.add_argument("--fetch", action="store_true", help="replicas may fetch cached KV from others")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    sizes = [int(size) for size in options.replicas.split(",")]
    result = run(sizes, options.blocks, options.sessions, options.decisions, options.seed, options.fetch)
    asked = {name: getattr(options, name) for name in ("blocks", "sessions", "decisions", "fetch")}
    print(json.dumps({"benchmark": "placement", "conditions": conditions() | asked, **result}))


if __name__ == "__main__":
    main()
