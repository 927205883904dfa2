"""How much of an engine step one prompt may take. Pure."""

from __future__ import annotations

from deployments.messages import Role


def prompt_share(role: Role, step_tokens: int, sequences: int) -> int:
    """The most prompt tokens of one request in a step while there are other requests, at least 1.

    `step_tokens`: the most tokens in a step. `sequences`: the most sequences that run.

    On a prefill replica one prompt takes a whole step, and the next prompt waits. On a decode replica one prompt takes
    half of what the running answers leave. Engines serve what runs before what waits, and a prompt that is being
    computed runs. Without this limit, short prompts and sessions whose KV cache has arrived waited until the whole
    prompt was computed.
    """
    return step_tokens if role is Role.PREFILL else max((step_tokens - sequences) // 2, 1)
