"""A fleet ready to simulate: its configuration, as an operator would write it, and its replicas."""

from __future__ import annotations

import random
from dataclasses import dataclass

from configs.schema import BatonConfig
from deployments.messages import ReplicaInfo, Role
from load_tests.simulator.links import Nic
from load_tests.simulator.metrics import Classes, Objectives
from load_tests.simulator.profiles import Cluster, Pool
from load_tests.simulator.replica import Replica
from load_tests.simulator.reporting import Reporter


@dataclass(frozen=True, slots=True)
class Options:
    """How a fleet is run.

    `ingresses`: the processes that take requests, in turn. `allocators`: the number of allocators that decide for them.
    One is the session manager, which all ingresses share. Several know each other's promises only from what replicas
    report, as if each ingress decided for itself. `call_s`: the mean time from an ingress to its allocator, or back;
    some ingresses are nearer than others. `snapshot_interval_s`: the shortest time between two reports of a replica
    with news. `quiet_s`: the same for a replica without news. `snapshot_delay_s`: the time until a snapshot is known.
    `placement`: more settings for the configuration's section of that name.
    """

    policy: str = "joint"
    split: str = "auto"
    admission: bool = True
    overcommit: float = 1.0
    ingresses: int = 1
    allocators: int = 1
    call_s: float = 0.0
    snapshot_interval_s: float = 0.1
    snapshot_delay_s: float = 0.0
    quiet_s: float = 1.0
    queue_timeout_s: float = 30.0
    max_queued_requests: int = 1024
    seed: int = 0
    placement: tuple[tuple[str, object], ...] = ()


@dataclass(slots=True, eq=False)
class Node:
    """A replica with its ports and its reports. `scheduled_s`: the time of its next boundary in the calendar."""

    replica: Replica
    reporter: Reporter
    kv_bytes_per_token: float
    layers: int
    out: Nic
    into: Nic
    scheduled_s: float = -1.0


def configuration(cluster: Cluster, block_tokens: int, classes: Classes, options: Options) -> BatonConfig:
    """The application that would run this fleet for these classes.

    Requests that are promised less time wait at the front.
    """
    return BatonConfig.model_validate(
        {
            "model": {"max_model_len": cluster.max_model_len},
            **_pools(cluster, block_tokens),
            "channel": {"kind": "in_process", "link_bytes_per_s": cluster.pools[0].profile.nic_bytes_per_s},
            "placement": {
                "policy": options.policy,
                "split": options.split,
                "admission": options.admission,
                "overcommit": options.overcommit,
                "queue_timeout_s": options.queue_timeout_s,
                "max_queued_requests": options.max_queued_requests,
                "snapshot_interval_s": options.snapshot_interval_s,
                "classes": {each.name: _class(each, rank) for rank, each in enumerate(classes)},
                "default_class": classes[0].name,
                **dict(options.placement),
            },
        }
    )


def _class(objectives: Objectives, rank: int) -> dict[str, object]:
    """A priority class."""
    if objectives.yields:
        return {"rank": rank, "yields": True}
    return {"ttft_s": objectives.ttft_s, "tpot_s": objectives.tpot_s, "rank": rank}


def _pools(cluster: Cluster, block_tokens: int) -> dict[str, object]:
    """The sections of the pools."""
    named: dict[str, dict[str, object]] = {"decode": {}, "mixed": {}}
    prefill: dict[str, object] = {}
    for pool in cluster.pools:
        if pool.role is Role.PREFILL:
            prefill["prefill"] = _pool(pool, block_tokens)
        else:
            named[pool.role.value][pool.name] = _pool(pool, block_tokens)
    return prefill | named


def _pool(pool: Pool, block_tokens: int) -> dict[str, object]:
    steps = pool.profile.steps
    return {
        "replicas": pool.replicas,
        "device": pool.profile.device,
        "strict": pool.strict,
        "engine": {
            "kind": "mock",
            "block_size": block_tokens,
            "num_blocks": pool.blocks(block_tokens),
            "max_num_seqs": pool.limits.sequences,
            "max_num_batched_tokens": pool.limits.batched_tokens,
            "num_layers": pool.profile.layers,
            "prefill_tokens_per_s": 1.0 / steps.prefill_token_s,
            "step_s": steps.base_s,
        },
    }


def nodes(cluster: Cluster, block_tokens: int, rng: random.Random) -> dict[str, Node]:
    """Every replica by its id. Each is a little faster or slower than its kind."""
    made = {}
    for pool in cluster.pools:
        for number in range(pool.replicas):
            node = new_node(cluster, pool, number, block_tokens, rng)
            made[node.replica.info.replica_id] = node
    return made


def deployment_of(pool: Pool) -> str:
    """The name of a pool's deployment."""
    return pool.name if pool.role is Role.PREFILL else f"{pool.role.value}-{pool.name}"


def new_node(cluster: Cluster, pool: Pool, number: int, block_tokens: int, rng: random.Random) -> Node:
    """One more replica of a pool. `number`: no other replica of the pool has or had it."""
    deployment, profile = deployment_of(pool), pool.profile
    info = _info(f"{deployment}-{number:04}", deployment, pool, cluster.max_model_len, block_tokens)
    speed = rng.lognormvariate(0.0, cluster.replica_sigma) if cluster.replica_sigma else 1.0
    tier_blocks = int(pool.tier_bytes / profile.kv_bytes_per_token / block_tokens)
    replica = Replica(info, profile.steps, pool.limits, random.Random(rng.random()), speed, tier_blocks)
    ports = Nic(profile.nic_bytes_per_s), Nic(profile.nic_bytes_per_s)
    return Node(replica, Reporter(replica), profile.kv_bytes_per_token, profile.layers, *ports)


def _info(replica_id: str, deployment: str, pool: Pool, max_model_len: int, block_tokens: int) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=replica_id,
        pool=deployment,
        role=pool.role,
        node_id=replica_id,
        fingerprint="simulated",
        block_size=block_tokens,
        total_blocks=pool.blocks(block_tokens),
        max_sessions=pool.limits.sequences,
        max_model_len=max_model_len,
        chunk_tokens=pool.limits.batched_tokens,
        kv_bytes_per_token=int(pool.profile.kv_bytes_per_token),
        prior=tuple(pool.profile.guess),
        strict=pool.strict,
        endpoints=(replica_id,),
    )
