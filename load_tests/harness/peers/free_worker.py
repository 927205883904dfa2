"""A worker for vLLM's engine core that computes nothing: a step takes `additional_config["step_s"]` seconds and no CPU.

Everything else is vLLM's own: scheduler, KV bookkeeping, processes, messages. So vLLM's server can be measured without
a model: `--worker-cls load_tests.harness.peers.free_worker.FreeWorker --additional-config '{"step_s": 0.02}'`.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

TOKEN_ID = 1000  # an ordinary word


class FreeWorker(CPUWorker):
    """Answers every sequence with the same token, once its whole prompt has been scheduled."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._step_s = float(self.vllm_config.additional_config["step_s"])
        self._missing: dict[str, int] = {}

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step: it first counts prompt tokens that are still missing, and then gives tokens."""
        for request_id in scheduler_output.finished_req_ids:
            self._missing.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._missing[new.req_id] = len(new.prompt_token_ids or ()) - new.num_computed_tokens
        sampled = []
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            self._missing[request_id] = max(0, self._missing[request_id] - count)
            sampled.append([] if self._missing[request_id] else [TOKEN_ID])
        if sampled:
            time.sleep(self._step_s)
        ids = list(scheduler_output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
