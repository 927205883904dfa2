"""The folder of engines' sockets: one for all that start, gone with the last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deployments.engine.sockets import FOLDER, socket_folder


def test_engines_that_start_together_share_a_folder_until_the_last_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    first, second = socket_folder(), socket_folder()
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
    with socket_folder():
        assert Path(os.environ[FOLDER]).parent == tmp_path
    assert os.environ[FOLDER] == str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_engine_that_does_not_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def start() -> None:
        with socket_folder():
            raise OSError("it does not start")

    with pytest.raises(OSError, match="it does not start"):
        start()
    assert not list(tmp_path.iterdir())
