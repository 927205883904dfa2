"""What the hostile client sends: requests that would cost the server much more than they cost the client."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MANY, PROMPTS = 16_384, 2_048
CYCLE = "root ::= root"
MOST_BYTES = 4 * 1024 * 1024
"""Of a body: what `ingress.max_body_bytes` allows."""
COMPLETIONS, CHAT, RESPONSES, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"
_WORDS = "the quick brown fox jumps over a lazy dog and "
_SAYS = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class Sent:
    """One kind of request. `path`: where it goes."""

    kind: str
    path: str
    body: bytes


def requests(model: str) -> tuple[Sent, ...]:
    """One request of each kind."""

    def sent(kind: str, path: str, **fields: Any) -> Sent:
        return Sent(kind, path, json.dumps({"model": model, **fields}).encode())

    def filled(kind: str, path: str, fields: Callable[[int], dict[str, Any]], unit: Any, **others: Any) -> Sent:
        """A body of `MOST_BYTES`, or a little less, with a field as often as it fits."""
        empty = len(sent(kind, path, **fields(0), **others).body)
        return sent(kind, path, **fields((MOST_BYTES - empty) // (len(json.dumps(unit)) + 2)), **others)

    hello, chat = {"prompt": "hi", "max_tokens": 4}, {"messages": [_SAYS], "max_tokens": 4}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    text = _WORDS * (MOST_BYTES // len(_WORDS) - 4)
    grammar = 'root ::= "a"\n' + "".join(f'r{number} ::= "b"\n' for number in range(200_000))
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        schema = {"type": "object", "properties": {"a": schema}}
    odd = {"type": "odd", "text": "a"}
    return (
        sent("many", COMPLETIONS, n=MANY, **hello),
        sent("many_chat", CHAT, n=MANY, **chat),
        sent("prompts", COMPLETIONS, prompt=["hi"] * PROMPTS, max_tokens=4),
        sent("prompts_ids", COMPLETIONS, prompt=[[5, 6, 7]] * PROMPTS, max_tokens=4),
        sent("cycle", COMPLETIONS, structured_outputs={"grammar": CYCLE}, **hello),
        sent("cycle_chat", CHAT, structured_outputs={"grammar": CYCLE}, **chat),
        sent("text", COMPLETIONS, prompt=text, max_tokens=4),
        sent("text_chat", CHAT, messages=[{"role": "user", "content": text}], max_tokens=4),
        sent("text_tokenize", TOKENIZE, prompt=text),
        filled("ids", COMPLETIONS, lambda count: {"prompt": [7] * count}, 7, max_tokens=4),
        filled("messages", CHAT, lambda count: {"messages": [_SAYS] * count}, _SAYS, max_tokens=4),
        filled("tools", CHAT, lambda count: {"tools": [tool] * count}, tool, **chat),
        filled("stops", COMPLETIONS, lambda count: {"stop": ["ab"] * count}, "ab", **hello),
        filled("nested", COMPLETIONS, lambda count: {"more": [{}] * count}, {}, **hello),
        sent("grammar", COMPLETIONS, structured_outputs={"grammar": grammar}, **hello),
        sent("schema", COMPLETIONS, structured_outputs={"json": schema}, **hello),
        sent("items", RESPONSES, input=[{}] * 4000, max_output_tokens=4),
        sent("says", RESPONSES, input=[_SAYS] * 780, max_output_tokens=4),
        sent("parts", CHAT, messages=[{"role": "user", "content": [odd] * 1500}], max_tokens=4),
        sent("ids_one_wrong", COMPLETIONS, prompt=[*[7] * 100_000, "a"], max_tokens=4),
    )
