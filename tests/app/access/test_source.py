"""Where API keys come from: a file that changes, or the environment."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from app.access.source import LOOK_EVERY_S, KeysFile, keys_of
from configs.schema import BatonConfig
from tests.app.access.test_keys import CLASSES, entry


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def config(**ingress: Any) -> BatonConfig:
    pool = {"engine": {"kind": "mock"}}
    args = {"mixed": {"a": pool}, "placement": {"classes": {"default": {}, "batch": {}}}, "ingress": ingress}
    return BatonConfig.model_validate(args)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.yaml", Clock()
    path.write_text("keys:\n" + entry("a", "k1"))
    keys = KeysFile(path, CLASSES, clock)
    path.write_text("keys:\n" + entry("other", "k2"))
    assert keys().find(b"k1"), "not looked at yet"
    clock.now_s = LOOK_EVERY_S
    assert keys().find(b"k1") is None
    assert keys().find(b"k2")


def test_a_link_that_is_set_anew_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes changes a mounted Secret. Both files have the same size and time."""
    one, two, link, clock = tmp_path / "one", tmp_path / "two", tmp_path / "keys.yaml", Clock()
    for path, key in ((one, "k1"), (two, "k2")):
        path.write_text("keys:\n" + entry("a", key))
        os.utime(path, (1, 1))
    link.symlink_to(one)
    keys = KeysFile(link, CLASSES, clock)
    link.unlink()
    link.symlink_to(two)
    clock.now_s = LOOK_EVERY_S
    assert keys().find(b"k2")


@pytest.mark.parametrize("text", ["keys:\n  - name: a\n    sha256: baton-secret", None])
def test_a_file_that_becomes_wrong_leaves_the_keys_of_before(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys.yaml", Clock()
    path.write_text("keys:\n" + entry("a", "k1"))
    keys = KeysFile(path, CLASSES, clock)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    clock.now_s = LOOK_EVERY_S
    with caplog.at_level(logging.ERROR, "baton.keys"):
        assert keys().find(b"k1")
    assert "keys of before count" in caplog.text
    assert "secret" not in caplog.text


def test_the_environment_holds_the_same_text() -> None:
    keys = keys_of(config(keys_env="KEYS"), {"KEYS": "keys:\n" + entry("a", "k1", classes="[batch]")})
    assert keys is not None
    assert keys().find(b"k1")


def test_without_keys_none_are_asked_for() -> None:
    assert keys_of(config(), {"KEYS": "keys:\n" + entry("a", "k1")}) is None


@pytest.mark.parametrize("ingress", [{"keys_env": "KEYS"}, {"keys_file": "/no/such/file"}])
def test_a_server_that_should_have_keys_does_not_start_without(ingress: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"ingress\.keys_"):
        keys_of(config(**ingress), {})


@pytest.mark.parametrize(
    ("ingress", "complaint"),
    [
        ({"keys_file": "/a", "keys_env": "A"}, "keys_file and keys_env"),
        ({"keys_file": "/a", "server_args": {"api_key": ["k"]}}, "keys_file and server_args.api_key"),
        ({"keys_file": "keys.yaml"}, "absolute"),
    ],
)
def test_keys_come_from_one_place(ingress: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        config(**ingress)
