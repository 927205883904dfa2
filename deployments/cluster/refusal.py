"""The error that a client gets when the session manager refuses its request."""

from __future__ import annotations

from deployments.errors import EndsEngines, NeverFits, Overloaded, SessionError, Unavailable, UnknownClass
from deployments.messages import Reject
from deployments.policy.admission.poison import POISON


def refusal(reject: Reject) -> SessionError:
    if reject.unavailable:
        return Unavailable(reject.reason)
    if reject.code == POISON:
        return EndsEngines(reject.reason)
    if reject.code == "unknown_class":
        return UnknownClass(reject.reason)
    if reject.retry_after_s is None:
        return NeverFits(reject.reason)
    return Overloaded(reject.reason, reject.retry_after_s, reject.code)


def internal(error: Exception) -> SessionError:
    """The error for an internal failure: the client learns only its kind."""
    return SessionError(f"the session could not be carried out: {type(error).__name__}")
