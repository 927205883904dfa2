"""The typed configuration of a Baton application: what `args:` of a `serve run` YAML may hold.

A wrong key or value fails `serve run` with a message that names it. Rules between fields are in `configs/checks.py`.
Every field has its description, unit and default here and nowhere else: `python -m configs.reference` prints the page.
Serve pickles these classes by path, so they all stay in this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from configs.checks import DEFAULT_CLASS, check_application, check_lora, check_pool
from configs.section import Section as Section

Policy = Literal[
    "joint",
    "round_robin",
    "weighted_round_robin",
    "power_of_two",
    "least_tokens",
    "prefix_affinity",
    "overlap_cost",
    "ppd",
    "pinned",
]


class ModelConfig(Section):
    """The model that every pool serves."""

    source: str = "bundled:smollm2-135m-instruct"
    """`bundled:NAME`, a directory, or a Hugging Face name."""
    name: str = Field("smollm2-135m-instruct", min_length=1)
    """The name that clients ask for."""
    max_model_len: int = Field(2048, gt=0)
    """Prompt plus answer."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """The data type of weights and activations; `auto`: the checkpoint's."""
    cache_dir: Path | None = None
    """The folder of converted checkpoints; null: `.cache/models` of the repository."""


class DiskKVConfig(Section):
    """A disk tier: KV blocks in files that outlive the engine and its process."""

    path: str
    """A folder on a local disk, one for each model. Every replica on the node has a file of its own in it."""
    bytes: int = Field(gt=0)
    """The size of one replica's file, which is allocated at its start."""


