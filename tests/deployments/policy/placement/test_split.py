"""Which requests may be split, and the name of the rule for those that may not."""

from __future__ import annotations

from dataclasses import fields

import pytest

from deployments.messages import Handoff, Mode
from deployments.policy.placement.split import RequestTraits, split_rule

FLAGS = [field.name for field in fields(RequestTraits) if field.name != "max_tokens"]


def test_an_ordinary_request_may_be_served_in_every_mode_split_first() -> None:
    modes, rule = split_rule(RequestTraits(max_tokens=16))
    assert rule == ""
    assert modes == (Mode.DISAGGREGATED, Mode.DECODE_LOCAL, Mode.PREFILL_LOCAL)


def test_one_token_is_prefill_work_alone() -> None:
    expected = ((Mode.PREFILL_LOCAL, Mode.DECODE_LOCAL), "one_token")
    assert split_rule(RequestTraits(max_tokens=1)) == expected
    assert split_rule(RequestTraits(max_tokens=1, prompt_logprobs=True)) == expected


@pytest.mark.parametrize("flag", FLAGS)
def test_every_trait_keeps_a_request_on_one_engine_and_names_its_rule(flag: str) -> None:
    modes, rule = split_rule(RequestTraits(16, **{flag: True}))
    assert modes == (Mode.DECODE_LOCAL, Mode.PREFILL_LOCAL)
    assert rule == flag.removeprefix("has_")
    assert split_rule.__doc__ is not None
    assert f"| {rule} " in split_rule.__doc__


@pytest.mark.parametrize("flag", FLAGS)
def test_rules_about_the_first_token_fall_away_where_decode_samples_it(flag: str) -> None:
    modes, rule = split_rule(RequestTraits(16, **{flag: True}), Handoff.PULLED)
    if flag in ("prompt_logprobs", "has_embeds_or_multimodal"):
        assert (modes, rule) == split_rule(RequestTraits(16, **{flag: True}))
    else:
        assert (modes, rule) == split_rule(RequestTraits(16))


def test_one_token_is_prefill_work_alone_in_every_handoff() -> None:
    assert split_rule(RequestTraits(max_tokens=1), Handoff.PULLED) == split_rule(RequestTraits(max_tokens=1))
