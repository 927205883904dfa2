"""What `baton status` and `baton sessions` print for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def status_text(state: Mapping[str, Any]) -> str:
    """Pools with their replicas, and the numbers of the whole, from `/baton/status`."""
    rows = [
        (
            pool,
            name,
            str(replica.get("phase", "?")) + ("" if replica.get("fresh", True) else " (silent)"),
            _of(replica.get("load"), "sessions"),
            f"{_of(replica.get('load'), 'free_blocks')}/{_of(replica.get('load'), 'total_blocks')}",
            _of(replica.get("load"), "backlog_tokens"),
        )
        for pool, each in state["pools"].items()
        for name, replica in each["replicas"].items()
    ]
    empty = [(pool, "-", "no replica", "-", "-", "-") for pool, each in state["pools"].items() if not each["replicas"]]
    head = ("POOL", "REPLICA", "PHASE", "SESSIONS", "FREE BLOCKS", "BACKLOG TOKENS")
    sessions = state.get("sessions") or {}
    lines = [
        f"ready: {'yes' if state.get('ready') else 'no'}",
        *aligned([head, *rows, *empty]),
        f"sessions: {sessions.get('open', 0)} open, {sessions.get('queued', 0)} queued",
        f"closed: {_counts(sessions, 'closed')}",
        f"placed: {_counts(state, 'modes')}",
        f"refused: {_counts(state, 'rejects')}",
        f"scaling: {_scaling(state.get('scaling'))}",
    ]
    return "\n".join(lines)


def session_rows(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The placed sessions, the oldest first, without any of their text."""
    rows = [
        {
            "session": each["session_id"],
            "state": "prefill" if each["prefilling"] else "decode",
            "mode": each["mode"],
            "prefill": each["prefill"],
            "decode": each["decode"],
            "prompt_tokens": each["prompt_tokens"],
            "cached_tokens": each["cached_tokens"],
            "age_s": each["age_s"],
        }
        for each in state.get("promises", ())
    ]
    return sorted(rows, key=lambda row: -float(row["age_s"]))


def sessions_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of `session_rows`."""
    if not rows:
        return "no session is placed"
    head = tuple(name.upper().replace("_", " ") for name in rows[0])
    return "\n".join(aligned([head, *(tuple("-" if each is None else str(each) for each in r.values()) for r in rows)]))


def timelines_text(found: Mapping[str, Any]) -> str:
    """When each session of a request did what, from `/status/sessions/ID`."""
    lines: list[str] = []
    for each in found["sessions"]:
        how = each["outcome"] or "runs"
        tokens = f"{each['prompt_tokens']} prompt tokens, {each['output_tokens']} given"
        head = ("WHAT", "WHERE", "BEGAN MS", "TOOK MS", "NOTE")
        rows = [
            (step["what"], step["where"], _ms(step["from_s"]), _took(step), step["note"] or "")
            for step in each["spans"]
        ]
        error = f": {each['error']}" if each["error"] else ""
        lines += [f"{each['session_id']}: {how}{error}; {tokens}", *aligned([head, *rows]), ""]
    if found["silent"]:
        lines.append(f"no word from {', '.join(found['silent'])}, so their part is missing")
    return "\n".join(lines).rstrip()


def _took(step: Mapping[str, Any]) -> str:
    return "goes on" if step["to_s"] is None else _ms(step["to_s"] - step["from_s"])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _of(load: Mapping[str, Any] | None, name: str) -> str:
    return str((load or {}).get(name, "-"))


def _counts(state: Mapping[str, Any], name: str) -> str:
    return ", ".join(f"{number} {each}" for each, number in (state.get(name) or {}).items()) or "none"


def _scaling(scaling: object) -> str:
    if not isinstance(scaling, Mapping):
        return "not configured"
    return "configured; --json has the newest plan and its reasons"


def prefixes_text(prefixes: Sequence[Mapping[str, Any]]) -> str:
    """A table of pinned prefixes, from `/baton/prefixes`."""
    if not prefixes:
        return "no prefix is pinned"
    rows = [
        (each["id"], str(each["tokens"]), str(each["blocks"]), _places(each["replicas"], each["missing"]))
        for each in prefixes
    ]
    return "\n".join(aligned([("ID", "TOKENS", "BLOCKS", "REPLICAS"), *rows]))


def _places(there: Sequence[str], missing: Sequence[str]) -> str:
    return f"{len(there)}" + (f", and {len(missing)} to come" if missing else "")
