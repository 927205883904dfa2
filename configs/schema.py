"""The typed configuration of a Baton application: what `args:` of a `serve run` YAML may hold.

Pydantic at the edge, frozen, `extra="forbid"`: a wrong key or value fails `serve run` with a message that names it.
Cross-field rules live in one place, `BatonConfig._check`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of every section: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Section):
    """The model that every pool serves."""

    source: str = Field(
        "bundled:smollm2-135m-instruct",
        description="`bundled:NAME`, a directory, or a Hugging Face name.",
    )
    name: str = Field("smollm2-135m-instruct", min_length=1, description="The name clients ask for.")
    max_model_len: int = Field(2048, gt=0, description="Prompt plus answer, in tokens.")
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    cache_dir: Path | None = Field(
        None, description="Where converted checkpoints go; default: `.cache/models` of the repository."
    )


class VllmEngineConfig(Section):
    """A vLLM V1 engine core. Anything not named here goes into `engine_args`."""

    kind: Literal["vllm"] = "vllm"
    block_size: int = Field(128, ge=16, le=256, description="Tokens per KV block.")
    kv_cache_memory_bytes: int | None = Field(
        None, gt=0, description="KV memory per worker in bytes; none: vLLM decides by gpu_memory_utilization."
    )
    max_model_len: int | None = Field(
        None, gt=0, description="Prompt plus answer that this pool takes; default: the model's."
    )
    max_num_seqs: int = Field(16, gt=0, description="Sessions that one replica runs at once.")
    max_num_batched_tokens: int | None = Field(None, gt=0, description="Tokens per step: the prefill chunk size.")
    tensor_parallel_size: int = Field(1, gt=0)
    enforce_eager: bool = True
    quantization: str | None = None
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    omp_threads: int = Field(1, gt=0, description="OpenMP threads per worker on CPU.")
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="The labelled escape: passed to vLLM's AsyncEngineArgs as they are."
    )


class MockEngineConfig(Section):
    """A paced double of the engine core, for tests of the control plane and for scale. Not a language model."""

    kind: Literal["mock"] = "mock"
    block_size: int = Field(16, ge=1, description="Tokens per KV block.")
    num_blocks: int = Field(1024, gt=0)
    max_num_seqs: int = Field(64, gt=0)
    max_num_batched_tokens: int = Field(2048, gt=0)
    num_layers: int = Field(4, gt=0)
    prefill_tokens_per_s: float = Field(20_000.0, gt=0)
    step_s: float = Field(0.005, ge=0, description="Seconds that a step costs, whatever is in it.")
    computes: bool = Field(
        True, description="False: no KV is computed or read, so a step costs hardly any CPU; tokens are then all alike."
    )
    seed: int = 0


EngineConfig = Annotated[VllmEngineConfig | MockEngineConfig, Field(discriminator="kind")]


class ResourcesConfig(Section):
    """What one replica of a pool takes from the Ray cluster."""

    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    accelerator_type: str | None = Field(None, description="A Ray accelerator type, for example H100, A100 or L40S.")
    custom: dict[str, float] = Field(default_factory=dict, description="Custom Ray resources.")


class PoolConfig(Section):
    """One pool of like replicas: a Serve deployment of its own."""

    replicas: int | None = Field(None, gt=0, description="A fixed count; default 1 when there is no autoscaling.")
    autoscaling: dict[str, Any] | None = Field(
        None, description="Ray Serve's autoscaling_config, instead of `replicas`."
    )
    surge_percent: int = Field(
        25,
        ge=0,
        le=100,
        description="Extra replicas in an update, at least one; 0: an old one stops before its successor starts.",
    )
    resources: ResourcesConfig = ResourcesConfig()
    engine: EngineConfig = VllmEngineConfig()
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the replica's process.")
    device: str | None = Field(
        None,
        description="The device whose data sheet gives the first guess of speed; default: accelerator_type.",
    )
    min_prompt_tokens: int = Field(0, ge=0, description="Shorter prompts go to other pools.")
    max_prompt_tokens: int | None = Field(None, gt=0, description="Longer prompts go to other pools; none: no limit.")
    classes: tuple[str, ...] = Field((), description="The priority classes that this pool serves; empty: all.")
    adapters: tuple[str, ...] = Field((), description="The LoRA adapters that this pool serves; empty: any.")

    @model_validator(mode="after")
    def _one_way_to_size(self) -> PoolConfig:
        if self.replicas is not None and self.autoscaling is not None:
            raise ValueError("give `replicas` or `autoscaling`, not both")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < self.min_prompt_tokens:
            raise ValueError(
                f"min_prompt_tokens {self.min_prompt_tokens} is over max_prompt_tokens {self.max_prompt_tokens}"
            )
        return self


class PacingConfig(Section):
    """What a prefill worker may have under way at once. A write over a limit goes alone."""

    peer_bytes: int = Field(64 * 1024 * 1024, gt=0, description="Bytes outstanding to one decode worker.")
    peer_descriptors: int = Field(8192, gt=0, description="Blocks of a layer outstanding to one decode worker.")
    device_bytes: int = Field(256 * 1024 * 1024, gt=0, description="Bytes outstanding over all peers.")
    device_descriptors: int = Field(32768, gt=0, description="Blocks of a layer outstanding over all peers.")
    bytes_per_s: float | None = Field(None, gt=0, description="The most that one worker sends; none: no limit.")


class ChannelConfig(Section):
    """How KV blocks move from prefill to decode memory."""

    kind: Literal["nixl", "vllm", "in_process"] = Field(
        "nixl", description="`nixl`: ours. `vllm`: vLLM's own NIXL connector, where ours does not carry the layout."
    )
    backend: Literal["UCX"] = "UCX"
    transports: str | None = Field(
        None, description="UCX_TLS of the workers, for example `rc,cuda_copy,cuda_ipc`; none: UCX decides."
    )
    net_devices: str | None = Field(
        None,
        description="UCX_NET_DEVICES of the workers, for example `mlx5_0:1`; none: UCX decides. One pool's own: `env`.",
    )
    pacing: PacingConfig = PacingConfig()
    link_bytes_per_s: float = Field(
        10e9, gt=0, description="Expected bandwidth between two replicas: the first guess of what a transfer takes."
    )
    handoff_timeout_s: float = Field(
        60.0, gt=0, description="From the offer of decode blocks until their KV must have landed."
    )
    secret: str | None = Field(
        None,
        description="Authenticates control messages between replicas; default: made from the Ray cluster's id.",
    )
    trace_dir: str | None = Field(None, description="Workers write a timeline of every handoff here, as JSON lines.")


class ClassConfig(Section):
    """A priority class: what its requests are promised, and when they are served among others.

    A request whose predicted times are over an objective is refused, or waits if that helps; without objectives
    nothing is refused for its predicted times.
    """

    rank: int = Field(0, ge=0, description="Waiting requests of a lower rank go first; of one rank by deadline.")
    weight: float = Field(1.0, gt=0, description="The share of a class with waiters that no rank takes from it.")
    ttft_s: float | None = Field(None, gt=0, description="Objective: seconds until the first token.")
    tpot_s: float | None = Field(None, gt=0, description="Objective: seconds from one token to the next.")
    max_queued: int | None = Field(None, ge=0, description="More waiting requests of the class are refused.")


DEFAULT_CLASS = "default"
"""The one class there is where the configuration names none: no objectives."""


class WeightsConfig(Section):
    """What a second of each kind counts when `joint` compares replicas, and what counts as equal."""

    ttft: float = Field(1.0, ge=0, description="Until the first token.")
    decode: float = Field(1.0, ge=0, description="Of the request's own decoding.")
    others: float = Field(1.0, ge=0, description="That the request costs those who run beside it.")
    later: float = Field(1.0, ge=0, description="Of a prefill queue: those who come later wait for this one as well.")
    late: float = Field(10.0, ge=0, description="Over an objective of its class.")
    memory_s: float = Field(0.2, ge=0, description="What a half full decode replica costs more than an empty one.")
    pin_s: float = Field(5.0, ge=0, description="Seconds that a conversation's last replicas are worth.")
    near_s: float = Field(0.002, ge=0, description="Costs so many seconds apart are equal, and chance decides.")
    near_share: float = Field(0.01, ge=0, le=1, description="The same, as a share of the least cost.")


class PlacementConfig(Section):
    """Where requests go, which of them wait or are refused, and for how long."""

    policy: Literal[
        "joint",
        "round_robin",
        "weighted_round_robin",
        "power_of_two",
        "least_tokens",
        "prefix_affinity",
        "overlap_cost",
    ] = Field("joint", description="How replicas are chosen. All but `joint` are there to be compared with.")
    admission: bool = Field(True, description="Refuse what is predicted to miss the objectives of its class.")
    admission_slack: float = Field(
        0.95, gt=0, description="A predicted time may be so many times its objective before the request is refused."
    )
    overcommit: float = Field(
        1.0,
        ge=1,
        le=4,
        description="KV that a decode replica may promise, in parts of what it has; 1.0: it never preempts.",
    )
    classes: dict[str, ClassConfig] = Field(default_factory=dict, description="Priority classes by name.")
    default_class: str = Field(DEFAULT_CLASS, description="The class of a request that names none.")
    weights: WeightsConfig = WeightsConfig()
    split: Literal["auto", "always"] = Field(
        "auto", description="`always`: whatever can be split is; `auto`: where that is expected to cost less."
    )
    prefill_queue_s: float | None = Field(
        None, gt=0, description="A prefill replica with so much work ahead gets no more; none: its engine queues."
    )
    split_min_prompt_tokens: int = Field(
        1, ge=1, description="Shorter prompts are prefilled by the decode replica itself."
    )
    queue_timeout_s: float = Field(30.0, gt=0, description="A request waits this long for capacity, then 429.")
    max_queued_requests: int = Field(1024, ge=0)
    session_timeout_s: float = Field(600.0, gt=0, description="The longest a session may live.")
    max_attempts: int = Field(4, ge=1, description="Placements of a session in a row that may come to nothing.")
    snapshot_interval_s: float = Field(0.1, gt=0)
    snapshot_stale_s: float = Field(5.0, gt=0, description="A replica silent for so long is not placed on.")
    hang_timeout_s: float = Field(60.0, gt=0, description="An engine that does not move for so long is given up.")
    drain_s: float = Field(
        30.0,
        gt=0,
        description="A replica that is taken out has so long to end its sessions; at three quarters they move.",
    )
    ingress_lease_s: float = Field(
        10.0, gt=0, description="The sessions of an ingress that does not answer for so long are ended."
    )


class IngressConfig(Section):
    """The HTTP side."""

    replicas: int = Field(1, gt=0)
    num_cpus: float = Field(0.5, ge=0)
    max_body_bytes: int = Field(4 * 1024 * 1024, gt=0)
    max_ongoing_requests: int = Field(1024, gt=0)
    drain_s: float = Field(
        60.0,
        gt=0,
        description="An ingress that is taken out has so long to end its answers; then they end with an error.",
    )
    server_args: dict[str, Any] = Field(
        default_factory=dict,
        description="The labelled escape: options of `vllm serve`, such as tool_call_parser or chat_template.",
    )


class BatonConfig(Section):
    """A whole application: one prefill pool and any number of decode pools."""

    model: ModelConfig = ModelConfig()
    prefill: PoolConfig
    decode: dict[str, PoolConfig] = Field(min_length=1, description="Decode pools by name.")
    channel: ChannelConfig = ChannelConfig()
    placement: PlacementConfig = PlacementConfig()
    ingress: IngressConfig = IngressConfig()

    @property
    def pools(self) -> dict[str, PoolConfig]:
        """Every pool by its deployment's name: `prefill`, and `decode-NAME` for each decode pool."""
        return {"prefill": self.prefill} | {f"decode-{name}": pool for name, pool in self.decode.items()}

    @model_validator(mode="after")
    def _check(self) -> BatonConfig:
        for name in self.decode:
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"decode pool name {name!r}: letters, digits, - and _ only")
        engines = {name: pool.engine for name, pool in self.pools.items()}
        for attribute in ("kind", "block_size"):
            values = {name: getattr(engine, attribute) for name, engine in engines.items()}
            if len(set(values.values())) > 1:
                raise ValueError(f"engine.{attribute} must be the same in every pool, not {values}")
        vllm = {name: engine for name, engine in engines.items() if isinstance(engine, VllmEngineConfig)}
        for name, engine in vllm.items():
            _check_vllm(name, engine, self.model.max_model_len)
        if self.channel.kind == "vllm" and vllm.keys() != engines.keys():
            raise ValueError(
                "channel.kind vllm is vLLM's own connector: every pool's engine.kind must be vllm, not mock"
            )
        dtypes = {name: engine.engine_args.get("kv_cache_dtype", "auto") for name, engine in vllm.items()}
        if len(set(dtypes.values())) > 1:
            raise ValueError(
                f"engine.engine_args.kv_cache_dtype must be the same in every pool to exchange KV, not {dtypes}"
            )
        _check_classes(self)
        for name, pool in self.pools.items():
            if pool.min_prompt_tokens >= self.model.max_model_len:
                raise ValueError(
                    f"{name}: min_prompt_tokens {pool.min_prompt_tokens}, and the model takes "
                    f"{self.model.max_model_len} tokens of prompt and answer"
                )
        return self


