"""OpenAI's headers for the limits of an API key."""

from __future__ import annotations

import pytest

from app.access.rate_limit import NAMES, duration, rate_limit_headers
from deployments.messages import Allowance, Quota

LEFT = Allowance(requests=2, requests_reset_s=60.2, tokens=0, tokens_reset_s=4.0)


def test_both_limits_in_openais_names() -> None:
    headers = rate_limit_headers(Quota("a", requests=3, tokens=1000), LEFT)
    assert dict(headers) == {
        b"x-ratelimit-limit-requests": b"3",
        b"x-ratelimit-remaining-requests": b"2",
        b"x-ratelimit-reset-requests": b"1m1s",
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"4s",
    }
    assert tuple(name.decode() for name, _ in headers) == NAMES


def test_a_limit_that_a_key_does_not_have_has_no_headers() -> None:
    assert [name for name, _ in rate_limit_headers(Quota("a", tokens=1000), LEFT)] == [
        b"x-ratelimit-limit-tokens",
        b"x-ratelimit-remaining-tokens",
        b"x-ratelimit-reset-tokens",
    ]
    assert rate_limit_headers(None, None) == []
    assert rate_limit_headers(Quota("a", 3), None) == [], "nothing is decided yet"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0s"), (0.001, "1s"), (7.0, "7s"), (59.5, "1m0s"), (61.0, "1m1s"), (360.0, "6m0s")]
)
def test_a_time_is_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