class VllmEngineConfig(Section):
    """A vLLM V1 engine core. Anything not named here goes into `engine_args`."""

    kind: Literal["vllm"] = "vllm"
    """The real engine: one vLLM engine core per replica."""
    block_size: int = Field(128, ge=16, le=256)
    """Tokens per KV block: a power of two."""
    kv_cache_memory_bytes: int | None = Field(None, gt=0)
    """KV memory per worker; null: vLLM decides by `gpu_memory_utilization`."""
    host_kv_bytes: int = Field(0, ge=0)
    """Main memory of a replica for KV blocks that were used before, beside the engine's own memory; 0: none."""
    disk_kv: DiskKVConfig | None = None
    """Space on the node's disk for the same, below main memory; null: none."""
    max_model_len: int | None = Field(None, gt=0)
    """Prompt plus answer that this pool takes; null: the model's."""
    max_num_seqs: int = Field(16, gt=0)
    """Sessions that one replica runs at once."""
    max_num_batched_tokens: int | None = Field(None, gt=0)
    """The most tokens per step, which is the prefill chunk where no answer runs; null: vLLM's default. Beside answers
    steps are shorter (`placement.prompt_share`). With `engine_args: {long_prefill_token_threshold: N}` vLLM sizes them:
    N tokens of one prompt at most, 0 for no bound."""
    phases: bool | Literal["auto"] = False
    """True: a step computes prompts alone or answers alone, in long phases in turn, for work whose latency does not
    count. `auto`: so, or with prompts beside answers, whichever makes the engine faster. For mixed pools."""
    tensor_parallel_size: int = Field(1, gt=0)
    """Workers per pipeline stage. Pools may differ where the heads of a block lie one behind the other."""
    pipeline_parallel_size: int = Field(1, gt=0)
    """Pipeline stages per replica, each with its share of the layers. Pools may differ. Needs `channel.kind: nixl`."""
    enforce_eager: bool = True
    """True: nothing is compiled. False: piecewise CUDA graphs on GPU; on CPU the first start compiles for minutes."""
    quantization: str | None = None
    """vLLM's name of a weight quantisation, such as `fp8`; null: none."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """The share of a GPU's memory that the engine takes; null: vLLM's default."""
    omp_threads: int = Field(1, gt=0)
    """OpenMP threads per worker on CPU."""
    engine_args: dict[str, Any] = Field({})
    """Any other of vLLM's `AsyncEngineArgs`. A key that Baton sets is refused."""

    @property
    def workers(self) -> int:
        """Workers per replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class MockEngineConfig(Section):
    """An engine that keeps a set pace and computes no model, for tests of the control plane and of large fleets."""

    kind: Literal["mock"] = "mock"
    """The mock engine, which computes no model."""
    block_size: int = Field(16, ge=1)
    """Tokens per KV block."""
    num_blocks: int = Field(1024, gt=0)
    """KV blocks; they must hold `model.max_model_len` tokens."""
    max_num_seqs: int = Field(64, gt=0)
    """Sessions that one replica runs at once."""
    max_num_batched_tokens: int = Field(2048, gt=0)
    """Tokens per step."""
    num_layers: int = Field(4, gt=0)
    """Layers that the engine says its model has."""
    prefill_tokens_per_s: float = Field(20_000.0, gt=0)
    """The pace of prefill."""
    step_s: float = Field(0.005, ge=0)
    """The length of a step with nothing in it."""
    sequence_s: float = Field(0.0, ge=0)
    """What each running answer adds to a step."""
    computes: bool = True
    """False: the engine neither computes nor reads KV, so a step costs hardly any CPU; all tokens are then alike."""
    seed: int = 0
    """Tokens are a function of it and of the KV in the blocks."""


class ResourcesConfig(Section):
    """What one replica of a pool takes from the Ray cluster."""

    num_cpus: float = Field(1.0, ge=0)
    """Logical CPUs of a replica."""
    num_gpus: float = Field(0.0, ge=0)
    """GPUs of a replica. On a GPU node an engine of several workers (`tensor_parallel_size` times
    `pipeline_parallel_size`) needs one for each."""
    accelerator_type: str | None = None
    """A Ray accelerator type, such as H100, A100 or L40S; null: any."""
    custom: dict[str, float] = Field({})
    """Custom Ray resources, by name."""


class PoolConfig(Section):
    """One pool of equal replicas: a Serve deployment of its own."""

    replicas: int | None = Field(None, gt=0)
    """A fixed number of replicas; null: 1, unless `autoscaling` is set."""
    autoscaling: dict[str, Any] | None = None
    """Ray Serve's `autoscaling_config`, instead of `replicas`. With `scaling`, only its bounds count."""
    cost: float = Field(1.0, gt=0)
    """What one replica costs in an hour, in any unit that is the same in every pool, for `scaling`."""
    surge_percent: int = Field(25, ge=0, le=100)
    """Extra replicas during an update, rounded up; 0: an old replica stops before its successor starts."""
    resources: ResourcesConfig = ResourcesConfig()
    """What one replica takes from the Ray cluster."""
    engine: VllmEngineConfig | MockEngineConfig = Field(VllmEngineConfig(), discriminator="kind")
    """The engine: `kind: vllm` or `kind: mock`. Kind and block size are the same in every pool."""
    env: dict[str, str] = Field({})
    """Environment variables of the replica's process; they win over Baton's own."""
    device: str | None = None
    """The device whose data sheet gives the first guess of this pool's speed; null: `resources.accelerator_type`."""
    min_prompt_tokens: int = Field(0, ge=0)
    """Shorter prompts go to other pools."""
    max_prompt_tokens: int | None = Field(None, gt=0)
    """Longer prompts go to other pools; null: no limit."""
    classes: tuple[str, ...] = ()
    """The priority classes that this pool serves; empty: all."""
    adapters: tuple[str, ...] = ()
    """The LoRA adapters that this pool serves; empty: any."""
    strict: bool = False
    """True: a prefill pool never decodes, a decode pool never prefills what can be split, unless a handoff of it
    failed. False: where that costs less time, it does."""

    @model_validator(mode="after")
    def _check(self) -> PoolConfig:
        check_pool(self)
        return self


class PacingConfig(Section):
    """What a prefill worker may have under way at once. A single write that is over a limit goes alone."""

    peer_bytes: int = Field(64 * 1024 * 1024, gt=0)
    """Bytes outstanding to one decode worker."""
    peer_descriptors: int = Field(8192, gt=0)
    """Descriptors (a block of a layer each) outstanding to one decode worker."""
    device_bytes: int = Field(256 * 1024 * 1024, gt=0)
    """Bytes outstanding over all peers."""
    device_descriptors: int = Field(32768, gt=0)
    """Descriptors outstanding over all peers."""
    bytes_per_s: float | None = Field(None, gt=0)
    """The most that one worker sends; null: no limit."""


