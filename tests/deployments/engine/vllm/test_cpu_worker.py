"""The worker of a pipeline stage on CPU, and what it takes vLLM's to do and not to do."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from deployments.engine.vllm import cpu_worker
from deployments.engine.vllm.arguments import CPU_STAGE

HIDDEN, MOST_TOKENS = 8, 16


def empty(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
    return IntermediateTensors({"hidden_states": torch.zeros(batch_size, HIDDEN, dtype=dtype, device=device)})


def a_runner() -> Any:
    return SimpleNamespace(
        intermediate_tensors=None,
        model=SimpleNamespace(make_empty_intermediate_tensors=empty),
        model_config=SimpleNamespace(dtype=torch.float32),
        max_num_tokens=MOST_TOKENS,
        device=torch.device("cpu"),
    )


def started(monkeypatch: pytest.MonkeyPatch, is_first: bool, runner: Any) -> Any:
    """What the end of an engine's start returns in a worker with this runner."""
    monkeypatch.setattr(cpu_worker, "get_pp_group", lambda: SimpleNamespace(is_first_rank=is_first))
    monkeypatch.setattr(CPUWorker, "compile_or_warm_up_model", lambda self: "times")
    worker = object.__new__(cpu_worker.StageWorker)
    worker.model_runner = runner
    return worker.compile_or_warm_up_model()


def test_a_stage_behind_the_first_has_room_for_the_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = a_runner()
    assert started(monkeypatch, False, runner) == "times"
    buffer = runner.intermediate_tensors
    assert buffer["hidden_states"].shape == (MOST_TOKENS, HIDDEN)
    assert buffer["hidden_states"].dtype == torch.float32
    started(monkeypatch, False, runner)
    assert runner.intermediate_tensors is buffer, "a warm-up has made it"


def test_the_first_stage_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = a_runner()
    assert started(monkeypatch, True, runner) == "times"
    assert runner.intermediate_tensors is None


def test_vllm_finds_the_class_by_its_path() -> None:
    module, _, name = CPU_STAGE.rpartition(".")
    assert getattr(importlib.import_module(module), name) is cpu_worker.StageWorker


def test_vllm_still_makes_the_buffer_in_its_warm_up_alone() -> None:
    """When this fails, vLLM may have mended it: try engines of two stages without `StageWorker`."""
    assert issubclass(CPUModelRunner, GPUModelRunner)
    makers = [
        name
        for name, function in inspect.getmembers(GPUModelRunner, inspect.isfunction)
        if "make_empty_intermediate_tensors" in inspect.getsource(function)
    ]
    assert makers == ["_dummy_run"]
    assert "make_empty_intermediate_tensors" not in inspect.getsource(CPUModelRunner)
    assert "if self._should_warm_up_model()" in inspect.getsource(CPUWorker.determine_available_memory)
    assert "assert self.intermediate_tensors is not None" in inspect.getsource(
        GPUModelRunner.sync_and_gather_intermediate_tensors
    )
