"""Asks a running Baton over HTTP."""

from __future__ import annotations

import os
from typing import Any

import httpx

from app.access.gate import ADMIN_KEY

KEY_VARIABLE = "BATON_ADMIN_KEY"
TIMEOUT_S = 15.0


class CliError(Exception):
    """Why a command cannot answer, in one line."""


def fetch_status(url: str, transport: httpx.BaseTransport | None = None) -> dict[str, Any]:
    """What `/baton/status` says. `url`: where Baton answers, its route prefix included. Raises CliError."""
    key = os.environ.get(KEY_VARIABLE)
    headers = {ADMIN_KEY: key} if key else {}
    try:
        with httpx.Client(transport=transport, timeout=TIMEOUT_S, headers=headers, trust_env=False) as client:
            response = client.get(f"{url.rstrip('/')}/baton/status")
            found = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CliError(f"no Baton answers at {url}: {_one_line(error)}") from error
    except ValueError as error:
        raise CliError(f"{url} answered {response.status_code} without JSON: it is not a Baton") from error
    if response.status_code in (401, 403):
        raise CliError(f"{url} wants an administrator's key: set {KEY_VARIABLE}")
    if response.status_code != 200 or not isinstance(found, dict):
        raise CliError(f"{url} answered {response.status_code}: {_reason(found)}")
    if not isinstance(found.get("pools"), dict):
        raise CliError(f"{url} answers without the state of any pool: it is not a Baton")
    return found


def _reason(found: object) -> str:
    error = found.get("error") if isinstance(found, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or "without a reason")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
