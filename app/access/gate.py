"""What a request's API key opens: routes, priority classes and limits. Pure. The request's scope then has the key."""

from __future__ import annotations

import base64
import contextlib
import hmac
from collections.abc import Callable, Mapping
from typing import Any

from app.access.keys import Keys
from app.errors import AdminOnly, ClassNotAllowed, KeyRefused
from configs.schema import KeyConfig
from deployments.messages import Quota

OPEN = frozenset({"/health", "/ready", "/ping"})
"""Routes that need no key: probes ask for them. Every other route needs one."""
ADMIN = ("/baton", "/metrics", "/status")
"""Routes for administrators, with all that is under them."""
ADMIN_KEY = "x-baton-admin-key"
KEY = "baton.key"
"""Where a scope has the entry of the request's key. A client cannot set it."""
BASIC = 'Basic realm="Baton", charset="UTF-8"'
"""How a browser is asked for a key, as a password of any name, so that people can look at routes for administrators.

A browser shows it again by itself, also from pages of other origins: so it opens only what is read.
"""
_KEYS = (b"authorization", b"x-api-key")
_ASKED = "this server asks for an API key: `Authorization: Bearer KEY` or `X-Api-Key: KEY`"

Scope = Mapping[str, Any]


class Gate:
    """`keys`: gives those that count now. `admin_key`: `ingress.admin_key`."""

    def __init__(self, keys: Callable[[], Keys], admin_key: str | None = None) -> None:
        self._keys, self._admin_key = keys, admin_key

    def admit(self, scope: Scope) -> KeyConfig | None:
        """The key of a request; None where it needs none. Raises KeyRefused and AdminOnly."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN:
            return None
        for_admins = is_for_admins(path)
        if for_admins and self._admin_key is not None and shows(scope, self._admin_key):
            return None
        is_read = for_admins and scope["method"] in ("GET", "HEAD")
        given = _bare(presented(scope), with_password=is_read) or (
            _header(scope, ADMIN_KEY.encode()) if for_admins else b""
        )
        key = self._keys().find(given) if given else None
        if key is None:
            raise KeyRefused(_ASKED, BASIC if is_read else "Bearer")
        if for_admins and not key.admin:
            raise AdminOnly(f"{path} is for administrators, and the key {key.name} is not one of theirs")
        return key


def is_for_admins(path: str) -> bool:
    """Whether a path is that of a route for administrators, or below one."""
    return any(path == route or path.startswith(f"{route}/") for route in ADMIN)


def shows(scope: Scope, admin_key: str) -> bool:
    """Whether a request's header `X-Baton-Admin-Key` holds `ingress.admin_key`."""
    return hmac.compare_digest(_header(scope, ADMIN_KEY.encode()), admin_key.encode())


def check_admin(scope: Scope, admin_key: str | None) -> None:
    """Raises AdminOnly for a request that no administrator has made. `admin_key`: `ingress.admin_key`.

    For what changes something: it needs a key also where no other route does.
    """
    if is_admin(scope) or (admin_key is not None and shows(scope, admin_key)):
        return
    why = (
        "it needs `ingress.admin_key`, or an API key that has `admin`"
        if admin_key is None
        else f"the header {ADMIN_KEY} does not hold the administrator's key"
    )
    raise AdminOnly(f"{scope['path']} is for administrators: {why}")


def presented(scope: Scope) -> bytes:
    """What a request has for an API key, with the scheme where it names one; b"" for nothing."""
    return next((value for name in _KEYS if (value := _header(scope, name))), b"")


def _bare(value: bytes, with_password: bool) -> bytes:
    """The key itself. `with_password`: a password may be one; the name before it says nothing."""
    scheme, _, rest = value.partition(b" ")
    if with_password and scheme.lower() == b"basic":
        with contextlib.suppress(ValueError):
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
    return rest.strip() if scheme.lower() == b"bearer" else value


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key.lower() == name), b"")


def key_of(scope: Scope) -> KeyConfig | None:
    """The key that a request has shown; None where it needed none."""
    key: KeyConfig | None = scope.get(KEY)
    return key


def is_admin(scope: Scope) -> bool:
    """Whether a request has shown an administrator's API key."""
    key = key_of(scope)
    return key is not None and key.admin


def class_for(key: KeyConfig | None, asked: str) -> str:
    """The priority class of a request that asks for one, or "". Raises ClassNotAllowed."""
    if key is None or not key.classes:
        return asked
    if asked and asked not in key.classes:
        raise ClassNotAllowed(f"the key {key.name} may use the classes {', '.join(key.classes)}, and not the asked one")
    return asked or key.classes[0]


def quota_of(key: KeyConfig | None, answers: int) -> Quota | None:
    """What the session manager counts a request as; None where its key has no limits."""
    if key is None or not (key.requests_per_minute or key.tokens_per_minute):
        return None
    return Quota(key.name, key.requests_per_minute or 0, key.tokens_per_minute or 0, answers)
