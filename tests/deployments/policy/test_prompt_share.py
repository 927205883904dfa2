"""The share of a step that one prompt gets, by role."""

from __future__ import annotations

from deployments.messages import Role
from deployments.policy.prompt_share import prompt_share


def test_prefill_gives_a_prompt_the_whole_step_and_decode_half_of_what_answers_leave() -> None:
    assert prompt_share(Role.PREFILL, 2048, 256) == 2048
    assert prompt_share(Role.DECODE, 2048, 256) == 896
    assert prompt_share(Role.DECODE, 256, 256) == 1, "a prompt always gets on"