class ChannelConfig(Section):
    """How KV blocks move from prefill to decode memory."""

    kind: Literal["nixl", "vllm", "in_process"] = "nixl"
    """`nixl`: Baton's channel. `vllm`: vLLM's NIXL connector, for other layouts. `in_process`: mocks in one process."""
    backend: Literal["UCX"] = "UCX"
    """NIXL's backend."""
    transports: str | None = None
    """`UCX_TLS` of the workers, such as `rc,cuda_copy,cuda_ipc`; null: UCX decides."""
    net_devices: str | None = None
    """`UCX_NET_DEVICES` of the workers, such as `mlx5_0:1`; null: UCX decides. A pool can set its own in its `env`."""
    pacing: PacingConfig = PacingConfig()
    """What a prefill worker may have under way at once."""
    link_bytes_per_s: float = Field(10e9, gt=0)
    """Expected bandwidth between two replicas: the first guess of a transfer's time."""
    handoff_timeout_s: float = Field(60.0, gt=0)
    """Seconds from the offer of decode blocks until their KV must have landed."""
    secret: str | None = None
    """The key that seals control messages; null: made once per Ray cluster and kept in the cluster's store."""
    trace_dir: str | None = None
    """A folder in which workers write a timeline of every handoff, as JSON lines; null: none."""


class ClassConfig(Section):
    """A priority class. A request that is predicted to miss an objective is refused, or waits if that helps."""

    rank: int = Field(0, ge=0)
    """A lower rank is served first; in a rank, what is due first. Every fourth place goes by `weight` instead."""
    weight: float = Field(1.0, gt=0)
    """The share of the class in the places that go by weight, and in those of its rank that no objective decides."""
    ttft_s: float | None = Field(None, gt=0)
    """Objective: seconds until the first token; null: none."""
    tpot_s: float | None = Field(None, gt=0)
    """Objective: seconds from one token to the next; null: none."""
    max_queued: int | None = Field(None, ge=0)
    """More waiting requests of the class are refused; null: only `max_queued_requests` counts."""
    yields: bool = False
    """Whether it takes only what the other classes leave: memory and places up to a mark, decode steps within the
    objectives of the answers beside it, prefill that is idle; and only while none of theirs waits. Its answers are let
    go when others need what they hold, and go on later. It must have the highest rank and no objectives."""


class WeightsConfig(Section):
    """What a second of each kind counts when `joint` compares replicas, and what counts as equal."""

    ttft: float = Field(1.0, ge=0)
    """Weight of a second until the first token."""
    decode: float = Field(1.0, ge=0)
    """Weight of a second of the request's own decoding."""
    others: float = Field(1.0, ge=0)
    """Weight of a second that the request costs its neighbours on the replica."""
    later: float = Field(1.0, ge=0)
    """Weight of a second that later requests wait for this request's prompt."""
    late: float = Field(10.0, ge=0)
    """Weight of a second over an objective of the request's class."""
    memory_s: float = Field(0.2, ge=0)
    """Seconds that a half full decode replica costs more than an empty one."""
    pin_s: float = Field(5.0, ge=0)
    """Seconds that the last replicas of the same conversation are worth."""
    near_s: float = Field(0.002, ge=0)
    """Costs that are fewer seconds apart count as equal, and chance decides."""
    near_share: float = Field(0.01, ge=0, le=1)
    """Costs that differ by a smaller share of the least cost count as equal, too."""


class PinsConfig(Section):
    """Limits of the prefixes that administrators pin by `POST /baton/prefixes`."""

    most: int = Field(32, ge=0)
    """Prefixes that may be pinned at one time; 0: none."""
    share: float = Field(0.25, gt=0, le=0.9)
    """The share of a replica's KV blocks that they may take. The longest request always fits beside them."""


