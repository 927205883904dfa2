"""OpenAI's headers for the limits of a request's API key. Pure."""

from __future__ import annotations

import math

from deployments.messages import Allowance, Quota

NAMES = tuple(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset"))
"""Their names, those of one limit together."""


def rate_limit_headers(quota: Quota | None, allowance: Allowance | None) -> list[tuple[bytes, bytes]]:
    """The headers of a response; none of a limit that the key does not have. `allowance`: None: nothing is decided."""
    if quota is None or allowance is None:
        return []
    return [
        *_of("requests", quota.requests, allowance.requests, allowance.requests_reset_s),
        *_of("tokens", quota.tokens, allowance.tokens, allowance.tokens_reset_s),
    ]


def _of(what: str, limit: int, left: int, reset_s: float) -> list[tuple[bytes, bytes]]:
    values = (("limit", str(limit)), ("remaining", str(left)), ("reset", duration(reset_s))) if limit else ()
    return [(f"x-ratelimit-{about}-{what}".encode(), value.encode()) for about, value in values]


def duration(seconds: float) -> str:
    """A time as OpenAI writes it, such as `7s` and `6m0s`, in whole seconds that are not less."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
