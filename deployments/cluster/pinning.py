"""The prefix that a request has pinned instead of being served. This file imports vllm."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

from vllm.v1.engine import EngineCoreRequest

from deployments.errors import PrefixRefused, RequestFault
from deployments.messages import Adapter, Pin


def pin_of(request: EngineCoreRequest, block_size: int) -> Pin:
    """The prompt of a request as engines get it. Equal prompts that share KV have equal ids. Raises RequestFault."""
    if request.mm_features or request.prompt_embeds is not None:
        raise RequestFault("a prompt with images, sound or embeddings cannot be pinned")
    tokens, salt = tuple(request.prompt_token_ids or ()), request.cache_salt or ""
    if len(tokens) < block_size:
        raise RequestFault(f"the prompt has {len(tokens)} tokens, and a block, the least to pin, has {block_size}")
    lora = request.lora_request
    adapter = Adapter(lora.lora_name, lora.lora_path, lora.lora_int_id) if lora else None
    named = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=12)
    named.update(repr((salt, adapter)).encode(errors="surrogatepass"))
    return Pin(named.hexdigest(), tokens, len(tokens) // block_size, salt, adapter)


def shown(pin: Pin | None, found: dict[str, Any]) -> dict[str, Any]:
    """What the session manager says of this pin, out of its answer to `Prefixes`. Raises PrefixRefused."""
    if "refused" in found:
        raise PrefixRefused(found["refused"])
    for entry in found["prefixes"]:
        if pin is not None and entry["id"] == pin.id:
            return dict(entry)
    raise PrefixRefused("the prefix was unpinned meanwhile")
