"""vLLM's real scheduler over a pipeline that computes nothing, in virtual time. No model, no weights, no process.

`VirtualPipeline` does what vLLM's engine core does with a batch queue: it schedules while the queue has a place, and
otherwise waits for the oldest batch. A batch takes the same time on each stage, and a stage computes one batch at a
time, in their order.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import LlamaConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from deployments.engine.vllm.choosing_scheduler import AsyncChoosingScheduler, ChoosingScheduler
from deployments.engine.vllm.phased_scheduler import AsyncPhasedScheduler, PhasedScheduler
from deployments.policy.temporal.controller import Controller
from deployments.step_cost import Coefficients
from transfer.vllm.step_clock import StepClock, StepReport

STOP, OTHER = 2, 7
"""The token that ends an answer, and the one that it has instead before its end."""
IDLE_TURNS = 10_000
"""So many turns without a token mean that the scheduler stands still."""
KINDS: dict[str, type[Scheduler]] = {
    "default": Scheduler,
    "default_async": AsyncScheduler,
    "phased": PhasedScheduler,
    "phased_async": AsyncPhasedScheduler,
    "choosing": ChoosingScheduler,
    "choosing_async": AsyncChoosingScheduler,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a scheduler is made for. `step_tokens`: the most of a step. `seats`: requests at once."""

    stages: int
    step_tokens: int
    seats: int
    blocks: int
    block_tokens: int = 16
    max_model_len: int = 8192


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its prompt and its answer in tokens. `max_tokens`: what its client asks for."""

    name: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int


def make_scheduler(kind: str, shape: Shape) -> Scheduler:
    """A scheduler of `KINDS`, without a KV connector. `kind`: its name there."""
    config = _config(shape)
    config.scheduler_config.async_scheduling = kind.endswith("_async")
    group = FullAttentionSpec(block_size=shape.block_tokens, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(shape.blocks, [], [KVCacheGroupSpec(["layer"], group)])
    return KINDS[kind](config, cache, StructuredOutputManager(config), shape.block_tokens, log_stats=False)


def _config(shape: Shape) -> VllmConfig:
    with tempfile.TemporaryDirectory() as path:
        model = LlamaConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=1,
            intermediate_size=64,
            max_position_embeddings=shape.max_model_len,
            architectures=["LlamaForCausalLM"],
        )
        model.save_pretrained(path)
        arguments = AsyncEngineArgs(
            model=path,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=shape.max_model_len,
            block_size=shape.block_tokens,
            max_num_seqs=shape.seats,
            max_num_batched_tokens=shape.step_tokens,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 28,
        )
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    config.cache_config.num_gpu_blocks = shape.blocks
    config.parallel_config.pipeline_parallel_size = shape.stages
    return config


@dataclass(slots=True)
class _Batch:
    output: SchedulerOutput
    sampling: set[str]
    end_s: float


@dataclass(slots=True)
class Outcome:
    """What a run was. `step_kinds`: `prefill`, `decode` or `mixed`, of every step with something in it.

    `busy_s`: of all stages together. `tokens`: of each finished answer, by its request's name. `written`: after each
    step that wrote any, the time and the tokens of all answers together.
    """

    seconds: float = 0.0
    busy_s: float = 0.0
    preemptions: int = 0
    step_kinds: list[str] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    written: list[tuple[float, int]] = field(default_factory=list)

    def seconds_until(self, share: float) -> float:
        """When so large a share of all tokens was written."""
        wanted = share * self.written[-1][1]
        return next(at_s for at_s, tokens in self.written if tokens >= wanted)

    @property
    def switches(self) -> int:
        """Changes between prefill and decode steps."""
        kinds = self.step_kinds
        return sum(one != other for one, other in pairwise(kinds))


class VirtualPipeline:
    """An engine core's loop. `steps`: seconds of a step through all stages. `hop_s`: from one stage to the next.

    `heard`: called with every output of the scheduler and with each that has come back, for tests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        steps: Coefficients,
        hop_s: float = 0.0,
        heard: Callable[[str, SchedulerOutput], None] | None = None,
    ) -> None:
        self._scheduler, self._steps, self._hop_s = scheduler, steps, hop_s
        self._heard = heard or (lambda _, __: None)
        stages = scheduler.parallel_config.pipeline_parallel_size
        self._free_s = [0.0] * stages
        self._places = stages + isinstance(scheduler, AsyncScheduler)
        self._queue: deque[_Batch] = deque()
        self._requests: dict[str, tuple[Request, Asked]] = {}
        self.now_s = 0.0
        self.outcome = Outcome()
        if isinstance(scheduler, ChoosingScheduler):
            scheduler.clock = lambda: self.now_s

    def add(self, asked: Asked) -> None:
        """A request comes now."""
        params = SamplingParams(max_tokens=asked.max_tokens, stop_token_ids=[STOP])
        core = EngineCoreRequest(asked.name, [OTHER] * asked.prompt_tokens, None, params, None, 0.0, None, None, None)
        request = Request.from_engine_core_request(core, None)
        self._requests[asked.name] = request, asked
        self._scheduler.add_request(request)

    def run(self) -> Outcome:
        """Until every request is over. Raises RuntimeError where the scheduler stands still."""
        idle = 0
        while self._scheduler.has_requests() or self._queue:
            idle = 0 if self.turn() else idle + 1
            if idle > IDLE_TURNS:
                raise RuntimeError(f"{len(self._scheduler.requests)} requests stand still")
        self.outcome.seconds = self.now_s
        return self.outcome

    def turn(self) -> bool:
        """Schedule a step, or wait for the oldest one: whether one with something in it was scheduled or came back."""
        if self._scheduler.has_requests():
            output = self._scheduler.schedule()
            self._heard("scheduled", output)
            self._queue.append(self._launched(output))
            if len(self._queue) < self._places and (
                output.total_num_scheduled_tokens or self._scheduler.has_requests()
            ):
                return bool(output.total_num_scheduled_tokens)
        batch = self._queue.popleft()
        self.now_s = max(self.now_s, batch.end_s)
        self._returned(batch)
        return bool(batch.sampling or batch.output.total_num_scheduled_tokens)

    def _launched(self, output: SchedulerOutput) -> _Batch:
        sampling = {name for name in output.num_scheduled_tokens if not self._scheduler.requests[name].is_prefill_chunk}
        counts = _counts(output)
        if counts is None:
            return _Batch(output, sampling, self.now_s)
        self.outcome.step_kinds.append(_kind(counts))
        stage_s = self._stage_s(counts)
        at_s = self.now_s
        for stage, free_s in enumerate(self._free_s):
            at_s = self._free_s[stage] = max(at_s, free_s) + stage_s
            at_s += self._hop_s
        self.outcome.busy_s += stage_s * len(self._free_s)
        return _Batch(output, sampling, at_s)

    def _stage_s(self, counts: StepReport) -> float:
        content = counts.prefill_tokens, counts.prefill_context, counts.decode_sequences, counts.decode_context
        return self._steps.step_s(*content) / len(self._free_s)

    def _returned(self, batch: _Batch) -> None:
        names = list(batch.output.num_scheduled_tokens)
        sampled = [self._token(name) if name in batch.sampling else [] for name in names]
        ran = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)
        answered = self._scheduler.update_from_output(batch.output, ran)
        self._heard("returned", batch.output)
        if new := sum(len(each.new_token_ids) for answers in answered.values() for each in answers.outputs):
            before = self.outcome.written[-1][1] if self.outcome.written else 0
            self.outcome.written.append((self.now_s, before + new))
        for output in (output for each in answered.values() for output in each.outputs):
            if output.finish_reason is not None:
                request, _ = self._requests.pop(output.request_id)
                self.outcome.tokens[output.request_id] = request.num_output_tokens
                self.outcome.preemptions += request.num_preemptions

    def _token(self, name: str) -> list[int]:
        if name not in self._requests:
            return [OTHER]  # of a request that has ended meanwhile; vLLM drops it
        request, asked = self._requests[name]
        return [STOP if request.num_output_tokens + 1 >= asked.output_tokens else OTHER]


def _counts(output: Any) -> StepReport | None:
    clock = StepClock()
    clock.begin(output, 0.0)
    return clock.end(1.0)


def _kind(counts: StepReport) -> str:
    if not counts.decode_sequences:
        return "prefill"
    return "mixed" if counts.prefill_tokens else "decode"


def run(
    kind: str,
    shape: Shape,
    asked: Sequence[Asked],
    steps: Coefficients,
    hop_s: float = 0.0,
    controller: Controller | None = None,
) -> Outcome:
    """All requests at once, until the last one is over. `kind`: of `KINDS`. `controller`: instead of a phased
    scheduler's own."""
    scheduler = make_scheduler(kind, shape)
    if controller is not None:
        assert isinstance(scheduler, PhasedScheduler), kind
        scheduler.controller = controller
    pipeline = VirtualPipeline(scheduler, steps, hop_s)
    for each in asked:
        pipeline.add(each)
    return pipeline.run()
