"""Asks a running Baton over HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from app.access.gate import ADMIN_KEY

KEY_VARIABLE = "BATON_ADMIN_KEY"
TIMEOUT_S = 15.0
CLASS = "x-baton-class"


class CliError(Exception):
    """Why a command cannot answer, in one line."""


def fetch_status(url: str, transport: httpx.BaseTransport | None = None) -> dict[str, Any]:
    """What `/baton/status` says. `url`: where Baton answers, its route prefix included. Raises CliError."""
    found = _ask(url, "GET", "/baton/status", transport)
    if not isinstance(found.get("pools"), dict):
        raise CliError(f"{url} answers without the state of any pool: it is not a Baton")
    return found


def fetch_timelines(url: str, name: str, transport: httpx.BaseTransport | None = None) -> dict[str, Any]:
    """What `/status/sessions/NAME` says. `name`: a request's id, or a session's. Raises CliError."""
    found = _ask(url, "GET", f"/status/sessions/{quote(name, safe='')}", transport)
    if not isinstance(found.get("sessions"), list):
        raise CliError(f"{url} answers without any session: it is not a Baton")
    return found


def fetch_explanation(
    url: str, body: Mapping[str, Any], priority: str = "", transport: httpx.BaseTransport | None = None
) -> dict[str, Any]:
    """What `/baton/explain` says of a request with this body and class. Raises CliError."""
    return _ask(url, "POST", "/baton/explain", transport, body, {CLASS: priority} if priority else {})


def drain(url: str, replica: str, resume: bool, transport: httpx.BaseTransport | None = None) -> dict[str, Any]:
    """Take a replica out of service, or put it back. Raises CliError."""
    path = f"/baton/replicas/{quote(replica, safe='')}/{'resume' if resume else 'drain'}"
    return _ask(url, "POST", path, transport)


def pin_prefix(
    url: str, body: Mapping[str, Any], key: str = "", transport: httpx.BaseTransport | None = None
) -> dict[str, Any]:
    """Pin the prompt of a request with this body. `key`: the name of the API key that it is for. Raises CliError."""
    return _ask(url, "POST", f"/baton/prefixes{f'?key={quote(key)}' if key else ''}", transport, body)


def fetch_prefixes(url: str, transport: httpx.BaseTransport | None = None) -> dict[str, Any]:
    """The prefixes that are pinned. Raises CliError."""
    return _ask(url, "GET", "/baton/prefixes", transport)


def unpin_prefix(url: str, prefix: str, transport: httpx.BaseTransport | None = None) -> dict[str, Any]:
    """Unpin a prefix, by its id. Raises CliError."""
    return _ask(url, "DELETE", f"/baton/prefixes/{quote(prefix, safe='')}", transport)


def _ask(
    url: str,
    method: str,
    path: str,
    transport: httpx.BaseTransport | None,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    key = os.environ.get(KEY_VARIABLE)
    sent = {**(headers or {}), **({ADMIN_KEY: key} if key else {})}
    try:
        with httpx.Client(transport=transport, timeout=TIMEOUT_S, headers=sent, trust_env=False) as client:
            response = client.request(method, f"{url.rstrip('/')}{path}", json=body)
            found = response.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CliError(f"no Baton answers at {url}: {_one_line(error)}") from error
    except ValueError as error:
        raise CliError(f"{url} answered {response.status_code} without JSON: it is not a Baton") from error
    if response.status_code in (401, 403):
        raise CliError(f"{url} wants an administrator's key: set {KEY_VARIABLE} ({reason_of(found)})")
    if response.status_code != 200 or not isinstance(found, dict):
        raise CliError(f"{url} answered {response.status_code}: {reason_of(found)}")
    return found


def reason_of(found: object) -> str:
    """Why a server has refused, from the JSON of its answer."""
    error = found.get("error") if isinstance(found, dict) else None
    return str(error.get("message", error) if isinstance(error, dict) else error or "without a reason")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
