"""The prefix that a request has pinned instead of being served. This file imports vllm."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace
from typing import Any

from vllm.v1.engine import EngineCoreRequest

from deployments.errors import PrefixRefused, RequestFault
from deployments.messages import Adapter, Pin


def prefix_of(request: EngineCoreRequest, tokens: int, block_size: int) -> Pin:
    """The first `tokens` tokens of a request's prompt, as a prefix that nothing pins."""
    lora = request.lora_request
    adapter = Adapter(lora.lora_name, lora.lora_path, lora.lora_int_id) if lora else None
    begins = tuple((request.prompt_token_ids or ())[:tokens])
    return Pin("", begins, tokens // block_size, request.cache_salt or "", adapter)


def pin_of(request: EngineCoreRequest, block_size: int) -> Pin:
    """The prompt of a request as engines get it. Equal prompts that share KV have equal ids. Raises RequestFault."""
    if request.mm_features or request.prompt_embeds is not None:
        raise RequestFault("a prompt with images, sound or embeddings cannot be pinned")
    prefix = prefix_of(request, len(request.prompt_token_ids or ()), block_size)
    if not prefix.blocks:
        tokens = len(prefix.tokens)
        raise RequestFault(f"the prompt has {tokens} tokens, and a block, the least to pin, has {block_size}")
    named = hashlib.blake2b(array("q", prefix.tokens).tobytes(), digest_size=12)
    named.update(repr((prefix.salt, prefix.adapter)).encode(errors="surrogatepass"))
    return replace(prefix, id=named.hexdigest())


def shown(pin: Pin | None, found: dict[str, Any]) -> dict[str, Any]:
    """What the session manager says of this pin, out of its answer to `Prefixes`. Raises PrefixRefused."""
    if "refused" in found:
        raise PrefixRefused(found["refused"])
    for entry in found["prefixes"]:
        if pin is not None and entry["id"] == pin.id:
            return dict(entry)
    raise PrefixRefused("the prefix was unpinned meanwhile")
