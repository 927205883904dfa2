"""What an engine is told of the KV that it fetches before it computes a prompt, in `kv_transfer_params`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FETCH = "baton_fetch"


def fetch_request(session_id: str, epoch: int, peers: Sequence[str], tokens: int, timeout_s: float) -> dict[str, Any]:
    """The first `tokens` of the prompt, from the cache of another replica, within `timeout_s` seconds.

    `session_id`, `epoch`: the fetch's own. `peers`: the control addresses of the source's workers, by rank.
    """
    told = {"session": session_id, "epoch": epoch, "peers": list(peers), "tokens": tokens, "timeout_s": timeout_s}
    return {FETCH: told}
