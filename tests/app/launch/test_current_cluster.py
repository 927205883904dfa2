"""Ray's file that names the current cluster: it is removed when that cluster has ended."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from app.launch.current_cluster import clear_ended_cluster


def test_the_file_is_where_ray_has_it(current: Path) -> None:
    from ray._common.utils import get_ray_address_file

    assert str(current) == get_ray_address_file(None)


def test_the_file_of_an_ended_cluster_is_removed_once(current: Path) -> None:
    assert clear_ended_cluster()
    assert not current.exists()
    assert not clear_ended_cluster()


def test_the_file_of_a_living_cluster_stays(current: Path) -> None:
    with socket.socket() as living:
        living.bind(("127.0.0.1", 0))
        living.listen()
        current.write_text(f"127.0.0.1:{living.getsockname()[1]}")
        assert not clear_ended_cluster()
    assert current.exists()


@pytest.mark.parametrize("text", ["192.0.2.1:6379", "", "nonsense", "nowhere.invalid:6379"])
def test_the_file_of_a_cluster_elsewhere_stays(current: Path, text: str) -> None:
    current.write_text(text)
    assert not clear_ended_cluster()
    assert current.exists()
