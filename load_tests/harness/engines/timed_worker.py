"""A worker of vLLM on CPU that tells how long it has computed, for the share of a pipeline's time that is bubbles.

`parallel_config.worker_cls` names it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm.distributed.parallel_state import get_pp_group

from deployments.engine.vllm.cpu_worker import StageWorker

PASSED_ON = ("irecv_tensor_dict", "isend_tensor_dict")
"""What hands hidden states from stage to stage. On CPU it spins while it waits."""


class TimedWorker(StageWorker):
    """Counts the CPU time of its thread within steps, without what it spends between stages.

    One OpenMP thread computes all of a step, and that is the thread which runs it.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._busy_s = 0.0

    def init_device(self) -> None:
        """Called once, before the first step."""
        super().init_device()
        group = get_pp_group()
        for name in PASSED_ON:
            setattr(group, name, self._taken_off(getattr(group, name)))

    def execute_model(self, scheduler_output: Any) -> Any:
        """The forward pass of a step."""
        with self._counted(1):
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The end of a step."""
        with self._counted(1):
            return super().sample_tokens(grammar_output)

    def stage_busy_s(self) -> float:
        """Seconds in which it has computed so far."""
        return self._busy_s

    def _taken_off(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **more: Any) -> Any:
            with self._counted(-1):
                return function(*arguments, **more)

        return timed

    @contextlib.contextmanager
    def _counted(self, sign: int) -> Iterator[None]:
        begun = time.thread_time()
        try:
            yield
        finally:
            self._busy_s += sign * (time.thread_time() - begun)
