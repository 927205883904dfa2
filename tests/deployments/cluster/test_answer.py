"""What a client has of its answer: its tokens, its marks, and the error that ends it."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from deployments.cluster.answer import Answer
from deployments.cluster.request_context import RequestContext
from deployments.errors import ReplicaLost, SessionTimeout
from deployments.messages import Mode, Placement, ReplicaInfo, Role


class Sent:
    """In the batch's place: what the client is given."""

    def __init__(self) -> None:
        self.outputs: list[EngineCoreOutput] = []

    def add(self, output: EngineCoreOutput) -> None:
        self.outputs.append(output)


def answer(context: RequestContext | None = None, **sampling: Any) -> tuple[Answer, Sent]:
    params = SamplingParams(**{"max_tokens": 10, **sampling})
    sent: Any = Sent()
    return Answer(EngineCoreRequest("s", [1, 2, 3], None, params, None, 0.0, None, None, None), context, sent), sent


def output(*tokens: int, reason: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput("of the engine", list(tokens), finish_reason=reason, kv_transfer_params={"a": 1})


def placement(mode: Mode) -> Placement:
    replica = ReplicaInfo("d-0", "d", Role.DECODE, "node", "print", 16, 10, 4, 512)
    return Placement("s", 1, mode, "split", replica, replica, 4, 1.0, 1.0)


def test_an_output_is_the_sessions_and_says_nothing_of_the_handoff() -> None:
    made, sent = answer()
    made.give(output(7, 8, reason=FinishReason.LENGTH), finish=True)
    (given,) = sent.outputs
    assert (given.request_id, given.kv_transfer_params, given.finish_reason) == ("s", None, FinishReason.LENGTH)
    assert made.sent == [7, 8]


def test_a_part_that_ends_does_not_end_the_answer() -> None:
    made, sent = answer()
    ended = output(7, reason=FinishReason.STOP)
    ended.stop_reason = 5
    made.give(ended, finish=False)
    assert (sent.outputs[0].finish_reason, sent.outputs[0].stop_reason) == (None, None)


def test_a_remainder_goes_on_after_what_the_client_has() -> None:
    made, _ = answer()
    made.give(output(7, 8), finish=True)
    left = made.remainder(2, "d0", after_progress=True)
    assert (left.number, left.answered, left.moved_from, left.after_progress) == (2, (7, 8), "d0", True)
    assert left.request.request_id != "s", "no output of an older attempt is taken for its own"


@pytest.mark.parametrize(
    ("tokens", "sampling", "moved"),
    [
        ([7], {"seed": 1, "temperature": 1.0}, True),
        ([], {"seed": 1, "temperature": 1.0}, False),
        ([7], {"temperature": 1.0}, False),
    ],
)
def test_only_a_seeded_answer_that_has_begun_is_marked_as_moved(
    tokens: list[int], sampling: dict[str, Any], moved: bool
) -> None:
    context = RequestContext("r")
    made, _ = answer(context, **sampling)
    made.give(output(*tokens), finish=True)
    made.remainder(2, "", after_progress=True)
    assert context.seed_moved is moved


def test_placements_are_noted_by_mode_and_rule() -> None:
    context = RequestContext("r")
    made, _ = answer(context)
    made.placed(placement(Mode.DISAGGREGATED), "")
    made.placed(placement(Mode.DECODE_LOCAL), "lora")
    assert (context.modes, context.rules) == ({Mode.DISAGGREGATED, Mode.DECODE_LOCAL}, {"lora"})


def test_the_first_error_of_a_request_with_several_answers_stands() -> None:
    context = RequestContext("r")
    for error in (first := SessionTimeout("first"), ReplicaLost("second")):
        made, sent = answer(context)
        made.fail(error)
        assert [given.finish_reason for given in sent.outputs] == [FinishReason.ERROR]
    assert context.error is first


def test_an_answer_needs_no_request_context() -> None:
    made, sent = answer()
    made.placed(placement(Mode.DECODE_LOCAL), "lora")
    made.give(output(7), finish=True)
    made.remainder(2, "", after_progress=False)
    made.fail(ReplicaLost("gone"))
    assert len(sent.outputs) == 2


def test_an_http_request_counts_the_tokens_of_its_sessions_and_knows_when_the_first_came() -> None:
    context = RequestContext("r")
    first, _ = answer(context)
    second = Answer(first.request, context, first.batch)
    assert (context.prompt_tokens, context.output_tokens, context.first_token_s) == (3, 0, None)
    first.give(output(), finish=False)
    assert context.first_token_s is None
    first.give(output(7), finish=False)
    came_s = context.first_token_s
    second.give(output(7, 8), finish=False)
    answer(context)
    assert (context.prompt_tokens, context.output_tokens, context.first_token_s) == (6, 3, came_s)
    assert came_s is not None
