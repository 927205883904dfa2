"""How many prompt tokens a step computes beside running answers, and how much of them one prompt takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from deployments.step_cost import Coefficients

STEADY = 0.9
"""The longest step beside an answer, as a share of its TPOT objective: its last steps may be longer than predicted."""

PROMPT_SHARE = 0.9
"""The default of `placement.prompt_share`."""

LOOKED_AT = 16
"""The most waiting prompts that an engine looks at, to find one that is short."""

LEAST_SHARE = 0.25
"""The least share of a step's time that prompts get beside running answers, however little their objectives leave."""


def allowed_step_s(tpot_s: float, decoding_s: float, share: float) -> float:
    """The longest step with prompts in it that a running answer allows.

    `tpot_s`: its objective; 0: none. `decoding_s`: what the step takes without prompts. `share`: that of the prompts
    beside answers without an objective.
    """
    return STEADY * tpot_s if tpot_s else decoding_s / (1.0 - share)


def prompt_budget(
    steps: Coefficients,
    step_tokens: int,
    sequences: int,
    context: int,
    begun_tokens: int,
    objectives: Collection[float],
    share: float,
) -> int:
    """The most prompt tokens of the next step, at least 1.

    `step_tokens`: the most tokens in a step. `sequences`, `context`: the answers that run, and the tokens that they
    hold together. `begun_tokens`: how much of the prompt is computed already. `objectives`: the TPOT objectives of
    these answers, and of those whose KV cache is about to arrive; 0 stands for none. Without any answer, prompts take
    the whole step. `share`: that of the prompts beside answers without an objective (`placement.prompt_share`).

    The step takes as long as the answers allow, and a quarter of it at least goes to prompts. A token costs more the
    more tokens are before it, so chunks shrink along a prompt.
    """
    whole = max(step_tokens - sequences, 1)
    if not objectives or not any(steps):
        return whole
    decoding_s = steps.step_s(0, 0, sequences, context)
    allowed_s = min(allowed_step_s(each, decoding_s, share) for each in objectives)
    left_s = max(allowed_s - decoding_s, decoding_s * LEAST_SHARE / (1.0 - LEAST_SHARE))
    token_s, square_s = steps.prefill_token_s + begun_tokens * steps.prefill_context_s, steps.prefill_context_s / 2
    if token_s * whole + square_s * whole * whole <= left_s:
        return whole
    # The positive root of `square_s * n^2 + token_s * n = left_s`, in the form that is exact for small squares.
    tokens = 2 * left_s / (token_s + math.sqrt(token_s * token_s + 4 * square_s * left_s))
    return max(1, int(tokens))


def share_of_one(budget: int, prompts: Sequence[int]) -> int:
    """The most tokens of one prompt in a step whose prompts together take `budget`, at least 1.

    `prompts`: the tokens that each prompt has yet to compute, in the order in which the engine serves them: that of
    their arrival. Where a shorter prompt is behind the first one, the first leaves the tokens that it needs, but no
    more than half, so that short prompts do not wait for a long one, nor keep it from its end. Otherwise one prompt
    follows the other, which makes their mean wait the least.
    """
    if len(prompts) < 2 or (shortest := min(prompts[1:])) >= prompts[0]:
        return budget
    return max(budget - shortest, budget // 2, 1)


def share_of_each(budget: int, prompts: Sequence[int]) -> int:
    """The most tokens of one prompt with which all prompts together take at most `budget`, at least 1.

    `prompts`: the tokens that each has yet to compute. The shorter ones are computed whole, and the others have equal
    parts.
    """
    left = budget
    for place, tokens in enumerate(sorted(prompts)):
        if tokens > (equal := left // (len(prompts) - place)):
            return max(equal, 1)
        left -= tokens
    return budget