class PlacementConfig(Section):
    """Where requests go and how long they wait. It stays one section with many fields, so YAML files stay valid."""

    policy: Policy = "joint"
    """How replicas are chosen. `joint` weighs pairs by predicted time and memory; the others are for comparison."""
    admission: bool = True
    """Refuse at once what is predicted to miss the objectives of its class."""
    admission_slack: float = Field(0.95, gt=0)
    """A predicted time over this multiple of its objective is refused. At 1.0, half of those at the edge are late."""
    overcommit: float = Field(1.0, ge=1, le=4)
    """KV that a decode replica may promise, as a multiple of what it has. At 1.0 it never preempts."""
    classes: dict[str, ClassConfig] = Field({})
    """Priority classes by name; empty: one class `default` without objectives."""
    default_class: str = DEFAULT_CLASS
    """The class of a request without the header `X-Baton-Class`."""
    weights: WeightsConfig = WeightsConfig()
    """How `joint` compares replicas."""
    split: Literal["auto", "always"] = "auto"
    """`auto`: a request is split where that is expected to cost less. `always`: wherever it can be."""
    prefill_queue_s: float | None = Field(None, gt=0)
    """Seconds of prompts after which a replica gets no more; null: half the TTFT objective of a request's class."""
    split_min_prompt_tokens: int = Field(1, ge=1)
    """One replica serves shorter prompts whole."""
    rebalance: bool = True
    """A running answer moves to another replica where the rest of it costs less by enough, as `joint` weighs it."""
    fetch: bool = False
    """A replica gets the cached part of a prompt from another replica, where that is expected to beat computing it."""
    spread: bool = False
    """A prefix whose prompts keep more than a tenth of a replica busy is copied to more replicas before they need it,
    and what is hottest to a replica that has nothing yet. With `fetch` only."""
    pins: PinsConfig = PinsConfig()
    """Pinned prefixes."""
    prompt_share: float = Field(0.9, ge=0.25, le=0.95)
    """The share of a step's time that prompts get beside running answers, where these have no `tpot_s`."""
    queue_timeout_s: float = Field(30.0, gt=0)
    """Seconds that a request waits for capacity; then it gets 429, or 503 when no replica is up."""
    max_queued_requests: int = Field(1024, ge=0)
    """More waiting requests are refused at once with 429."""
    session_timeout_s: float = Field(600.0, gt=0)
    """The longest life of a session. Then it ends with an error."""
    max_attempts: int = Field(4, ge=1)
    """Placements in a row that a session may lose. One that gives more than a first token starts the count anew."""
    snapshot_interval_s: float = Field(0.1, gt=0)
    """Seconds between two reports of a replica at least; once a second when nothing changes. With more than 50
    replicas and `overcommit: 1.0`, all together report 500 times a second, and each once a second at least."""
    snapshot_stale_s: float = Field(5.0, gt=0)
    """Seconds without a report after which nothing is placed on a replica."""
    hang_timeout_s: float = Field(60.0, gt=0)
    """Seconds without a step or an answer until an engine with sessions counts as lost, and Serve replaces it."""
    drain_s: float = Field(30.0, gt=0)
    """Seconds that a stopping replica has. Its sessions may end in the first three quarters; then they move, and KV
    that a peer still uses is waited for. Where the whole application stops, they may end in all of it."""
    ingress_lease_s: float = Field(10.0, gt=0)
    """Seconds without an answer from an ingress until its sessions end; when it has died, they end at once."""


class StoredResponsesConfig(Section):
    """Responses that are kept: retrieve, cancel, `previous_response_id` and background."""

    max_bytes: int = Field(256 * 1024 * 1024, gt=0)
    """What the store holds; over that, the oldest responses of the client with the most bytes go first."""
    ttl_s: float = Field(86400.0, gt=0)
    """Seconds that a response is kept once it is over."""


class AdapterConfig(Section):
    """A LoRA adapter that is served from the start."""

    name: str = Field(min_length=1)
    """The model name that clients ask for."""
    path: str = Field(min_length=1)
    """A folder in PEFT's format with safetensors, readable under this path on every node."""


class LoraConfig(Section):
    """LoRA adapters. Each is loaded by a replica when a request for it first comes there."""

    adapters: tuple[AdapterConfig, ...] = ()
    """The adapters at the start; more come by `/v1/load_lora_adapter`."""
    max_loras: int = Field(4, ge=1)
    """Different adapters in one engine step."""
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16
    """The highest rank of an adapter."""
    max_cpu_loras: int = Field(32, ge=1)
    """Adapters that one replica keeps loaded, at least `max_loras`; the one that is unused the longest goes first."""

    @model_validator(mode="after")
    def _check(self) -> LoraConfig:
        check_lora(self)
        return self


