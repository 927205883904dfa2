"""One table: why a request fails -> HTTP status, error type and code. One list: HTTP status -> error type."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from deployments.errors import (
    EndsEngines,
    EngineFault,
    GrammarTooLong,
    HandoffFailed,
    Moved,
    NeverFits,
    Overloaded,
    PrefixRefused,
    ReplicaCrashed,
    ReplicaGone,
    ReplicaLost,
    RequestFault,
    SessionError,
    SessionTimeout,
    StoreAway,
    TooManyParts,
    Unavailable,
    UnknownClass,
)


class RequestError(Exception):
    """Base of everything that is wrong with an HTTP request before it becomes a session."""


class BodyTooLarge(RequestError):
    """The body is over `ingress.max_body_bytes`."""


class BodyTimeout(RequestError):
    """The body did not arrive in time."""


class HeaderTooLong(RequestError):
    """A header that Baton reads is longer than its longest valid value."""


class TooManyForClient(RequestError):
    """The client has as many answers open as one client may have."""


class KeyRefused(RequestError):
    """The request has no API key, or one that is not known. `challenge`: how it may show one."""

    def __init__(self, reason: str, challenge: str = "Bearer") -> None:
        super().__init__(reason)
        self.challenge = challenge


class AdminOnly(RequestError):
    """The route is for administrators, and the request's key is not one of theirs."""


class ClassNotAllowed(RequestError):
    """The request asks for a priority class that its key may not use."""


class MethodNotAllowed(RequestError):
    """One of Baton's own routes was called with another method than GET."""


class NotText(RequestError):
    """The body holds half of a surrogate pair, which no text has."""


class NotAnObject(RequestError):
    """A field of the body must be an object, and is not."""


class TooDeep(RequestError):
    """Something in the body is nested too deeply."""


class TooManyValues(RequestError):
    """The body has more strings, objects and lists than `ingress.max_values` allows."""


class StoredResponsesOff(RequestError):
    """A request needs stored responses, and `ingress.stored_responses` is not set."""


class ResponseNotFound(RequestError):
    """This client has stored no response of that id, or it is there no more."""


class BadResponseRequest(RequestError):
    """What a request wants of a stored response cannot be."""


class BadExplainRequest(RequestError):
    """What is to be explained is no request of a route that can be explained."""


class BadPrefixRequest(RequestError):
    """What is to be pinned is not one prompt."""


class SessionNotFound(RequestError):
    """No ingress has a timeline of that request or session, or has it no more."""


class BatchesOff(RequestError):
    """A request is about files or batches, and `ingress.batches` is not set."""


class BadBatchRequest(RequestError):
    """What a request wants of files or batches cannot be. `param`: what of it is wrong, by its name."""

    def __init__(self, reason: str, param: str | None = None) -> None:
        super().__init__(reason)
        self.param = param


class BatchFileNotFound(RequestError):
    """This client has no file of that id, or has it no more."""


class BatchNotFound(RequestError):
    """This client has no batch of that id."""


class BatchFileInUse(RequestError):
    """A batch that is not over reads the file."""


class BatchFileTooLarge(RequestError):
    """The file is over `ingress.batches.max_file_bytes`."""


class BatchOver(RequestError):
    """The batch is over and cannot be cancelled."""


class BatchQuotaSpent(RequestError):
    """The client has as many files, bytes or batches as one may have."""


@dataclass(frozen=True)
class Row:
    """One row of the table. `code` and `retry_after_s` (seconds) are used where the exception has none of its own.

    `retried`: False where clients that retry such a status are told not to.
    """

    status: int
    type: str
    code: str
    retry_after_s: float | None = None
    retried: bool = True


