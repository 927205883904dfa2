"""Which modes serve a request exactly: the same tokens, with the same probabilities, as one engine gives.

Where prefill pushes the KV cache, a split request's first token is sampled by the prefill engine and enters the
decode engine as the last token of its prompt. Whatever counts, or was moved by, *generated* tokens therefore starts
one token late on the decode engine. A request that would feel that is served by one engine until the state travels
with the handoff. Where decode pulls the KV cache it samples every token itself, and those rules fall away.
"""

from __future__ import annotations

from dataclasses import dataclass

from deployments.messages import Handoff, Mode

ANY = (Mode.DISAGGREGATED, Mode.DECODE_LOCAL, Mode.PREFILL_LOCAL)
"""Best first. One engine serves anything; the prefill pool's is the last resort (see `placement.place`)."""

ONE_ENGINE = (Mode.DECODE_LOCAL, Mode.PREFILL_LOCAL)


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """What of a request's parameters bears on splitting it.

    `seeded_sampling`: a seed and a temperature above zero. `output_penalties`: presence or frequency.
    `stateful_logits`: thinking budgets, watermarks. What counts prompt and answer alike (repetition penalty), or
    can be counted on (minimum length), is split.
    """

    max_tokens: int
    prompt_logprobs: bool = False
    seeded_sampling: bool = False
    output_penalties: bool = False
    structured_output: bool = False
    bad_words: bool = False
    stateful_logits: bool = False
    has_embeds_or_multimodal: bool = False
    lora: bool = False
    repetition_detection: bool = False


def split_rule(traits: RequestTraits, handoff: Handoff = Handoff.PUSHED) -> tuple[tuple[Mode, ...], str]:
    """The modes that serve a request exactly, best first, and the rule that narrowed them ("" when none did).

    Rules about the first token hold for a pushed handoff only: one_token, prompt_logprobs, embeds_or_multimodal and
    lora hold for every handoff.

    | rule                 | why it is not split                                                             |
    | -------------------- | ------------------------------------------------------------------------------- |
    | one_token            | prefill gives the whole answer: there is nothing to hand over                   |
    | prompt_logprobs      | they cover the whole prompt, and decode never computes what it was handed       |
    | seeded_sampling      | decode's generator would repeat the position that the first token used up       |
    | output_penalties     | they count generated tokens: decode would take the first for prompt             |
    | structured_output    | decode's grammar has not accepted the first token and would ask for it again    |
    | bad_words            | a banned sequence that begins with the first token would not be recognised      |
    | stateful_logits      | the processor's state has not seen the first token                              |
    | embeds_or_multimodal | block hashes and placeholders of non-text input do not travel yet               |
    | lora                 | the adapter would have to be loaded, under one id, on both replicas             |
    | repetition_detection | it looks at generated tokens, and the first would be missing from them          |
    """
    if traits.max_tokens == 1:
        return (Mode.PREFILL_LOCAL, Mode.DECODE_LOCAL), "one_token"
    pushed = handoff is Handoff.PUSHED
    rules = (
        (traits.prompt_logprobs, "prompt_logprobs"),
        (pushed and traits.seeded_sampling, "seeded_sampling"),
        (pushed and traits.output_penalties, "output_penalties"),
        (pushed and traits.structured_output, "structured_output"),
        (pushed and traits.bad_words, "bad_words"),
        (pushed and traits.stateful_logits, "stateful_logits"),
        (traits.has_embeds_or_multimodal, "embeds_or_multimodal"),
        (traits.lora, "lora"),
        (pushed and traits.repetition_detection, "repetition_detection"),
    )
    rule = next((name for applies, name in rules if applies), "")
    return (ONE_ENGINE, rule) if rule else (ANY, "")


def continuation_rule(traits: RequestTraits) -> str:
    """Why an answer that has begun cannot go on with its tokens as part of the prompt; "" when it can.

    By the same rules: what counts, or was moved by, generated tokens would not know of those before. Prompt
    logprobs have been told by then, and an adapter is loaded wherever the session is placed next.
    """
    rules = (
        (traits.seeded_sampling, "seeded_sampling"),
        (traits.output_penalties, "output_penalties"),
        (traits.structured_output, "structured_output"),
        (traits.bad_words, "bad_words"),
        (traits.stateful_logits, "stateful_logits"),
        (traits.has_embeds_or_multimodal, "embeds_or_multimodal"),
        (traits.repetition_detection, "repetition_detection"),
    )
    return next((name for applies, name in rules if applies), "")
