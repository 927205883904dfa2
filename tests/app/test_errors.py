"""Why a request fails, as an HTTP response."""

from __future__ import annotations

import pytest

from app.errors import TABLE, answer, anthropic_type_of, type_of
from deployments import errors


def test_every_session_error_is_in_the_table() -> None:
    classes = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)}
    assert classes <= TABLE.keys()


@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (errors.NeverFits("x"), 400, "context_length_exceeded", None),
        (errors.UnknownClass("x"), 400, "unknown_class", None),
        (errors.Overloaded("x", 2.1), 429, "overloaded", "3"),
        (errors.Overloaded("x", 0.2, "predicted_ttft"), 429, "predicted_ttft", "1"),
        (errors.Unavailable("x"), 503, "no_replica_available", "5"),
        (errors.ReplicaLost("x"), 503, "replica_lost", "1"),
        (errors.HandoffFailed("x"), 503, "handoff_failed", "1"),
        (errors.SessionTimeout("x"), 504, "session_timeout", None),
        (errors.SessionError(), 500, "session_failed", None),
        (KeyError("secret"), 500, "internal_error", None),
    ],
)
def test_the_table(error: Exception, status: int, code: str, retry_after: str | None) -> None:
    response = answer(error)
    assert (response.status, response.body["error"]["code"]) == (status, code)
    assert response.headers.get("retry-after") == retry_after
    assert "secret" not in str(response.body)


def test_every_row_has_the_type_of_its_status() -> None:
    assert {row.status: row.type for row in TABLE.values()} == {
        row.status: type_of(row.status) for row in TABLE.values()
    }


@pytest.mark.parametrize(
    ("status", "kind", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "not_found_error", "not_found_error"),
        (405, "invalid_request_error", "invalid_request_error"),
        (408, "invalid_request_error", "invalid_request_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (499, "invalid_request_error", "invalid_request_error"),
        (500, "server_error", "api_error"),
        (501, "server_error", "api_error"),
        (503, "service_unavailable_error", "overloaded_error"),
        (504, "timeout_error", "timeout_error"),
    ],
)
def test_the_status_gives_the_type(status: int, kind: str, anthropic: str) -> None:
    assert (type_of(status), anthropic_type_of(status)) == (kind, anthropic)


class Late(errors.SessionTimeout):
    """An error that is not in the table itself."""


def test_an_error_has_the_row_of_its_base_class_and_a_message_in_any_case() -> None:
    assert answer(Late("too late")) == answer(errors.SessionTimeout("too late"))
    assert answer(errors.SessionTimeout()).body["error"]["message"] == "session timeout"
