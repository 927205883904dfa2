"""Which modes serve a request exactly: the same tokens, with the same probabilities, as one engine gives.

Where prefill pushes the KV cache, the first token of a split request is sampled by the prefill engine. The decode
engine takes it as the first of the answer (`transfer/vllm/continued_answer.py`), so everything that counts generated
tokens counts it: penalties, limits, grammars, a seed's generator. The rules here are for requests with a state that
cannot be made again from tokens, or with an input that does not travel. Where decode pulls the KV cache, it samples
every token.
"""

from __future__ import annotations

from dataclasses import dataclass

from deployments.messages import Handoff, Mode

ANY = (Mode.DISAGGREGATED, Mode.DECODE_LOCAL, Mode.PREFILL_LOCAL)
"""All modes, best first. One engine serves any request; one of the prefill pool is the last choice (see `place`)."""

ONE_ENGINE = (Mode.DECODE_LOCAL, Mode.PREFILL_LOCAL)


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """The parameters of a request that decide whether it may be split.

    `max_tokens`: the most tokens still to come. `stateful_logits`: thinking budgets, watermarks.
    """

    max_tokens: int
    prompt_logprobs: bool = False
    stateful_logits: bool = False
    has_embeds_or_multimodal: bool = False


def split_rule(traits: RequestTraits, handoff: Handoff = Handoff.PUSHED) -> tuple[tuple[Mode, ...], str]:
    """The modes that serve a request exactly, best first, and the rule that excluded the others ("" when none did).

    `stateful_logits` concerns the first token, and applies to a pushed handoff only.

    | rule                 | why it is not split                                                             |
    | -------------------- | ------------------------------------------------------------------------------- |
    | one_token            | prefill gives the whole answer: there is nothing to hand over                   |
    | prompt_logprobs      | they cover the whole prompt, and decode never computes what it was handed       |
    | stateful_logits      | the processor's state has not seen the first token                              |
    | embeds_or_multimodal | block hashes and placeholders of non-text input do not travel yet               |
    """
    if traits.max_tokens == 1:
        return (Mode.PREFILL_LOCAL, Mode.DECODE_LOCAL), "one_token"
    rules = (
        (traits.prompt_logprobs, "prompt_logprobs"),
        (handoff is Handoff.PUSHED and traits.stateful_logits, "stateful_logits"),
        (traits.has_embeds_or_multimodal, "embeds_or_multimodal"),
    )
    rule = next((name for applies, name in rules if applies), "")
    return (ONE_ENGINE, rule) if rule else (ANY, "")


def continuation_rule(traits: RequestTraits) -> str:
    """The rule because of which an answer that has begun cannot go on elsewhere; "" when it can.

    Prompt logprobs have been sent by then.
    """
    rules = ((traits.stateful_logits, "stateful_logits"), (traits.has_embeds_or_multimodal, "embeds_or_multimodal"))
    return next((name for applies, name in rules if applies), "")
