"""One simulated run of a policy under a load. The description can be sent to another process.

**Objectives.** Mooncake's conversation, `agents` and `shared` have two classes. Prompts of up to 16,384 tokens are
promised the first token within 2 s, longer ones within 15 s. A simulated H100 with nothing else to do takes 0.7 s for
the longest of the first class, and 13 s for the longest of the second. With any policy, the short ones among the
waiting requests go first (rank). Azure's conversation and the made traces have one class: 1 s. 99% of Azure's prompts
take at most 0.15 s alone. All are promised 0.05 s a token. That is 20 tokens a second, several times as fast as people
read, and twice the time that a full H100 needs for a step of decode alone.

**Load.** 1.0 is an estimate of what the fleet can do without any cache hit, with prefill and decode each busy all the
time: `capacity`. The load at which a policy stops keeping up is measured, not estimated.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from configs.schema import BatonConfig
from deployments.policy.allocator import Allocator
from deployments.policy.placement import fetch
from load_tests.simulator import synthetic, traces
from load_tests.simulator.cluster import Options
from load_tests.simulator.metrics import Classes, Objectives, summarise
from load_tests.simulator.profiles import Cluster, Pool, heterogeneous
from load_tests.simulator.simulation import Simulation
from load_tests.simulator.traces import Trace

CHAT: Classes = (Objectives("chat", ttft_s=1.0, tpot_s=0.05),)
LONG_CHAT: Classes = (
    Objectives("chat", ttft_s=2.0, tpot_s=0.05, most_prompt_tokens=16384),
    Objectives("long", ttft_s=15.0, tpot_s=0.05),
)
MADE: dict[str, Callable[[float, int, int], Trace]] = {
    "poisson": synthetic.poisson,
    "burst": synthetic.burst,
    "conversations": synthetic.conversations,
    "agents": synthetic.agents,
    "shared": synthetic.shared,
    "hot": synthetic.hot,
    "documents": synthetic.documents,
}
LONG_PROMPTS = ("agents", "shared", "hot", "documents")
"""The made traces whose prompts are as long as Mooncake's, and which have its objectives."""
MADE_RATE, MADE_REQUESTS = 10.0, 20_000


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is simulated.

    `load`: a share of the estimated capacity. `requests`: the number that is sent. `prefill`: the number of replicas
    that prefill; None means the fleet's own share. `tier_gb`: main memory of each replica for KV, in 10^9 bytes.
    `always_fetch`: with `placement.fetch`, all that is sooner fetched than computed is fetched, at no price for the KV
    whose place it takes. The rest is as in `Options`.
    """

    trace: str
    replicas: int
    load: float
    policy: str
    admission: bool
    requests: int
    ingresses: int = 1
    allocators: int = 1
    call_s: float = 0.0
    snapshot_delay_s: float = 0.0
    seed: int = 1
    placement: tuple[tuple[str, object], ...] = ()
    prefill: int | None = None
    tier_gb: float = 0.0
    always_fetch: bool = False

    @property
    def options(self) -> Options:
        return Options(
            policy=self.policy,
            admission=self.admission,
            ingresses=self.ingresses,
            allocators=self.allocators,
            call_s=self.call_s,
            snapshot_delay_s=self.snapshot_delay_s,
            seed=self.seed,
            placement=self.placement,
        )


def classes_of(trace: str) -> Classes:
    """The classes of a trace's requests, with their objectives."""
    return LONG_CHAT if trace.startswith("mooncake") or trace in LONG_PROMPTS else CHAT


@functools.lru_cache(maxsize=4)
def load_trace(name: str, max_model_len: int) -> Trace:
    """A trace by the beginning of its file's name, or a made trace by its own name. Raises TraceError."""
    trace = MADE[name](MADE_RATE, MADE_REQUESTS, 1) if name in MADE else traces.find(name)
    return trace.fitting(max_model_len)


def perform(experiment: Experiment) -> dict[str, Any]:
    """Simulate an experiment. Returns one row of figures."""
    begun_s = time.process_time()
    cluster = heterogeneous(experiment.replicas, prefill=experiment.prefill, tier_bytes=experiment.tier_gb * 1e9)
    trace = load_trace(experiment.trace, cluster.max_model_len)
    rate = experiment.load * capacity(cluster, trace)
    classes = classes_of(experiment.trace)
    scaled = trace.scaled(rate, experiment.requests)
    displaced = 0.0 if experiment.always_fetch else fetch.DISPLACED
    with mock.patch.object(fetch, "DISPLACED", displaced):
        result = Simulation(cluster, scaled, classes, experiment.options, make_allocator).run()
    return {
        "trace": experiment.trace,
        "replicas": experiment.replicas,
        "prefill_replicas": cluster.prefill.replicas,
        "load": experiment.load,
        "rate": round(rate, 2),
        "policy": experiment.policy,
        "admission": experiment.admission,
        "ingresses": experiment.ingresses,
        "allocators": experiment.allocators,
        "requests": experiment.requests,
        "seed": experiment.seed,
        "tier_gb": experiment.tier_gb,
        "always_fetch": experiment.always_fetch,
        **summarise(result.records, classes),
        "preemptions": result.preemptions,
        "moves": result.moves,
        "simulated_s": round(result.simulated_s, 1),
        "cpu_s": round(time.process_time() - begun_s, 1),
    }


def make_allocator(config: BatonConfig, rng: random.Random) -> Allocator:
    """The production allocator."""
    return Allocator(config, rng)


def capacity(cluster: Cluster, trace: Trace) -> float:
    """Requests per second that both prefill and decode could serve, computed from means and without cache hits."""
    pool = cluster.prefill
    prompts = [request.prompt_tokens for request in trace.requests]
    prefill_s = sum(pool.profile.steps.prefill_s(tokens, 0, pool.limits.batched_tokens) for tokens in prompts)
    prefill_s /= len(prompts)
    decode = sum(pool.replicas * _decoded_per_s(pool, trace, prefill_s) for pool in cluster.decode)
    return min(pool.replicas / prefill_s, decode)


def _decoded_per_s(pool: Pool, trace: Trace, prefill_s: float) -> float:
    """Answers per second of one decode replica whose memory is all promised.

    A session also holds its memory during its prefill.
    """
    number = len(trace.requests)
    promised = sum(request.prompt_tokens + request.max_tokens for request in trace.requests) / number
    output = sum(request.output_tokens for request in trace.requests) / number
    context = sum(request.prompt_tokens + request.output_tokens / 2 for request in trace.requests) / number
    sequences = min(pool.limits.sequences, pool.blocks(trace.block_tokens) * trace.block_tokens / promised)
    step_s = pool.profile.steps.step_s(0, 0, sequences, sequences * context)
    return sequences / (output * step_s + prefill_s)
