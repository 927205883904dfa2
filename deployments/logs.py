"""How a process of Baton writes its logs: as Python does, or each line as a JSON object on its standard error.

A line about a session has its `session_id`, which contains the request's id; one about an HTTP request has its
`request_id`. Both come with the `extra` of the call that logs. The keys are those of vLLM's and Serve's JSON lines.
"""

from __future__ import annotations

import logging
from typing import Literal

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(process)d %(message)s"


def start(log_format: Literal["text", "json"], deployment: str, replica_id: str) -> None:
    """Let the logs of this process be written so from now on, in the place of every handler before.

    `deployment`, `replica_id`: of this process.
    """
    if log_format != "json":
        return
    from pythonjsonlogger.json import JsonFormatter

    handler = logging.StreamHandler()
    where = {"deployment": deployment, "replica": replica_id}
    handler.setFormatter(JsonFormatter(_FORMAT, static_fields=where))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def of_session(session_id: str) -> dict[str, str]:
    """The `extra` of a line about a session."""
    return {"session_id": session_id}


def of_request(request_id: str) -> dict[str, str]:
    """The `extra` of a line about an HTTP request."""
    return {"request_id": request_id}