# The row of the exception's most specific class applies, along its MRO. OpenAI's client retries 408, 429 and 5xx.
TABLE: dict[type[Exception], Row] = {
    NeverFits: Row(400, "invalid_request_error", "context_length_exceeded"),
    UnknownClass: Row(400, "invalid_request_error", "unknown_class"),
    TooManyParts: Row(400, "invalid_request_error", "too_many_parts"),
    GrammarTooLong: Row(400, "invalid_request_error", "grammar_too_long"),
    RequestFault: Row(400, "invalid_request_error", "request_refused"),
    EndsEngines: Row(400, "invalid_request_error", "ends_engines"),
    EngineFault: Row(500, "server_error", "engine_error", retried=False),
    Overloaded: Row(429, "rate_limit_error", "overloaded", retry_after_s=1.0),
    Unavailable: Row(503, "service_unavailable_error", "no_replica_available", retry_after_s=5.0),
    StoreAway: Row(503, "service_unavailable_error", "store_unavailable", retry_after_s=1.0),
    ReplicaLost: Row(503, "service_unavailable_error", "replica_lost", retry_after_s=1.0),
    ReplicaCrashed: Row(503, "service_unavailable_error", "replica_lost", retry_after_s=1.0),
    ReplicaGone: Row(503, "service_unavailable_error", "replica_lost", retry_after_s=1.0),
    Moved: Row(503, "service_unavailable_error", "replica_lost", retry_after_s=1.0),
    HandoffFailed: Row(503, "service_unavailable_error", "handoff_failed", retry_after_s=1.0),
    PrefixRefused: Row(409, "invalid_request_error", "prefix_refused"),
    SessionTimeout: Row(504, "timeout_error", "session_timeout"),
    SessionError: Row(500, "server_error", "session_failed"),
    BodyTooLarge: Row(413, "invalid_request_error", "body_too_large"),
    BodyTimeout: Row(408, "invalid_request_error", "body_timeout"),
    HeaderTooLong: Row(400, "invalid_request_error", "header_too_long"),
    TooManyForClient: Row(429, "rate_limit_error", "too_many_for_client", retry_after_s=1.0),
    KeyRefused: Row(401, "authentication_error", "invalid_api_key"),
    AdminOnly: Row(403, "permission_error", "admin_only"),
    ClassNotAllowed: Row(403, "permission_error", "class_not_allowed"),
    MethodNotAllowed: Row(405, "invalid_request_error", "method_not_allowed"),
    NotText: Row(400, "invalid_request_error", "not_text"),
    NotAnObject: Row(400, "invalid_request_error", "not_an_object"),
    TooDeep: Row(400, "invalid_request_error", "nested_too_deeply"),
    TooManyValues: Row(400, "invalid_request_error", "too_many_values"),
    StoredResponsesOff: Row(400, "invalid_request_error", "stored_responses_off"),
    ResponseNotFound: Row(404, "not_found_error", "response_not_found"),
    SessionNotFound: Row(404, "not_found_error", "session_not_found"),
    BadResponseRequest: Row(400, "invalid_request_error", "bad_response_request"),
    BatchesOff: Row(400, "invalid_request_error", "batches_off"),
    BadBatchRequest: Row(400, "invalid_request_error", "bad_batch_request"),
    BatchFileNotFound: Row(404, "not_found_error", "file_not_found"),
    BatchNotFound: Row(404, "not_found_error", "batch_not_found"),
    BatchFileInUse: Row(409, "invalid_request_error", "file_in_use", retried=False),
    BatchFileTooLarge: Row(413, "invalid_request_error", "file_too_large"),
    BatchOver: Row(409, "invalid_request_error", "batch_over", retried=False),
    BatchQuotaSpent: Row(429, "rate_limit_error", "batch_quota", retried=False),
    BadExplainRequest: Row(400, "invalid_request_error", "bad_explain_request"),
    BadPrefixRequest: Row(400, "invalid_request_error", "bad_prefix_request"),
}
_UNKNOWN = Row(500, "server_error", "internal_error")

# The type of every error of the API by its status, in OpenAI's shape; statuses that are not here have their hundred's.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# Where Anthropic's API has another name for it.
_ANTHROPIC = {"service_unavailable_error": "overloaded_error", "server_error": "api_error"}


def type_of(status: int) -> str:
    """The error type of an HTTP status, in OpenAI's shape."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def anthropic_type_of(status: int) -> str:
    """The error type of an HTTP status, in Anthropic's shape."""
    return "request_too_large" if status == 413 else _ANTHROPIC.get(type_of(status), type_of(status))


@dataclass(frozen=True)
class Answer:
    """An HTTP response with a JSON body."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def error_body(message: str, error_type: str, code: str | int | None, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def answer(error: Exception) -> Answer:
    """The response to a failed request. An exception that is not in the table gives 500 without details."""
    row = next((TABLE[cls] for cls in type(error).__mro__ if cls in TABLE), _UNKNOWN)
    message = "internal error" if row is _UNKNOWN else str(error) or row.code.replace("_", " ")
    code = (isinstance(error, Overloaded) and error.code) or row.code
    headers = {}
    retry_after_s = getattr(error, "retry_after_s", None) or row.retry_after_s
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if isinstance(error, KeyRefused):
        headers["www-authenticate"] = error.challenge
    if not row.retried:
        headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients heed it
    return Answer(row.status, error_body(message, row.type, code, getattr(error, "param", None)), headers)
