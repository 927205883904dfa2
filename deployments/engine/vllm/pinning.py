"""The request that pins a prefix in an engine; `transfer.vllm.pins` reads it there."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from deployments.messages import Pin, ReplicaInfo
from transfer.control.fetch_request import fetch_request
from transfer.vllm.pins import PIN

FETCH_TIMEOUT_S = 10.0
"""What of a pinned prefix has not come from its source by then is computed. Nothing else waits for it."""
NO_PROMPT = (1,)
"""The prompt of a request that only unpins."""


def pin_request(
    request_id: str, keep: Collection[str], pin: Pin | None, source: ReplicaInfo | None
) -> EngineCoreRequest:
    """See `Engine.pin`. Its one token goes nowhere."""
    tokens = pin.tokens if pin else NO_PROMPT
    extra: dict[str, Any] = {PIN: {"id": pin.id if pin else "", "keep": list(keep)}}
    if source is not None and source.endpoints:
        extra["kv_transfer_params"] = fetch_request(request_id, 1, source.endpoints, len(tokens), FETCH_TIMEOUT_S)
    adapter = pin.adapter if pin else None
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1, extra_args=extra),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=LoRARequest(adapter.name, adapter.number, adapter.path) if adapter else None,
        cache_salt=(pin.salt or None) if pin else None,
        data_parallel_rank=None,
    )
