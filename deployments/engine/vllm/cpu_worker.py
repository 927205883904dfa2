"""vLLM's worker on CPU, for engines of several pipeline stages.

A stage behind the first takes the hidden states of the stage before into a buffer of its model runner. vLLM makes that
buffer in its warm-up, and skips the warm-up on CPU where nothing is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.worker_base import CompilationTimes


class StageWorker(CPUWorker):
    """Has its buffer before its engine takes a request. vLLM loads this class by its path (`worker_cls`)."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Called once, at the end of the engine's start."""
        times = super().compile_or_warm_up_model()
        if not get_pp_group().is_first_rank:
            make_buffer(self.model_runner)
        return times


def make_buffer(runner: GPUModelRunner) -> None:
    """Give a stage the buffer for the largest step, unless it has one."""
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
