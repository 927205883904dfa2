"""A tier survives kill -9 in the middle of its stores."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.transfer.store.conftest import Cache, keys_of
from tests.transfer.store.store_child import SLOTS
from tests.transfer.store.test_block_store import got
from transfer.store.block_store import BlockStore
from transfer.store.ledger import Tier


@pytest.mark.slow
def test_after_a_kill_every_block_is_what_was_stored(
    make_store: Callable[..., BlockStore], cache: Cache, tmp_path: Path
) -> None:
    chance = random.Random(7)
    for seed in range(4):
        command = [sys.executable, str(Path(__file__).with_name("store_child.py")), str(tmp_path), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(chance.random() / 10)  # any moment will do
            child.kill()
        store = make_store(disk=SLOTS)
        found = 0
        for prompt in range(40):
            keys = keys_of(prompt, 8)
            on_disk = [tier is Tier.DISK for tier in store.lookup(keys)]
            assert got(store, cache, keys) == on_disk, "each block with a record is whole"
            found += sum(on_disk)
        assert found >= SLOTS // 2
        assert store.counters()["digest_failures"] == 0
        store.close()
    assert len(list(tmp_path.glob("*/*.index"))) == 1, "the lock of a killed process is gone"
