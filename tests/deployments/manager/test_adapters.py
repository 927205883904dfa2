"""One list of adapters for all ingresses."""

from __future__ import annotations

import asyncio

from deployments.manager.adapters import LoadedAdapters
from deployments.manager.calls import ShareAdapters
from deployments.messages import Adapter, AdapterList

A, B = Adapter("a", "/a", 1), Adapter("b", "/b", 2)
NONE, LONG_S = AdapterList(), 60.0


async def test_changes_of_all_ingresses_are_in_one_list() -> None:
    shared = LoadedAdapters()
    await shared.share(ShareAdapters(NONE, load=(A,)))
    both = await shared.share(ShareAdapters(NONE, load=(B,)))
    assert both == AdapterList(2, (A, B))
    assert await shared.share(ShareAdapters(both, unload=("a",))) == AdapterList(3, (B,))


async def test_an_ingress_that_waits_gets_a_change_at_once() -> None:
    shared = LoadedAdapters()
    waiting = asyncio.create_task(shared.share(ShareAdapters(NONE, wait_s=LONG_S)))
    await asyncio.sleep(0)
    changed = await shared.share(ShareAdapters(NONE, load=(A,)))
    assert await asyncio.wait_for(waiting, LONG_S / 2) == changed
    assert await asyncio.wait_for(shared.share(ShareAdapters(NONE, wait_s=LONG_S)), LONG_S / 2) == changed


async def test_a_wait_ends_without_a_change() -> None:
    assert await LoadedAdapters().share(ShareAdapters(NONE, wait_s=0.01)) == NONE


async def test_a_manager_that_has_restarted_takes_the_newest_list_that_an_ingress_knows() -> None:
    old, new, restarted = AdapterList(3, (A,)), AdapterList(4, (A, B)), LoadedAdapters()
    assert await restarted.share(ShareAdapters(old)) == old
    assert await restarted.share(ShareAdapters(new)) == new
    assert await restarted.share(ShareAdapters(old)) == new
