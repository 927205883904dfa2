"""The names of engines' sockets and shared memory: there for all that start, gone with the last."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import uuid
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from deployments.engine.names import FOLDER, names_until_started
from deployments.host.shared_memory import SHARED_MEMORY, shared_memory_of


def test_engines_that_start_together_share_a_folder_until_the_last_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    first, second = names_until_started(), names_until_started()
    first.__enter__()
    folder = Path(os.environ[FOLDER])
    second.__enter__()
    assert os.environ[FOLDER] == str(folder)
    (folder / "socket").touch()
    first.__exit__(None, None, None)
    assert folder.is_dir(), "the second engine may not be connected yet"
    second.__exit__(None, None, None)
    assert not folder.exists()
    assert FOLDER not in os.environ


def test_a_folder_of_the_user_s_choice_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with names_until_started():
        assert Path(os.environ[FOLDER]).parent == tmp_path
    assert os.environ[FOLDER] == str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_sockets_are_elsewhere_where_temporary_files_are_too_deep_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with names_until_started(), socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"{os.environ[FOLDER]}/{uuid.uuid4()}")
    assert not list(deep.iterdir())


def test_an_engine_that_does_not_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def start() -> None:
        with names_until_started():
            raise OSError("it does not start")

    with pytest.raises(OSError, match="it does not start"):
        start()
    assert not list(tmp_path.iterdir())


MAPS = """
import sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
made = SharedMemory(create=True, size=100)
resource_tracker.unregister(made._name, "shared_memory")  # or the end of this test would say that it is gone
print(made.name, flush=True)
sys.stdin.read()
print(bytes(made.buf[:4]), flush=True)
"""


def test_shared_memory_of_a_started_engine_has_no_name_and_goes_on() -> None:
    ours = SharedMemory(create=True, size=100)
    child = subprocess.Popen([sys.executable, "-c", MAPS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        with names_until_started(), names_until_started():
            name = child.stdout.readline().strip()
            assert shared_memory_of([child.pid]) == {SHARED_MEMORY / name}
            other_end = SharedMemory(name)
        assert shared_memory_of([child.pid]) == set()
        assert not (SHARED_MEMORY / name).exists()
        assert shared_memory_of([os.getpid()]) == {SHARED_MEMORY / ours.name}, "that of this process is not an engine's"
        assert other_end.buf is not None
        other_end.buf[:4] = b"told"
        assert child.communicate()[0].strip() == "b'told'"
        other_end.close()
    finally:
        child.kill()
        ours.close()
        ours.unlink()
