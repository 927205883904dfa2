"""The name of an engine's weights."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub.constants
import pytest

from transfer.vllm import weights
from transfer.vllm.weights import weights_of


def checkpoint(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_it_is_the_same_while_the_files_are(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    assert weights_of(str(folder)) == weights_of(str(folder))


@pytest.mark.parametrize("change", ["size", "time", "name", "another file"])
def test_it_is_another_one_when_a_file_is(change: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    before, file = weights_of(str(folder)), folder / "model.safetensors"
    stat = file.stat()
    if change == "size":
        file.write_bytes(b"other weights")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "time":
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))
    elif change == "name":
        file.rename(folder / "model-1.safetensors")
    else:
        (folder / "more.safetensors").write_bytes(b"more")
    assert weights_of(str(folder)) != before


def test_of_a_name_it_is_that_of_the_files_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "snapshots" / "abc")
    asked = []

    def cached(name: str, file: str, revision: str | None) -> str:
        asked.append((name, revision))
        return str(folder / file)

    monkeypatch.setattr(weights, "try_to_load_from_cache", cached)
    assert weights_of("someone/model", "v1") == weights_of(str(folder))
    assert asked == [("someone/model", "v1")]


def test_where_no_files_are_found_it_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert weights_of("someone/nothing") != weights_of("someone/nothing")
    assert weights_of(str(tmp_path)) != weights_of(str(tmp_path)), "a folder without weights"