class TraceConfig(Section):
    """The trace that the session manager keeps of its traffic: when requests came, how long they and their answers
    were, and which of them began alike. It holds no text, no tokens and no clients."""

    path: Path
    """The file, on the node of the session manager; lines are added at its end. Its folder must exist."""
    max_bytes: int = Field(256 * 1024 * 1024, gt=0)
    """The most that it takes on disk. At half of that the file is renamed, with `.1` at its end, in place of the one
    before."""


class TracingConfig(Section):
    """Where the spans and the metrics of requests go: a collector that speaks OTLP, OpenTelemetry's protocol."""

    otlp: str | None = Field(None, pattern=r"^https?://[^/]+")
    """The collector's base URL, such as http://collector:4318. null: what the standard variables
    `OTEL_EXPORTER_OTLP_*` say, in the environment of each process, or a collector on its own host."""
    protocol: Literal["http/protobuf", "grpc"] = "http/protobuf"
    """How it speaks: collectors take HTTP on port 4318, and gRPC on 4317."""
    sample: float = Field(1.0, ge=0, le=1)
    """The share of requests that are traced. A request that comes with a `traceparent` is traced where that says so."""
    metrics: bool = True
    """Whether the collector also gets OpenTelemetry's metrics of a model server, `gen_ai.server.*`, of all requests.
    false for a collector that takes traces alone."""


class BatchesConfig(Section):
    """Files and batches: `/v1/files` and `/v1/batches`, as OpenAI defines them. What is kept survives restarts."""

    database_url: str | None = Field(None, pattern=r"^[a-z][a-z0-9+]*://")
    """The database of files, batches and answered lines, as SQLAlchemy names it: `sqlite:////var/lib/baton/batches.db`,
    or `postgresql+psycopg://USER:PASSWORD@HOST/NAME` for ingresses on several nodes. null: SQLite, in
    `.cache/batches` of the repository."""
    files_url: str | None = Field(None, min_length=1)
    """Where the bytes of files are, as fsspec names it: a folder, or `s3://BUCKET/PREFIX` and others whose package is
    installed. null: `.cache/batches/files` of the repository. Every ingress must reach both."""
    priority_class: str = Field("batch", min_length=1)
    """The priority class of lines. One that `placement.classes` does not name is made, with a rank above all others and
    `yields`. An API key with `classes` may have batches where it names this one."""
    max_concurrency: int = Field(64, gt=0)
    """Lines that one ingress runs at once at most; how many of them depends on what admission lets in."""
    max_file_bytes: int = Field(1024 * 1024 * 1024, gt=0)
    """The largest file that can be uploaded. A line has `ingress.max_body_bytes` at most."""
    max_lines: int = Field(1_000_000, gt=0, le=2**31)
    """The most lines of a batch."""
    max_files: int = Field(1000, gt=0)
    """Files that one API key may have. Without keys, each key that clients make up counts alone."""
    max_bytes: int = Field(10 * 1024 * 1024 * 1024, gt=0)
    """Bytes of all files of one API key. What batches write counts, and is not refused."""
    max_total_bytes: int = Field(100 * 1024 * 1024 * 1024, gt=0)
    """Bytes of all files."""
    max_batches: int = Field(16, gt=0)
    """Batches of one API key that are not over."""
    max_completion_window_s: int = Field(7 * 86400, gt=0)
    """The longest `completion_window`. Lines that are not answered within it get an error."""
    file_ttl_s: int = Field(30 * 86400, gt=0)
    """Seconds after which a file is removed that says nothing else (`expires_after`)."""


