"""What the real cluster's run of the chaos benchmark decides without one."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from configs.schema import BatonConfig, VllmEngineConfig
from load_tests.chaos.deck import DAMAGE, KILL_MANAGER, KILLS, deck
from load_tests.chaos.http_crowd import HttpCrowd, _Asked
from load_tests.chaos.real import settings
from load_tests.chaos.tier_files import damage


def test_the_deck_is_seeded_and_has_each_kill_once_in_forty() -> None:
    cards = deck(40, random.Random(1))
    assert cards == deck(40, random.Random(1)) != deck(40, random.Random(2))
    assert len(cards) == 40
    assert [cards.count(kill) for kill in (*KILLS, KILL_MANAGER)] == [1] * 6
    assert deck(1, random.Random(1)) == [KILLS[0]]


def test_replicas_fetch_have_tiers_and_their_files_are_damaged(tmp_path: Path) -> None:
    config = BatonConfig.model_validate(settings(tmp_path)["applications"][0]["args"])
    assert config.placement.fetch
    for pool in config.pools.values():
        assert isinstance(pool.engine, VllmEngineConfig)
        assert pool.engine.disk_kv is not None
        assert pool.engine.disk_kv.path == str(tmp_path)
    assert DAMAGE in deck(40, random.Random(1))


@pytest.mark.parametrize("seed", range(10))
def test_damage_breaks_every_file_of_blocks(tmp_path: Path, seed: int) -> None:
    assert damage(tmp_path, random.Random(seed)) == 0
    folder, whole = tmp_path / "baton-kv", bytes(20_000)
    folder.mkdir()
    for name in ("segment-0.blocks", "segment-1.blocks", "segment-0.index"):
        (folder / name).write_bytes(whole)
    assert damage(tmp_path, random.Random(seed)) == 2
    for name in ("segment-0.blocks", "segment-1.blocks"):
        assert (folder / name).read_bytes() != whole
    assert (folder / "segment-0.index").read_bytes() == whole


@pytest.mark.parametrize(
    ("asked", "verdict"),
    [
        ({"tokens": [1, 2, 3], "finish": "length"}, "whole"),
        ({"tokens": [1, 2], "finish": "length"}, "truncated"),
        ({"tokens": [1, 2]}, "truncated"),
        ({"tokens": [1, 3], "finish": "length"}, "wrong"),
        ({"tokens": [1, 2, 3, 3], "finish": "length"}, "duplicated"),
        ({"tokens": [1], "error": "replica_lost"}, "failed"),
        ({"tokens": [1], "broken": "it broke"}, "failed"),
        ({"tokens": [1], "broken": "it broke", "without": {"ingress"}}, "cut"),
        ({"tokens": [1], "error": "503", "without": {"session-manager"}}, "failed"),
    ],
)
async def test_verdicts(asked: dict[str, object], verdict: str) -> None:
    crowd = HttpCrowd("http://127.0.0.1:9", random.Random(1))
    made = _Asked([5], 3, **asked)  # type: ignore[arg-type] # fields by name
    made.task = asyncio.create_task(asyncio.sleep(0))
    await made.task
    assert crowd._verdict(made, [1, 2, 3], hung=False) == verdict
    assert crowd._verdict(made, [1, 2, 3], hung=True) in {verdict, "hung"}


async def test_a_client_that_leaves(unused_tcp_port: int) -> None:
    """It leaves in the middle of a request that is never answered."""
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(30), "127.0.0.1", unused_tcp_port)
    crowd = HttpCrowd(f"http://127.0.0.1:{unused_tcp_port}", random.Random(1))
    crowd._whole = [([5], [1, 2, 3])]
    async with server:
        asking = asyncio.create_task(crowd.run(1, lambda: bool(crowd.verdicts)))
        while not crowd._open:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        crowd.leave()
        await asking
    assert crowd.verdicts == ["left"]
