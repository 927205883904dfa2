"""The order of a window's lines: those that begin alike together, and a mix of prompts and answers at each moment."""

from __future__ import annotations

import itertools
import json
import random

from hypothesis import given
from hypothesis import strategies as st

from app.batches.line_order import SHARED_BYTES, Group, groups_of, in_mixed_order, mixed
from app.batches.line_reader import Line
from app.batches.line_request import PREFIX_BYTES, LineRequest, request_of
from tests.app.batches.toys import CHAT, MODEL, line


def asked(number: int, prompt: bytes, answer_tokens: int = 100) -> LineRequest:
    return LineRequest(number, str(number), b"{}", prompt[:PREFIX_BYTES], len(prompt), answer_tokens)


_HEADS = st.sampled_from([b"a" * 600, b"a" * 600 + b"b" * 600, b"c" * 700, b"d" * 20, b""])
_LINES = st.lists(st.tuples(_HEADS, st.binary(max_size=100), st.integers(1, 5000)), max_size=12).map(
    lambda each: [asked(number, head + tail, answer) for number, (head, tail, answer) in enumerate(each, 1)]
)


@given(_LINES, st.randoms(use_true_random=False))
def test_it_is_an_order_of_the_lines_which_does_not_depend_on_theirs(
    lines: list[LineRequest], draw: random.Random
) -> None:
    ordered = in_mixed_order(lines)
    assert sorted(ordered, key=lambda each: each.line) == lines
    draw.shuffle(lines)
    assert in_mixed_order(lines) == ordered


@given(_LINES)
def test_groups_stay_together_and_lines_of_two_groups_differ_early(lines: list[LineRequest]) -> None:
    groups = groups_of(lines)
    of_line = {each.line: number for number, group in enumerate(groups) for each in group.lines}
    ordered = in_mixed_order(lines)
    changes = sum(of_line[one.line] != of_line[two.line] for one, two in itertools.pairwise(ordered))
    assert changes == max(len(groups) - 1, 0)
    for one, two in itertools.combinations(groups, 2):
        shared = max(len(common(a.prefix, b.prefix)) for a in one.lines for b in two.lines)
        every = min(len(common(a.prefix, b.prefix)) for a in lines for b in lines)
        assert shared < every + SHARED_BYTES


def common(one: bytes, other: bytes) -> bytes:
    return bytes(a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


_GROUPS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 10_000)), min_size=1, max_size=60).map(
    lambda each: [Group((asked(number, b""),), float(p), float(a)) for number, (p, a) in enumerate(each)]
)


@given(_GROUPS)
def test_at_each_moment_what_was_taken_is_about_as_heavy_in_prompt_as_all(groups: list[Group]) -> None:
    order = mixed(groups)
    assert sorted(order, key=lambda each: each.lines[0].line) == groups
    mean = sum(each.prompt_tokens for each in groups) / sum(each.answer_tokens for each in groups)
    surplus = [each.prompt_tokens - mean * each.answer_tokens for each in order]
    most = max(map(abs, surplus))
    assert all(abs(each) <= most + 1e-6 * (1 + most) for each in itertools.accumulate(surplus))


def test_long_prompts_and_long_answers_take_turns() -> None:
    long = [asked(number, random.Random(number).randbytes(4000), 10) for number in range(1, 11)]
    wordy = [asked(number, random.Random(number).randbytes(40), 1000) for number in range(11, 21)]
    order = [each.line <= 10 for each in in_mixed_order([*long, *wordy])]
    assert order == [True, False] * 10


def test_prompts_that_begin_alike_are_neighbours() -> None:
    heads = ["You are a poet. " * 50, "You are a judge. " * 50, "Be short. " * 80]
    lines = []
    for number in range(30):
        messages = [{"role": "system", "content": heads[number % 3]}, {"role": "user", "content": str(number * 7)}]
        lines.append(line(number, body={"model": MODEL, "messages": messages}))
    requests = [request_of(Line(at, json.dumps(each).encode()), CHAT) for at, each in enumerate(lines)]
    heads_in_order = [each.line % 3 for each in in_mixed_order(requests)]
    assert sum(one != two for one, two in itertools.pairwise(heads_in_order)) == 2


def test_what_all_lines_share_makes_no_groups() -> None:
    head = b"x" * 5000
    lines = [asked(number, head + random.Random(number).randbytes(40), 10 * number) for number in range(1, 9)]
    assert len(groups_of(lines)) == 8
    (whole,) = groups_of([asked(number, head) for number in (5, 3, 9)])
    assert [each.line for each in whole.lines] == [3, 5, 9]
    assert whole.prompt_tokens == 5000 / 4, "a prefix is computed once"
    assert in_mixed_order([]) == []
