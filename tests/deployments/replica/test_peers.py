"""The peers that the manager names, and the engine that is introduced to them."""

from __future__ import annotations

import pytest

from deployments.messages import Peers
from deployments.replica.timings import Timings
from tests.deployments.replica.doubles import Fixture, until


@pytest.mark.parametrize("idle", [{"timings": Timings(heartbeat_s=0.01)}], indirect=True)
async def test_its_engine_meets_the_peers_that_the_manager_names_once(idle: Fixture) -> None:
    idle.engine.is_busy = True  # at first
    idle.manager.peers = Peers(7, (("tcp://one",), ("tcp://two",)))
    await idle.replica.start()
    await idle.manager.until(lambda snapshot: snapshot.peers_version == 7)
    await until(lambda: bool(idle.engine.met))
    count = len(idle.manager.snapshots)
    await idle.manager.until(lambda snapshot: len(idle.manager.snapshots) > count + 2)
    assert idle.engine.met == [idle.manager.peers.endpoints]
    idle.manager.peers = Peers(8, ())
    await until(lambda: idle.engine.met[-1] == ())
