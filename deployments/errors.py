"""Why a session can fail. `app/errors.py` maps each of these to an HTTP status and an OpenAI error body."""

from __future__ import annotations


class SessionError(Exception):
    """Base of all errors that end a session without an answer."""


class NeverFits(SessionError):
    """No replica could ever hold the request: the client must ask for less."""


class UnknownClass(SessionError):
    """The request asks for a priority class that does not exist."""


class TooManyParts(SessionError):
    """The request would become more answers than one may have."""


class GrammarTooLong(SessionError):
    """The grammar or schema of the answer is longer than `ingress.max_grammar_characters`."""


class RequestFault(SessionError):
    """An engine refuses this request, as any other engine would."""


class EndsEngines(RequestFault):
    """Two engines have crashed with this request."""


class EngineFault(SessionError):
    """An engine ended the request with an error, and does not say that the request is to blame."""


class Overloaded(SessionError):
    """There is no capacity now, or none that meets the request's class. `retry_after_s`: when to ask again.

    `code`: the kind of reason, as in `messages.Reject`.
    """

    def __init__(self, reason: str, retry_after_s: float, code: str = "") -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.code = code


class Unavailable(SessionError):
    """No replica of a kind the request needs is up."""

    retry_after_s = 5.0


class StoreAway(Unavailable):
    """The store of responses cannot be reached."""

    retry_after_s = 1.0


class PrefixRefused(SessionError):
    """The prompt cannot be pinned beside those that are."""


class ReplicaLost(SessionError):
    """A replica died or refused in the middle of the session."""


class Moved(ReplicaLost):
    """A replica gave the session up and keeps its KV cache for the next one. No failure caused it."""


class ReplicaCrashed(ReplicaLost):
    """The replica's engine has crashed: it was not killed from outside."""


class ReplicaGone(ReplicaLost):
    """Serve has taken the replica out: it is being stopped, or it has died."""


class HandoffFailed(SessionError):
    """The KV cache did not reach the decode replica."""


class SessionTimeout(SessionError):
    """The session outlived its deadline."""