def _check_classes(config: BatonConfig) -> None:
    """Every class that is named exists, and each has a decode pool that serves it."""
    placement = config.placement
    known = placement.classes.keys() or {DEFAULT_CLASS}
    if wrong := [name for name in known if not name.replace("-", "").replace("_", "").isalnum()]:
        raise ValueError(f"placement.classes: class name {wrong[0]!r}: letters, digits, - and _ only")
    if placement.default_class not in known:
        raise ValueError(f"placement.default_class {placement.default_class!r} is none of {sorted(known)}")
    for name, pool in config.pools.items():
        if unknown := set(pool.classes) - known:
            raise ValueError(f"{name}: classes {sorted(unknown)} are not in placement.classes {sorted(known)}")
    for name in known:
        if not any(not pool.classes or name in pool.classes for pool in config.decode.values()):
            raise ValueError(f"no decode pool serves class {name!r}")


def _check_vllm(pool: str, engine: VllmEngineConfig, max_model_len: int) -> None:
    if engine.block_size & (engine.block_size - 1):
        raise ValueError(f"{pool}: engine.block_size must be a power of two, not {engine.block_size}")
    if engine.max_model_len is not None and engine.max_model_len > max_model_len:
        raise ValueError(f"{pool}: engine.max_model_len {engine.max_model_len} is over the model's {max_model_len}")
    ours = {"kv_transfer_config", "kv_events_config", "model", "dtype", "enable_prefix_caching", "worker_extension_cls"}
    owned = ours | {"distributed_executor_backend"} | VllmEngineConfig.model_fields.keys()
    if taken := owned & engine.engine_args.keys():
        raise ValueError(f"{pool}: engine.engine_args may not set {sorted(taken)}: Baton sets them")
