"""How much of a step one prompt may take."""

from __future__ import annotations

from deployments.messages import Role


def prompt_share(role: Role, step_tokens: int, sequences: int) -> int:
    """Prompt tokens of one request that a step takes while there are other requests, at least 1. `step_tokens`: of all
    in a step; `sequences`: that may run.

    A prefill replica gives a prompt all of a step, the next one waits. On a decode replica one prompt takes half of
    what running answers leave: engines give a step to what runs before they look at what waits, and a prompt that is
    computed there runs. Without a limit sessions whose KV cache has arrived, and short prompts, waited until the
    whole of it was computed.
    """
    return step_tokens if role is Role.PREFILL else max((step_tokens - sequences) // 2, 1)
