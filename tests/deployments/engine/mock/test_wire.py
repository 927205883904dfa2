"""The mock engine's wire format against the installed vLLM: a moved field fails here, not in a deployment."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

vllm_engine = pytest.importorskip("vllm.v1.engine")

from vllm.sampling_params import SamplingParams  # noqa: E402 - after importorskip
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder  # noqa: E402 - after importorskip

from deployments.engine.mock import wire as mock_wire  # noqa: E402 - after importorskip
from deployments.messages import Role  # noqa: E402 - after importorskip


def core_request(params: SamplingParams, prompt: list[int]) -> Any:
    return vllm_engine.EngineCoreRequest(
        request_id="r-1",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=1.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        client_index=3,
        external_req_id="external",
    )


def encode(request: Any) -> tuple[bytes, ...]:
    return tuple(bytes(frame) for frame in MsgpackEncoder().encode(request))


def test_every_field_that_the_mock_reads_is_where_it_reads_it() -> None:
    baton = {"role": "prefill", "session": "s", "epoch": 2, "peers": ["tcp://127.0.0.1:1"]}
    params = SamplingParams(
        max_tokens=7,
        min_tokens=2,
        stop_token_ids=[11, 12],
        logprobs=3,
        seed=5,
        extra_args={"kv_transfer_params": {"baton": baton}, "something": 1},
    )
    params.update_from_generation_config({}, eos_token_id=2)
    ignoring = SamplingParams(ignore_eos=True)
    request = mock_wire.decode_request(encode(core_request(params, [1, 2, 3])))
    assert (request.request_id, request.prompt_token_ids) == ("r-1", [1, 2, 3])
    sampling = request.sampling_params
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (7, 2, [11, 12])
    assert (sampling.ignore_eos, sampling.logprobs, sampling.seed) == (False, 3, 5)
    assert mock_wire.decode_request(encode(core_request(ignoring, [1]))).sampling_params.ignore_eos
    assert sampling.eos_token_id == params.eos_token_id == 2
    assert request.handoff == msgspec.convert(baton, mock_wire.Handoff)
    assert request.handoff.key == ("s", 2)


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    sampling = mock_wire.decode_request(encode(core_request(params, [1]))).sampling_params
    for name in ("max_tokens", "min_tokens", "ignore_eos", "logprobs", "seed", "extra_args"):
        assert getattr(sampling, name) == getattr(params, name), name
    assert not sampling.stop_token_ids
    assert not params.stop_token_ids


def test_a_request_without_token_ids_is_refused() -> None:
    request = core_request(SamplingParams(), [1])
    request.prompt_token_ids = None
    with pytest.raises(ValueError, match="array"):
        mock_wire.decode_request(encode(request))


def test_outputs_read_as_vllms_own() -> None:
    outputs = [
        mock_wire.OutputStruct("a", [10]),
        mock_wire.OutputStruct("b", [11], mock_wire.logprobs(11, 2)),
        mock_wire.OutputStruct("c", [12], finish_reason=mock_wire.FinishReason.STOP, stop_reason=12),
        mock_wire.OutputStruct("d", [], finish_reason=mock_wire.FinishReason.ERROR),
    ]
    frames = mock_wire.encode_outputs(outputs)
    decoded = MsgpackDecoder(vllm_engine.EngineCoreOutputs).decode(frames)
    assert decoded.engine_index == 0
    assert decoded.timestamp > 0
    assert decoded.finished_requests is None
    found = [(o.request_id, o.new_token_ids, o.finish_reason, o.stop_reason) for o in decoded.outputs]
    reasons = vllm_engine.FinishReason
    assert found == [
        ("a", [10], None, None),
        ("b", [11], None, None),
        ("c", [12], reasons.STOP, 12),
        ("d", [], reasons.ERROR, None),
    ]
    logprobs = decoded.outputs[1].new_logprobs
    assert logprobs.logprob_token_ids.tolist() == [[11, 12, 13]]
    assert logprobs.logprobs[0, 0] == pytest.approx(math.log(0.5))
    assert logprobs.sampled_token_ranks.tolist() == [1]
    assert decoded.outputs[0].new_logprobs is None


def test_finish_reasons_are_vllms() -> None:
    for reason in mock_wire.FinishReason:
        assert vllm_engine.FinishReason[reason.name] == reason


async def test_the_mock_serves_a_request_of_vllm(make_mock: Any, no_leaks: None) -> None:
    engine = make_mock(Role.DECODE)
    await engine.start()
    params = SamplingParams(max_tokens=1, logprobs=1)
    await engine.add(encode(core_request(params, [5, 6, 7])))
    while not (step := await engine.step()).outputs:
        continue
    frames = engine.encode([output.payload for output in step.outputs])
    decoded = MsgpackDecoder(vllm_engine.EngineCoreOutputs).decode(frames)
    assert decoded.outputs[0].finish_reason is vllm_engine.FinishReason.LENGTH
    assert decoded.outputs[0].new_logprobs.logprob_token_ids[0, 0] == decoded.outputs[0].new_token_ids[0]
    await engine.shutdown()


def test_the_contract_tests_speak_vllms_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """conftest.encode_plain writes requests without vLLM: the same fields must come out."""
    spec = importlib.util.spec_from_file_location("plain", Path(__file__).parents[1] / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plain", conftest)
    spec.loader.exec_module(conftest)
    frames = conftest.encode_plain("r", [1, 2], {"max_tokens": 4, "stop_token_ids": [9]})
    request = MsgpackDecoder(vllm_engine.EngineCoreRequest).decode(frames)
    assert (request.request_id, request.prompt_token_ids) == ("r", [1, 2])
    assert (request.sampling_params.max_tokens, request.sampling_params.stop_token_ids) == (4, [9])
    frames = mock_wire.encode_outputs([mock_wire.OutputStruct("a", [10])])
    assert conftest.decode_plain(frames) == [("a", [10], None)]
