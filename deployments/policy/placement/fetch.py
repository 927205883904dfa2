"""What a prompt would load from a replica's KV tiers, or fetch from another replica's cache, and what that takes. Pure.

Of the replicas of one engine, the one that has most of the prompt is the source for all others. So what a fetch saves
is a column like any other, and every way is weighed with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deployments.fleet.columns import Codes, Columns, Flags, Numbers, ReplicaView
from deployments.messages import FetchPlan

if TYPE_CHECKING:
    from deployments.policy.placement.estimates import Outlook

FETCH_S = 0.02
"""What a fetch or a load costs besides its bytes: messages, and the steps of the engine until its request runs."""
LOAD_BYTES_PER_S = 5e9
"""What a replica's tiers are taken to give until it has loaded much."""
LINK_BYTES_PER_S = 1e9
"""What a replica is taken to fetch until it has fetched much, where the configuration does not say it."""
PRIOR_S = 1.0
"""What was taken to be counts as much as so many seconds of loads or fetches."""
LEAST_TIMEOUT_S = 0.1
"""The shortest time that a fetch gets."""
DISPLACED = 4.0
"""What a fetched copy costs, as a multiple of the seconds that it spares: it takes the place of other KV.

Without that cost, prompts that many replicas may fetch are soon on all of them, and a busy fleet computes more. The
number is measured (docs/benchmarks/policies.md).
"""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The replicas in `rows` would have `tokens` of the prompt once they have fetched from the one in `source`.

    `takes_s`: by row, until the KV is there. `spares_s`: by row, the seconds of computing that it saves.
    """

    source: int
    tokens: int
    rows: Codes
    takes_s: Numbers
    spares_s: Numbers


def fetched(outlook: Outlook) -> Iterator[Fetched]:
    """For each engine that several replicas run: what they would fetch, where that takes less time than computing."""
    columns, resident = outlook.columns, resident_tokens(outlook)
    for same in columns.by_engine():
        if (source := _source(outlook, same, resident)) is None:
            continue
        tokens = int(resident[source])
        able = same & columns.ready
        rows = np.flatnonzero(able & (tokens - outlook.cached_tokens >= columns["block_size"]))
        brought = tokens - resident[rows]
        rate = _rate(columns, "fetched_bytes", "fetch_s", outlook.knowledge.link_bytes_per_s or LINK_BYTES_PER_S)[rows]
        takes_s = FETCH_S + brought * columns["kv_bytes_per_token"][rows] / rate
        spares_s = outlook.whole_beside_s[rows] - outlook.beside_from(tokens)[rows]
        pays = takes_s < spares_s
        if pays.any():
            yield Fetched(source, tokens, rows[pays], takes_s[pays], spares_s[pays])


def _source(outlook: Outlook, same: Flags | np.bool_, resident: Numbers) -> int | None:
    """The replica that has most of the prompt and lends it; of several, the one that moves the fewest bytes now.

    None lends what only its tiers have.
    """
    hits = outlook.hit_rows
    able = hits[(same & outlook.columns.ready)[hits]]
    order = np.lexsort((outlook.link_load[able], -resident[able]))
    return int(able[order[0]]) if able.size else None


def resident_tokens(outlook: Outlook) -> Numbers:
    """Prompt tokens in the memory of each replica's engine."""
    if not outlook.knowledge.resident:
        return outlook.cached_tokens
    column = outlook.cached_tokens.copy()
    rows, tokens = outlook.found(outlook.knowledge.resident)
    column[rows] = tokens
    return column


def brought_s(outlook: Outlook) -> Numbers:
    """Seconds until what is not computed is in each replica's memory: loaded from its tiers, or fetched."""
    columns, loaded = outlook.columns, outlook.cached_tokens - resident_tokens(outlook)
    rate = _rate(columns, "loaded_bytes", "load_s", LOAD_BYTES_PER_S)
    seconds: Numbers = np.where(loaded > 0, FETCH_S + loaded * columns["kv_bytes_per_token"] / rate, 0.0)
    for each in outlook.fetches:
        seconds[each.rows] = each.takes_s
    return seconds


def _rate(columns: Columns, amount: str, seconds: str, prior: float) -> Numbers:
    """Bytes per second of each replica, by what it has seen, beside `PRIOR_S` at the rate that was taken before.

    So one slow fetch does not make all later ones too dear to be tried.
    """
    rate: Numbers = (PRIOR_S * prior + columns[amount]) / (PRIOR_S + columns[seconds])
    return rate


def block_s(view: ReplicaView, link_bytes_per_s: float) -> float:
    """Seconds that a replica takes to fetch a block, by what it has fetched so far.

    `link_bytes_per_s`: what it is taken to fetch until then; 0: not known.
    """
    prior = link_bytes_per_s or LINK_BYTES_PER_S
    rate = (PRIOR_S * prior + view.fetched_bytes) / (PRIOR_S + view.fetch_s)
    return view.info.block_size * view.info.kv_bytes_per_token / rate


def displaced_s(outlook: Outlook) -> Numbers:
    """Seconds of later requests, by row, because what it would fetch takes the place of other KV; see `DISPLACED`."""
    seconds = np.zeros(len(outlook.columns.ready))
    for each in outlook.fetches:
        seconds[each.rows] = DISPLACED * each.spares_s
    return seconds


def fetch_plan(outlook: Outlook, row: int) -> FetchPlan | None:
    """What the replica in `row` fetches before it computes the request's prompt; None where computing is cheaper.

    A fetch may last as long as computing would take what it saves.
    """
    for each in outlook.fetches:
        at = np.flatnonzero(each.rows == row)
        if at.size:
            spares_s, takes_s = float(each.spares_s[at[0]]), float(each.takes_s[at[0]])
            timeout_s = max(LEAST_TIMEOUT_S, spares_s / float(outlook.share[row]))
            return FetchPlan(outlook.columns.info(each.source), each.tokens, timeout_s, spares_s - takes_s)
    return None
