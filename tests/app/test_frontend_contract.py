"""What `app/frontend.py` and the cluster core lean on in vLLM: a failure names what a new one has moved."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor

from app.frontend import ClusterLLM

# Set by AsyncLLM only when its frontend profiler is on, which ours never is.
NOT_SET = {"_frontend_profiler_worker_name"}


def _assigned(*functions: Any) -> set[str]:
    """The attributes of `self` that these functions assign."""
    trees = [ast.parse(textwrap.dedent(inspect.getsource(function))) for function in functions]
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _used(function: Any, name: str) -> set[str]:
    """The attributes of `self.NAME`, or of a local variable NAME, that a function reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Attribute) and node.value.attr == name)
            or (isinstance(node.value, ast.Name) and node.value.id == name)
        )
    }


def test_cluster_llm_sets_what_async_llm_sets() -> None:
    theirs = _assigned(AsyncLLM.__init__) - NOT_SET
    of_the_class = {
        n for n, value in vars(ClusterLLM).items() if not callable(value) and not n.startswith(("__", "_abc"))
    }
    ours = _assigned(ClusterLLM.__init__, ClusterLLM._set_processors) | of_the_class
    assert theirs - ours == set(), "AsyncLLM.__init__ sets attributes that ClusterLLM does not"
    assert ours - theirs == set(), "ClusterLLM sets attributes that AsyncLLM.__init__ no longer sets"


def test_what_the_frontend_asks_of_a_core() -> None:
    methods: tuple[Any, ...] = (AsyncLLM.add_request, AsyncLLM._add_request, AsyncLLM.generate, AsyncLLM.abort)
    methods += (AsyncLLM._run_output_handler, AsyncLLM.get_supported_tasks, AsyncLLM.shutdown)
    used = set().union(*(_used(method, "engine_core") for method in methods), _used_by_errored())
    assert used == {
        "add_request_async",
        "abort_requests_async",
        "get_output_async",
        "get_supported_tasks_async",
        "resources",
        "shutdown",
    }


def _used_by_errored() -> set[str]:
    assert AsyncLLM.errored.fget is not None
    return _used(AsyncLLM.errored.fget, "engine_core")


def test_signatures() -> None:
    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert parameters(build_app) == ["args", "supported_tasks", "model_config"]
    assert parameters(init_app_state) == ["engine_client", "state", "args", "supported_tasks"]
    assert inspect.iscoroutinefunction(init_app_state)
    assert parameters(AsyncLLM.add_request)[:4] == ["self", "request_id", "prompt", "params"]
    assert parameters(OutputProcessor.__init__)[1:5] == [
        "tokenizer",
        "log_stats",
        "stream_interval",
        "tracing_enabled",
    ]
    assert parameters(EngineCoreClient.add_request_async) == ["self", "request"]
    assert parameters(EngineCoreClient.abort_requests_async) == ["self", "request_ids"]
    assert set(EngineCoreClient.__abstractmethods__) == {"shutdown"}


FIELDS = {
    EngineCoreRequest: """request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time
        lora_request cache_salt data_parallel_rank prompt_embeds prompt_is_token_ids client_index current_wave
        priority trace_headers resumable external_req_id reasoning_ended reasoning_parser_kwargs
        abort_immediately session_id kv_hints""",
    EngineCoreOutput: """request_id new_token_ids new_logprobs new_prompt_logprobs_tensors pooling_output
        finish_reason stop_reason events kv_transfer_params ec_transfer_params trace_headers prefill_stats
        routed_experts num_nans_in_logits mm_cache_miss_hashes new_sampling_mask spec_decode_metrics
        prompt_token_id_logprobs""",
    EngineCoreOutputs: """engine_index outputs scheduler_stats timestamp utility_output finished_requests
        wave_complete start_wave weight_version""",
}


@pytest.mark.parametrize("struct", FIELDS, ids=lambda struct: struct.__name__)
def test_fields_by_order(struct: type) -> None:
    """These are encoded as arrays: a field that moved changes the meaning of every field after it."""
    assert list(struct.__struct_fields__) == FIELDS[struct].split()  # type: ignore[attr-defined]


def test_finish_reasons() -> None:
    assert {reason.name: reason.value for reason in FinishReason} == {
        "STOP": 0,
        "LENGTH": 1,
        "ABORT": 2,
        "ERROR": 3,
        "REPETITION": 4,
    }