class KeyConfig(Section):
    """An API key: an entry of `keys` in the file of `ingress.keys_file`. Only the key's hash is in it."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """What logs, errors and `/baton/status` call it. Its clients are one client, and find the same stored responses."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """The SHA-256 of the key in hexadecimal."""
    classes: tuple[str, ...] = ()
    """The priority classes that it may ask for; a request that names none gets the first. Empty: all of them, and
    `placement.default_class` where none is named."""
    requests_per_minute: int | None = Field(None, gt=0)
    """Requests that are let through in any 60 s; null: any number."""
    tokens_per_minute: int | None = Field(None, gt=0)
    """Tokens of prompts and answers in any 60 s; null: any number."""
    admin: bool = False
    """Whether it opens `/status`, `/baton/*` and `/metrics`, and may load and unload adapters."""


class IngressConfig(Section):
    """The HTTP side."""

    replicas: int | None = Field(None, gt=0)
    """Ingress processes; null: by the cores of the machine where the application is built: one below 4 cores, 2 below
    24, then one for every 8, at most 8."""
    num_cpus: float = Field(0.5, ge=0)
    """Logical CPUs of each ingress."""
    max_body_bytes: int = Field(4 * 1024 * 1024, gt=0)
    """A larger request body is refused with 413."""
    max_ongoing_requests: int = Field(1024, gt=0)
    """Requests that Serve gives one ingress at once."""
    max_parts: int = Field(256, gt=0)
    """Answers that one request may ask for: `n` for each of its prompts. More than this, or than
    `placement.max_queued_requests`, is refused whole with 400."""
    max_client_parts: int = Field(1024, gt=0)
    """Answers that one client may have open in one ingress; more are refused with 429. A client is an API key, or the
    address that a request without a key comes from."""
    max_values: int = Field(8192, gt=0)
    """Strings (keys, too), objects and lists that a body may have in `messages`. In `input` each counts twice,
    elsewhere a quarter. Sixteen members of a list or an object, whatever they are, count as one more. A body with more
    is refused with 400: the time in which the ingress checks it, and serves nothing else, grows with them. Agents with
    hundreds of turns on a model with a long context may need more."""
    max_grammar_characters: int = Field(128 * 1024, gt=0)
    """A longer grammar, schema, regular expression or list of choices for an answer is refused with 400."""
    refusals_per_s: float = Field(20.0, ge=0)
    """Refused requests of one client that are answered in a second; a hundred more come at once, and others wait. A
    body counts once more for each 64 KiB. 0: all are answered at once."""
    client_header: str | None = None
    """The header in which a proxy that you trust gives the client's address; of several addresses the last counts.
    null: the connection's address. The launcher sets it for the proxy that it starts."""
    default_max_tokens: int | None = Field(None, gt=0)
    """The longest answer in tokens of a chat, message or response request that says none; null: the model's length."""
    drain_s: float = Field(60.0, gt=0)
    """Seconds that a stopping ingress has to end its answers; those that take longer end with an error."""
    timelines: int = Field(512, ge=0)
    """Ended sessions whose timelines each ingress keeps, the newest, for `/status`."""
    access_log: bool = True
    """One JSON line for each request, on the standard output of its ingress."""
    stored_responses: StoredResponsesConfig | None = None
    """Where set, even to `{}`: responses are stored, in a process that all ingresses share. null: none are."""
    batches: BatchesConfig | None = None
    """Where set, even to `{}`: files and batches are served, in every ingress. null: they are not."""
    admin_key: str | None = Field(None, min_length=1)
    """What the header `X-Baton-Admin-Key` must hold to load and unload adapters; null: only an API key with `admin`
    may. Where there are API keys, it opens `/status`, `/baton/*` and `/metrics`, too."""
    keys_file: Path | None = None
    """The file of API keys, under this path on every node with an ingress. Then every route but `/health`, `/ready` and
    `/ping` asks for a key. A change counts within 2 s. null: no route asks for one."""
    keys_env: str | None = Field(None, min_length=1)
    """Instead of `keys_file`: the name of the environment variable of ingresses that holds the same text."""
    separate_caches: bool = False
    """Requests of different API keys share no cached KV, so that none can find out by its latency what another has
    asked. Each key's requests get a cache salt of their own, with which vLLM's `cache_salt` still works. Prompts that
    all keys share, such as a system prompt, are computed once for each key."""
    allowed_origins: tuple[str, ...] = ()
    """The origins whose pages a browser lets use the API (CORS), such as https://chat.example.com; `*`: any. Empty:
    none."""
    server_args: dict[str, Any] = Field({})
    """Other options of `vllm serve`, such as `tool_call_parser`. An option that Baton sets is refused by name."""

    def count(self, cores: int) -> int:
        """The number of ingress processes. `cores`: of the machine."""
        return self.replicas or (1 if cores < 4 else min(8, max(2, cores // 8)))


class ScalingConfig(Section):
    """One plan for the sizes of all pools that have `autoscaling`, within its `min_replicas` and `max_replicas`. Pools
    with `replicas` stay as they are."""

    interval_s: float = Field(5.0, gt=0)
    """Seconds from one plan to the next."""
    dry_run: bool = False
    """True: plans are made and explained, and nothing is changed."""
    headroom: float = Field(0.85, gt=0, le=1)
    """The share of an objective, and of KV memory, that a predicted value may take. Less means more replicas."""
    shrink_after_s: float = Field(180.0, ge=0)
    """Seconds for which fewer replicas must have been enough before one stops; twice a measured start, where that is
    longer."""
    hold_intervals: int = Field(3, ge=0)
    """Plans for which a pool keeps its size after it grew, or after a replica of it became ready."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds after which a start is given up, and its pool asks for no other one for as long."""
    idle_s: float = Field(300.0, gt=0)
    """Seconds without a request after which a pool with `min_replicas: 0` has no replica."""
    season_s: float | None = Field(None, gt=0)
    """Seconds after which the load repeats, such as 86400 for a day: what was seen then is expected again. null: only
    the trend of the last minutes is."""
    max_cost_per_hour: float | None = Field(None, gt=0)
    """The most that all pools may cost in an hour, by their `cost`; null: no limit."""


class BatonConfig(Section):
    """A whole application. At least one pool decodes: `mixed` pools alone, or a prefill pool and `decode` pools."""

    model: ModelConfig = ModelConfig()
    """The model that every pool serves."""
    prefill: PoolConfig | None = None
    """The prefill pool; its deployment is `prefill`."""
    decode: dict[str, PoolConfig] = Field({})
    """Decode pools by name; their deployments are `decode-NAME`."""
    mixed: dict[str, PoolConfig] = Field({})
    """Pools that do both, by name; their deployments are `mixed-NAME`."""
    channel: ChannelConfig = ChannelConfig()
    """How KV moves."""
    placement: PlacementConfig = PlacementConfig()
    """Where requests go, and how long they wait."""
    ingress: IngressConfig = IngressConfig()
    """The HTTP side."""
    lora: LoraConfig | None = None
    """LoRA adapters; null: none can be served."""
    scaling: ScalingConfig | None = None
    """One plan for the sizes of all pools that have `autoscaling`, even as `{}`; null: each pool scales by Serve's
    rules."""
    trace: TraceConfig | None = None
    """A trace of the traffic, for the simulator; null: none."""
    metrics: bool = True
    """Tell metrics through Ray, for Prometheus, from ingresses, replicas and the session manager."""
    tracing: TracingConfig | None = None
    """Spans of requests, for an OpenTelemetry collector, from ingresses, replicas and the session manager; `{}`: with
    the section's defaults. null: none."""
    log_format: Literal["text", "json"] = "text"
    """How logs are written. `json`: each line is a JSON object; what concerns a session has its `session_id`."""
    log_level: Literal["warning", "info"] = "warning"
    """What ingresses and replicas write. `info`: also a line when a session, or its part on a replica, is over."""

    @property
    def pools(self) -> dict[str, PoolConfig]:
        """Every pool by its deployment's name: `prefill`, `decode-NAME` and `mixed-NAME`."""
        prefill = {} if self.prefill is None else {"prefill": self.prefill}
        named = {"decode": self.decode, "mixed": self.mixed}
        return prefill | {f"{role}-{name}": pool for role, pools in named.items() for name, pool in pools.items()}

    @property
    def classes(self) -> dict[str, ClassConfig]:
        """Every priority class by name: those of `placement.classes`, or one that promises nothing; that of batches."""
        named = dict(self.placement.classes) or {DEFAULT_CLASS: ClassConfig()}
        batches = self.ingress.batches
        if batches is not None and batches.priority_class not in named:
            rank = 1 + max(each.rank for each in named.values())
            named[batches.priority_class] = ClassConfig(rank=rank, yields=True)
        return named

    @property
    def block_size(self) -> int:
        """Tokens per KV block, the same in every pool."""
        return next(iter(self.pools.values())).engine.block_size

    @model_validator(mode="after")
    def _check(self) -> BatonConfig:
        check_application(self)
        return self


def role_of(pool: str) -> Literal["prefill", "decode", "mixed"]:
    """The role of a pool, by its deployment's name."""
    return "prefill" if pool == "prefill" else "mixed" if pool.startswith("mixed-") else "decode"
