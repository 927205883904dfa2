"""The fields that a body of each API may have, and what may be in them."""

from __future__ import annotations

import random
from typing import Any

from load_tests.fuzz import values
from load_tests.fuzz.values import BIG_INTS, Draw, of

MODEL = "smollm2-135m-instruct"

SAMPLING: dict[str, Draw] = {
    "temperature": of(0, 0.0, 1e-9, 0.01, 1, 2, 2.0001, -0.0, -1, 1e308, None),
    "top_p": of(1, 1e-9, 0.5, 0, 1.0001, None),
    "top_k": of(-1, 0, 1, 49_152, 2**31 - 1, 2**63, -2),
    "min_p": of(0, 1, 0.5, -0.1),
    "seed": of(0, -1, *BIG_INTS),
    "frequency_penalty": of(-2, 2, 0, 2.1),
    "presence_penalty": of(-2, 2, 0, -2.1),
    "repetition_penalty": of(1, 1e-6, 2, 0, -1, 1e308),
    "logit_bias": values.logit_bias,
    "max_tokens": of(1, 2, 16, 64, 0, -1, 511, 512, 2048, *BIG_INTS),
    "min_tokens": of(0, 1, 16, 17, -1, 2**31),
    "n": of(1, 2, 8, 64, 256, 257, 2048, 16_384, 0, -1, *BIG_INTS),
    "best_of": of(1, 2, 20, 0, 2**31),
    "stop": of(None, "a", [], ["a"], [""], "", ["\U0001f600", "\ud83d"], ["a"] * 300, ["x" * 5000]),
    "stop_token_ids": values.token_ids,
    "allowed_token_ids": values.token_ids,
    "bad_words": of([], ["a"], [""], ["\U0001f600"], ["\ud83d"], ["a b c"] * 50),
    "ignore_eos": of(True, False),
    "skip_special_tokens": of(True, False),
    "include_stop_str_in_output": of(True, False),
    "truncate_prompt_tokens": of(None, 1, 5, -1, 0, 2**31, -2),
    "prompt_logprobs": of(0, 1, 20, 21, -1),
    "structured_outputs": values.grammar,
    "response_format": values.response_format,
    "return_token_ids": of(True, False),
    "stream_options": of(None, {}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}),
    "user": values.text,
    "priority": of(0, 1, -1, 2**31, 2**63),
    "cache_salt": of("a", "", "\u00e9" * 50, "\ud83d"),
    "request_id": of("a", "", "\u00e9", "a" * 5000),
    "vllm_xargs": of({}, {"a": 1}, {"a": [1, "b"]}, {"kv_transfer_params": "x"}, {"a": None}),
    "kv_transfer_params": of({}, {"do_remote_prefill": True}, values.nested(40)),
    "unknown_field": of(1, values.nested(200), values.nested(900, is_list=True)),
    "model": of(MODEL, "other", "", None),
}
COMPLETION: dict[str, Draw] = {
    "prompt": of(*values.TEXTS),
    "logprobs": of(0, 1, 5, 20, 21, -1, None),
    "echo": of(True, False),
    "suffix": of("", "x"),
    "add_special_tokens": of(True, False),
    "prompt_embeds": of(None, "", "AAAA", ["AAAA", "BBBB"], "\u00e9"),
}
CHAT: dict[str, Draw] = {
    "logprobs": of(True, False),
    "top_logprobs": of(0, 1, 20, 21, -1),
    "max_completion_tokens": of(1, 16, 0, 2048, 2**31),
    "tools": values.tools,
    "tool_choice": of("auto", "none", "required", "x", {"type": "function", "function": {"name": "f"}}),
    "parallel_tool_calls": of(True, False, None),
    "echo": of(True, False),
    "add_generation_prompt": of(True, False),
    "continue_final_message": of(True, False),
    "chat_template": of(None, "{{ messages }}", "{% for", "{{ 1 / 0 }}"),
    "chat_template_kwargs": of({}, {"a": 1}, {"messages": []}, {"tools": 1}, {"tokenize": True}),
    "documents": of([], [{"title": "a", "text": "b"}], [{}]),
    "reasoning_effort": of("low", "none", "x"),
    "mm_processor_kwargs": of({}, {"a": 1}),
}
RESPONSES: dict[str, Draw] = {
    "instructions": values.text,
    "max_output_tokens": of(1, 16, 64, 0, -1, 2048, 2**31, 2**64),
    "temperature": SAMPLING["temperature"],
    "top_p": SAMPLING["top_p"],
    "top_k": SAMPLING["top_k"],
    "text": lambda draw: {"format": draw.choice(({"type": "text"}, {"type": "json_object"}, _text_format(draw)))},
    "tools": values.flat_tools,
    "tool_choice": of("auto", "none", "required", {"type": "function", "name": "f"}),
    "top_logprobs": of(0, 1, 20, 21),
    "include": of([], ["message.output_text.logprobs"], ["x"]),
    "background": of(False, True),
    "store": of(False, True),
    "previous_response_id": of(None, "", "resp_1", "x"),
    "truncation": of("auto", "disabled", "x"),
    "metadata": of({}, {"a": "b"}, {"a": 1}),
    "reasoning": of({"effort": "low"}, {}, None),
    "max_tool_calls": of(0, 1, 2**31),
    "logit_bias": values.logit_bias,
    "cache_salt": SAMPLING["cache_salt"],
    "structured_outputs": values.grammar,
    "request_id": SAMPLING["request_id"],
}
MESSAGES: dict[str, Draw] = {
    "system": lambda draw: values.text(draw) if draw.random() < 0.5 else [{"type": "text", "text": values.text(draw)}],
    "tools": values.message_tools,
    "tool_choice": of(
        {"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "f"}, {"type": "x"}
    ),
    "stop_sequences": of([], ["a"], [""], ["\ud83d"], ["a"] * 100),
    "max_tokens": of(1, 16, 64, 0, -1, 2048, 2**63),
    "temperature": SAMPLING["temperature"],
    "top_p": SAMPLING["top_p"],
    "top_k": SAMPLING["top_k"],
    "metadata": of({}, {"user_id": "a"}, None),
    "thinking": of({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}),
}
TOKENIZE: dict[str, Draw] = {
    "prompt": of(*values.TEXTS, "a" * 100_000),
    "add_special_tokens": of(True, False),
    "return_token_strs": of(True, False),
}
DETOKENIZE: dict[str, Draw] = {"tokens": values.token_ids}


def _text_format(draw: random.Random) -> dict[str, Any]:
    return {"type": "json_schema", "name": "x", "schema": values.schema(draw), "strict": True}
