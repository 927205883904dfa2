"""What the planner reads, from the allocator's books: for the session manager and for the simulator. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from configs.schema import role_of
from deployments.fleet.columns import Columns
from deployments.fleet.flow import WINDOW_S
from deployments.messages import Role
from deployments.policy.allocator import Allocator
from deployments.policy.predictors import TRUSTED_STEPS
from deployments.policy.scaling.inputs import Now, PoolNow, Waiting
from deployments.step_cost import Coefficients


def observe(
    allocator: Allocator,
    pools: Iterable[str],
    now_s: float,
    targets: Mapping[str, int],
    starting: Mapping[str, Sequence[float]],
) -> Now:
    """The fleet as the planner reads it.

    `pools`: the names of all pools. `targets`: the replicas that each was asked for last. `starting`: of each pool, the
    ages in seconds of the starts in flight; a pool without any may be missing.
    """
    coefficients = allocator.predictors.coefficients(now_s)
    columns = allocator.fleet.live(now_s, coefficients).columns
    models = allocator.predictors.models
    known = {name: coefficients.get(name) for name in pools if name in models and models[name].count >= TRUSTED_STEPS}
    seen = tuple(
        _pool(name, columns, now_s, known.get(name), targets[name], tuple(starting.get(name, ()))) for name in pools
    )
    return Now(now_s, seen, dict(allocator.predictors.demand.arrived), _waiting(allocator, columns))


def _pool(
    name: str,
    columns: Columns,
    now_s: float,
    steps: Coefficients | None,
    target: int,
    starting: tuple[float, ...],
) -> PoolNow:
    of_pool = [number for number, kind in enumerate(columns.kinds) if kind.pool == name]
    rows = np.flatnonzero(columns.ready & np.isin(columns.kind, of_pool))
    role = Role(role_of(name))
    if not rows.size:
        return PoolNow(name, role, target, 0, starting, steps)
    info, kind = columns.info(int(rows[0])), columns.kinds[int(columns.kind[rows[0]])]
    number = {each: columns[each][rows] for each in _READ}
    total = np.array([columns.info(int(row)).total_blocks for row in rows])
    backlog_s = np.maximum(number["busy_until_s"] - now_s, number["behind_s"]).clip(0.0)
    fading = np.exp((number["flow_at_s"] - now_s) / WINDOW_S) / WINDOW_S
    return PoolNow(
        name,
        role,
        target,
        int(rows.size),
        starting,
        steps,
        blocks=info.total_blocks,
        block_size=info.block_size,
        max_sessions=info.max_sessions,
        chunk_tokens=kind.chunk_tokens,
        sessions=float(number["sessions"].sum()),
        answers=float((number["sessions"] - number["prompts"]).clip(0.0).sum()),
        promised=float((total - number["free_blocks"]).clip(0.0).sum()),
        held=float(number["held_tokens"].sum()),
        backlog_s=float(backlog_s.sum()),
        prefill_load=float((number["flow_s"] * fading).sum()),
    )


_READ = ("free_blocks", "sessions", "prompts", "held_tokens", "busy_until_s", "behind_s", "flow_s", "flow_at_s")


def _waiting(allocator: Allocator, columns: Columns) -> Waiting:
    """The requests that wait, by what they wait for: prefill, where a decode replica has room for them now."""
    able = columns.ready & columns.decodes & ~columns.is_of(Role.PREFILL)
    room = float((columns["room_blocks"] * columns["block_size"])[able].max(initial=-1.0))
    free = float((columns["free_blocks"] * columns["block_size"])[able].max(initial=0.0))
    prefill = memory = place = prefill_tokens = decode_tokens = 0
    for request in allocator.room.requests():
        if allocator.decider.classes.resolve(request.priority).yields:
            continue  # it takes what there is, and no replica starts for it
        tokens = request.prompt_tokens + request.max_tokens
        if tokens <= room:
            prefill, prefill_tokens = prefill + 1, prefill_tokens + request.prompt_tokens
            continue
        decode_tokens += tokens
        if tokens <= free:
            place += 1
        else:
            memory += 1
    return Waiting(prefill, memory, place, prefill_tokens, decode_tokens)
