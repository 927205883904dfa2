"""A changed configuration is deployed under load: every process is replaced, and no request fails.

The last file by name: afterwards the cluster is another one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.e2e.client import Load, body, client_of, complete, until
from tests.e2e.cluster import Cluster, engines
from tests.e2e.conftest import questions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

UPDATED_WITHIN_S = 600.0
CLIENTS = 2


def change(application: dict[str, Any]) -> None:
    """Smaller steps, and what makes another engine of it without making another model."""
    pools = application["args"]
    for pool in (pools["prefill"], *pools["decode"].values()):
        pool["engine"] |= {"max_num_batched_tokens": 192, "engine_args": {"revision": "next"}}


async def test_an_update_under_load_fails_no_request(baton: Cluster, reference: dict[str, list[int]]) -> None:
    names = [name for name in reference if name.startswith("crowd-")] + ["recovery-long"]
    asked = [body(*questions()[name]) for name in names]
    before = await asyncio.to_thread(baton.running)

    def updated() -> bool:
        running = baton.running()
        return bool(running) and not any(running[name] & before[name] for name in before)

    async with Load(baton, asked, CLIENTS) as load:
        await asyncio.to_thread(baton.deploy, change)
        await until(updated, UPDATED_WITHIN_S, "every replica is a new one")
    assert [said for said in load.said if said.error or said.tokens != reference[names[said.asked]]] == []
    assert len(load.said) > CLIENTS
    async with client_of(baton) as client:
        after = await complete(client, *questions()["recovery-200"])
    assert after.json()["choices"][0]["token_ids"] == reference["recovery-200"]
    assert after.headers["x-baton-mode"] == "disaggregated"
    status = await asyncio.to_thread(baton.settled)
    assert not baton.used_blocks()
    assert set(status["modes"]) == {"disaggregated"}, "there was a whole pair at every moment"
    await until(lambda: len(engines(baton)) == 3, UPDATED_WITHIN_S, "the engines of replicas that are gone have ended")
