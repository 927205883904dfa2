"""An adapter's id depends on its files, and on nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deployments.checkpoint.adapter import CONFIG, adapter_id, digits, engine_name
from deployments.checkpoint.errors import AdapterError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    (made / CONFIG).write_text("{}")
    (made / "adapter_model.safetensors").write_bytes(b"weights")
    return made


def test_the_same_files_have_the_same_id_in_every_folder(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("not a part of it")
    assert adapter_id(str(copy)) == adapter_id(str(folder))
    assert 0 < adapter_id(str(folder)) < 2**31


@pytest.mark.parametrize("file", [CONFIG, "adapter_model.safetensors"])
def test_other_contents_have_another_id(folder: Path, file: str) -> None:
    before = adapter_id(str(folder))
    (folder / file).write_bytes(b"other")
    assert adapter_id(str(folder)) != before


@pytest.mark.parametrize("file", [CONFIG, "adapter_model.safetensors"])
def test_a_folder_without_an_adapter_is_refused_by_name(folder: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(AdapterError, match=str(folder)):
        adapter_id(str(folder))


def test_engines_know_an_adapter_by_name_and_id() -> None:
    assert engine_name("tuned", 255) == "tuned@000000ff"
    assert digits(2**31 - 1) == "7fffffff"
