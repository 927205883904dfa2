"""Whether the replica that computes a prompt first fetches a part of it from another replica's cache. Pure."""

from __future__ import annotations

import numpy as np

from deployments.messages import FetchPlan
from deployments.policy.placement.field import Field

FETCH_S = 0.02
"""What a fetch costs besides its bytes: messages, and the steps of the engine that go by until its request runs."""
LINK_BYTES_PER_S = 1e9
"""What two replicas are taken to exchange until a write between two has been measured."""
LEAST_TIMEOUT_S = 0.1
"""The shortest time that a fetch gets."""


def fetch_plan(here: Field, row: int) -> FetchPlan | None:
    """What the replica in `row` fetches before it computes the request's prompt; None where computing is cheaper.

    A fetch may last as long as computing would take what it saves. The source is the replica that has most of the
    prompt; of several, the one that moves the fewest bytes now. Engines of several workers do not lend.
    """
    outlook, columns, target = here.outlook, here.columns, here.columns.info(row)
    if not here.settings.fetches or not target.decodes or not outlook.hit_rows.size:
        return None
    have, prompt = outlook.cached_on(row), here.request.prompt_tokens
    lends = columns.ready[outlook.hit_rows] & (outlook.hit_rows != row)
    lends &= columns.fingerprint[outlook.hit_rows] == columns.fingerprint[row]
    rows, tokens = outlook.hit_rows[lends], outlook.hit_tokens[lends]
    if not rows.size or tokens.max() < have + target.block_size:
        return None
    most = rows[tokens == tokens.max()]
    source = columns.info(int(most[np.argmin(outlook.link_load[most])]))
    brought = min(int(tokens.max()), prompt - 1) - have
    computed_s = float(outlook.prefill_s[row]) * brought / max(1, prompt - have)
    link = here.knowledge.link_bytes_per_s or LINK_BYTES_PER_S
    cost_s = FETCH_S + brought * target.kv_bytes_per_token / link
    if len(source.endpoints) != 1 or cost_s >= computed_s:
        return None
    return FetchPlan(source, have + brought, max(LEAST_TIMEOUT_S, computed_s), computed_s - cost_s)
