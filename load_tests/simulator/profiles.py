"""What the simulated machines can do, and the fleets made of them.

**H100, H200**: Llama-3.1-8B in bfloat16 on one accelerator, by roofline. Model (Hugging Face config): 32 layers, hidden
4096, feed-forward 14336, 32 heads, 8 KV heads of 128, vocabulary 128256: 131072 bytes of KV a token, 16 GB of weights.
Accelerator (NVIDIA's data sheets, SXM): 989e12 dense bfloat16 FLOP/s both; 3.35e12 B/s and 80 GB (H100), 4.8e12 B/s and
141 GB (H200). Assumptions: 45% of the FLOP/s, 75% of the bandwidth, 4 ms a step for scheduling and launches; 90% of
memory is the engine's, 4 GB of that for activations. **L40S**: the same, with the data sheet's 362e12 dense FLOP/s,
864e9 B/s and 48 GB. These are meant to differ from what
`deployments.policy.prediction.step_time` assumes before it has learned, as the real ones will. NIC: 400 Gb/s
(ConnectX-7's data sheet), 50e9 B/s.

**cpu**: SmolLM2-135M in float32, blocks of 128 tokens, chunks of 256, as in `configs/cpu-1p1d.yaml`, one core each:
46080 bytes of KV a token (30 layers, 3 KV heads of 64, 4 bytes). Steps: what docs/benchmarks/tune.md has (a decode step
of 72 ms, prompts of 1000 and 4096 tokens in 5 and 41 s, on a busy machine), unless fitted ones are given. Link: what
one thread copies, 6.1e9 B/s there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deployments.messages import Role
from deployments.policy.prediction.step_time import ModelShape, roofline
from deployments.step_cost import Coefficients
from load_tests.simulator.steps import Limits

LLAMA_8B = ModelShape(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
FLOPS_SHARE, BANDWIDTH_SHARE, OVERHEAD_S = 0.45, 0.75, 0.004
MEMORY_SHARE, ACTIVATION_BYTES = 0.9, 4e9
NIC_BYTES_PER_S = 50e9


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of replica. `steps`: the true time of its steps. `guess`: what it says of them before it has run.

    `kv_bytes`: memory for KV, in bytes.
    """

    name: str
    steps: Coefficients
    guess: Coefficients
    kv_bytes: float
    kv_bytes_per_token: float
    layers: int
    nic_bytes_per_s: float
    device: str


def _accelerator(name: str, bytes_per_s: float, memory_bytes: float, flops_per_s: float = 989e12) -> Profile:
    ideal = roofline(LLAMA_8B, name)
    truth = replace(
        ideal,
        flops_per_s=flops_per_s * FLOPS_SHARE,
        bytes_per_s=bytes_per_s * BANDWIDTH_SHARE,
        overhead_s=OVERHEAD_S,
    )
    kv_bytes = memory_bytes * MEMORY_SHARE - ACTIVATION_BYTES - truth.weight_bytes
    return Profile(
        name,
        truth.coefficients(),
        ideal.coefficients(),
        kv_bytes,
        truth.kv_bytes_per_token,
        LLAMA_8B.layers,
        NIC_BYTES_PER_S,
        name,
    )


H100 = _accelerator("h100", 3.35e12, 80e9)
H200 = _accelerator("h200", 4.8e12, 141e9)
L40S = _accelerator("l40s", 864e9, 48e9, 362e12)
CPU_STEPS = Coefficients(base_s=0.05, prefill_token_s=0.0034, prefill_context_s=3.2e-6, sequence_s=0.02, context_s=2e-6)
SMOLLM2 = ModelShape(
    layers=30,
    hidden=576,
    intermediate=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    vocab=49152,
    bytes_per_weight=4.0,
    kv_bytes_per_value=4.0,
)
CPU = Profile("cpu", CPU_STEPS, roofline(SMOLLM2, "cpu").coefficients(), 805306368, 46080, 30, 6.1e9, "cpu")


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas of one kind. `name`: "prefill", or the name of a decode or mixed pool. `strict`: as in the
    configuration. `tier_bytes`: main memory of a replica for KV that its own memory has no room for."""

    name: str
    role: Role
    replicas: int
    profile: Profile
    limits: Limits
    strict: bool = False
    tier_bytes: float = 0.0

    def blocks(self, block_tokens: int) -> int:
        """The number of KV blocks of one replica."""
        return int(self.profile.kv_bytes / self.profile.kv_bytes_per_token / block_tokens)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A fleet. `hop_s`: seconds from the session manager to a replica, and from a replica to the client."""

    pools: tuple[Pool, ...]
    max_model_len: int
    hop_s: float = 0.001
    replica_sigma: float = 0.02

    @property
    def prefill(self) -> Pool:
        return next(pool for pool in self.pools if pool.role is Role.PREFILL)

    @property
    def decode(self) -> tuple[Pool, ...]:
        return tuple(pool for pool in self.pools if pool.role is Role.DECODE)


def heterogeneous(
    replicas: int, noise_sigma: float = 0.05, prefill: int | None = None, tier_bytes: float = 0.0
) -> Cluster:
    """Prefill on H100, and two decode pools: three H100 to two H200. 11 of 16 replicas prefill, or `prefill` of all.

    That ratio keeps prefill and decode about equally busy for the two traces, whose prompts are long, where no cache
    has them.
    """
    decode = max(2, round(replicas * 5 / 16) if prefill is None else replicas - prefill)
    large = max(1, round(decode * 2 / 5))
    chunked = Limits(batched_tokens=8192, sequences=256, noise_sigma=noise_sigma)
    mixed = Limits(batched_tokens=2048, sequences=256, noise_sigma=noise_sigma)
    pools = (
        Pool("prefill", Role.PREFILL, max(1, replicas - decode), H100, chunked),
        Pool("h100", Role.DECODE, decode - large, H100, mixed),
        Pool("h200", Role.DECODE, large, H200, replace(mixed, sequences=512)),
    )
    return Cluster(tuple(replace(pool, tier_bytes=tier_bytes) for pool in pools), max_model_len=131072)


def cpu_pair(
    prefill: Coefficients = CPU_STEPS, decode: Coefficients = CPU_STEPS, noise_sigma: float = 0.05, hop_s: float = 0.005
) -> Cluster:
    """The real cluster of `configs/cpu-1p1d.yaml`: one engine a core. `steps`: fitted to what the engines reported."""
    pools = (
        Pool("prefill", Role.PREFILL, 1, replace(CPU, steps=prefill), Limits(256, 16, noise_sigma=noise_sigma)),
        Pool("main", Role.DECODE, 1, replace(CPU, steps=decode), Limits(256, 32, noise_sigma=noise_sigma)),
    )
    return Cluster(pools, max_model_len=2048, hop_s=hop_s, replica_sigma=0.0)
