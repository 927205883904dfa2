"""A refusal's way from the session manager to the client: its kind and its numbers arrive."""

from __future__ import annotations

import pytest

from app.errors import answer
from deployments.cluster.refusal import refusal
from deployments.messages import Reject


@pytest.mark.parametrize(
    ("reject", "status", "code", "retry_after"),
    [
        (Reject("predicted TTFT 4.1 s", 2.1, code="predicted_ttft"), 429, "predicted_ttft", "3"),
        (Reject("the queue is full", 1.0, code="displaced"), 429, "displaced", "1"),
        (Reject("busy", 1.0), 429, "overloaded", "1"),
        (Reject("no priority class 'vip'", code="unknown_class"), 400, "unknown_class", None),
        (Reject("too long"), 400, "context_length_exceeded", None),
        (Reject("no replica is up", 2.0, unavailable=True, code="queue_timeout"), 503, "no_replica_available", "5"),
    ],
)
def test_a_refusal_reaches_the_client(reject: Reject, status: int, code: str, retry_after: str | None) -> None:
    response = answer(refusal(reject))
    assert (response.status, response.body["error"]["code"]) == (status, code)
    assert response.body["error"]["message"] == reject.reason
    assert response.headers.get("retry-after") == retry_after
