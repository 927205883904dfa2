"""How a process of Baton writes its logs: as Python does, or each line as a JSON object on its standard error.

`warning` is the level of all lines. With `info` there is also a line of each session, from every process of it.

A line about a session has its `session_id`, which contains the request's id; one about an HTTP request has its
`request_id`. Both come with the `extra` of the call that logs. The keys are those of vLLM's and Serve's JSON lines.
"""

from __future__ import annotations

import logging
from typing import Literal

OF_SESSIONS = ("baton.core", "baton.replica")
"""The loggers whose lines of the level `info` are about sessions."""
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(process)d %(message)s"


def start(
    log_format: Literal["text", "json"], deployment: str, replica_id: str, level: Literal["warning", "info"] = "warning"
) -> None:
    """Let the logs of this process be written so from now on, as JSON in the place of every handler before.

    `deployment`, `replica_id`: of this process.
    """
    if level == "info":
        for name in OF_SESSIONS:
            logging.getLogger(name).setLevel(logging.INFO)
    if log_format != "json":
        if level == "info" and not logging.getLogger().handlers:  # else Python writes warnings alone
            logging.basicConfig(level=logging.WARNING, format="%(message)s")
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
