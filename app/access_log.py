"""One JSON line for each request, when it is over: the logger `baton.access`, on the ingress's standard output.

Without `start` the logger is off, and a request costs one look at it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from app.errors import Answer
from deployments.cluster.request_context import RequestContext

logger = logging.getLogger("baton.access")
_LONGEST = 500
"""Characters of a path or a reason."""


def start() -> None:
    """Let the lines of this process go to its standard output, and nowhere else."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class Entry:
    """One request, from its arrival on. Nothing is done for its tokens one by one. `key`: the name of its API key."""

    __slots__ = ("_method", "_path", "_request_id", "_started_s", "key")

    def __init__(self, scope: Mapping[str, Any], request_id: str) -> None:
        self._started_s = time.monotonic()
        self._request_id = request_id
        self._method, self._path = scope["method"], scope["path"]
        self.key: str | None = None

    def write(
        self, status: int, failure: Answer | None = None, context: RequestContext | None = None, left: bool = False
    ) -> None:
        """Write the line. `status`: 0 where the client got none. `failure`: what it was told. `left`: it went away."""
        if not logger.isEnabledFor(logging.INFO):
            return
        now_s = time.monotonic()
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self._request_id,
            "method": self._method,
            "path": self._path[:_LONGEST],
            "status": status or None,
            "outcome": _outcome(status, failure, left),
            "total_s": round(now_s - self._started_s, 4),
        }
        if self.key is not None:
            line["key"] = self.key
        if context is not None:
            first_s = context.first_token_s
            line |= {
                "mode": ",".join(sorted(context.modes)) or None,
                "rule": ",".join(sorted(context.rules)) or None,
                "prompt_tokens": context.prompt_tokens,
                "output_tokens": context.output_tokens,
                "ttft_s": None if first_s is None else round(first_s - self._started_s, 4),
            }
        if failure is not None:
            error = failure.body["error"]
            line |= {"code": error["code"], "reason": error["message"][:_LONGEST]}
        logger.info("%s", json.dumps(line))


def _outcome(status: int, failure: Answer | None, left: bool) -> str:
    """`ok`, `error`, `broken_off` (an error after the response had begun) or `client_left`."""
    if left:
        return "client_left"
    if failure is None:
        return "ok"
    return "error" if status >= 400 else "broken_off"
