"""A hot prefix: its tokens come from the ingress of a prompt that has it, and a further replica fetches it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from deployments.messages import Pin, ReplicaInfo
from deployments.policy import spread
from load_tests.harness.control_plane import LARGE, PREFILL, SMALL, InProcess, config, until
from load_tests.harness.control_plane.gates import GatedEngine
from tests.deployments.cluster.asking import Launch, prompt
from transfer.memory.blocks import chained_hashes

BLOCKS = 4


async def test_what_prompts_share_is_fetched_by_a_replica_that_no_request_goes_to(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mock engines cache nothing, so the session manager is told that one has it."""
    for name, value in (("SHARE", 1e-9), ("LEAST_TOKENS", BLOCKS), ("WARM_LOAD", 0.0), ("PLAN_S", 0.001)):
        monkeypatch.setattr(spread, name, value)
    fetched: list[tuple[GatedEngine, Pin, ReplicaInfo]] = []

    async def pin(
        self: GatedEngine,
        request_id: str,
        keep: Collection[str],
        pin: Pin | None = None,
        source: ReplicaInfo | None = None,
    ) -> None:
        assert pin is not None
        assert source is not None
        fetched.append((self, pin, source))

    monkeypatch.setattr(GatedEngine, "pin", pin)
    cluster: InProcess = await launch(config(fetch=True, spread=True), (PREFILL, SMALL, LARGE))
    shared = prompt(4 * BLOCKS)
    hashes = chained_hashes(shared, 4)

    def find(asked: Sequence[int]) -> tuple[dict[str, int], dict[str, int]]:
        return ({SMALL: BLOCKS}, {}) if tuple(asked[:BLOCKS]) == hashes else ({}, {})

    monkeypatch.setattr(cluster.manager._allocator.predictors.index, "find", find)

    async def ask_until_it_comes() -> Any:
        await cluster.answer([*shared, *prompt(9)], max_tokens=3)
        await cluster.answer(prompt(20), max_tokens=3)
        return fetched

    await until(ask_until_it_comes)
    (engine, prefix, source) = fetched[0]
    assert (engine is cluster.engines[PREFILL], source.replica_id) == (True, SMALL)
    assert prefix == Pin("", tuple(shared), BLOCKS)
    monkeypatch.undo()
    await cluster.settle()
